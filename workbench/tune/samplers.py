"""Samplers: which point to try next.

A sampler is a pure function of its seed, the points, the trials so far and the number of the new trial. So a
study that is resumed, or whose workers finish in another order, proposes the same points; nothing is kept
between calls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.errors import UnknownNameError
from workbench.tune.points import Points


@dataclass(frozen=True)
class Observation:
    """One trial as a sampler sees it."""

    row: int
    """Row of `Points`."""
    state: Literal["running", "done", "failed"]
    value: float | None = None
    """Time (any unit, positive); set when done."""


class Sampler(Protocol):
    """Chooses the next point."""

    @property
    def name(self) -> str:
        """Name in `SAMPLERS`."""
        ...

    def propose(self, points: Points, history: Sequence[Observation], number: int) -> int | None:
        """Row of an unseen valid point for trial `number`; None if every point has been seen."""
        ...


@dataclass(frozen=True)
class RandomSampler:
    """Uniform over the unseen valid points."""

    seed: int = 0
    name: str = "random"

    def propose(self, points: Points, history: Sequence[Observation], number: int) -> int | None:
        """See `Sampler.propose`."""
        rows = np.flatnonzero(_free(points, history))
        return int(_generator(self.seed, number).choice(rows)) if len(rows) else None


@dataclass(frozen=True)
class TpeSampler:
    """Optuna's multivariate TPE over one categorical a knob, moved to the nearest unseen valid point.

    The objective is the logarithm of the time; a failure counts as twice the worst time seen. Trials that are
    still running are taken for bad ones, so that parallel workers spread out (`constant_liar`).
    """

    seed: int = 0
    startup: int = 10
    """Trials drawn uniformly before the model is used."""
    candidates: int = 24
    """Candidates that TPE scores a proposal."""
    name: str = "tpe"

    def propose(self, points: Points, history: Sequence[Observation], number: int) -> int | None:
        """See `Sampler.propose`."""
        random = _generator(self.seed, number)
        free = _free(points, history)
        rows = np.flatnonzero(free)
        if not len(rows):
            return None
        if sum(o.state != "running" for o in history) < self.startup or len(rows) == 1:
            return int(random.choice(rows))
        return points.nearest(self._wish(points, history, random), free, random)

    def _wish(self, points: Points, history: Sequence[Observation], random: np.random.Generator) -> list[int]:
        import optuna
        from optuna.distributions import BaseDistribution, CategoricalDistribution
        from optuna.trial import TrialState, create_trial

        space: dict[str, BaseDistribution] = {
            k: CategoricalDistribution(tuple(range(len(v)))) for k, v in points.values.items() if len(v) > 1
        }
        column = {k: i for i, k in enumerate(points.values)}
        values = log_values(history)
        with _quiet():
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=0,
                n_ei_candidates=self.candidates,
                multivariate=True,
                constant_liar=True,
                seed=int(random.integers(2**31)),
            )
            study = optuna.create_study(sampler=sampler)
            trials = []
            for o, value in zip(history, values, strict=True):
                params = {k: int(points.matrix[o.row, column[k]]) for k in space}
                state = TrialState.RUNNING if value is None else TrialState.COMPLETE
                trials.append(create_trial(state=state, value=value, params=params, distributions=space))
            study.add_trials(trials)
            wish = study.ask(fixed_distributions=space).params
        return [int(wish.get(k, 0)) for k in points.values]


SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "tpe": lambda seed: TpeSampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
}
"""Samplers by name; each takes a seed."""


def make_sampler(name: str, seed: int = 0) -> Sampler:
    """A sampler by name; raises UnknownNameError."""
    if name not in SAMPLERS:
        raise UnknownNameError("sampler", name, SAMPLERS)
    return SAMPLERS[name](seed)


def log_values(history: Sequence[Observation]) -> list[float | None]:
    """Objective of each trial: log time, log of twice the worst time for a failure, None while running."""
    done = [o.value for o in history if o.state == "done" and o.value is not None]
    penalty = math.log(2 * max(done)) if done else 0.0
    return [
        None
        if o.state == "running"
        else penalty
        if o.value is None or o.state == "failed"
        else math.log(o.value)
        for o in history
    ]


def _free(points: Points, history: Sequence[Observation]) -> NDArray[np.bool_]:
    free = np.ones(len(points), np.bool_)
    free[[o.row for o in history]] = False
    return free


def _generator(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's notes about experimental options and in-memory studies."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
