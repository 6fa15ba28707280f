"""GEMMs and attention on tensor cores: mma.sync, tcgen05, and the two ends of the o-projection."""

from __future__ import annotations

import pytest
import references
import torch
from contracts import contract, generated, judge
from running import Device, clean, normal, run, weight_map

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


@pytest.mark.parametrize(("tp", "b"), [(8, 1), (8, 8), (16, 16)])
def test_mla_value(tp: int, b: int) -> None:
    h, pitch = 96 // tp, 3648 if tp == 8 else 2880
    device = Device()
    latent = device.put(normal(1, b, h, 512), "latent")
    kv_b = device.put(normal(2, h, 256, 512, std=512**-0.5), "kv_b")
    projected = device.put(normal(3, b, pitch), "projected")
    gate = projected[:, 2112 : 2112 + h * 128]
    lengths = torch.ones(b, dtype=torch.int32)
    if b > 1:
        lengths[1], gate[1] = 0, torch.nan
    used, out = device.put(lengths, "lengths"), device.empty(b, h * 128, name="out")
    uv = kv_b[:, 128:].transpose(1, 2)
    outcome = run(f"mla_tp{tp}_b{b}_2", device, latent, uv, gate, used, out)
    clean(outcome, known=PARTIAL_TILE if b % 16 else "")
    product = references.rounded(torch.einsum("bhc,hcv->bhv", latent.double(), uv.double()))
    want = references.rounded(product * torch.sigmoid(gate.double().reshape(b, h, 128))).reshape(b, -1)
    want[lengths == 0] = 0
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("tp", "b"), [(8, 1), (8, 8), (16, 2)])
def test_mla_query(tp: int, b: int) -> None:
    h, pitch = 96 // tp, 3648 if tp == 8 else 2880
    device = Device()
    projected = device.put(normal(1, b, pitch), "projected")
    q_norm, kv_norm = (device.put(1 + normal(s, n, std=0.2)) for s, n in ((2, 1536), (3, 512)))
    qb = device.put(normal(4, h * 192, 1536, std=1536**-0.5), "q_b")
    uk = device.put(normal(5, h, 128, 512, std=128**-0.5), "w_uk")
    cache = device.put(torch.full((8, 64, 576), 0x55, dtype=torch.uint8), "cache")
    slots = torch.arange(b, dtype=torch.int64) * 37 + 5
    if b > 2:
        slots[2] = -1
    where = device.put(slots, "slots")
    q_inv, k_inv = (device.put(torch.tensor([v])) for v in (8.0, 4.0))
    query = device.empty(b, h, 576, dtype=torch.uint8, name="query")
    before = cache.clone()
    outcome = run(f"mla_tp{tp}_b{b}", device, projected[:, :2112], q_norm, kv_norm, qb, uk, cache, where,
                  q_inv, k_inv, 1e-5, query)  # fmt: skip
    clean(outcome, known=PARTIAL_TILE if b > 2 else "")
    want_q, want_kv = references.mla_query(projected[:, :2112], q_norm, kv_norm, qb, uk, 8.0, 4.0)
    got = query.view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(got, want_q, atol=0.1, rtol=0.13)  # a step of e4m3
    assert (got == want_q).double().mean() > 0.97
    rows = cache.view(-1, 576)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            got = rows[slot].view(torch.float8_e4m3fn).double()
            torch.testing.assert_close(got, want_kv[i], atol=0.1, rtol=0.13)
            assert (got == want_kv[i]).double().mean() > 0.97
    rest = torch.ones(512, dtype=torch.bool)
    rest[slots[slots >= 0]] = False
    assert torch.equal(rows[rest], before.view(-1, 576)[rest])
