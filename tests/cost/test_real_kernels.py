"""The latency model on kernels that were compiled and simulated: order of sizes, and the floor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.compile import CompileRequest, compile_candidate
from workbench.cost import Prediction, load_machine, predict, roofline
from workbench.isa.sass.parser import parse_sass
from workbench.isa.sass.tool import disassemble
from workbench.ops import load_op
from workbench.simulator import Memory, SimulationOptions, simulate
from workbench.templates import load_template
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).resolve().parents[2])
GB300 = load_machine("gb300")
STORED = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}


def predictions(op_name: str, workload_name: str) -> tuple[float, Prediction, Prediction, int]:
    """Roofline, predictions from SASS and from PTX, and the distinct bytes that the launches load."""
    op = load_op(WORKSPACE, op_name)
    workload = op.workload(workload_name)
    template = load_template(WORKSPACE.template(op_name, WORKSPACE.template_names(op_name)[0]))
    artifact = compile_candidate(CompileRequest.of(op, workload, template, template.default), None)
    memory, views = Memory(), {}
    for b in artifact.buffers:
        given = any(b.name == x.name for x in op.inputs)
        changed = any(b.name == x.name for x in op.outputs)
        writable = changed or not given
        array = memory.allocate(
            b.name, b.nbytes, align=b.align, writable=writable, initialized=given or b.zeroed
        )
        tensor = torch.from_numpy(array).view(STORED.get(b.dtype.value, torch.uint8))
        views[b.name] = tensor.reshape(*b.shape[:-1], -1)
    op.generators["ordinary"](workload.axes, 0, views.__getitem__)
    outcome = simulate(artifact, memory, SimulationOptions(count_sectors=True))
    assert outcome.completed
    sass = parse_sass(disassemble(artifact.cubin))
    return (
        roofline(op, workload, GB300).us,
        predict(artifact, outcome.counters, GB300, sass),
        predict(artifact, outcome.counters, GB300),
        sum(c.unique_load_bytes for c in outcome.counters),
    )


@pytest.mark.slow
def test_experts_at_real_sizes() -> None:
    op = load_op(WORKSPACE, "moe_experts")
    times = {}
    for name in ("tp16_b1", "tp8_b1"):
        floor, sass, ptx, loaded = predictions("moe_experts", name)
        compulsory = op.compulsory_bytes(op.workload(name).axes)
        assert loaded == pytest.approx(compulsory, rel=0.02), "the kernel reads its experts once"
        assert floor < sass.us < 6 * floor
        assert 0.5 < ptx.us / sass.us < 2
        assert sum(p.hbm_bytes for p in sass.launches) == pytest.approx(compulsory, rel=0.02)
        times[name] = sass.us
    assert 1 < times["tp8_b1"] / times["tp16_b1"] < 2, "half the bytes take less time, but the gaps stay"


@pytest.mark.slow
def test_moe_chain_has_a_prediction_for_every_launch() -> None:
    floor, sass, _, _ = predictions("moe", "tp8_b1")
    assert len(sass.launches) >= 2 and sass.us > floor
    assert all(p.us > 0 and p.occupancy.ctas_per_sm > 0 and p.reason for p in sass.launches)
