"""The persistent routed experts: MXFP4 weights, MXFP8 activations, block-scaled tcgen05."""

from __future__ import annotations

import pytest
import references
import torch
from running import Device, clean, load, normal, run, weight_map

from workbench.ops import mxfp4

pytestmark = pytest.mark.usefixtures("index")

EXPERTS, LATENT = 896, 3584


def zeros(device: Device, name: str, *shape: int) -> torch.Tensor:
    """A buffer that the host provides whole; only what is touched takes memory."""
    count = 1
    for n in shape:
        count *= n
    raw = device.memory.allocate(name, count, align=1024, initialized=True)
    view = torch.from_numpy(raw).view(*shape)
    device._addresses[raw.ctypes.data] = (view, device.memory.address(name))
    return view


def shuffled(rows: torch.Tensor) -> torch.Tensor:
    """Stored row l of each 32 holds row `4 (l % 8) + l // 8`."""
    order = torch.arange(32)
    return rows.unflatten(0, (-1, 32))[:, 4 * (order % 8) + order // 8].flatten(0, 1)


def interleaved(scales: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 rows by 4 columns, 512 bytes each: row `32 a + b`, column c at `16 b + 4 a + c`."""
    rows, columns = scales.shape
    return scales.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def test_one_token() -> None:
    width = 384
    device = Device()
    rng = torch.Generator().manual_seed(5)
    ids = torch.randperm(EXPERTS, generator=rng)[:16].int()
    x = normal(1, 1, LATENT)
    w13 = zeros(device, "w13", EXPERTS, 2 * width, LATENT // 2)
    s13 = zeros(device, "s13", EXPERTS, 2 * width * LATENT // 32)
    w2 = zeros(device, "w2", EXPERTS, LATENT, width // 2)
    s2 = zeros(device, "s2", EXPERTS, LATENT * width // 32)
    want = []
    values, codes = references.mx_quantise(x)
    latent = values.unflatten(-1, (-1, 32)) * torch.exp2(codes.double() - 127)[..., None]
    for e in ids.tolist():
        up_gate = torch.randint(0, 256, (2 * width, LATENT // 2), dtype=torch.uint8, generator=rng)
        scale13 = torch.randint(118, 122, (2 * width, LATENT // 32), dtype=torch.uint8, generator=rng)
        down = torch.randint(0, 256, (LATENT, width // 2), dtype=torch.uint8, generator=rng)
        scale2 = torch.randint(118, 122, (LATENT, width // 32), dtype=torch.uint8, generator=rng)
        w13[e], s13[e] = shuffled(up_gate), interleaved(shuffled(scale13))
        w2[e], s2[e] = shuffled(down), interleaved(shuffled(scale2))
        product = mxfp4.decode(up_gate, scale13, torch.float64) @ latent.flatten()
        up, gate = product[0::2], product[1::2]
        h, h_codes = references.mx_quantise(references.situ(gate, up)[None], floor=True)
        hidden = (h.unflatten(-1, (-1, 32)) * torch.exp2(h_codes.double() - 127)[..., None]).flatten()
        want.append(references.rounded(mxfp4.decode(down, scale2, torch.float64) @ hidden))
    maps = zeros(device, "maps", 256)
    tensors = (w13, (128, EXPERTS * 768, 28), (1792, 64)), (w2, (128, EXPERTS * LATENT, 3), (192, 64))
    for i, (weight, dims, strides) in enumerate(tensors):
        weight_map(device, weight, (128, 128, 2), "b4x16_p64", dims, strides)
        maps[128 * i : 128 * i + 128] = torch.from_numpy(device.memory.view(f"buffer{device._count}"))
    kernel = load("experts_tp8_b1")
    workspace = zeros(device, "workspace", kernel.arguments[5]["shape"][0])
    workspace.fill_(0xFF)
    out = device.empty(16 * LATENT, name="out")
    outcome = run(
        "experts_tp8_b1", device, device.put(x), device.put(ids), maps, s13.view(-1), s2.view(-1), workspace,
        out, 1, 100.0, 0.25, 0.04,
    )  # fmt: skip
    clean(outcome)
    got, golden = out.view(16, LATENT).double(), torch.stack(want)
    assert golden.abs().mean() > 1e-3
    error = (got - golden).square().mean().sqrt() / golden.square().mean().sqrt()
    assert error < 1e-2
