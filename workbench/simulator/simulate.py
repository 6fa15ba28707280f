"""Runs the launches of an artifact, or of any PTX module, on simulated memory."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from workbench.artifact import Artifact, Launch
from workbench.errors import WorkbenchError
from workbench.findings import Finding
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator.access import GlobalSpace
from workbench.simulator.codegen import Program, compile_kernel
from workbench.simulator.counters import Counters
from workbench.simulator.launch import LaunchState, LimitReachedError, SimulationOptions
from workbench.simulator.memory import Memory
from workbench.simulator.runtime import FLAGS
from workbench.simulator.scheduler import Chunk
from workbench.simulator.traffic import SECTOR, TrafficCounts


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did."""

    findings: tuple[Finding, ...]
    counters: tuple[Counters, ...]
    """One a launch that ran."""
    completed: bool
    """False if a deadlock, a trap or a limit ended the run before the last instruction."""
    printed: tuple[str, ...] = ()
    """Output of the kernels' printf calls."""
    seconds: float = 0.0
    """Wall time of the execution, translation excluded."""

    @property
    def lane_instructions(self) -> int:
        """PTX instructions times lanes, of all launches."""
        return sum(c.lane_instructions for c in self.counters)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A launch with its parameter block already filled in; for modules that are no artifact."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    """One after the other at their PTX offsets."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem_bytes: int = 0


@dataclass(slots=True)
class _Part:
    """What the chunks of one process did."""

    findings: tuple[Finding, ...]
    visits: Any
    passes: list[int]
    longest: Any
    divergent: int
    waits: int
    printed: list[str]
    completed: bool
    traffic: TrafficCounts


def simulate(artifact: Artifact, memory: Memory, options: SimulationOptions | None = None) -> Outcome:
    """Run all launches of an artifact in order.

    Args:
        artifact: its PTX is executed; every buffer its launches name must be in `memory` under its name.
        memory: global memory; changed in place.
        options: see `SimulationOptions`.

    Raises:
        UnsupportedInstruction: if a kernel has an instruction that the simulator lacks.
        UnknownNameError: if `memory` lacks a buffer.
    """
    module = _parsed(artifact.ptx)
    names = {r.buffer for launch in artifact.launches for p in launch.params for r in p.relocations}
    addresses = {name: memory.address(name) for name in names}
    launches = [_bound(module, launch, addresses) for launch in artifact.launches]
    return simulate_module(module, launches, memory, options)


@lru_cache(maxsize=16)
def _parsed(ptx: str) -> Module:
    return parse(ptx)


_programs: OrderedDict[tuple[int, str], tuple[Module, Program]] = OrderedDict()
"""The programs used last, by module and kernel: verification runs the same kernels on many inputs."""


def _program(module: Module, kernel: str) -> Program:
    key = (id(module), kernel)
    if key not in _programs:
        _programs[key] = (module, compile_kernel(module, module.kernel(kernel)))
        while len(_programs) > 32:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key][1]


def _bound(module: Module, launch: Launch, addresses: dict[str, int]) -> KernelLaunch:
    kernel = module.kernel(launch.kernel)
    block = bytearray()
    for param, given in zip(kernel.params, launch.params, strict=True):
        raw = given.bind(addresses)
        if len(raw) != param.size:
            raise WorkbenchError(
                f"{launch.kernel}: parameter {param.name} has {param.size} bytes, {len(raw)} are given"
            )
        block.extend(bytes(param.offset - len(block)))
        block.extend(raw)
    return KernelLaunch(
        launch.kernel, launch.grid, launch.block, bytes(block), launch.cluster, launch.smem_bytes
    )


def simulate_module(
    module: Module, launches: Sequence[KernelLaunch], memory: Memory, options: SimulationOptions | None = None
) -> Outcome:
    """Run launches of a PTX module in order; see `simulate`."""
    options = options or SimulationOptions()
    _check_float_environment()
    deadline = time.monotonic() + options.time_limit
    programs: dict[str, Program] = {}
    for launch in launches:
        if launch.kernel not in programs:
            programs[launch.kernel] = _program(module, launch.kernel)
    mark = memory.mark()
    addresses = _place_variables(module, memory)
    findings: list[Finding] = []
    counters: list[Counters] = []
    printed: list[str] = []
    completed = True
    start = time.perf_counter()
    try:
        for launch in launches:
            state = LaunchState(
                programs[launch.kernel], memory, launch.grid, launch.block, launch.cluster, launch.smem_bytes,
                launch.parameters, options, deadline, addresses,
            )  # fmt: skip
            part = _run_launch(state)
            findings.extend(part.findings)
            printed.extend(part.printed)
            counters.append(_counters(state, part))
            if not part.completed:
                completed = False
                break
    finally:
        seconds = time.perf_counter() - start
        memory.release(mark)
    return Outcome(tuple(findings), tuple(counters), completed, tuple(printed), seconds)


def _check_float_environment() -> None:
    smallest = np.array([1e-45], np.float32)
    if not (smallest * np.float32(1))[0] > 0:
        raise WorkbenchError(
            "this process flushes subnormal numbers to zero; the simulator would be inexact in it"
        )


