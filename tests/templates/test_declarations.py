"""What the templates declare: spaces, defaults, scratch buffers."""

from __future__ import annotations

from workbench.ops.model import Op
from workbench.templates import Template


def test_template_belongs_to_its_folder(template: Template) -> None:
    assert template.op == template.path.parent.name
    assert template.summary


def test_at_least_three_knobs_really_vary_at_the_real_workloads(template: Template, op: Op) -> None:
    points = template.space(op.workload("tp8_b8").axes).all_points
    varying = [k for k in template.knobs if len({p[k] for p in points}) > 1]
    assert len(varying) >= 3


def test_default_is_valid_at_every_workload(template: Template, op: Op) -> None:
    for workload in op.workloads:
        assert template.space(workload.axes).why_invalid(template.default) is None, workload.name


def test_spaces_are_large_enough_to_tune_and_small_enough_to_enumerate(template: Template, op: Op) -> None:
    for workload in op.workloads:
        count = len(template.space(workload.axes).all_points)
        wanted = 64 if template.op in ("moe", "moe_experts") and workload.real else 12
        assert wanted <= count <= 10_000, (workload.name, count)


def test_every_knob_value_is_valid_somewhere(template: Template, op: Op) -> None:
    used = {k: set() for k in template.knobs}
    for workload in op.workloads:
        for point in template.space(workload.axes).all_points:
            for name, value in point.items():
                used[name].add(value)
    assert used == {k: set(v) for k, v in template.knobs.items()}


def test_buffers_resolve_and_do_not_clash(template: Template, op: Op) -> None:
    for workload in op.workloads:
        names = [b.name for b in template.bind(op, workload, template.default)]
        assert len(set(names)) == len(names)
