"""The routed experts of Kimi K3's latent MoE: their arithmetic, honest and wrong, and their weights.

Weights are in checkpoint order: `w13[e]` has I gate rows, then I up rows, each of L packed E2M1 elements;
`w2[e]` has L rows of I. Each 32 elements along the last axis share an E8M0 scale. For one token and one
of its experts

    g, u = W13 x        accumulated wide, not rounded
    h = bf16(situ(g, u))
    y = W2 h            accumulated wide; the caller rounds it to bf16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workbench.ops import mxfp4, mxfp8
from workbench.ops.random import fill_bytes, stream
from workbench.ops.rounding import to_bf16
from workbench.ops.situ import situ, tanh_high, tanh_low

SPREAD = (-1, 0, 1, 2)
"""Exponents that a block's scale may have, relative to the matrix's base scale."""
_SPREAD_RMS = math.sqrt(sum(4.0**e for e in SPREAD) / len(SPREAD))
_SPREAD_MEAN = sum(2.0**e for e in SPREAD) / len(SPREAD)

Tensors = Mapping[str, torch.Tensor]


Pick = Callable[[torch.Tensor], torch.Tensor]
"""From the chosen ids `[B, K]` to the ids that a kernel reads from."""


def own(ids: torch.Tensor) -> torch.Tensor:
    """Each slot reads its own expert."""
    return ids


@dataclass(frozen=True)
class Recipe:
    """How the experts are computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    pick13: Pick = own
    pick13_scale: Pick = own
    pick2: Pick = own
    pick2_scale: Pick = own
    scale13: bool = True
    scale2: bool = True
    swap_gate_up: bool = False
    """Up rows taken for gate rows."""
    interleaved: bool = False
    """Rows read as gate_0, up_0, gate_1, ... instead of halves."""
    high_nibble_first: bool = False
    drop_l: int = 0
    """Elements missing from the end of the sum over L."""
    drop_i: int = 0
    """Elements missing from the end of the sum over I."""
    round_gate_up: bool = False
    """Gate and up rounded to bf16 before SiTU."""
    mxfp8: bool = False
    """Latent and hidden quantised to MXFP8 (hidden by the floor rule) in place of the bf16 hidden."""

    def applies(self, axes: Mapping[str, int]) -> bool:
        """True if the mistake changes anything at these axes."""
        ids = torch.arange(axes["B"] * axes["K"]).view(axes["B"], axes["K"])
        picks = [p for p in (self.pick13, self.pick13_scale, self.pick2, self.pick2_scale) if p is not own]
        moves = not picks or any(not torch.equal(p(ids), ids) for p in picks)
        return moves and self.drop_l < axes["L"] and self.drop_i < axes["I"]


GOLDEN = Recipe()
BASELINE = Recipe(dtype=torch.float32, tanh=tanh_low)
HIGH = Recipe(dtype=torch.float32, tanh=tanh_high)


def distinct(ids: torch.Tensor) -> list[int]:
    """The different values of an integer tensor, ascending."""
    return sorted(set(ids.flatten().tolist()))


def run_experts(
    inputs: Tensors, latent: torch.Tensor, ids: torch.Tensor, recipe: Recipe = GOLDEN
) -> torch.Tensor:
    """Unrounded expert outputs `[B, K, L]` in `recipe.dtype` for latent `[B, L]` and ids `[B, K]`.

    `inputs` holds `w13`, `w13_scale`, `w2`, `w2_scale`; only the experts that `ids` names are touched.
    """
    x = latent.to(recipe.dtype)
    if recipe.mxfp8:
        x = mxfp8.through(x)
    x = x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    sums = _per_slot(inputs, "w13", recipe.pick13(ids), recipe.pick13_scale(ids), x, recipe)
    hidden = _activation(sums, recipe)
    hidden = mxfp8.through(hidden, floor=True) if recipe.mxfp8 else to_bf16(hidden).to(recipe.dtype)
    return _per_slot(inputs, "w2", recipe.pick2(ids), recipe.pick2_scale(ids), hidden, recipe)


