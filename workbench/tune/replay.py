"""Replay of brute-forced spaces: how near a sampler comes to the optimum without running a kernel.

Spaces are read in Kernel Tuner's cache format (JSON, may be gzipped): `tune_params`, and for each
configuration its measured time or the name of its failure.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from workbench.errors import ContentError
from workbench.tune.points import Points
from workbench.tune.samplers import Observation, Sampler, make_sampler

BUDGETS = (25, 50, 100, 200)


@dataclass(frozen=True)
class ReplaySpace:
    """A space whose every point has a known outcome."""

    name: str
    points: Points
    times: tuple[float | None, ...]
    """Milliseconds of each row; None where it failed."""

    @property
    def optimum(self) -> float:
        """The lowest time."""
        return min(t for t in self.times if t is not None)


class ReplayReport(BaseModel):
    """What `workbench replay --json` prints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    space: str
    sampler: str
    budget: int
    seeds: int
    fraction_of_optimum: dict[int, float]
    """By number of evaluations: optimum over best time so far, mean over the seeds (1 is the optimum)."""
    overhead_ms: float
    """Mean time the sampler took for one proposal."""


def load_space(path: Path) -> ReplaySpace:
    """Read a space.

    Raises:
        ContentError: if the file cannot be read or is not in Kernel Tuner's cache format.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text)
    except (OSError, EOFError, ValueError) as e:
        raise ContentError(path, f"cannot be read as a tuning cache: {e}") from e
    try:
        names = document["tune_params_keys"]
        cache = document["cache"].values()
        values = {k: tuple(document["tune_params"][k]) for k in names}
        objective = document.get("objective", "time")
        outcomes = [entry.get(objective) for entry in cache]
        points = Points.of_list(values, ({k: entry[k] for k in names} for entry in cache))
    except (AttributeError, KeyError, TypeError) as e:
        raise ContentError(path, f"is not in Kernel Tuner's cache format: {e!r}") from e
    times = tuple(_time(t) for t in outcomes)
    if not any(t is not None for t in times):
        raise ContentError(path, "holds no configuration with a time")
    return ReplaySpace(path.name.removesuffix(".gz").removesuffix(".json"), points, times)


def run(space: ReplaySpace, sampler: Sampler, budget: int) -> list[float]:
    """Best time after each of `budget` unique evaluations (infinite before the first success)."""
    history: list[Observation] = []
    best, curve = math.inf, []
    for number in range(budget):
        row = sampler.propose(space.points, history, number)
        if row is None:
            break
        value = space.times[row]
        history.append(Observation(row, "failed" if value is None else "done", value))
        best = min(best, math.inf if value is None else value)
        curve.append(best)
    return curve + [best] * (budget - len(curve))


def replay(
    space: ReplaySpace, sampler: str, *, budget: int = 200, seeds: int = 10, budgets: Sequence[int] = BUDGETS
) -> ReplayReport:
    """Run a sampler with `seeds` seeds and report the fraction of the optimum at each budget."""
    marks = sorted({b for b in budgets if b < budget} | {budget})
    sums = dict.fromkeys(marks, 0.0)
    began = time.perf_counter()
    for seed in range(seeds):
        curve = run(space, make_sampler(sampler, seed), budget)
        for mark in marks:
            sums[mark] += space.optimum / curve[mark - 1]
    elapsed = time.perf_counter() - began
    return ReplayReport(
        space=space.name,
        sampler=sampler,
        budget=budget,
        seeds=seeds,
        fraction_of_optimum={m: s / seeds for m, s in sums.items()},
        overhead_ms=1000 * elapsed / max(1, seeds * min(budget, len(space.points))),
    )


def _time(outcome: object) -> float | None:
    """A usable time, or None for a failure (a name, zero, infinity, or Kernel Tuner's 1e20)."""
    if isinstance(outcome, int | float) and not isinstance(outcome, bool) and 0 < outcome < 1e19:
        return float(outcome)
    return None
