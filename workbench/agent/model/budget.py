"""Limits on what a run may spend, counted before and after each call of a model.

A call is only made while nothing is used up, and with no more room for output than what is left: a limit is
overshot by one call at most (the prompt's size is a guess until the server has counted it). Calls in flight
are counted with their estimate, so that chains running side by side do not overshoot together.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from workbench.agent.model.messages import Reply, Request, Usage
from workbench.agent.model.profile import Price
from workbench.errors import WorkbenchError


class BudgetError(WorkbenchError):
    """A limit is reached; `limit` names it. The run ends in good order, with what it has."""

    def __init__(self, limit: str, message: str) -> None:
        self.limit = limit
        super().__init__(message)


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class Limits(_Data):
    """What a run may use; None is no limit."""

    tokens: int | None = Field(default=None, ge=1)
    """Prompt and completion tokens together."""
    usd: float | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)
    """Wall time, of all sittings of a resumed run together."""
    rounds: int = Field(default=20, ge=1)
    """Calls of the model a chain."""
    stall: int = Field(default=8, ge=1)
    """Rounds of a chain without a better verified candidate."""


class Spend(_Data):
    """What a run used."""

    calls: int = 0
    usage: Usage = Usage()
    wasted: Usage = Usage()
    """Tokens of attempts that broke off; they count against the budget."""
    lost: Usage = Usage()
    """Prompt tokens, guessed, of calls that an interruption cut off. Nobody knows whether they were charged
    for: they count against the limits, and are no part of `usage` and `usd`.
    """
    usd: float | None = None
    """None if the price of the model is not known."""
    seconds: float = 0.0


class Ledger:
    """Counts a run's spending; safe to use from several threads.

    Args:
        limits: what may be used.
        price: of the model; None if it is not known, which a limit in USD does not allow.
        seconds_before: wall time of earlier sittings.
        lost: tokens of calls that interruptions cut off.

    Raises:
        WorkbenchError: if money is limited and the price is not known.
    """

    def __init__(
        self, limits: Limits, price: Price | None, seconds_before: float = 0.0, lost: Usage | None = None
    ) -> None:
        if limits.usd is not None and price is None:
            raise WorkbenchError(
                "the price of this model is not known, so that money cannot be limited: give [price] in the "
                "profile, or limit tokens"
            )
        self.limits, self.price = limits, price
        self._started, self._before = time.monotonic(), seconds_before
        self._lock = threading.Lock()
        self._spend = Spend(usd=None if price is None else 0.0, lost=lost or Usage())
        self._in_flight = Usage()

    @property
    def spend(self) -> Spend:
        """What was used so far."""
        with self._lock:
            return self._spend.model_copy(update={"seconds": self.seconds})

    @property
    def seconds(self) -> float:
        """Wall time of all sittings."""
        return self._before + time.monotonic() - self._started

    def cost(self, usage: Usage) -> float | None:
        """USD for some tokens; None if the price is not known."""
        if self.price is None:
            return None
        cached = self.price.input if self.price.cached is None else self.price.cached
        fresh = max(0, usage.prompt - usage.cached)
        return (fresh * self.price.input + usage.cached * cached + usage.completion * self.price.output) / 1e6

    @contextmanager
    def reserve(self, request: Request) -> Iterator[Request]:
        """Make sure that a call may be made; yields the request with the room for output that is left.

        Raises:
            BudgetError: if a limit is reached, or what is left does not hold the prompt.
        """
        with self._lock:
            allowed = self._allowed(request)
            held = Usage(prompt=request.estimated_tokens, completion=allowed)
            self._in_flight = self._in_flight.plus(held)
        try:
            yield request.model_copy(update={"max_output_tokens": allowed})
        finally:
            with self._lock:
                self._in_flight = Usage(
                    prompt=self._in_flight.prompt - held.prompt,
                    completion=self._in_flight.completion - held.completion,
                )

    def _allowed(self, request: Request) -> int:
        """Output tokens that a call may have."""
        prompt, output = request.estimated_tokens, request.max_output_tokens
        if self.limits.seconds is not None and self.seconds >= self.limits.seconds:
            raise BudgetError("seconds", f"the run's {self.limits.seconds:g} s are used up")
        used = self._spend.usage.plus(self._spend.wasted).plus(self._spend.lost).plus(self._in_flight)
        if self.limits.tokens is not None:
            left = self.limits.tokens - used.total - prompt
            if left < 1:
                raise BudgetError(
                    "tokens",
                    f"a call needs about {prompt} tokens; {used.total} of {self.limits.tokens} are used",
                )
            output = min(output, left)
        if self.limits.usd is not None and self.price is not None:
            spent = self.cost(used) or 0.0
            left_usd = self.limits.usd - spent - prompt * self.price.input / 1e6
            if left_usd <= 0:
                raise BudgetError(
                    "usd", f"the next call does not fit: {spent:.4f} of {self.limits.usd:g} USD are used"
                )
            if self.price.output > 0:
                output = min(output, int(left_usd / self.price.output * 1e6))
            if output < 1:
                raise BudgetError(
                    "usd", f"no room for an answer: {spent:.4f} of {self.limits.usd:g} USD are used"
                )
        return output

    def charge(self, reply: Reply) -> None:
        """Count a call's tokens, those of its broken attempts too."""
        self._add(reply.usage, reply.wasted, 1)

    def charge_wasted(self, usage: Usage) -> None:
        """Count tokens of a call that never came to an answer."""
        self._add(Usage(), usage, 0)

    def _add(self, usage: Usage, wasted: Usage, calls: int) -> None:
        with self._lock:
            more = self.cost(usage.plus(wasted))
            old = self._spend
            self._spend = Spend(
                calls=old.calls + calls,
                usage=old.usage.plus(usage),
                wasted=old.wasted.plus(wasted),
                lost=old.lost,
                usd=None if more is None or old.usd is None else old.usd + more,
            )


def load_prices() -> Mapping[str, Price]:
    """Read the table of prices that comes with the workbench: model name to price."""
    text = (resources.files("workbench.agent.model") / "prices.toml").read_text()
    return {name: Price.model_validate(p) for name, p in tomllib.loads(text)["price"].items()}