def _place_variables(module: Module, memory: Memory) -> dict[str, int]:
    """Allocate the module's global and constant variables."""
    addresses: dict[str, int] = {}
    views: dict[str, Any] = {}
    for v in module.variables:
        if v.space not in ("global", "const") or v.elements is None:
            continue
        size = max(1, v.elements * int(v.type.lstrip("busfp")) // 8)
        name = v.name if v.name not in memory else f"{v.name} (module variable)"
        view = memory.allocate(
            name, size, align=max(v.align, 16), writable=v.space == "global", initialized=True
        )
        if v.initial:
            view[: len(v.initial)] = np.frombuffer(v.initial, np.uint8)
        addresses[v.name] = memory.address(name)
        views[v.name] = view
    for v in module.variables:
        for offset, symbol, addend in v.pointers:
            if v.name in views:
                if symbol not in addresses:
                    raise WorkbenchError(f"the initial value of {v.name!r} takes the address of {symbol!r}")
                pointer = (addresses[symbol] + addend).to_bytes(8, "little")
                views[v.name][offset : offset + 8] = np.frombuffer(pointer, np.uint8)
    return addresses


# -- one launch ----------------------------------------------------------------------------------


def _run_launch(state: LaunchState) -> _Part:
    options, program = state.options, state.program
    per_chunk = max(1, options.chunk_lanes // state.threads)
    cluster = state.cluster[0] * state.cluster[1] * state.cluster[2]
    workers = 1 if program.communicates else max(1, min(options.processes, state.ctas))
    if workers > 1 and state.ctas * state.threads < 2048:
        workers = 1
    per_chunk = min(per_chunk, -(-state.ctas // workers))
    per_chunk = -(-per_chunk // cluster) * cluster
    chunks = [np.arange(k, min(k + per_chunk, state.ctas)) for k in range(0, state.ctas, per_chunk)]
    if options.seed:
        Random(options.seed).shuffle(chunks)
    state.bind()
    if workers == 1:
        return _run_chunks(state, chunks)
    return _run_forked(state, [chunks[k::workers] for k in range(workers)])


def _run_chunks(state: LaunchState, groups: list[Any]) -> _Part:
    space = GlobalSpace(state.memory)
    program = state.program
    blocks = len(program.blocks)
    part = _Part((), np.zeros(blocks, np.int64), [0] * blocks, None, 0, 0, [], True, TrafficCounts())
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

    with np.errstate(all="ignore", under="call", over="call", call=FLAGS):
        try:
            if program.spins:
                active = [Chunk(state, ctas, space) for ctas in groups]
                runs = [(c, c.run()) for c in active]
                while runs:
                    runs = [(c, run) for c, run in runs if next(run, _DONE) is not _DONE]
                for c in active:
                    finish(c)
            else:
                for ctas in groups:
                    chunk = Chunk(state, ctas, space)
                    for _ in chunk.run():
                        pass
                    finish(chunk)
        except LimitReachedError as limit:
            state.log.add("time-limit", None, f"the launch was stopped: it used up {limit}")
            part.completed = False
    part.findings = state.log.findings()
    part.completed &= all(f.rule != "trap" for f in part.findings)
    part.printed = state.printed
    if state.traffic is not None:
        part.traffic = state.traffic.counts
    return part


_DONE = object()


def _run_forked(state: LaunchState, groups: list[list[Any]]) -> _Part:
    """Run groups of chunks in forked processes over the shared arena; this process takes the first group."""
    children: list[tuple[int, int]] = []
    sys.stdout.flush()
    sys.stderr.flush()
    for chunks in groups[1:]:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                try:
                    answer: Any = _run_chunks(state, chunks)
                except Exception as error:  # handed to the parent, which raises it
                    answer = error
                data = pickle.dumps(answer)
                with os.fdopen(writer, "wb") as out:
                    out.write(struct.pack("<Q", len(data)) + data)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        children.append((pid, reader))
    problem: BaseException | None = None
    part: _Part | None = None
    try:
        part = _run_chunks(state, groups[0])
    except BaseException as raised:
        problem = raised
    answered: set[int] = set()
    try:
        for pid, reader in children:
            if problem is not None:
                break
            with os.fdopen(reader, "rb", closefd=False) as source:
                data = source.read()
            os.waitpid(pid, 0)
            answered.add(pid)
            if len(data) < 8 or len(data) - 8 != struct.unpack("<Q", data[:8])[0]:
                problem = WorkbenchError("a simulator process ended early; the machine may be out of memory")
                break
            answer = pickle.loads(data[8:])  # from our own fork
            if isinstance(answer, Exception):
                problem = answer
                break
            assert part is not None
            part = _joined(state, part, answer)
    finally:
        for pid, reader in children:
            os.close(reader)
            if pid not in answered:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if problem is not None:
        raise problem
    assert part is not None
    return part


def _joined(state: LaunchState, a: _Part, b: _Part) -> _Part:
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
    )  # fmt: skip


def _counters(state: LaunchState, part: _Part) -> Counters:
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
        async_bytes=lanes("async_bytes"),
        atomics=lanes("atomics"),
        divergent_branches=part.divergent,
        barrier_waits=part.waits,
    )
