"""Top-k routing as the contract states it, and inputs whose order every honest kernel agrees on.

Score `s = sigmoid(logit)` in float32, key `s + bias` in float32. Experts are taken by descending key; of
equal keys the lower id comes first; NaN keys come last (again by id). Weights are `s / (sum of the chosen
s + 1e-20)`, rounded once to bf16, in rank order; if a NaN is chosen every weight of the token is NaN.

A kernel may compute the sigmoid with `tanh.approx` (error of a score at most 2^-12), so two keys that
differ by less than 2^-11 could honestly come out in either order. The generators therefore guarantee that
among the first K + 1 keys of a token neighbours are either equal in every honest kernel (same logit, or
same router row, and same bias) or at least `MARGIN` apart.
"""

from __future__ import annotations

import torch

MARGIN = 2.0**-10
"""Least distance between neighbouring keys that are not exact ties."""
EPSILON = 1e-20
POWER = 1.2
"""Exponent of the power-law popularity of experts."""

_ROUNDS = 5000


def routing_keys(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Float32 keys `[B, E]` from logits `[B, E]` (float64 or float32) and bias `[E]` float32."""
    return torch.sigmoid(logits.double()).float() + bias


def stable_top(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Ids `[B, k]` int64 of the first `k` keys `[B, E]`: descending, lower id first, NaN last."""
    by_key = torch.where(keys.isnan(), torch.inf, -keys).argsort(dim=-1, stable=True)
    # -inf keys and NaN keys are both +inf after the change of sign: a second stable sort puts NaN behind.
    is_nan = keys.isnan().gather(-1, by_key).to(torch.uint8)
    return by_key.gather(-1, is_nan.argsort(dim=-1, stable=True))[..., :k]


def route(logits: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen ids `[B, k]` int64 and unrounded weights `[B, k]` in the dtype of `logits`."""
    ids = stable_top(routing_keys(logits, bias), k)
    chosen = torch.sigmoid(logits.gather(-1, ids))
    return ids, chosen / (chosen.sum(-1, keepdim=True) + EPSILON)


def smallest_gap(logits: torch.Tensor, bias: torch.Tensor, k: int) -> float:
    """Least non-zero distance between neighbours among the first `k + 1` finite keys of any token."""
    keys = routing_keys(logits, bias)
    top = keys.gather(-1, stable_top(keys, min(k + 1, keys.shape[-1]))).double()
    gaps = top[:, :-1] - top[:, 1:]
    gaps = gaps[gaps.isfinite() & (gaps != 0)]
    return float(gaps.min()) if gaps.numel() else float("inf")


def separate_bias(
    logits: torch.Tensor, bias: torch.Tensor, k: int, rng: torch.Generator, owner: torch.Tensor | None = None
) -> torch.Tensor:
    """Move entries of `bias` `[E]` until neighbours among the first `k + 1` keys of every token are
    `MARGIN` apart.

    `owner[e]` names the expert that `e` is tied with on purpose (itself by default): tied experts share a
    bias and their equal keys are left alone. Logits are `[B, E]`, float64 or float32.

    Raises:
        ValueError: if no such bias was found (far too many tokens for the experts there are).
    """
    experts = logits.shape[-1]
    owner = torch.arange(experts) if owner is None else owner
    bias = bias.float()[owner].clone()
    scores = torch.sigmoid(logits.double()).float()
    count = min(k + 1, experts)
    spread = max(32 * MARGIN, float(bias.std()) / 4)
    for _ in range(_ROUNDS):
        keys = scores + bias
        top = stable_top(keys, count)
        ranked = keys.gather(-1, top).double()
        tied = owner[top[:, :-1]] == owner[top[:, 1:]]
        close = (ranked[:, :-1] - ranked[:, 1:] < MARGIN) & ~tied
        if not close.any():
            return bias
        losers = torch.tensor(sorted(set(owner[top[:, 1:][close]].tolist())))
        bias[losers] += torch.randn(len(losers), generator=rng) * spread
        bias = bias[owner]
    raise ValueError(
        f"no bias separates the first {count} of {experts} keys of {logits.shape[0]} tokens by {MARGIN}"
    )


def tie_owners(experts: int, k: int, rng: torch.Generator) -> torch.Tensor:
    """Groups of tied experts whose total exceeds `k`, so that a tie crosses the last rank. Returns
    `owner` `[E]`."""
    size = next(s for s in (3, 2, 4, 5, 7, 11, 13) if k % s)
    groups = k // size + 1
    if groups * size > experts:
        raise ValueError(f"{experts} experts are too few for {groups} groups of {size}")
    members = torch.randperm(experts, generator=rng)[: groups * size].view(groups, size)
    owner = torch.arange(experts)
    owner[members] = members.min(dim=1, keepdim=True).values.expand_as(members)
    return owner


def popularity(experts: int, rng: torch.Generator) -> torch.Tensor:
    """Power-law probabilities `[E]` float64 over randomly ordered experts."""
    weights = torch.arange(1, experts + 1, dtype=torch.float64) ** -POWER
    return (weights / weights.sum())[torch.randperm(experts, generator=rng)]


def choose_experts(
    tokens: int, experts: int, k: int, rng: torch.Generator, power_law: bool = False
) -> torch.Tensor:
    """Distinct expert ids `[tokens, k]` int32 for each token, uniform or power-law, in random order."""
    p = popularity(experts, rng) if power_law else torch.ones(experts, dtype=torch.float64)
    return torch.multinomial(p.expand(tokens, -1), k, generator=rng).to(torch.int32)
