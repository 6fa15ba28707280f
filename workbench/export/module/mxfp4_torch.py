"""MXFP4 in PyTorch alone, on any device: E2M1 elements, two a byte (low nibble first), one E8M0 scale for 32.

The same interface and the same numbers as `workbench.ops.mxfp4`, which decodes faster on the CPU with NumPy.
Source: OCP Microscaling Formats (MX) v1.0, tables 5 and 7.
"""

from __future__ import annotations

import torch

BLOCK = 32
"""Elements that share a scale."""
NAN_SCALE = 0xFF
"""E8M0 code of NaN."""
SCALE_BIAS = 127

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES: tuple[float, ...] = _MAGNITUDES + tuple(-m for m in _MAGNITUDES)
"""Value of each of the 16 codes."""
E2M1_RMS = (sum(m * m for m in _MAGNITUDES) / len(_MAGNITUDES)) ** 0.5
"""Root mean square of uniformly random codes."""
E2M1_MEAN = sum(_MAGNITUDES) / len(_MAGNITUDES)
"""Mean magnitude of uniformly random codes."""


def decode_scale(codes: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """E8M0 codes (uint8, any shape) as numbers; all finite ones are exact in float64 and float32."""
    values = torch.exp2(codes.to(torch.float64) - SCALE_BIAS)
    return torch.where(codes == NAN_SCALE, torch.nan, values).to(dtype)


def decode(
    packed: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Decode packed E2M1 `[..., K/2]` uint8 with E8M0 scales `[..., K/32]` uint8 to `[..., K]` numbers.

    `dtype` is float64 or float32; the product of element and scale is exact in both (within their range).
    With `scale=None` the bare elements are returned.
    """
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=packed.device)
    values = table[unpack(packed).long()]
    if scale is not None:
        factors = decode_scale(scale, dtype).unsqueeze(-1)
        values = (values.view(*values.shape[:-1], -1, BLOCK) * factors).flatten(-2)
    return values


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack E2M1 codes `[..., K]` (0..15) into bytes `[..., K/2]`, low nibble first."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes `[..., K/2]` into E2M1 codes `[..., K]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
