"""MXFP4: E2M1 elements, two a byte (low nibble first), one E8M0 scale for 32 elements along the last axis.

Source: OCP Microscaling Formats (MX) v1.0, tables 5 and 7: E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a
sign bit; E8M0 code c is 2^(c - 127), and 0xFF is NaN.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 32
"""Elements that share a scale."""
NAN_SCALE = 0xFF
"""E8M0 code of NaN: the poison of experts that are not chosen."""
SCALE_BIAS = 127

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES: tuple[float, ...] = _MAGNITUDES + tuple(-m for m in _MAGNITUDES)
"""Value of each of the 16 codes."""
E2M1_RMS = float(np.sqrt(np.mean(np.square(_MAGNITUDES))))
"""Root mean square of uniformly random codes."""
E2M1_MEAN = float(np.mean(_MAGNITUDES))
"""Mean magnitude of uniformly random codes."""

# A byte decodes to two floats; taken as one complex number it is a single table look-up (1.6 ms for 2.7 M
# elements).
_PAIRS = np.array([complex(E2M1_VALUES[b & 15], E2M1_VALUES[b >> 4]) for b in range(256)])
_PAIR_TABLES = {torch.float64: _PAIRS, torch.float32: _PAIRS.astype(np.complex64)}
_SCALES = np.array([2.0 ** (c - SCALE_BIAS) for c in range(255)] + [np.nan])


def decode_scale(codes: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """E8M0 codes (uint8, any shape) as numbers; all finite ones are exact in float64 and float32."""
    return torch.from_numpy(np.take(_SCALES, codes.numpy())).to(dtype)


def decode(
    packed: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Decode packed E2M1 `[..., K/2]` uint8 with E8M0 scales `[..., K/32]` uint8 to `[..., K]` numbers.

    `dtype` is float64 or float32; the product of element and scale is exact in both (within their range).
    With `scale=None` the bare elements are returned.
    """
    pairs = np.take(_PAIR_TABLES[dtype], packed.numpy(), mode="clip")
    values = torch.view_as_real(torch.from_numpy(pairs)).flatten(-2)
    if scale is not None:
        values.view(*values.shape[:-1], -1, BLOCK).mul_(decode_scale(scale, dtype).unsqueeze(-1))
    return values


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack E2M1 codes `[..., K]` (0..15) into bytes `[..., K/2]`, low nibble first."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes `[..., K/2]` into E2M1 codes `[..., K]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
