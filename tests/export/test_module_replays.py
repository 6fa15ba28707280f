"""Graphs that are captured once and replayed: batches change, padding holds anything, epochs go on.

A captured graph holds fixed addresses and arguments. A replay is therefore a call with the same tensors,
their contents replaced, that makes no memory; `test_module` holds calls to that.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.export.conftest import TUNED
from tests.export.module_winners import SimulatedProgram
from workbench.export.module.k3_decode.steps import Step, batches, captured, prepared, smallest
from workbench.isa.ptx import parse
from workbench.simulator import Memory
from workbench.simulator.simulate import KernelLaunch, SimulationOptions, simulate_module

WIDTH = 7168


# Verify steps through a real kernel


class Graph:
    """The tensors of one captured step."""

    def __init__(self, package: ModuleType, step: Step, weight: torch.Tensor) -> None:
        self.package, self.step = package, step
        self.tensors = {
            "x": torch.zeros(step.rows, WIDTH, dtype=torch.bfloat16),
            "weight": weight,
            "out": torch.zeros(step.rows, WIDTH, dtype=torch.bfloat16),
        }

    def replay(self, rows: torch.Tensor) -> torch.Tensor:
        """Run on the rows of live requests; what the rows of padding hold must not matter."""
        live = rows.shape[0] // self.step.tokens
        padding = self.step.padding(live)
        self.tensors["x"][: padding.start] = rows
        self.tensors["x"][padding] = torch.nan
        torch.ops.k3_decode.rmsnorm(*self.tensors.values())
        return self.tensors["out"][: padding.start]


@pytest.mark.parametrize("tokens", [1, 4, 5, 8])
def test_every_batch_replays_the_next_graph_and_padding_does_not_leak(
    package: ModuleType, simulated: type[SimulatedProgram], tokens: int
) -> None:
    rng = torch.Generator().manual_seed(tokens)
    weight = torch.randn(WIDTH, generator=rng).to(torch.bfloat16)
    steps = captured((1, 8, 18, 32), tokens)
    graphs = {step: Graph(package, step, weight) for step in steps}
    used = set()
    for requests in (1, 2, 4, 1, 3):
        step = smallest(steps, requests, tokens)
        assert step is not None and step.rows <= max(TUNED)
        used.add(step.rows)
        x = torch.randn(requests * tokens, WIDTH, generator=rng).to(torch.bfloat16)
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        out = graphs[step].replay(x).double()
        assert torch.allclose(out, exact, rtol=8e-3, atol=1e-3), (requests, step)
    counts = package.counts()
    assert not counts.fallbacks
    assert {rows for _, rows, _ in counts.padded} == used - set(TUNED)


# Epochs


RING = """
.version 9.0
.target sm_103a
.address_size 64
.visible .entry ring(.param .u64 p_x, .param .u64 p_out, .param .u64 p_exchange, .param .u64 p_flag)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %d<12>;
    .reg .f32 %f<3>;
    ld.param.u64 %d1, [p_x];
    ld.param.u64 %d2, [p_out];
    ld.param.u64 %d3, [p_exchange];
    ld.param.u64 %d4, [p_flag];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r1, 32, %r2;
    mul.wide.u32 %d5, %r3, 4;
    add.u64 %d6, %d1, %d5;
    ld.global.f32 %f1, [%d6];
    add.u64 %d7, %d3, %d5;
    st.global.f32 [%d7], %f1;
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra passed;
    atom.acq_rel.gpu.global.add.u32 %r4, [%d4], 1;
    {epoch}
poll:
    ld.acquire.gpu.global.u32 %r7, [%d4];
    sub.s32 %r8, %r7, %r6;
    setp.lt.s32 %p2, %r8, 0;
    @%p2 bra poll;
passed:
    bar.sync 0;
    add.u32 %r9, %r1, 1;
    and.b32 %r9, %r9, 3;
    mad.lo.u32 %r10, %r9, 32, %r2;
    mul.wide.u32 %d8, %r10, 4;
    add.u64 %d9, %d3, %d8;
    ld.global.f32 %f2, [%d9];
    add.u64 %d10, %d2, %d5;
    st.global.f32 [%d10], %f2;
    ret;
}}
"""
"""Row i of `out` is row i + 1 of `x`, the last one's the first: each CTA waits for all four in between."""
FROM_MEMORY = "shr.u32 %r5, %r4, 2; add.u32 %r5, %r5, 1; shl.b32 %r6, %r5, 2;"
FROZEN = "mov.u32 %r6, 4;"
"""What a launch argument would be: right in the first run, and the same in every replay."""


