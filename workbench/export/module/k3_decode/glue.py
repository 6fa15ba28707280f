"""Parts of a decode layer for which there is no op yet, by PyTorch: float64 inside, rounded where the model
rounds."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Group(Protocol):
    """The ranks that share a layer."""

    rank: int
    ranks: int

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's bf16 partial, as `ordered_sum` has it."""

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Every rank's columns side by side, in the order of ranks."""


class Alone:
    """One rank that holds everything."""

    rank = 0
    ranks = 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The partial itself."""
        return partial

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """The columns themselves."""
        return columns


class Distributed:
    """The ranks of a `torch.distributed` group."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as distributed

        self._distributed, self._group = distributed, group
        self.rank = int(distributed.get_rank(group))
        self.ranks = int(distributed.get_world_size(group))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's partial."""
        return ordered_sum(self._all(partial))

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Every rank's columns side by side."""
        return torch.cat(self._all(columns), -1)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        self._distributed.all_gather(parts, tensor.contiguous(), group=self._group)
        return parts


def ordered_sum(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of bf16 partials in float32, rounded once: four groups of neighbouring ranks, then the groups in
    order, where the ranks divide by four; one after the other where not."""
    size = len(partials) // 4 if len(partials) % 4 == 0 else len(partials)
    groups = [partials[i : i + size] for i in range(0, len(partials), size)]
    total: torch.Tensor | None = None
    for group in groups:
        part = group[0].float()
        for other in group[1:]:
            part = part + other.float()
        total = part if total is None else total + part
    assert total is not None
    return total.to(torch.bfloat16)


def router(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Router logits `[B, E]` float32 of rows `[B, H]` and weights `[E, H]`."""
    return (x.double() @ weight.double().T).float()


def combine(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Weighted sum `[B, L]` bf16 of the chosen experts' rows `[B, K, L]`, in the order of the ranks."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float64)
    for k in range(rows.shape[1]):
        total = total + weights[:, k, None].double() * rows[:, k].double()
    return _to_bf16(total)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of two bf16 tensors, rounded once."""
    return _to_bf16(a.double() + b.double())


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    latent: int,
    key_scale: float = 1.0,
) -> torch.Tensor:
    """Latent `[B, H, latent]` bf16 that each head attends to; zero where a request has no tokens.

    Args:
        query: `[B, H, W]` e4m3 as bytes.
        cache: `[S, Z, W]` e4m3 as bytes, pages of Z rows.
        pages: `[B, P]` pages of each request in order; those past its length are not looked at.
        lengths: `[B]` tokens of each request.
        scale: of the logits, the scales of queries and cache included.
        latent: leading columns of a cache row that are attended to.
        key_scale: of the cache's numbers.
    """
    rows = cache[pages.clamp(min=0).long()].view(torch.float8_e4m3fn).double().flatten(1, 2)
    logits = torch.einsum("bhw,btw->bht", query.view(torch.float8_e4m3fn).double(), rows) * scale
    there = torch.arange(rows.shape[1], device=rows.device)[None] < lengths[:, None]
    logits = logits.masked_fill(~there[:, None], -torch.inf)
    weights = torch.softmax(logits, -1).masked_fill(~there[:, None], 0.0)
    rows = rows.masked_fill(~there[..., None], 0.0)
    return _to_bf16(key_scale * torch.einsum("bht,btw->bhw", weights, rows[..., :latent]))


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "meta":
        return x.to(torch.bfloat16)
    rounding = importlib.import_module(f"{__package__}.contract.ops.rounding")
    rounded: torch.Tensor = rounding.to_bf16(x)
    return rounded
