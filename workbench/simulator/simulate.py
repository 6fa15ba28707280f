"""Runs the launches of an artifact, or of any PTX module, on simulated memory."""

from __future__ import annotations

import ctypes
import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from workbench.artifact import Artifact, Launch
from workbench.errors import WorkbenchError
from workbench.findings import Finding
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator.codegen import Program, compile_kernel
from workbench.simulator.counters import Counters
from workbench.simulator.launch import LaunchState, SimulationOptions
from workbench.simulator.memory import Memory
from workbench.simulator.running import Part, counters_of
from workbench.simulator.stream import run_stream
from workbench.simulator.trace import Tracer, TraceRecord
from workbench.simulator.workers import Workers

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


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
    trace: TraceRecord = field(default_factory=TraceRecord)
    """What `SimulationOptions.trace` asked for."""
    seconds: float = 0.0
    """Wall time of the execution, translation excluded."""
    steps: int = 0
    """Blocks of instructions that were run, in this process."""
    order_work: int = 0
    """Entries of clocks that happens-before compared, in this process."""

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
    pdl: bool = False
    """Programmatic stream serialization; matters only with `SimulationOptions.adversary.overlap`."""


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
    module = parse(artifact.ptx)
    names = {r.buffer for launch in artifact.launches for p in launch.params for r in p.relocations}
    addresses = {name: memory.address(name) for name in names}
    launches = [bound(module, launch, addresses) for launch in artifact.launches]
    return simulate_module(module, launches, memory, options)


_programs: OrderedDict[tuple[int, str, bool, int], tuple[Module, Program]] = OrderedDict()
"""The programs used last, by module, kernel and copy: verification runs the same kernels on many inputs."""


def _program(module: Module, kernel: str, traced: bool, copy: int = 0) -> Program:
    key = (id(module), kernel, traced, copy)
    if key not in _programs:
        _programs[key] = (module, compile_kernel(module, module.kernel(kernel), traced))
        while len(_programs) > 32:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key][1]


def forget(module: Module) -> None:
    """Give up the programs of a module, and the memory of their launches, which is in cycles."""
    for key in [k for k, (m, _) in _programs.items() if m is module]:
        del _programs[key]
    gc.collect()


def bound(module: Module, launch: Launch, addresses: dict[str, int]) -> KernelLaunch:
    """Fill in the parameter block of an artifact's launch."""
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
        launch.kernel, launch.grid, launch.block, bytes(block), launch.cluster, launch.smem_bytes, launch.pdl
    )


def simulate_module(
    module: Module,
    launches: Sequence[KernelLaunch],
    memory: Memory,
    options: SimulationOptions | None = None,
    arrive: Callable[[], None] | None = None,
) -> Outcome:
    """Run launches of a PTX module in order; see `simulate`.

    `arrive` is called when the grid before the first launch completes: at once, unless the first launch has
    programmatic stream serialization and `options.adversary.overlap` is set; then at the last moment.
    """
    options = options or SimulationOptions()
    tracer = Tracer(options.trace, memory) if options.trace is not None else None
    if tracer is not None:
        options = replace(options, processes=1)
    check_float_environment()
    keep_freed_arrays()
    deadline = time.monotonic() + options.time_limit
    overlap = options.adversary.overlap and any(launch.pdl for launch in launches)
    programs: list[Program] = []
    for n, launch in enumerate(launches):
        # The code of a launch holds its parameters, so launches that overlap cannot share it.
        copy = sum(other.kernel == launch.kernel for other in launches[:n]) if overlap else 0
        programs.append(_program(module, launch.kernel, options.trace is not None, copy))
    mark = memory.mark()
    addresses = place_variables(module, memory)
    findings: list[Finding] = []
    counters: list[Counters] = []
    printed: list[str] = []
    completed = True
    start = time.perf_counter()
    try:
        states = [
            LaunchState(
                program, memory, launch.grid, launch.block, launch.cluster, launch.smem_bytes,
                launch.parameters, options, deadline, addresses,
            )
            for program, launch in zip(programs, launches, strict=True)
        ]  # fmt: skip
        for state in states:
            state.tracer = tracer
            state.stepwise = overlap
        if not overlap and arrive is not None:
            arrive()
        with Workers(states) as workers:
            if overlap:
                parts: Iterator[Part] = iter(run_stream(states, [launch.pdl for launch in launches], arrive))
            else:
                parts = (workers.run(index) for index in range(len(states)))
            for state, part in zip(states, parts, strict=False):
                state.settle()
                findings.extend(part.findings)
                printed.extend(part.printed)
                counters.append(counters_of(state, part))
                completed &= part.completed
                if not completed and not overlap:
                    break
    finally:
        seconds = time.perf_counter() - start
        memory.release(mark)
        for state in states:
            if state.order is not None:
                state.order.close()
    record = tracer.record() if tracer is not None else TraceRecord()
    steps = sum(state.steps for state in states)
    work = sum({id(state.order): state.order_work for state in states}.values())
    return Outcome(tuple(findings), tuple(counters), completed, tuple(printed), record, seconds, steps, work)


@cache
def keep_freed_arrays() -> None:
    """Have glibc reuse the memory of freed arrays instead of returning it to the system.

    The arrays of a cohort are just above glibc's limits for that; mapping them anew costs a tenth of a run.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def check_float_environment() -> None:
    """Refuse to run where subnormal numbers are flushed."""
    smallest = np.array([1e-45], np.float32)
    if not (smallest * np.float32(1))[0] > 0:
        raise WorkbenchError(
            "this process flushes subnormal numbers to zero; the simulator would be inexact in it"
        )


def place_variables(module: Module, memory: Memory, label: str = "module variable") -> dict[str, int]:
    """Allocate the module's global and constant variables; `label` tells them from buffers of their name."""
    addresses: dict[str, int] = {}
    views: dict[str, Any] = {}
    for v in module.variables:
        if v.space not in ("global", "const") or v.elements is None:
            continue
        size = max(1, v.elements * int(v.type.lstrip("busfp")) // 8)
        name = v.name if v.name not in memory else f"{v.name} ({label})"
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