def _per_slot(
    inputs: Tensors, name: str, ids: torch.Tensor, scale_ids: torch.Tensor, x: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Products of each slot's matrix with its vector `x` `[B, K, n]`; every matrix is decoded once."""
    scaled, drop = (recipe.scale13, recipe.drop_l) if name == "w13" else (recipe.scale2, recipe.drop_i)
    out = torch.empty(*ids.shape, inputs[name].shape[1], dtype=recipe.dtype)
    pairs = zip(ids.flatten().tolist(), scale_ids.flatten().tolist(), strict=True)
    for expert, scale_expert in sorted(set(pairs)):
        tokens, slots = ((ids == expert) & (scale_ids == scale_expert)).nonzero(as_tuple=True)
        matrix = _matrix(inputs, name, expert, scale_expert if scaled else None, recipe)
        out[tokens, slots] = _product(x[tokens, slots], matrix, drop)
    return out


def _activation(sums: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    gate, up = (sums[..., 0::2], sums[..., 1::2]) if recipe.interleaved else sums.chunk(2, dim=-1)
    if recipe.swap_gate_up:
        gate, up = up, gate
    if recipe.round_gate_up:
        gate, up = to_bf16(gate).to(recipe.dtype), to_bf16(up).to(recipe.dtype)
    return situ(gate, up, recipe.tanh)


def _matrix(
    inputs: Tensors, name: str, expert: int, scale_expert: int | None, recipe: Recipe
) -> torch.Tensor:
    packed = inputs[name][expert]
    if recipe.high_nibble_first:
        packed = (packed >> 4) | (packed << 4)
    scale = None if scale_expert is None else inputs[f"{name}_scale"][scale_expert]
    return mxfp4.decode(packed, scale, recipe.dtype)


def _product(x: torch.Tensor, w: torch.Tensor, drop: int) -> torch.Tensor:
    keep = x.shape[-1] - drop
    return x[..., :keep] @ w[..., :keep].T


def base_exponent(terms: int, input_rms: float, output_rms: float) -> int:
    """Exponent of the base scale with which a random row times an input of `input_rms` has about
    `output_rms`."""
    return round(math.log2(output_rms / (input_rms * mxfp4.E2M1_RMS * _SPREAD_RMS * math.sqrt(terms))))


def fill_scales(out: torch.Tensor, rng: torch.Generator, base: int) -> None:
    """Fill E8M0 codes with `2^(base + e)`, e uniform over `SPREAD`."""
    draw = torch.randint(0, len(SPREAD), out.shape, generator=rng)
    out.copy_(draw + (mxfp4.SCALE_BIAS + base + SPREAD[0]))


@dataclass(frozen=True)
class Magnitudes:
    """What the generated weights aim at; all are root mean squares but `gate_mean`."""

    latent: float = 1.0
    gate: float = 2.0
    hidden: float = 3.0
    out: float = 1.0
    gate_mean: float = 0.0
    """Mean of the gate accumulators when the latent is about 1 throughout; reached by choosing signs."""


def negative_gates(terms: int) -> Magnitudes:
    """Aim at gates about -20 for a latent of `terms` elements near 1.

    There sigmoid(g) is e^g, so an absolute error of a gate is a relative error of the output: rounding a
    gate to bf16 (steps of 1/8) costs 3 %, while `tanh.approx` still costs 2^-11. Gates of short rows must
    scatter more to get there.
    """
    mean = -20.0
    scatter = max(1.0, -mean / (0.6 * math.sqrt(terms)))
    return Magnitudes(gate=scatter, hidden=4 * math.exp(mean + 2 * scatter), gate_mean=mean)


def fill_experts(tensors: Tensors, ids: torch.Tensor, seed: int, aim: Magnitudes | None = None) -> None:
    """Give the experts in `ids` random weights and poison every other one's scales with NaN (0xFF).

    Writes `w13`, `w13_scale`, `w2`, `w2_scale` in place. Packed weights of other experts are not touched,
    so their pages stay unallocated; their scales are, because a kernel that reads a wrong expert must see
    NaN.
    """
    aim = aim or Magnitudes()
    w13, w2 = tensors["w13"], tensors["w2"]
    terms13, terms2 = 2 * w13.shape[-1], 2 * w2.shape[-1]
    rows_i = w13.shape[1] // 2
    base13 = base_exponent(terms13, aim.latent, aim.gate)
    base2 = base_exponent(terms2, aim.hidden, aim.out)
    tensors["w13_scale"].fill_(mxfp4.NAN_SCALE)
    tensors["w2_scale"].fill_(mxfp4.NAN_SCALE)
    for expert in distinct(ids):
        rng = stream(seed, "expert", str(expert))
        fill_bytes(w13[expert], rng)
        fill_bytes(w2[expert], rng)
        fill_scales(tensors["w13_scale"][expert], rng, base13)
        fill_scales(tensors["w2_scale"][expert], rng, base2)
        if aim.gate_mean:
            step = mxfp4.E2M1_MEAN * _SPREAD_MEAN * 2.0**base13 * terms13 * aim.latent
            _bias_signs(w13[expert, :rows_i], rng, aim.gate_mean / step)


def _bias_signs(packed: torch.Tensor, rng: torch.Generator, excess: float) -> None:
    """Set signs so that a fraction `(1 + |excess|) / 2` of the elements has the sign of `excess`."""
    codes = mxfp4.unpack(packed) & 7
    wanted = torch.rand(codes.shape, generator=rng) < (1 + min(abs(excess), 1.0)) / 2
    negative = wanted if excess < 0 else ~wanted
    packed.copy_(mxfp4.pack(codes | (negative.to(torch.uint8) << 3)))


def expert_flops(axes: Mapping[str, int]) -> int:
    """Multiplies and adds of the routed experts for B tokens (weight reuse does not change them)."""
    return 6 * axes["B"] * axes["K"] * axes["I"] * axes["L"]


def expert_bytes(axes: Mapping[str, int]) -> int:
    """Weight and scale bytes of the distinct experts, expected under uniform routing: `E (1 - (1 -
    K/E)^B)` of them."""
    distinct = axes["E"] * (1 - (1 - axes["K"] / axes["E"]) ** axes["B"])
    elements = 3 * axes["I"] * axes["L"]
    return round(distinct * (elements // 2 + elements // mxfp4.BLOCK))
