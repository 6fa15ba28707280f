"""Kernels without clusters or tensor cores: SiTU, embedding, the skinny GEMM and routing."""

from __future__ import annotations

import pytest
import references
import torch
from running import Device, clean, normal, run

pytestmark = pytest.mark.usefixtures("index")


def close(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("tp", [8, 16])
def test_dense_situ(tp: int) -> None:
    hidden, padded = (4224, 4224) if tp == 8 else (2112, 2176)
    device = Device()
    x = device.put(normal(1, 4, 2 * hidden, std=3.0))
    out = device.empty(4, padded)
    clean(run(f"dense_situ_tp{tp}", device, x, out, 4.0, 25.0))
    close(out, references.dense_situ(x, padded), 8e-3, 2e-2)


def test_embedding() -> None:
    device = Device()
    weight = device.put(normal(2, 20480, 7168), "weight")
    ids = device.put(torch.tensor([0, 20480, 20481, 40959, 40960, 163839, 163840, -1], dtype=torch.int32))
    out = device.empty(8, 7168)
    clean(run("embedding_i32_tp8", device, ids, weight, out, 20480, 163840))
    assert torch.equal(out.double(), references.embedding(ids, weight, 20480, 163840))


@pytest.mark.parametrize("b", [1, 2])
def test_skinny_gemm(b: int) -> None:
    """The input projection of a KDA layer at TP16: 3216 by 7168."""
    n, k = 3216, 7168
    device = Device()
    x, w = device.put(normal(3, b, k)), device.put(normal(4, n, k, std=k**-0.5))
    out = device.empty(b, n)
    clean(run(f"skinny_b{b}", device, x, w, out, out))
    close(out, references.gemm(x, w), 2e-2, 2e-2)
