"""GEMMs and attention on tensor cores: mma.sync, tcgen05, and the two ends of the o-projection."""

from __future__ import annotations

import pytest
import torch
from contracts import contract, generated, judge
from running import Device, clean, run, weight_map

pytestmark = pytest.mark.usefixtures("index")

PARTIAL_TILE = "uninitialized-read"
"""Rows of a 16-row tile past the batch are multiplied as they lie in memory; the results are dropped."""


@pytest.mark.parametrize(
    ("tactic", "n", "m", "generator"),
    [
        ((64, 8, 4, 8), 3216, 8, "ordinary"),
        ((128, 8, 2, 6), 6288, 5, "cancelling"),
        ((64, 16, 2, 10), 3216, 16, "nan_inf"),
        ((128, 8, 1, 6), 1024, 3, "uneven"),
    ],
)
def test_split_k_gemm(tactic: tuple[int, ...], n: int, m: int, generator: str) -> None:
    op, axes = contract("splitk_gemm"), {"B": m, "N": n, "K": 7168 if n > 1024 else 768}
    given, device = generated(op, axes, generator), Device()
    x, w = device.put(given["x"], "x"), device.put(given["weight"], "weight")
    out = device.empty(m, n, name="out")
    tensor_map = weight_map(device, w, (64, tactic[0]))
    as_operand = lambda t: t.as_strided((*t.shape, 1), (t.stride(0), 1, 0))  # noqa: E731
    y = out.as_strided((n, m, 1), (1, n, 0))
    name = "splitk_" + "_".join(map(str, tactic))
    clean(run(name, device, as_operand(w), as_operand(x), y, y, tensor_map))
    judge(op, axes, given, {"out": out})


@pytest.mark.parametrize(("tp", "b", "generator"), [
    (8, 1, "ordinary"), (8, 8, "padding"), (16, 16, "padding"), (16, 16, "nan_inf"), (8, 8, "steep_gates"),
])  # fmt: skip
def test_mla_value(tp: int, b: int, generator: str) -> None:
    op = contract("mla_value")
    axes = op.workload(f"tp{tp}_b{b}").axes
    given, device = generated(op, axes, generator), Device()
    t = {n: device.put(value, n) for n, value in given.items()}
    h, d, first = axes["H"], axes["D"], axes["G"]
    gate, uv = t["projected"][:, first : first + h * d], t["kv_b"][:, d:].transpose(1, 2)
    out = device.empty(b, h * d, name="out")
    outcome = run(f"mla_tp{tp}_b{b}_2", device, t["latent"], uv, gate, t["lengths"], out)
    clean(outcome, known=PARTIAL_TILE if b % 16 else "")
    judge(op, axes, given, {"out": out})


@pytest.mark.parametrize(("tp", "b", "generator"), [
    (8, 1, "ordinary"), (8, 8, "padding"), (16, 2, "ordinary"), (16, 2, "saturating"), (16, 2, "tiny"),
    (16, 2, "large"),
])  # fmt: skip
def test_mla_query(tp: int, b: int, generator: str) -> None:
    op = contract("mla_query")
    axes = op.workload(f"tp{tp}_b{b}").axes
    given, device = generated(op, axes, generator), Device()
    t = {n: device.put(value.view(torch.uint8) if n == "cache" else value, n) for n, value in given.items()}
    query = device.empty(b, axes["H"], 576, dtype=torch.uint8, name="query")
    outcome = run(f"mla_tp{tp}_b{b}", device, t["projected"][:, :2112], t["q_norm"], t["kv_norm"], t["qb"],
                  t["uk"], t["cache"], t["slots"], t["q_inv"], t["k_inv"], 1e-5, query)  # fmt: skip
    clean(outcome, known=PARTIAL_TILE if b > 2 else "")
    e4m3 = torch.float8_e4m3fn
    judge(op, axes, given, {"query": query.view(e4m3), "cache": t["cache"].view(e4m3)})
