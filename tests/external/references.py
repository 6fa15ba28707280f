"""What the kernels of a Kimi K3 layer compute, in float64; pure functions in the style of the op contracts.

Inputs are tensors of the stored dtypes; where an intermediate is rounded to bf16 by contract, it is here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.ops import routing
from workbench.ops.rounding import to_bf16

BETA, LINEAR = 4.0, 25.0
EPS = 1e-5


def rounded(x: Tensor) -> Tensor:
    """Rounded to bf16, as float64."""
    return to_bf16(x.double()).double()


def situ(gate: Tensor, up: Tensor) -> Tensor:
    """`beta tanh(g / beta) sigmoid(g) lambda tanh(u / lambda)`."""
    g, u = gate.double(), up.double()
    return BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR * torch.tanh(u / LINEAR)


def dense_situ(x: Tensor, padded: int) -> Tensor:
    """SiTU of `[gate | up]` rows, zero up to `padded` columns."""
    gate, up = x.double().chunk(2, -1)
    out = rounded(situ(gate, up))
    return torch.nn.functional.pad(out, (0, padded - out.shape[-1]))


def embedding(ids: Tensor, weight: Tensor, start: int, vocab: int) -> Tensor:
    """Rows of this rank's shard, zero for tokens of other ranks or out of the vocabulary."""
    row = ids.long() - start
    here = (ids >= 0) & (ids < vocab) & (row >= 0) & (row < weight.shape[0])
    return torch.where(here[:, None], weight[row.clamp(0, weight.shape[0] - 1)].double(), 0.0)


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, rounded once to bf16."""
    return rounded(x.double() @ weight.double().T)


def rms(x: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean x^2 + eps)` along the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def attn_res(
    prefix: Tensor, delta: Tensor | None, blocks: Tensor, nb: int, norm: Tensor, query: Tensor, out: Tensor,
    eps: float = EPS, final: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention residual: the mixed and normalised row, and the new prefix.

    `prefix`, `delta` [B, 7168]; `blocks` [B, 8, 7168]; the first `nb` saved blocks and the prefix are mixed.
    Without a delta `prefix` is the row that replaces the old prefix.
    """
    p = rounded(prefix.double() + delta.double()) if delta is not None else prefix.double()
    values = torch.cat((blocks[:, :nb].double(), p[:, None]), 1)
    logits = (rms(values, eps) * norm.double()) @ query.double()
    mix = (torch.softmax(logits, -1)[..., None] * values).sum(1)
    if final:
        mix = rounded(mix)
    return rounded(rms(mix, eps) * out.double()), p


def top16(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Ids in rank order and renormalised weights."""
    ids, weights = routing.route(logits.double(), bias, 16)
    return ids, rounded(weights)


def kda(
    row: dict[str, Tensor], conv: Tensor, state: Tensor, weights: dict[str, Tensor], eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """One KDA decode step of B tokens, each with its own state.

    Args:
        row: `qkv` [B, 3, H, 128], `gate` [B, H, 128], `fa` [B, 128], `beta` [B, H].
        conv: [B, 3 taps, 3, H, 128], oldest first.
        state: [B, H, V, K].
        weights: `conv` [3, 4, H, 128], `fb` [H, 128, 128], `a_log` [H], `dt` [H, 128], `norm` [128].

    Returns:
        Output [B, H, 128], the new state, the new taps.
    """
    f = {k: v.double() for k, v in row.items()}
    w = {k: v.double() for k, v in weights.items()}
    taps = torch.cat((conv.double(), f["qkv"][:, None]), 1)  # [B, 4, 3, H, 128]
    mixed = torch.einsum("bthcd,htcd->bhcd", taps, w["conv"])
    q, k, v = torch.nn.functional.silu(mixed).unbind(1)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * 128**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = rounded(torch.einsum("hdf,bf->bhd", w["fb"], f["fa"]))
    decay = torch.exp(-5 * torch.sigmoid(torch.exp(w["a_log"])[None, :, None] * (g + w["dt"])))
    s = state.double() * decay[:, :, None, :]
    beta = torch.sigmoid(f["beta"])[..., None]
    s = s + (beta * (v - torch.einsum("bhvk,bhk->bhv", s, k)))[..., None] * k[:, :, None, :]
    o = torch.einsum("bhvk,bhk->bhv", s, q)
    out = rounded(rms(o, eps) * w["norm"] * torch.sigmoid(f["gate"]))
    return out, s, taps[:, 1:]


def mx_exponent(largest: Tensor, floor: bool = False) -> Tensor:
    """E8M0 codes of blocks with these largest magnitudes: e4m3 values reach 1.75 * 2^8.

    Rounds up where the mantissa is above 1.75; `floor` never does, and saturates.
    """
    bits = largest.float().view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    code = exponent - 8
    if not floor:
        code = code + (mantissa > 0x600000).int()
    return torch.where(exponent == 0, 0, code.clamp(0, 254))


def mx_quantise(x: Tensor, floor: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 values (as float64) and E8M0 codes of blocks of 32."""
    blocks = x.double().unflatten(-1, (-1, 32))
    codes = mx_exponent(blocks.abs().amax(-1), floor)
    scaled = blocks * torch.exp2(127.0 - codes.double())[..., None]
    limit = 448.0
    values = scaled.clamp(-limit, limit).float().to(torch.float8_e4m3fn).double()
    return values.flatten(-2), codes


def plan_scales(plan: Tensor, b: int) -> Tensor:
    """E8M0 codes [B, 112] of an experts plan: 16-byte rows of four codes after 64 rows of 3584 values."""
    rows = plan[64 * 3584 :].view(64, 28, 16)[:b, :, :4]
    return rows.reshape(b, 112).int()


def mla_query(
    x: Tensor, q_norm: Tensor, kv_norm: Tensor, qb: Tensor, uk: Tensor, q_inv: float, k_inv: float
) -> tuple[Tensor, Tensor]:
    """Quantised query [B, H, 576] and cache row [B, 576] of rows [B, 2112], as float64."""
    x = x.double()
    q = rounded(rms(x[:, :1536], EPS) * q_norm.double())
    kv = rounded(rms(x[:, 1536:2048], EPS) * kv_norm.double())
    heads = uk.shape[0]
    q = rounded(q @ qb.double().T).view(-1, heads, 192)
    latent = rounded(torch.einsum("bhd,hdc->bhc", q[..., :128], uk.double()))
    return (
        e4m3(torch.cat((latent, q[..., 128:]), -1) * q_inv),
        e4m3(torch.cat((kv, x[:, 2048:2112]), -1) * k_inv),
    )


def e4m3(x: Tensor) -> Tensor:
    """Rounded to e4m3, saturating, as float64."""
    return x.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()


def grouped_sum(partials: list[Tensor]) -> Tensor:
    """Four groups of consecutive ranks summed in FP32, then the groups in order."""
    size = max(1, len(partials) // 4)
    groups = []
    for first in range(0, len(partials), size):
        total = partials[first].float()
        for p in partials[first + 1 : first + size]:
            total = total + p.float()
        groups.append(total)
    result = groups[0]
    for g in groups[1:]:
        result = result + g
    return result.double()
