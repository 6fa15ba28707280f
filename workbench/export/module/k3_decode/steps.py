"""Which steps of a serving engine the package takes, which rows they have, what a replayed graph may assume.

A *step* is `requests` requests of `tokens` rows each: 1 row in decode, 1 + drafts in a uniform verify step of
speculative decoding (3 to 7 drafts). Row `request * tokens + token`; `rows = requests * tokens`, at most 64.
Ops whose rows are independent see a batch of `rows`. The two that are not see it by token or by request:

* KDA runs a request's tokens in order, `requests` rows at a time (`Step.of_token`). Its caches are those of
  vLLM 0.33: `slots` is `[requests, tokens]`; the state before token 0 is in `slots[b, accepted - 1]`, token t
  leaves its state in `slots[b, t]`. The convolution's window is in `slots[b, 0]` alone, `window(tokens)` raw
  inputs, oldest first; the three taps before token 0 begin at `first_tap(accepted)`; afterwards it holds
  inputs `accepted`, `accepted + 1` of the old window and then the step's own. A slot <= 0 is never written.
* MLA inserts all rows of a request before any of them is attended, and row t sees `length(total, t)` entries.

Graphs. A size that is to be captured is rounded up to whole requests (`captured`), and a batch replays the
smallest graph that holds it (`smallest`). The requests it lacks are padding and come last: slot 0 (KDA), -1
(MLA insert), length 0, accepted 1. Their rows may hold NaN; rows of live requests must not depend on them.

Replays. Launch arguments are frozen at capture, so nothing may count replays on the host: a counter that
tells one replay from the next (an epoch) lives in device memory and its kernel advances it. Kernels of this
package do so in their own memory, which all graphs that use a kernel share: replays must be ordered, in one
stream or by events. Mailboxes, where a frozen argument chooses the slot, have a `Rotation`.

Ranks. `recognise` looks only at what every rank of a tensor-parallel group has alike, so all ranks decide
alike; `signature` is a number to compare where that is to be checked. Pure functions of the host: no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

MAX_ROWS = 64
"""Rows of the largest step."""
DRAFTS = (3, 4, 5, 6, 7)
"""Draft tokens a request that a verify step may have; 0 is decode without speculation."""
TAPS = 3
"""Raw inputs that KDA's convolution keeps."""
PADDING_SLOT_KDA, PADDING_SLOT_MLA, PADDING_LENGTH, PADDING_ACCEPTED = 0, -1, 0, 1


@dataclass(frozen=True)
class Step:
    """A step as a graph has it, padding requests included.

    Raises:
        ValueError: if there is no request, or a request has neither 1 nor 4 to 8 tokens.
    """

    requests: int
    tokens: int = 1

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"a step has at least one request, not {self.requests}")
        unsupported = drafts_problem(self.tokens - 1)
        if unsupported:
            raise ValueError(unsupported)

    @property
    def rows(self) -> int:
        """Rows of every activation."""
        return self.requests * self.tokens

    @property
    def verify(self) -> bool:
        """True if drafts are verified."""
        return self.tokens > 1

    def row(self, request: int, token: int) -> int:
        """Row of a request's token; raises IndexError if the step has no such row."""
        if not (0 <= request < self.requests and 0 <= token < self.tokens):
            raise IndexError(f"request {request}, token {token} of {self}")
        return request * self.tokens + token

    def of_token(self, token: int) -> slice:
        """Rows of all requests' token `token`, in the requests' order."""
        return slice(self.row(0, token), self.rows, self.tokens)

    def of_request(self, request: int) -> slice:
        """Rows of one request, in the tokens' order."""
        first = self.row(request, 0)
        return slice(first, first + self.tokens)

    def padding(self, live: int) -> slice:
        """Rows of padding where the first `live` requests are real; raises ValueError if those do not fit."""
        if not 0 <= live <= self.requests:
            raise ValueError(f"{live} requests do not fit a step of {self.requests}")
        return slice(live * self.tokens, self.rows)

    def length(self, total: int, token: int) -> int:
        """Cache entries that a token attends to.

        Args:
            total: the request's entries with all of this step's tokens; 0 or less for padding.
            token: which token of the request.
        """
        return max(total - (self.tokens - 1 - token), 0) if total > 0 else PADDING_LENGTH

    def __str__(self) -> str:
        each = "one token" if self.tokens == 1 else f"{self.tokens} tokens"
        return f"{self.requests} request{'s' if self.requests > 1 else ''} of {each}"


def drafts_problem(drafts: int) -> str:
    """Why a number of draft tokens is not supported; empty if it is."""
    if drafts == 0 or drafts in DRAFTS:
        return ""
    return (
        f"{drafts} draft tokens are not supported; without speculation 0, with it {DRAFTS[0]} to {DRAFTS[-1]}"
    )


def window(tokens: int) -> int:
    """Raw inputs in a KDA convolution's cache row: three without speculation, `drafts` more with it."""
    return TAPS + tokens - 1


def first_tap(accepted: int) -> int:
    """Where the taps before token 0 begin in the window; `accepted` tokens of the last step, at least 1."""
    return accepted - 1


# Captured sizes


