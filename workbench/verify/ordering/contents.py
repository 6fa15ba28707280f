"""What simulated buffers hold when a contract says how large they are and what for, but not what is in them.

Contents are ours, so nothing that follows from them alone may be held against a kernel: an error counts only
if it shows with every `Fill`. Zeros keep indices in range and loops short; the counting fills give distinct
small indices of 32 and 64 bits; the numbers are finite in bf16, fp16, fp32 and fp8 and unlike each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from workbench.ops.model import Role
from workbench.simulator import Memory

SOMEWHERE = "(memory behind a pointer)"
Bytes = npt.NDArray[np.uint8]
_PATTERN = 1 << 18
"""Words that are drawn; a longer buffer repeats them."""
_MOST_FILLED = 1 << 22
"""Words of a buffer that are filled; what lies behind them is zero and takes no memory."""


class Fill(StrEnum):
    """What inputs hold."""

    NUMBERS = "numbers"
    ZEROS = "zeros"
    COUNT32 = "count32"
    COUNT64 = "count64"
    POINTERS = "pointers"
    """Each 8 bytes are the address of some memory that nobody else uses."""


@dataclass(frozen=True)
class SimulatedBuffer:
    """One buffer of a launch list."""

    name: str
    nbytes: int
    role: Role
    align: int = 256
    fill: int | None = None
    """Word that fills it before the first launch, if the contract says."""
    numbers: bool = False
    """It holds numbers before the first launch, whatever its role."""
    sentinel: bool = False
    """It holds what polls take for "not there yet" before the first launch."""

    @property
    def given(self) -> bool:
        """Whether it holds something before the first launch."""
        filled = self.fill is not None or self.numbers or self.sentinel
        return self.role not in (Role.OUTPUT, Role.SCRATCH) or filled


def place(memory: Memory, buffers: tuple[SimulatedBuffer, ...]) -> None:
    """Allocate the buffers, each at an address that is aligned as the contract says and no better.

    Raises:
        WorkbenchError: if an alignment is no power of two, or memory is full.
    """
    for b in buffers:
        if b.align < 256:
            memory.allocate(f"(before {b.name})", b.align)
        memory.allocate(b.name, b.nbytes, align=b.align, initialized=b.given)
    memory.allocate(SOMEWHERE, 1 << 20, initialized=True)


def write_inputs(memory: Memory, b: SimulatedBuffer, fill: Fill, seed: int) -> None:
    """Give an input its contents: activations, weights, metadata and state."""
    words = memory.view(b.name)[: b.nbytes // 4 * 4].view(np.uint32)
    words = words[:_MOST_FILLED]
    if b.nbytes % 4:
        memory.view(b.name)[b.nbytes // 4 * 4 :] = 0
    if b.fill is not None:
        words[:] = b.fill
    elif fill is Fill.ZEROS:
        words[:] = 0
    elif fill is Fill.COUNT32:
        words[:] = np.arange(len(words), dtype=np.uint32)
    elif fill is Fill.COUNT64:
        words[:] = 0
        words[::2] = np.arange(len(words[::2]))
    elif fill is Fill.POINTERS:
        address = memory.address(SOMEWHERE) + (1 << 19)
        words[::2] = address & 0xFFFFFFFF
        words[1::2] = address >> 32
    elif b.role is Role.METADATA:
        words[:] = np.arange(len(words), dtype=np.uint32) % 4
    else:
        pattern = _numbers(min(len(words), _PATTERN), seed)
        for start in range(0, len(words), _PATTERN):
            words[start : start + _PATTERN] = pattern[: len(words) - start]
    if not memory.allocation(b.name).initialized:
        memory.mark_written(b.name)


def _numbers(count: int, seed: int) -> npt.NDArray[np.uint32]:
    """Words whose halves are bf16 numbers of magnitude 0.5 to 2, with no NaN in any format."""
    random = np.random.default_rng(seed)
    high = random.integers(0x3F00, 0x4000, count, dtype=np.uint32)
    low = random.integers(0x3F00, 0x4000, count, dtype=np.uint32)
    sign = random.integers(0, 2, count, dtype=np.uint32) << 31
    words = (high << 16 | low | sign) & np.uint32(0xFF7EFF7E)
    return words.astype(np.uint32)


def reset(
    memory: Memory, buffers: tuple[SimulatedBuffer, ...], fill: Fill, seed: int, mailbox: int = 0
) -> None:
    """Bring all buffers into the state before the first launch.

    Args:
        memory: where they are.
        buffers: all of them.
        fill: contents of inputs.
        seed: draws numbers.
        mailbox: word that fills mailboxes of which the contract says nothing.
    """
    for n, b in enumerate(buffers):
        if b.role in (Role.FLAG, Role.MAILBOX) and not b.numbers:
            words = memory.view(b.name)[: b.nbytes // 4 * 4].view(np.uint32)
            memory.view(b.name)[:] = 0
            words[:] = b.fill if b.fill is not None else (mailbox if b.role is Role.MAILBOX else 0)
            memory.mark_written(b.name)
        elif b.given:
            write_inputs(memory, b, fill, seed + n)
        else:
            memory.poison(b.name, 0)
