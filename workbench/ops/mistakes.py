"""Known mistakes of expert kernels, as recipes whose results can be compared with a refused kernel's.

They run in float32: only whether a result matches within the op's tolerance is asked of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workbench.ops.experts import Pick, Recipe


@dataclass(frozen=True)
class Mistake:
    """Rule id, what the kernel does wrong, and how to compute the same."""

    rule: str
    summary: str
    recipe: Recipe


def next_slot(ids: torch.Tensor) -> torch.Tensor:
    """Slot k reads the expert of slot k + 1."""
    return ids.roll(-1, dims=1)


def previous_slot(ids: torch.Tensor) -> torch.Tensor:
    """Slot k reads the expert of slot k - 1."""
    return ids.roll(1, dims=1)


def first_slot(ids: torch.Tensor) -> torch.Tensor:
    """Every slot reads the expert of slot 0."""
    return ids[:, :1].expand_as(ids)


def next_token(ids: torch.Tensor) -> torch.Tensor:
    """Token b reads the experts of token b + 1."""
    return ids.roll(-1, dims=0)


def first_token(ids: torch.Tensor) -> torch.Tensor:
    """Every token reads the experts of token 0."""
    return ids[:1].expand_as(ids)


def _wrong(**changes: Any) -> Recipe:
    return Recipe(dtype=torch.float32, **changes)


def _picking(pick: Pick, *fields: str) -> Recipe:
    return _wrong(**dict.fromkeys(fields or ("pick13", "pick13_scale", "pick2", "pick2_scale"), pick))


_PICKS: Mapping[str, tuple[Pick, str]] = {
    "next-slot": (next_slot, "each slot uses the expert of the next slot"),
    "previous-slot": (previous_slot, "each slot uses the expert of the slot before"),
    "first-slot": (first_slot, "every slot uses the expert of the first slot"),
    "next-token": (next_token, "each token uses the experts of the next token"),
    "first-token": (first_token, "every token uses the experts of the first token"),
}
_PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "w13": (("pick13", "pick13_scale"), "for gate and up only"),
    "w2": (("pick2", "pick2_scale"), "for the second projection only"),
    "scales": (("pick13_scale", "pick2_scale"), "for the scales only"),
}


def _tails(axis: str, fields: tuple[str, ...], counts: tuple[int, ...]) -> dict[str, Mistake]:
    """The ends of one sum, or of both where they share their code."""
    return {
        f"dropped-{'-'.join(fields).replace('drop_', '')}-{n}": Mistake(
            "dropped-tail",
            f"the last {n} elements are left out of the sum over {axis}",
            _wrong(**dict.fromkeys(fields, n)),
        )
        for n in counts
    }


MISTAKES: Mapping[str, Mistake] = {
    "swapped-gate-up": Mistake(
        "swapped-gate-up", "up rows are taken for gate rows", _wrong(swap_gate_up=True)
    ),
    "interleaved-gate-up": Mistake(
        "swapped-gate-up",
        "gate and up rows are read as alternating instead of as halves",
        _wrong(interleaved=True),
    ),
    "no-scales": Mistake("missing-scale", "no scale is applied", _wrong(scale13=False, scale2=False)),
    "no-w13-scale": Mistake("missing-scale", "the scales of w13 are not applied", _wrong(scale13=False)),
    "no-w2-scale": Mistake("missing-scale", "the scales of w2 are not applied", _wrong(scale2=False)),
    **{name: Mistake("wrong-expert", words, _picking(pick)) for name, (pick, words) in _PICKS.items()},
    **{
        f"{name}-{part}": Mistake("wrong-expert", f"{words}, {where}", _picking(pick, *fields))
        for name, (pick, words) in _PICKS.items()
        for part, (fields, where) in _PARTS.items()
    },
    "nibble-order": Mistake("nibble-order", "the high nibble is taken first", _wrong(high_nibble_first=True)),
    "rounded-gate-up": Mistake(
        "wrong-rounding", "gate and up are rounded to bf16 before SiTU", _wrong(round_gate_up=True)
    ),
    **_tails("L", ("drop_l",), (8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
    **_tails("I", ("drop_i",), (8, 16, 32, 64, 128, 256)),
    **_tails("L and over I", ("drop_l", "drop_i"), (8, 16, 32, 64, 128)),
}
"""By unique name, the likeliest first."""
