"""One set of inputs, placed in simulated memory and used for many artifacts.

A `Case` is an op at one workload with the inputs of one generator and seed. Golden and the honest
computations are computed once, when first needed. Before each run `restore` puts the state back and
poisons the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from workbench.artifact import BoundBuffer
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.ops.compare import Standard, standard_of
from workbench.ops.model import Buffer, Op, Role, Workload, storage_shape
from workbench.ops.trivial import POISONS
from workbench.verify.numerics import judge
from workbench.verify.report import Check

__all__ = [
    "POISONS",
    "Arena",
    "Case",
    "is_zero_at_first",
    "place_scratch",
    "reset_scratch",
    "same_bits",
    "swapped_inputs",
]


class Arena(Protocol):
    """What a case needs of a memory; `workbench.simulator.Memory` has it."""

    def allocate(
        self, name: str, nbytes: int, *, align: int = 256, writable: bool = True, initialized: bool = False
    ) -> npt.NDArray[np.uint8]:
        """Zero bytes under `name`, lazily."""
        ...

    def view(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes under `name`."""
        ...

    def poison(self, name: str, byte: int) -> None:
        """Fill with `byte` and mark as never written."""
        ...


@dataclass(frozen=True)
class Case:
    """Inputs in memory. Buffers carry the op's names; weights, activations and metadata are read-only."""

    op: Op
    workload: Workload
    generator: str
    seed: int
    memory: Arena = field(repr=False)
    state: Mapping[str, npt.NDArray[np.uint8]] = field(repr=False)
    """Bytes of the state buffers as the generator left them."""

    @staticmethod
    def create(op: Op, workload: Workload, generator: str, seed: int, memory: Arena) -> Case:
        """Allocate every buffer of the op in `memory`, in declared order, and run the generator.

        Raises:
            UnknownNameError: if the op has no such generator.
            WorkbenchError: if the generator leaves an input unfilled or memory is full.
        """
        if generator not in op.generators:
            raise UnknownNameError("generator", generator, op.generators)
        for b in op.buffers:
            nbytes = b.dtype.nbytes(math.prod(b.resolve(workload.axes)))
            given = b.role.is_input or b.role is Role.FLAG
            memory.allocate(b.name, nbytes, align=b.align, writable=b.role.is_writable, initialized=given)
        inputs = {b.name: _tensor(memory, b, workload) for b in op.inputs}
        filled = op.generators[generator](workload.axes, seed, inputs.__getitem__)
        for b in op.inputs:
            if b.name not in filled or filled[b.name].data_ptr() != inputs[b.name].data_ptr():
                raise WorkbenchError(f"{op.name}: generator {generator!r} does not fill {b.name!r} in place")
        state = {b.name: memory.view(b.name).copy() for b in op.buffers if b.role is Role.STATE}
        return Case(op, workload, generator, seed, memory, state)

    @property
    def label(self) -> str:
        """`generator` and, when it is not 0, the seed."""
        return self.generator if not self.seed else f"{self.generator}/seed{self.seed}"

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Inputs as the op finds them; state comes from the kept copy, the rest is the memory itself."""
        tensors = {b.name: _tensor(self.memory, b, self.workload) for b in self.op.inputs}
        for b in self.op.inputs:
            if b.name in self.state:
                tensors[b.name] = _shaped(self.state[b.name], b, self.workload)
        return tensors

    @cached_property
    def standard(self) -> Standard:
        """Golden and the honest computations' errors, computed once."""
        return standard_of(self.op, self.inputs, self.workload.axes)

    def restore(self, poison: int = POISONS[0]) -> None:
        """Put the state back, fill outputs with the byte `poison` (never written) and zero flags.

        Golden is computed before the first run, so that no run can have a part in it.
        """
        self.standard  # noqa: B018
        for b in self.op.buffers:
            if b.name in self.state:
                self.memory.view(b.name)[:] = self.state[b.name]
            elif b.role is Role.FLAG:
                self.memory.view(b.name)[:] = 0
            elif b.role.is_writable:
                self.memory.poison(b.name, poison)

    def read_outputs(self) -> dict[str, torch.Tensor]:
        """Copies of the judged buffers, in their storage types."""
        return {b.name: _tensor(self.memory, b, self.workload).clone() for b in self.op.outputs}

    def judge(
        self, got: Mapping[str, torch.Tensor], poison: int | None = None, diagnose: bool = True
    ) -> Check:
        """Judge outputs of this case; `poison` is the byte that `restore` was given."""
        return judge(
            self.op,
            self.workload.axes,
            self.standard,
            got,
            self.label,
            inputs=self.inputs if diagnose else None,
            poison=poison,
        )


def place_scratch(
    memory: Arena, op: Op, buffers: Iterable[BoundBuffer], poison: int = POISONS[0]
) -> list[BoundBuffer]:
    """Allocate the buffers of an artifact that are not the op's own; returns them.

    The caller frees them with the memory's mark and release. Flags and buffers declared `zeroed` are
    zero, the others poison.
    """
    names = {b.name for b in op.buffers}
    scratch = [b for b in buffers if b.name not in names]
    for b in scratch:
        memory.allocate(b.name, b.nbytes, align=b.align, writable=True, initialized=is_zero_at_first(b))
    reset_scratch(memory, scratch, poison)
    return scratch


def reset_scratch(memory: Arena, scratch: Iterable[BoundBuffer], poison: int = POISONS[0]) -> None:
    """Bring scratch buffers into the state they have before the first launch."""
    for b in scratch:
        if is_zero_at_first(b):
            memory.view(b.name)[:] = 0
        else:
            memory.poison(b.name, poison)


@contextmanager
def swapped_inputs(case: Case, memory: Arena, pairs: int = 4) -> Iterator[None]:
    """Exchange a few random pairs of elements in each weight and activation of floating point, for a while.

    Sums, histograms and nearly every sample of the elements stay as they were.
    """
    random = np.random.default_rng(case.seed + 0x5EED)
    done: list[tuple[npt.NDArray[Any], int, int]] = []
    for b in case.op.inputs:
        if not b.dtype.is_float or b.role not in (Role.WEIGHT, Role.ACTIVATION):
            continue
        elements = memory.view(b.name).view(f"u{max(1, b.dtype.bits // 8)}")
        for _ in range(pairs):
            i = int(random.integers(len(elements)))
            others = (int(j) for j in random.integers(len(elements), size=64))
            j = next((j for j in others if elements[j] != elements[i]), i)
            done.append((elements, i, j))
    for elements, i, j in done:
        elements[[i, j]] = elements[[j, i]]
    try:
        yield
    finally:
        for elements, i, j in reversed(done):
            elements[[i, j]] = elements[[j, i]]


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether all tensors of `a` are bitwise equal to those of `b`."""
    raw = {n: (x.contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8)) for n, x in a.items()}
    return all(torch.equal(x, y) for x, y in raw.values())


def is_zero_at_first(b: BoundBuffer) -> bool:
    """True if a buffer is zero before the first launch, and only then."""
    return b.zeroed or b.role is Role.FLAG


def _tensor(memory: Arena, buffer: Buffer, workload: Workload) -> torch.Tensor:
    return _shaped(memory.view(buffer.name), buffer, workload)


def _shaped(raw: npt.NDArray[Any], buffer: Buffer, workload: Workload) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, buffer.dtype.torch_name)
    return torch.from_numpy(raw).view(dtype).view(storage_shape(buffer, workload.axes))
