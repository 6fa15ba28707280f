"""What the templates compile to: registers, vector loads, and what is read before the wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from workbench.artifact import Artifact, Launch
from workbench.isa.ptx import parse
from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Address, Instruction, Kernel, Reg, Symbol
from workbench.ops.model import Op
from workbench.templates import Template

PORTABLE = {"decode": "bits", "math": "f32"}


@dataclass(frozen=True)
class Access:
    """A global load or store: its place among the instructions, and the buffers its address comes from."""

    at: int
    instruction: Instruction
    buffers: frozenset[str]


def accesses(kernel: Kernel, launch: Launch) -> Iterator[Access]:
    """Global accesses in program order; addresses are followed from pointer parameters, not through loads."""
    names = {
        param.name: frozenset(r.buffer for r in bound.relocations)
        for param, bound in zip(kernel.params, launch.params, strict=True)
    }
    origin: dict[Reg, frozenset[str]] = {}
    for at, instruction in enumerate(kernel.instructions):
        is_global = "global" in instruction.modifiers
        if is_global and instruction.opcode in ("ld", "st"):
            address = next(o for o in instruction.operands if isinstance(o, Address))
            assert isinstance(address.base, Reg)
            yield Access(at, instruction, origin[address.base])
        if is_global:
            found: frozenset[str] = frozenset()
        elif instruction.opcode == "ld" and "param" in instruction.modifiers:
            found = frozenset().union(
                *(
                    names.get(o.base.name, frozenset())
                    for o in instruction.operands
                    if isinstance(o, Address) and isinstance(o.base, Symbol)
                )
            )
        else:
            found = frozenset().union(*(origin.get(r, frozenset()) for r in reads(instruction)))
        for register in writes(instruction):
            origin[register] = found


def kernels(artifact: Artifact) -> Iterator[tuple[Kernel, Launch]]:
    module = parse(artifact.ptx)
    for launch in artifact.launches:
        yield module.kernel(launch.kernel), launch


def waits(kernel: Kernel) -> list[int]:
    return [i for i, x in enumerate(kernel.instructions) if x.name == "griddepcontrol.wait"]


@pytest.mark.parametrize("workload", ["small_b1", "small_b3", "tp8_b1"])
def test_default_compiles_for_gb300_without_spills(
    template: Template, op: Op, workload: str, compiled
) -> None:
    artifact = compiled(op, workload, template)
    assert artifact.launches
    for launch in artifact.launches:
        assert artifact.resources[launch.kernel].spill_stores == 0
        assert artifact.resources[launch.kernel].stack_bytes == 0


@pytest.mark.parametrize("workload", ["small_b1", "tp8_b1"])
def test_portable_arithmetic_compiles_for_hopper(template: Template, op: Op, workload: str, compiled) -> None:
    changes = {k: v for k, v in PORTABLE.items() if k in template.knobs}
    assert compiled(op, workload, template, changes, "sm_90a").arch == "sm_90a"


def test_every_launch_is_pdl_waits_once_and_before_it_releases_dependents(variant, real) -> None:
    for kernel, launch in kernels(real(variant)):
        assert launch.pdl
        (wait,) = waits(kernel)
        assert kernel.instructions[wait].predicate is None
        (trigger,) = (
            i for i, x in enumerate(kernel.instructions) if x.name == "griddepcontrol.launch_dependents"
        )
        assert wait < trigger


def test_only_weights_are_touched_before_the_wait(variant, real) -> None:
    artifact = real(variant)
    for kernel, launch in kernels(artifact):
        (wait,) = waits(kernel)
        for access in accesses(kernel, launch):
            roles = {artifact.buffer(name).role for name in access.buffers}
            assert roles, access.instruction.text
            if access.at < wait:
                assert access.instruction.opcode == "ld"
                assert all(r.is_immutable for r in roles), access.instruction.text


def test_no_load_leaves_the_memory_model(variant, real) -> None:
    for kernel, _ in kernels(real(variant)):
        assert not [x.text for x in kernel.instructions if x.opcode == "ld" and "nc" in x.modifiers]


def test_independent_weights_are_loaded_before_the_wait(variant, real) -> None:
    found = set()
    for kernel, launch in kernels(real(variant)):
        for access in accesses(kernel, launch):
            early = access.buffers & {"weight", "bias", "w_router", "w_down"}
            found |= early
            assert not early or access.at < waits(kernel)[0], access.instruction.text
    wanted = {
        "rmsnorm": {"weight"},
        "moe_topk": {"bias"},
        "moe": {"bias", "w_router", "w_down"},
        "skinny_gemm": {"weight"},
    }
    assert found == wanted.get(variant[0].op, set())


def test_weight_streams_are_sixteen_byte_loads(variant, real) -> None:
    streams = {"w_router", "w_down", "w13", "w2"}
    seen = set()
    for kernel, launch in kernels(real(variant)):
        for access in accesses(kernel, launch):
            for name in access.buffers & streams:
                seen.add(name)
                assert {"v4", "b32"} <= set(access.instruction.modifiers), access.instruction.text
    assert seen == {b.name for b in real(variant).buffers} & streams
