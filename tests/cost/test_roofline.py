"""Rooflines against the figures of the K3 decode survey."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.cost import load_machine, roofline
from workbench.ops import load_op
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).resolve().parents[2])
# Megabytes and microseconds at 8 TB/s, counted by hand from the checkpoint's shapes: compulsory bytes of the
# routed experts of one token are 16 x (W13 + its scales + W2 + its scales).
EXPERT_TP8 = 768 * 1792 + 768 * 112 + 3584 * 192 + 3584 * 12
EXPERT_TP16 = 384 * 1792 + 384 * 112 + 3584 * 96 + 3584 * 6


@pytest.mark.parametrize(
    ("op", "workload", "megabytes", "us"),
    [
        ("moe_experts", "tp8_b1", 35.1, 4.39),
        ("moe_experts", "tp16_b1", 17.5, 2.19),
        ("moe_topk", "tp8_b1", 0.0072, 0.0009),
        ("rmsnorm", "tp8_b1", 0.043, 0.0054),
        ("skinny_gemm", "tp8_b1", 90.2, 11.27),
        ("skinny_gemm", "tp16_b1", 46.1, 5.77),
        ("skinny_gemm", "mla_tp8_b1", 52.3, 6.54),
        ("o_proj", "tp8_b1", 22.0, 2.75),
        ("kda", "tp8_b1", 2.08, 0.26),
        ("mla_query", "tp8_b1", 8.66, 1.08),
        ("mla_value", "tp8_b1", 1.59, 0.199),
        ("attn_res", "tp8_b1", 0.158, 0.0197),
    ],
)
def test_matches_the_survey(op: str, workload: str, megabytes: float, us: float) -> None:
    contract = load_op(WORKSPACE, op)
    r = roofline(contract, contract.workload(workload), load_machine("gb300"))
    assert r.bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert r.us == pytest.approx(us, rel=0.01) and r.bound == "memory" and r.us == r.memory_us


@pytest.mark.parametrize(("workload", "expert"), [("tp8_b1", EXPERT_TP8), ("tp16_b1", EXPERT_TP16)])
def test_expert_bytes_by_hand(workload: str, expert: int) -> None:
    contract = load_op(WORKSPACE, "moe_experts")
    r = roofline(contract, contract.workload(workload), load_machine("gb300"))
    # Latent, ids and the unweighted rows come on top of the weights.
    assert r.bytes == 16 * expert + 3584 * 2 + 16 * 4 + 16 * 3584 * 2


def test_slower_machine_has_a_higher_floor() -> None:
    contract = load_op(WORKSPACE, "moe_experts")
    w = contract.workload("tp8_b1")
    a, b = roofline(contract, w, load_machine("gb300")), roofline(contract, w, load_machine("h200"))
    assert b.us / a.us == pytest.approx(8.0 / 4.8)


def test_compute_bound_when_flops_dominate() -> None:
    from dataclasses import replace

    contract = load_op(WORKSPACE, "moe_experts")
    heavy = replace(contract, flops=lambda axes: 10**12)
    r = roofline(heavy, heavy.workload("tp8_b1"), load_machine("gb300"))
    assert r.bound == "compute" and r.rate == "bf16" and r.us == pytest.approx(10**12 / 2500e6)
