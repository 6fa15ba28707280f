"""The templates against the verifiers, executed in the simulator with all memory checks."""

from __future__ import annotations

import random

import pytest

from workbench.ops.model import Op
from workbench.simulator import Memory, simulate
from workbench.templates import Knobs, Template
from workbench.verify.inputs import Case, place_scratch
from workbench.verify.report import Verdict

STRUCTURES: dict[str, list[Knobs]] = {
    "moe_experts": [{}, {"decode": "bits", "math": "f32"}, {"math": "f32x2"}],
    "moe": [
        {},
        {"route": "inline"},
        {"combine": "separate", "down_warps": 8},
        {"decode": "bits", "math": "f32"},
    ],
}
"""Knob changes worth a run at the real sizes."""


def covering(template: Template, op: Op, workload: str, seed: int = 0) -> list[Knobs]:
    """A few points that take every knob through all values that are valid at the workload."""
    points = list(template.space(op.workload(workload).axes).all_points)
    random.Random(seed).shuffle(points)
    chosen: list[Knobs] = []
    seen: set[tuple[str, object]] = set()
    for point in points:
        if not seen >= set(point.items()):
            chosen.append(point)
            seen |= set(point.items())
    return chosen


def check(op: Op, workload: str, generator: str, artifacts: list, seed: int = 0) -> None:
    memory = Memory()
    case = Case.create(op, op.workload(workload), generator, seed, memory)
    for artifact in artifacts:
        mark = memory.mark()
        case.restore()
        place_scratch(memory, op, artifact.buffers)
        outcome = simulate(artifact, memory)
        assert outcome.completed
        assert not outcome.findings, (artifact.knobs, outcome.findings[0].message)
        verdict = case.judge(case.read_outputs())
        assert verdict.verdict is Verdict.PASS, (artifact.knobs, generator, verdict.summary)
        memory.release(mark)


@pytest.mark.parametrize("workload", ["small_b1", "small_b3"])
def test_default_is_right_for_every_generator(template: Template, op: Op, workload: str, compiled) -> None:
    artifact = compiled(op, workload, template)
    for generator in op.generators:
        check(op, workload, generator, [artifact])


def test_every_knob_value_is_right_with_several_tokens(template: Template, op: Op, compiled) -> None:
    artifacts = [compiled(op, "small_b3", template, p) for p in covering(template, op, "small_b3")]
    check(op, "small_b3", "ordinary", artifacts, seed=1)
    check(op, "small_b3", "nan_inf", artifacts, seed=1)


def test_structures_are_right_for_every_generator(template: Template, op: Op, compiled) -> None:
    changes = [c for c in STRUCTURES.get(template.op, []) if c]
    artifacts = [compiled(op, "small_b3", template, c) for c in changes]
    for generator in op.generators if artifacts else ():
        check(op, "small_b3", generator, artifacts)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["tp8_b1", "tp8_b8", "tp16_b1"])
def test_real_sizes_are_right(template: Template, op: Op, workload: str, compiled) -> None:
    artifacts = [compiled(op, workload, template, c) for c in STRUCTURES.get(template.op, [{}])]
    for generator in ("ordinary", "nan_inf"):
        check(op, workload, generator, artifacts)


@pytest.mark.slow
def test_every_knob_value_is_right_at_a_real_size(template: Template, op: Op, compiled) -> None:
    artifacts = [compiled(op, "tp8_b1", template, p) for p in covering(template, op, "tp8_b1")]
    check(op, "tp8_b1", "ordinary", artifacts)
