"""MXFP8 activations: e4m3 elements, one E8M0 scale for 32 elements along the last axis.

The scale is chosen so that the block's largest magnitude lands in the top binade of e4m3 (largest number
1.75 * 2^8). Two rules are in use: round the scale up where the largest mantissa is above 1.75, or never
("floor"), which saturates such blocks at 448.
"""

from __future__ import annotations

import torch

from workbench.ops.rounding import to_e4m3

BLOCK = 32


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """`[..., K]` as float64 `[..., K / 32, 32]`."""
    return x.double().reshape(*x.shape[:-1], -1, BLOCK)


def exponent(largest: torch.Tensor, floor: bool = False) -> torch.Tensor:
    """E8M0 codes (int32) of blocks with these largest magnitudes; 0 for blocks of zeros and subnormals."""
    bits = largest.float().view(torch.int32)
    biased, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    code = biased - 8
    if not floor:
        code = code + (mantissa > 0x600000).int()
    return torch.where(biased == 0, 0, code.clamp(0, 254))


def quantise(x: torch.Tensor, floor: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements (float64) `[..., K]` and codes (int32) `[..., K / 32]` of `x`."""
    blocks = _blocks(x)
    codes = exponent(blocks.abs().amax(-1), floor)
    scaled = blocks * torch.exp2(127.0 - codes.double())[..., None]
    return to_e4m3(scaled).double().flatten(-2), codes


def decode(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The numbers (float64) that elements and codes stand for."""
    blocks = _blocks(values)
    return (blocks * torch.exp2(codes.double() - 127)[..., None]).flatten(-2)


def through(x: torch.Tensor, floor: bool = False) -> torch.Tensor:
    """`x` as it is after the trip through MXFP8, in its dtype (every result is exact in float32)."""
    return decode(*quantise(x, floor)).to(x.dtype)
