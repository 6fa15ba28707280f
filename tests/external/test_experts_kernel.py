"""The persistent routed experts: MXFP4 weights, MXFP8 activations, block-scaled tcgen05."""

from __future__ import annotations

import pytest
import torch
from contracts import contract, generated, judge
from running import Device, clean, load, run, weight_map

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


def alternating(rows: torch.Tensor) -> torch.Tensor:
    """The package's order up_0, gate_0, up_1, ... of gate rows followed by up rows."""
    gate, up = rows.chunk(2)
    return torch.stack((up, gate), 1).flatten(0, 1)


@pytest.mark.parametrize("generator", ["ordinary", "saturating", "uneven_blocks"])
def test_one_token(generator: str) -> None:
    op = contract("moe_experts_mx")
    axes = op.workload("tp8_b1").axes
    width, given = axes["I"], generated(op, axes, generator)
    device = Device()
    w13 = zeros(device, "w13", EXPERTS, 2 * width, LATENT // 2)
    s13 = zeros(device, "s13", EXPERTS, 2 * width * LATENT // 32)
    w2 = zeros(device, "w2", EXPERTS, LATENT, width // 2)
    s2 = zeros(device, "s2", EXPERTS, LATENT * width // 32)
    for e in given["ids"].flatten().tolist():
        w13[e] = shuffled(alternating(given["w13"][e]))
        s13[e] = interleaved(shuffled(alternating(given["w13_scale"][e])))
        w2[e], s2[e] = shuffled(given["w2"][e]), interleaved(shuffled(given["w2_scale"][e]))
    maps = zeros(device, "maps", 256)
    tensors = (w13, (128, EXPERTS * 768, 28), (1792, 64)), (w2, (128, EXPERTS * LATENT, 3), (192, 64))
    for i, (weight, dims, strides) in enumerate(tensors):
        weight_map(device, weight, (128, 128, 2), "b4x16_p64", dims, strides)
        maps[128 * i : 128 * i + 128] = torch.from_numpy(device.memory.view(f"buffer{device._count}"))
    kernel = load("experts_tp8_b1")
    workspace = zeros(device, "workspace", kernel.arguments[5]["shape"][0])
    workspace.fill_(0xFF)
    out = device.empty(16 * LATENT, name="out")
    clean(run(
        "experts_tp8_b1", device, device.put(given["latent"]), device.put(given["ids"].flatten()), maps,
        s13.view(-1), s2.view(-1), workspace, out, 1, 100.0, 0.25, 0.04,
    ))  # fmt: skip
    judge(op, axes, given, {"expanded": out.view(1, 16, LATENT)})
    golden = op.reference(given, axes)["expanded"].flatten()
    error = (out.double() - golden).norm() / golden.norm()
    assert error < 1e-2
