"""Kernels with clusters and mailboxes: attention residual, KDA, MLA's value projection."""

from __future__ import annotations

import pytest
import references
import torch
from running import Device, clean, normal, run

pytestmark = pytest.mark.usefixtures("index")


def close(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("name", "nb", "delta", "write"),
    [
        ("attn_res_nb0", 0, False, 0),
        ("attn_res_nb0_delta", 0, True, -1),
        ("attn_res_nb1", 1, True, -1),
        ("attn_res_nb4", 4, True, -1),
        ("attn_res_nb8", 8, True, -1),
    ],
)
def test_attention_residual(name: str, nb: int, delta: bool, write: int) -> None:
    b = 2
    device = Device()
    prefix, source = device.put(normal(1, b, 7168), "prefix"), device.put(normal(2, b, 7168), "delta")
    blocks = device.put(normal(3, b, 8, 7168), "blocks")
    norm, out_norm = (device.put(1 + normal(s, 7168, std=0.25)) for s in (4, 6))
    query = device.put(normal(5, 7168, std=0.05))
    out = device.empty(b, 7168, name="out")
    want, new = references.attn_res(
        (prefix if delta else source).clone(), source.clone() if delta else None, blocks.clone(), nb, norm,
        query, out_norm,
    )  # fmt: skip
    clean(run(name, device, source, prefix, blocks, norm, query, out_norm, out, 1e-5, 1e-5))
    close(out, want, 3e-2, 8e-2)
    assert torch.equal(prefix.double(), new)
    if write >= 0:
        assert torch.equal(blocks[:, write].double(), new)


@pytest.mark.parametrize(("name", "write", "final"), [
    ("attn_res_nb4_ring", -1, False), ("attn_res_nb4_write", 4, False), ("attn_res_final", -1, True),
])  # fmt: skip
def test_attention_residual_from_a_mailbox(name: str, write: int, final: bool) -> None:
    """One slot of the ring holds the delta; it is armed again afterwards."""
    b, nb = 2, 8 if final else 4
    device = Device()
    ring = torch.full((1, 64, 7168), -0.0, dtype=torch.bfloat16).view(torch.int32).fill_(-0x80000000)
    ring = ring.view(torch.bfloat16)
    rows = normal(2, b, 7168)
    ring[0, :b] = rows
    box = device.put(ring, "ring")
    prefix, blocks = device.put(normal(1, b, 7168), "prefix"), device.put(normal(3, b, 8, 7168), "blocks")
    norm, out_norm = (device.put(1 + normal(s, 7168, std=0.25)) for s in (4, 6))
    query = device.put(normal(5, 7168, std=0.05))
    out = device.empty(b, 7168, name="out")
    want, new = references.attn_res(
        prefix.clone(), rows, blocks.clone(), nb, norm, query, out_norm, final=final
    )
    clean(run(name, device, box, prefix, blocks, norm, query, out_norm, out, 1e-5, 1e-5))
    close(out, want, 3e-2, 8e-2)
    assert torch.equal(prefix.double(), new)
    assert (box.view(torch.int32) == -0x80000000).all()
    if write >= 0:
        assert torch.equal(blocks[:, write].double(), new)


@pytest.mark.parametrize(("tp", "b"), [(8, 1), (8, 2), (16, 2), (8, 8), (16, 16), (8, 16)])
def test_kda(tp: int, b: int) -> None:
    h, pitch = (12, 6288) if tp == 8 else (6, 3216)
    dim, slots = h * 128, b + 9
    device = Device()
    projected = device.put(normal(1, b, pitch), "projected")
    conv_w = device.put(normal(2, 3, 4, dim, std=0.5), "conv_weight")
    dt = device.put(normal(3, dim, dtype=torch.float32), "dt_bias")
    a_log = device.put(normal(4, h, std=0.5, dtype=torch.float32), "a_log")
    conv = device.put(normal(5, slots, 3, 3 * dim), "conv")
    state = device.put(normal(6, slots, h, 128, 128, std=0.3, dtype=torch.float32), "state")
    fb = device.put(normal(7, dim, 128, std=0.1), "fb")
    norm = device.put(1 + normal(8, 128, std=0.2, dtype=torch.float32), "norm")
    ids = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(0))[:b].int() + 1
    if b > 2:
        ids[1] = 0  # a padded row
    slot = device.put(ids, "slots")
    out = device.empty(b, dim, name="out")
    at = ids.long()
    part = lambda start, width: projected[:, start : start + width]  # noqa: E731
    want, new_state, new_conv = references.kda(
        {
            "qkv": part(0, 3 * dim).reshape(b, 3, h, 128).clone(),
            "gate": part(3 * dim, dim).reshape(b, h, 128).clone(),
            "fa": part(4 * dim, 128).clone(), "beta": part(4 * dim + 128, h).clone(),
        },
        conv[at].reshape(b, 3, 3, h, 128), state[at],
        {"conv": conv_w.reshape(3, 4, h, 128), "fb": fb.reshape(h, 128, 128), "a_log": a_log,
         "dt": dt.reshape(h, 128), "norm": norm},
    )  # fmt: skip
    null = conv[0].clone(), state[0].clone()
    clean(run(
        f"kda_tp{tp}_b{b}", device, part(0, 3 * dim), conv_w, dt, conv.transpose(-1, -2), part(4 * dim, 128),
        part(4 * dim + 128, h), a_log, dt, slot, state, out, part(3 * dim, dim), norm,
        -5.0, 128**-0.5, 1e-5, fb,
    ))  # fmt: skip
    live = at > 0
    close(out[live].reshape(-1, h, 128), want[live], 3e-2, 3e-2)
    assert not out[~live].any()
    close(state[at][live], new_state[live], 3e-2, 3e-2)
    assert torch.equal(conv[at][live].reshape(-1, 3, 3, h, 128).double(), new_conv[live])
    assert torch.equal(conv[0], null[0]) and torch.equal(state[0], null[1])
