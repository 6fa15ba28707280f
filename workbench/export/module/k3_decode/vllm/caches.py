"""The attention ops on vLLM's paged caches: rows are staged, the op runs on the stage, rows go back.

Kernels are verified on caches of as many slots as tokens, contiguous; vLLM's are larger, strided, and shared
by layers. So the rows of a step (KDA: 0.8 MB a token at TP8; MLA: 576 bytes) are copied to a stage of exactly
the verified shape and back. All by device operations of fixed shapes, with no look at a value: the same
Python may be captured once and replayed.

A row of padding (slot 0 of KDA, -1 of MLA) is never written. To have fixed shapes it is stored all the same:
its own old bytes in KDA's slot 0, which nobody uses, and a live row's bytes once more in MLA's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..steps import TAPS, Step

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs the `kda` op on rows, slots, taps and states; the last two are updated."""
STAGE_PAGES = 8
"""Pages of the MLA stage, as in the op's workloads."""


def kda_decode(
    run: Run, rows: torch.Tensor, slots: torch.Tensor, conv: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token for each of B requests.

    Args:
        run: the op.
        rows: `[B, P]` of the input projection.
        slots: `[B]` int32; at most 0 is padding.
        conv: `[S, at least 3, 3 H D]` bf16, the taps first, oldest first; updated.
        state: `[S, H, D, D]` float32; updated.
    """
    live, at, local = _slots(slots)
    taps, states = _staged(conv[:, :TAPS], at), _staged(state, at)
    old_taps, old_states = taps[1:].clone(), states[1:].clone()
    out = run(rows, local, taps, states)
    conv[:, :TAPS].index_put_((at,), _where(live, taps[1:], old_taps))
    state.index_put_((at,), _where(live, states[1:], old_states))
    return out


def kda_verify(
    run: Run,
    rows: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    conv: torch.Tensor,
    state: torch.Tensor,
    step: Step,
) -> torch.Tensor:
    """The tokens of uniform verify requests one after the other; caches as `steps` says.

    Args:
        run: the op, which has R rows, one of each request, `step.tokens` times.
        rows: `[R T, P]`, row `request T + token`.
        slots: `[R, T]` int32, a state for each token; a first slot of at most 0 is padding.
        accepted: `[R]` int32, tokens of the last step that were accepted.
        conv: `[S, 3 + T - 1, 3 H D]` bf16 in slot `slots[b, 0]`; updated.
        state: `[S, H, D, D]` float32; updated.
    """
    offset = (accepted.long() - 1).clamp(0, step.tokens - 1)
    live, at, local = _slots(slots.gather(1, offset[:, None])[:, 0])
    window_at = slots[:, 0].clamp(min=0).long()
    window = conv[window_at]
    taps_at = offset[:, None] + torch.arange(TAPS, device=rows.device)
    taps = window.gather(1, taps_at[:, :, None].expand(-1, -1, window.shape[2]))
    inputs = rows.view(step.requests, step.tokens, -1)
    width = window.shape[2]
    new_window = torch.cat((taps[:, 1:], inputs[..., :width]), 1)
    taps = torch.cat((torch.zeros_like(taps[:1]), taps))
    states = _staged(state, at)
    outs = []
    for token in range(step.tokens):
        outs.append(run(inputs[:, token].contiguous(), local, taps, states))
        target = slots[:, token].clamp(min=0).long()
        written = live & (slots[:, token] > 0)
        state.index_put_((target,), _where(written, states[1:], state[target]))
    rows_of_window = new_window.shape[1]
    kept = _where(live & (slots[:, 0] > 0), new_window, window[:, :rows_of_window])
    conv[:, :rows_of_window].index_put_((window_at,), kept)
    return torch.stack(outs, 1).flatten(0, 1)


def mla_stage(rows: int, cache: torch.Tensor) -> torch.Tensor:
    """Zeroed pages that hold the cache rows of a step, `[pages, Z, W]` bytes."""
    pages = max(STAGE_PAGES, -(-rows // cache.shape[1]))
    return torch.zeros(pages, *cache.shape[1:], dtype=torch.uint8, device=cache.device)


def mla_insert(stage: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Put the first rows of the stage into the cache `[S, Z, W]` (bytes) at `slots` `[B]`; negative ones are
    left out."""
    size = cache.shape[1]
    live = slots >= 0
    new = stage.flatten(0, 1)[: slots.shape[0]]
    first = live.int().argmax(0, keepdim=True)  # as an index it must stay a tensor: a number is the host's
    at = torch.where(live, slots, slots.index_select(0, first)).clamp(min=0)
    page, row = at // size, at % size
    new = torch.where(live[:, None], new, new.index_select(0, first))
    cache.index_put_((page, row), torch.where(live.any(), new, cache[page, row]))


def stage_slots(slots: torch.Tensor) -> torch.Tensor:
    """Rows of the stage in order, -1 for padding."""
    order = torch.arange(slots.shape[0], device=slots.device)
    return torch.where(slots >= 0, order, -1)


def requests_padded(
    pages: torch.Tensor, lengths: torch.Tensor, requests: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and lengths of exactly `requests` requests; those that the metadata lacks are empty."""
    have = min(pages.shape[0], lengths.shape[0], requests)
    pages, lengths = pages[:have], lengths[:have]
    lack = requests - have
    if lack:
        pages = torch.nn.functional.pad(pages, (0, 0, 0, lack))
        lengths = torch.nn.functional.pad(lengths, (0, lack))
    return pages, lengths


def of_tokens(pages: torch.Tensor, lengths: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and lengths of each row: a token sees its request's tokens up to itself."""
    if not step.verify:
        return pages, lengths
    after = torch.arange(step.tokens - 1, -1, -1, device=lengths.device, dtype=lengths.dtype)
    seen = torch.where(lengths[:, None] > 0, (lengths[:, None] - after).clamp(min=0), 0)
    return pages.repeat_interleave(step.tokens, 0), seen.flatten()


def _slots(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which rows are live, the cache's slots, and the stage's: 1.. in order, 0 for padding."""
    live = slots > 0
    order = torch.arange(1, slots.shape[0] + 1, device=slots.device, dtype=torch.int32)
    return live, slots.clamp(min=0).long(), torch.where(live, order, torch.zeros_like(order))


def _staged(cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows `at` of a cache after a row of zeros."""
    rows = cache[at]
    return torch.cat((torch.zeros_like(rows[:1]), rows))


def _where(live: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(live.view(-1, *(1,) * (new.dim() - 1)), new, old)
