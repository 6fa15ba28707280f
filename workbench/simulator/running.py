"""Runs the CTAs of one launch and counts what they did."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.findings import Finding
from workbench.simulator.adversary import PLAIN
from workbench.simulator.cluster import order_of_ctas
from workbench.simulator.counters import Counters
from workbench.simulator.launch import LaunchState, LimitReachedError
from workbench.simulator.ordering.order import Touched
from workbench.simulator.runtime import FLAGS
from workbench.simulator.scheduler import Chunk
from workbench.simulator.traffic import SECTOR, TrafficCounts

Array = npt.NDArray[Any]

_LOOP = 8
"""Turns that a loop is taken to make when work is estimated."""


@dataclass(slots=True)
class Part:
    """What one process did of a launch."""

    findings: tuple[Finding, ...]
    visits: Array
    """Warps that ran each block."""
    passes: list[int]
    """Lanes that ran each block."""
    longest: Array | None
    """Visits of the warp that executed most instructions."""
    divergent: int
    waits: int
    printed: list[str]
    completed: bool
    traffic: TrafficCounts
    async_bytes: int = 0
    """Bytes of bulk and tensor copies."""
    touched: Touched = field(default_factory=dict)
    """What it wrote and read of buffers that kernels may write, if other processes run the rest."""

    @staticmethod
    def empty(blocks: int, findings: tuple[Finding, ...] = ()) -> Part:
        """Return a part that did not run to its end."""
        visits = np.zeros(blocks, np.int64)
        return Part(findings, visits, [0] * blocks, None, 0, 0, [], False, TrafficCounts())


def partition(state: LaunchState, processes: int | None = None) -> list[list[Array]]:
    """Divide a launch among processes: for each its groups of CTA numbers, each group to be run as one chunk.

    CTAs that may wait for one another, or share atomics, stay in one process; so does a launch too small to
    pay, and every run under a seed or an adversary, which must not depend on the number of processes.
    """
    options, program = state.options, state.program
    loops = any(s <= b.index for b in program.blocks for s in b.successors)
    work = state.ctas * state.threads * sum(c.instructions for c in program.costs) * (_LOOP if loops else 1)
    workers = max(1, min(processes or options.processes, state.ctas))
    checking = bool(options.seed) or options.adversary != PLAIN
    if program.communicates or work < options.parallel_work or checking:
        workers = 1
    cluster = state.cluster[0] * state.cluster[1] * state.cluster[2]
    count = -(-state.ctas * state.threads // options.chunk_lanes)
    count = min(-(-count // workers) * workers, state.ctas)
    size = -(-state.ctas // count)
    size = -(-size // cluster) * cluster
    if options.adversary.resident is not None:
        size = state.ctas
    order = some_of(state, order_of_ctas(state.grid, state.cluster))
    chunks = [order[k : k + size] for k in range(0, len(order), size)]
    if options.seed:
        Random(options.seed).shuffle(chunks)
    return [chunks[k::workers] for k in range(workers)]


def some_of(state: LaunchState, order: Array) -> Array:
    """Leave out the CTAs in the middle of a launch that `SimulationOptions.most_ctas` says is too large."""
    most = state.options.most_ctas
    if most is None or state.program.communicates or len(order) <= most:
        return order
    cluster = state.cluster[0] * state.cluster[1] * state.cluster[2]
    half = max(1, most // (2 * cluster)) * cluster
    if 2 * half >= len(order):
        return order
    state.open[order[half:-half]] = True
    return np.concatenate([order[:half], order[-half:]])


def run_chunks(state: LaunchState, groups: list[Array]) -> Part:
    """Run groups of CTAs, one after the other unless they may wait for each other."""
    run = run_steps(state, groups)
    with numpy_errors():
        while True:
            try:
                next(run)
            except StopIteration as end:
                part: Part = end.value
                return part


def numpy_errors() -> np.errstate:
    """Return the context in which generated code runs."""
    return np.errstate(all="ignore", under="call", over="call", call=FLAGS)


def run_steps(state: LaunchState, groups: list[Array], together: bool = False) -> Generator[bool, None, Part]:
    """Run groups of CTAs; yields, inside `numpy_errors`, whether it could go on at once.

    Args:
        state: the launch.
        groups: numbers of the CTAs of each group.
        together: have all groups run side by side even if they do not poll each other's memory.
    """
    state.bind()
    space = state.space()
    program = state.program
    blocks = len(program.blocks)
    part = Part((), np.zeros(blocks, np.int64), [0] * blocks, None, 0, 0, [], True, TrafficCounts())
    best = -1
    weights = np.array([c.instructions for c in program.costs], np.int64)

    def finish(chunk: Chunk) -> None:
        nonlocal best
        visits = chunk.visits.astype(np.int64)
        part.visits += visits.sum(axis=1)
        part.passes = [a + b for a, b in zip(part.passes, chunk.passes, strict=True)]
        totals = weights @ visits
        k = int(np.argmax(totals))
        if int(totals[k]) > best:
            best, part.longest = int(totals[k]), visits[:, k]
        part.divergent += chunk.divergent_branches
        part.waits += chunk.barriers.waits
        part.completed &= not chunk.deadlocked
        if chunk.order is not None:
            chunk.order.close()

    try:
        if program.spins or together:
            active = [Chunk(state, ctas, space) for ctas in groups]
            runs = [(c, c.run()) for c in active]
            while runs:
                turns = [(c, run, next(run, None)) for c, run in runs]
                runs = [(c, run) for c, run, turn in turns if turn is not None]
                yield any(turn is not False for *_, turn in turns)
            for c in active:
                finish(c)
        else:
            for ctas in groups:
                chunk = Chunk(state, ctas, space)
                yield from chunk.run()
                finish(chunk)
    except LimitReachedError as limit:
        state.log.add("time-limit", None, f"the launch was stopped: it used up {limit}")
        part.completed = False
    part.findings = state.log.findings()
    part.completed &= all(f.rule != "trap" for f in part.findings)
    part.printed = state.printed
    part.async_bytes = state.async_bytes
    if state.order is not None and state.options.processes > 1:
        part.touched = state.order.touched()
    if state.traffic is not None:
        part.traffic = state.traffic.counts
    return part


def joined(state: LaunchState, a: Part, b: Part) -> Part:
    """Add what another process did to what this one did."""
    weights = np.array([c.instructions for c in state.program.costs], np.int64)
    longest = max(
        (x for x in (a.longest, b.longest) if x is not None), key=lambda v: int(weights @ v), default=None
    )
    state.log.merge(b.findings)
    return replace(
        a, findings=state.log.findings(), visits=a.visits + b.visits,
        passes=[x + y for x, y in zip(a.passes, b.passes, strict=True)], longest=longest,
        divergent=a.divergent + b.divergent, waits=a.waits + b.waits, printed=a.printed + b.printed,
        completed=a.completed and b.completed, traffic=a.traffic + b.traffic,
        async_bytes=a.async_bytes + b.async_bytes,
    )  # fmt: skip


def counters_of(state: LaunchState, part: Part) -> Counters:
    """Return the counters of a launch that has run."""
    costs = state.program.costs

    def by_class(visits: Any) -> dict[str, int]:
        total: dict[str, int] = {}
        if visits is not None:
            for n, cost in zip(visits, costs, strict=True):
                for kind, count in cost.classes.items():
                    total[kind] = total.get(kind, 0) + int(n) * count
        return {k: v for k, v in sorted(total.items()) if v}

    def lanes(attribute: str) -> int:
        return sum(n * int(getattr(c, attribute)) for n, c in zip(part.passes, costs, strict=True))

    return Counters(
        kernel=state.program.kernel.name,
        ctas=state.ctas,
        warps=state.ctas * state.warps,
        lane_instructions=lanes("instructions"),
        warp_instructions=by_class(part.visits),
        longest_warp=by_class(part.longest),
        global_load_bytes=lanes("global_load_bytes"),
        global_store_bytes=lanes("global_store_bytes"),
        global_load_sectors=part.traffic.load_sectors,
        global_store_sectors=part.traffic.store_sectors,
        unique_load_bytes=SECTOR * state.traffic.loads.count() if state.traffic is not None else 0,
        unique_store_bytes=SECTOR * state.traffic.stores.count() if state.traffic is not None else 0,
        shared_bytes=lanes("shared_bytes"),
        bank_conflicts=part.traffic.bank_conflicts,
        async_bytes=lanes("async_bytes") + part.async_bytes,
        atomics=lanes("atomics"),
        divergent_branches=part.divergent,
        barrier_waits=part.waits,
    )
