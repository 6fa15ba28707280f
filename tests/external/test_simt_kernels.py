"""Kernels without clusters or tensor cores: SiTU, embedding, the skinny GEMM and routing."""

from __future__ import annotations

import pytest
import references
import torch
from contracts import contract, generated, judge
from running import Device, clean, normal, run

pytestmark = pytest.mark.usefixtures("index")


def close(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("generator", ["ordinary", "wide", "large", "tiny", "denormals", "negative_zero",
                                       "all_equal", "nan_inf"])  # fmt: skip
@pytest.mark.parametrize("tp", [8, 16])
def test_dense_situ(tp: int, generator: str) -> None:
    """Of negative gates alone it keeps few digits: 1 + tanh(g / 2) cancels (K3's layer 0 does so)."""
    op = contract("situ")
    axes = op.workload(f"dense_tp{tp}_b8").axes
    given, device = generated(op, axes, generator), Device()
    out = device.empty(axes["B"], axes["P"])
    clean(run(f"dense_situ_tp{tp}", device, device.put(given["gate_up"]), out, 4.0, 25.0))
    judge(op, axes, given, {"out": out})


def test_embedding() -> None:
    device = Device()
    weight = device.put(normal(2, 20480, 7168), "weight")
    ids = device.put(torch.tensor([0, 20480, 20481, 40959, 40960, 163839, 163840, -1], dtype=torch.int32))
    out = device.empty(8, 7168)
    clean(run("embedding_i32_tp8", device, ids, weight, out, 20480, 163840))
    assert torch.equal(out.double(), references.embedding(ids, weight, 20480, 163840))


def product(name: str, op_name: str, axes: dict[str, int], generator: str, doubled: bool = False) -> None:
    """Run a product's kernel on the contract's inputs; `doubled` passes the output twice."""
    op, device = contract(op_name), Device()
    given = generated(op, axes, generator)
    out = device.empty(axes["B"], axes["N"])
    outputs = [out, out] if doubled else [out]
    clean(run(name, device, device.put(given["x"]), device.put(given["weight"]), *outputs))
    judge(op, axes, given, {"out": out})


@pytest.mark.parametrize("b", [1, 2])
def test_skinny_gemm(b: int) -> None:
    """The input projection of a KDA layer at TP16: 3216 by 7168."""
    axes = dict(contract("skinny_gemm").workload(f"tp16_b{b}").axes)
    product(f"skinny_b{b}", "skinny_gemm", axes, "ordinary", doubled=True)


@pytest.mark.parametrize("generator", ["cancelling", "uneven", "large", "denormals", "nan_inf"])
def test_skinny_gemm_at_the_edges(generator: str) -> None:
    axes = {"B": 2, "N": 128, "K": 7168}
    product("skinny_b2", "skinny_gemm", axes, generator, doubled=True)


def test_low_rank_gate_projections() -> None:
    """F_A with beta, [144, 7168], and F_B, [1536, 128], of the stock path: the columns of F_A's result."""
    op, device = contract("skinny_gemm"), Device()
    first, second = {"B": 2, "N": 144, "K": 7168}, {"B": 2, "N": 1536, "K": 128}
    a, b = generated(op, first), generated(op, second)
    middle, out = device.empty(2, 144), device.empty(2, 1536)
    clean(run("kda_fa_b2", device, device.put(a["x"]), device.put(a["weight"]), middle))
    judge(op, first, a, {"out": middle})
    clean(run("kda_fb_b2", device, middle[:, :128], device.put(b["weight"]), out))
    judge(op, second, {**b, "x": middle[:, :128].clone()}, {"out": out})


def test_prefetch_changes_nothing() -> None:
    device = Device()
    data = device.put(normal(8, 1 << 16), "data")
    before = data.clone()
    ranges = torch.zeros(8, 2, dtype=torch.int64)
    ranges[0] = torch.tensor([device.address(data), 1 << 17])
    ranges[3] = torch.tensor([device.address(data) + 64, 4096])
    clean(run("l2_prefetch", device, device.put(ranges)))
    assert torch.equal(data, before)