def captured(
    sizes: Iterable[int], tokens: int = 1, *, max_requests: int | None = None, max_rows: int = MAX_ROWS
) -> tuple[Step, ...]:
    """The steps that graphs are captured for, smallest first.

    Args:
        sizes: rows that an engine asks for (`cudagraph_capture_sizes`), each rounded up to whole requests.
        tokens: rows of a request.
        max_requests: of the engine; larger graphs are left out.
        max_rows: of the package, or of the engine where that is less (vLLM rounds no size up beyond its
            `max_cudagraph_capture_size`); larger graphs are left out, so `sizes` may go beyond.

    Raises:
        ValueError: if a size is not positive or the number of tokens is not supported.
    """
    found = set()
    for size in sizes:
        if size < 1:
            raise ValueError(f"a captured size is at least 1, not {size}")
        step = Step(-(-size // tokens), tokens)
        if step.rows <= max_rows and (max_requests is None or step.requests <= max_requests):
            found.add(step.requests)
    return tuple(Step(requests, tokens) for requests in sorted(found))


def prepared(
    sizes: Iterable[int], tokens: int = 1, *, max_requests: int | None = None, max_rows: int = MAX_ROWS
) -> tuple[Step, ...]:
    """All steps to prepare: decode of one token a request, and verify steps if `tokens` is more than 1."""
    sizes = tuple(sizes)
    decode = captured(sizes, max_requests=max_requests, max_rows=max_rows)
    if tokens == 1:
        return decode
    return decode + captured(sizes, tokens, max_requests=max_requests, max_rows=max_rows)


def batches(steps: Iterable[Step]) -> tuple[int, ...]:
    """Batches that kernels are asked for: each step's rows, and its requests for KDA's tokens in turn."""
    return tuple(sorted({n for step in steps for n in (step.rows, step.requests)}))


def smallest(steps: Iterable[Step], requests: int, tokens: int = 1) -> Step | None:
    """The graph that so many requests replay; None if they have no graph."""
    fitting = [s for s in steps if s.tokens == tokens and s.requests >= requests >= 1]
    return min(fitting, key=lambda s: s.requests, default=None)


# Recognising a step


@dataclass(frozen=True)
class Counts:
    """What one layer's attention metadata counts, all of it known on the host and alike on every rank."""

    prefills: int = 0
    decodes: int = 0
    """Requests of plain decode; where an attention does not tell verify requests apart, those as well."""
    decode_tokens: int = 0
    verifies: int | None = None
    """Requests that verify drafts; None where an attention does not tell them apart (MLA)."""
    verify_tokens: int = 0
    staged: int | None = None
    """Requests of the staged slot table, padding included, where there is one (KDA)."""


@dataclass(frozen=True)
class Recognised:
    """The step that some rows are, or why they are none that the package takes."""

    step: Step | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.step is not None


def recognise(rows: int, tokens: int, layers: Iterable[Counts], known: Collection[Step]) -> Recognised:
    """The step of `rows` rows, if all layers agree that it is one that was prepared.

    Args:
        rows: of the step's activations, padding included.
        tokens: of a verify step, 1 + drafts; 1 without speculation. A step without any verifying request is
            decode of one token a request.
        layers: what each layer's metadata counts.
        known: the prepared steps.
    """
    layers = tuple(layers)
    if not layers:
        return Recognised(None, "no layer has attention metadata")
    if any(c.prefills for c in layers):
        return Recognised(None, "some requests are in prefill")
    each = tokens if any(c.verifies for c in layers) else 1
    if rows % each:
        return Recognised(None, f"{rows} rows are not whole requests of {each} tokens")
    step = Step(rows // each, each)
    if step not in known:
        return Recognised(None, f"{step} ({rows} rows) was not prepared")
    for counts in layers:
        reason = _disagreement(step, counts)
        if reason:
            return Recognised(None, reason)
    return Recognised(step)


def _disagreement(step: Step, counts: Counts) -> str:
    if not step.verify:
        if counts.verifies:
            return f"drafts are verified (requests: {counts.verifies}), and there is no speculation"
        if counts.decode_tokens == counts.decodes <= step.rows:
            return ""
        return f"{counts.decode_tokens} rows of {counts.decodes} requests are not one token a request"
    if counts.verifies is None:
        if counts.decode_tokens == counts.decodes * step.tokens == step.rows:
            return ""
        return (
            f"{counts.decode_tokens} rows of {counts.decodes} requests are not {step.tokens} tokens a request"
        )
    if counts.decodes:
        return "verify rows are mixed with decode rows"
    if counts.verify_tokens != counts.verifies * step.tokens:
        return f"not every request verifies {step.tokens} tokens"
    if counts.staged is None or counts.staged * step.tokens != step.rows:
        return f"slots are staged for {counts.staged or 0} requests, the graph has {step.requests}"
    return ""


def signature(step: Step | None, *context: int | str) -> int:
    """A 63-bit number of a decision, the same in every process; ranks that differ in it must not go on."""
    said = repr((None if step is None else (step.requests, step.tokens), context))
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") >> 1


# Mailboxes across replays


@dataclass(frozen=True)
class Rotation:
    """The parities of a mailbox that the `calls` calls of a step publish to in turn, alike in every replay.

    A call publishes its rows to one parity and re-arms (fills with the sentinel) that of the call before it:
    the first call of a step that of the last call of the step before. Which step that was is not known at
    capture, so the first call re-arms as many rows as it publishes itself, or more.
    """

    calls: int
    """A step: one for each layer that uses the mailbox."""
    parities: int

    def publishes(self, call: int) -> int:
        """Parity that a call publishes to."""
        return call % self.parities

    def rearms(self, call: int) -> int:
        """Parity that a call re-arms."""
        return (call - 1) % self.calls % self.parities

    @property
    def problem(self) -> str:
        """Why the rotation cannot be repeated; empty if it can."""
        if self.calls < 1 or self.parities < 2:
            return f"{self.calls} calls over {self.parities} parities: at least 1 and 2 are wanted"
        if self.publishes(0) != self.rearms(0):
            return ""
        return (
            f"{self.calls} calls over {self.parities} parities cannot be repeated: the first call publishes"
            f" to parity {self.publishes(0)}, which the last call of the step before left for it to re-arm"
        )
