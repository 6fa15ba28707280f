"""Seeded inputs. Every stream is named, so that adding one draw does not change the others."""

from __future__ import annotations

import hashlib

import torch


def stream(seed: int, *names: str) -> torch.Generator:
    """A generator that depends on `seed` and on `names` alone."""
    digest = hashlib.sha256("/".join((str(seed), *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill_normal(out: torch.Tensor, rng: torch.Generator, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Fill `out` in place with normal numbers, rounded to its dtype; returns it."""
    return out.copy_(torch.randn(out.shape, generator=rng).mul_(std).add_(mean))


def fill_bytes(out: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Fill a uint8 tensor in place with uniform bytes, eight at a draw; returns it."""
    words = torch.randint(-(2**63), 2**63 - 1, ((out.numel() + 7) // 8,), generator=rng, dtype=torch.int64)
    return out.copy_(words.view(torch.uint8)[: out.numel()].view(out.shape))


def choose(count: int, k: int, rng: torch.Generator) -> list[int]:
    """`k` distinct numbers below `count`, in random order."""
    return [int(i) for i in torch.randperm(count, generator=rng)[:k]]