class RingProgram:
    """Executes the ring's PTX on the memory that the executor gives it."""

    ptx: ClassVar[str]
    seed: ClassVar[int]
    places: ClassVar[list[tuple[int, ...]]]
    findings: ClassVar[list[str]]
    sizes: ClassVar[Mapping[str, int]] = {"x": 512, "out": 512, "exchange": 512, "flag": 4}

    def __init__(self, cubin: bytes, launches: Sequence[object]) -> None:
        del cubin, launches

    def run(self, addresses: Mapping[str, int], stream: int, after_wait: bool = False) -> None:
        self.places.append(tuple(addresses[name] for name in ("exchange", "flag")))
        memory = Memory()
        host = {
            name: np.frombuffer((ctypes.c_uint8 * n).from_address(addresses[name]), np.uint8)
            for name, n in self.sizes.items()
        }
        for name, n in self.sizes.items():
            memory.allocate(name, n, align=256, initialized=True)[:] = host[name]
        block = struct.pack("<4Q", *(memory.address(name) for name in self.sizes))
        launch = KernelLaunch("ring", (4, 1, 1), (32, 1, 1), block)
        options = SimulationOptions(seed=self.seed, chunk_lanes=32)  # CTAs run one by one as far as they can
        outcome = simulate_module(parse(self.ptx), [launch], memory, options)
        self.findings += [f.rule for f in outcome.findings if f.severity.value == "error"]
        assert outcome.completed
        for name in self.sizes:
            host[name][:] = memory.view(name)


def ring(package: ModuleType) -> Any:
    """The ring as a verified kernel of four rows, and the executor that the package makes for it."""
    table, runtime = (importlib.import_module(f"k3_decode.{name}") for name in ("table", "runtime"))
    roles = {"x": "activation", "out": "output"}
    buffers = tuple(table.Buffer(n, ("B", "N"), "f32", "float32", role, "") for n, role in roles.items())
    op = replace(package.table().ops["rmsnorm"], name="ring", buffers=buffers)

    def slot(name: str, nbytes: int, own: bool) -> Any:
        return table.Slot(name, (nbytes // 4,), "f32", nbytes, 256, zeroed=name == "flag", own=own)

    slots = (
        slot("x", 512, False),
        slot("out", 512, False),
        slot("exchange", 512, True),
        slot("flag", 4, True),
    )
    kernel = replace(package.table().kernels[0], key="ring", op="ring", batch=4, slots=slots)
    return runtime.Executor(op, kernel, torch.device("cpu"))


def replays(package: ModuleType, monkeypatch: pytest.MonkeyPatch, epoch: str, seed: int) -> list[bool]:
    """Replay a graph of four rows and one of three, which runs at four, in turn; whether each was right."""
    RingProgram.ptx, RingProgram.seed = RING.format(epoch=epoch), seed
    RingProgram.places, RingProgram.findings = [], []
    monkeypatch.setattr(package.runtime, "make_program", RingProgram)
    executor = ring(package)
    graphs = {rows: {n: torch.zeros(rows, 32) for n in ("x", "out")} for rows in (4, 3)}
    executor.make_staging(graphs[3])
    right = []
    for n, rows in enumerate((4, 3, 3, 4, 3, 4)):
        tensors = graphs[rows]
        tensors["x"].copy_(torch.arange(rows * 32.0).view(rows, 32) + 1000 * (n + 1))
        executor.run(tensors, rows)
        whole = torch.cat([tensors["x"], tensors["x"][-1:]])[:4]  # the last row stands for what is missing
        right.append(torch.equal(tensors["out"], whole.roll(-1, 0)[:rows]))
    assert len(set(RingProgram.places)) == 1, "both graphs have the kernel's one memory"
    assert executor.own["flag"].view(torch.int32).item() == 4 * len(right)
    return right


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_epoch_in_device_memory_goes_on_from_replay_to_replay(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert all(replays(package, monkeypatch, FROM_MEMORY, seed))
    assert RingProgram.findings == []


def test_an_epoch_that_was_frozen_at_capture_is_right_once(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = replays(package, monkeypatch, FROZEN, seed=1)
    assert right[0] and not all(right[1:])
    assert RingProgram.findings, "and it is found to be a race"


def test_what_is_prepared_is_what_is_asked_for() -> None:
    steps = prepared((1, 2, 4, 8, 16), tokens=4)
    asked = set(batches(steps))
    for step in steps:
        assert step.rows in asked and step.requests in asked
    assert max(asked) == 16
