"""Kernels of the corpus judged by the workbench's own op contracts: their inputs, goldens and tolerances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from running import Device, run

from workbench.ops import Op, load_op
from workbench.ops.compare import compare, standard_of
from workbench.ops.trivial import zero_inputs
from workbench.simulator import Outcome, SimulationOptions
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])
Tensors = dict[str, torch.Tensor]


def contract(name: str) -> Op:
    """An op of this repository."""
    return load_op(WORKSPACE, name)


def generated(op: Op, axes: Mapping[str, int], generator: str = "ordinary", seed: int = 0) -> Tensors:
    """The op's inputs."""
    storage = zero_inputs(op, axes)
    op.generators[generator](axes, seed, storage.__getitem__)
    return storage


def judge(op: Op, axes: Mapping[str, int], before: Tensors, after: Tensors) -> None:
    """Fail unless every output and state in `after` is within the op's tolerance.

    Args:
        before: the op's inputs as they were before the run.
        after: outputs and states by the op's names, in their shapes.
    """
    standard = standard_of(op, before, axes)
    for b in op.outputs:
        got, golden = after[b.name], standard.golden[b.name]
        got = got.double() if golden.is_floating_point() else got
        outcome = compare(golden, got, op.tolerances[b.name], standard.honest[b.name])
        assert outcome.passed, f"{op.name}: {b.name} {outcome.reason}"


def kda_on(device: Device, axes: Mapping[str, int], given: Tensors) -> tuple[Tensors, tuple[object, ...]]:
    """Place a KDA step's buffers; return them by name, and the arguments that the package's kernels take."""
    b, h, d = axes["B"], axes["H"], axes["D"]
    t = {name: device.put(value, name) for name, value in given.items()}
    t["out"] = device.empty(b, h * d, name="out")
    part = lambda start, width: t["projected"][:, start : start + width]  # noqa: E731
    values = (
        part(0, 3 * h * d), t["conv_weight"], t["dt_bias"], t["conv"].transpose(-1, -2),
        part(4 * h * d, d), part(4 * h * d + d, h), t["a_log"], t["dt_bias"], t["slots"], t["state"],
        t["out"], part(3 * h * d, h * d), t["norm"], -5.0, d**-0.5, 1e-5, t["fb"],
    )  # fmt: skip
    return t, values


def run_kda(
    name: str, axes: Mapping[str, int], given: Tensors, options: SimulationOptions | None = None
) -> tuple[Outcome, Tensors]:
    """Run a KDA kernel of the package; its buffers afterwards."""
    device = Device()
    t, values = kda_on(device, axes, given)
    return run(name, device, *values, options=options), t
