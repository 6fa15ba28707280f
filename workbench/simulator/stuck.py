"""Who waits for what, and whose fault it is, when no thread of a launch can go on.

Threads that wait for others that are stuck themselves are named with the cause, not as findings of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Address, Instruction, Reg
from workbench.simulator.access import SHARED_WINDOW
from workbench.simulator.memory import BASE
from workbench.simulator.program import is_poll

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_EVERY = np.ones((1, 1), bool)


@dataclass(frozen=True, slots=True)
class _Wait:
    rule: str
    item: Instruction | None
    text: str
    co: Cohort
    root: bool
    """The threads it waits for do not wait for anything else that could be the cause."""

    @property
    def lanes(self) -> int:
        return self.co.lanes


def report_deadlock(ck: Chunk) -> None:
    """Report the waits that are the cause of a deadlock of `ck`, each with how many others wait behind it."""
    waits = [*_polls(ck)]
    polling = np.zeros(len(ck.ctas), bool)
    for w in waits:
        polling[w.co.ctas] = True
    waits += [*_barriers(ck, polling), *_cluster_barriers(ck, polling), *_incomplete_warps(ck)]
    roots = [w for w in waits if w.root]
    if not roots:
        roots = waits
    behind = [w for w in waits if w not in roots]
    tail = ""
    if behind:
        first = behind[0]
        at = f" (line {first.item.line})" if first.item is not None else ""
        tail = f"; {sum(w.lanes for w in behind)} threads wait behind them, the first: {first.text}{at}"
    for w in roots:
        ck.report(w.rule, w.item, w.text + tail, w.co, _EVERY)


def _polls(ck: Chunk) -> list[_Wait]:
    blocks = ck.launch.program.blocks
    found: list[_Wait] = []
    absent = len(ck.ctas) - ck.started
    on_memory: list[tuple[int, Cohort]] = []
    on_barriers: list[tuple[tuple[Instruction, str], Cohort]] = []
    for key, cohorts in ck.yielded.items():
        for co in cohorts:
            known = ck.mbarriers.describe(co)
            if known is not None:
                on_barriers.append((known, co))
            else:
                on_memory.append((key % len(blocks), co))
    polling = {int(c) // ck.cluster_size for _, co in on_memory for c in np.unique(co.ctas)}
    for known, co in on_barriers:
        root = polling.isdisjoint(int(c) // ck.cluster_size for c in np.unique(co.ctas))
        found.append(_Wait("mbarrier-phase", *known, co, root))
    for k, co in on_memory:
        item, what = _polled(ck, k, co)
        text = f"polls {what} that no one changes any more"
        rule = "deadlock"
        if absent:
            first, last = int(ck.ctas[ck.started]), int(ck.ctas[-1])
            rule = "not-co-resident"
            text = (
                f"polls {what}, which only CTAs {first} to {last} could still change; they cannot start, for "
                f"{ck.started} CTAs fill the device and wait"
            )
        found.append(_Wait(rule, item, text, co, True))
    return found


def _polled(ck: Chunk, k: int, co: Cohort) -> tuple[Instruction | None, str]:
    """Return the load that a loop from block `k` polls with and what its first lane looks at."""
    blocks = ck.launch.program.blocks
    fallback: Instruction | None = None
    for block in blocks[k:]:
        for item in block.instructions:
            fallback = fallback or item
            if is_poll(item) or item.opcode in ("ld", "ldu"):
                return item, _place(ck, item, co)
        if block.spins:
            break
    return fallback, "memory"


def _place(ck: Chunk, item: Instruction, co: Cohort) -> str:
    operand = next((o for o in item.operands if isinstance(o, Address)), None)
    if operand is None or not isinstance(operand.base, Reg):
        return "memory"
    keys = ck.launch.program.context.keys(operand.base.name)
    if len(keys) != 1 or keys[0] not in co.registers:
        return "memory"
    address = int(co.registers[keys[0]].ravel()[0]) + operand.offset
    if any(m.startswith("shared") for m in item.modifiers):
        return f"shared memory at {address & 0xFFFFFF:#x}"
    if SHARED_WINDOW <= address < SHARED_WINDOW + (1 << 32):
        return f"shared memory at {address - SHARED_WINDOW:#x}"
    memory = ck.launch.memory
    a = memory.find(address - BASE)
    if a is None:
        return f"memory at {address:#x}"
    at = address - BASE
    word = int(memory.bytes[at : at + 4].view(np.uint32)[0]) if at % 4 == 0 and at + 4 <= a.end else None
    holds = f" (it holds {word:#x})" if word is not None else ""
    return f"byte {at - a.start} of {a.name!r}{holds}"


def _barriers(ck: Chunk, polling: Array) -> list[_Wait]:
    found = []
    weights = ck.launch.barrier_weights
    for n, entries in ck.barriers.waiting.items():
        here = np.zeros(len(ck.ctas), np.int64)
        for co, _ in entries:
            np.add.at(here, np.broadcast_to(co.rows(), co.shape).ravel(),
                      np.broadcast_to(weights[co.threads], co.shape).ravel())  # fmt: skip
        living = (ck.alive * weights).sum(axis=1)
        for co, block in entries:
            row = int(co.ctas[0])
            wanted, arrived = int(ck.barriers.expected[row, n]), int(ck.barriers.arrived[row, n])
            elsewhere = int(living[row] - here[row])
            goal = int(living[row]) if wanted < 0 else wanted
            hopeless = wanted >= 0 and arrived + elsewhere < goal
            text = f"barrier {n} has {arrived} of {goal} threads and no one else can come"
            if elsewhere:
                text += f" ({elsewhere} threads of the CTA are elsewhere)"
            root = hopeless or not polling[row]
            found.append(_Wait("barrier-divergence", block.instruction, text, co, root))
    return found


def _cluster_barriers(ck: Chunk, polling: Array) -> list[_Wait]:
    found = []
    size = ck.cluster_size
    for co, item, text in ck.cluster.stuck():
        first = int(co.ctas[0]) // size * size
        held = bool(ck.barriers.waiting) or bool(polling[first : first + size].any())
        found.append(_Wait("cluster-barrier", item, text, co, not held))
    return found


def _incomplete_warps(ck: Chunk) -> list[_Wait]:
    blocks = ck.launch.program.blocks
    found = []
    for key, cohorts in ck.parked.items():
        block = blocks[key % len(blocks)]
        item = next(iter(block.instructions), block.instruction)
        found += [
            _Wait("deadlock", item, "waits for the other lanes of its warp", co, False) for co in cohorts
        ]
    return found
