"""One conformance suite for every sampler, and what TPE must do better than chance."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_landscapes import points, time_us

from workbench.errors import UnknownNameError, WorkbenchError
from workbench.templates import Space
from workbench.tune import SAMPLERS, Observation, Points, load_space, make_sampler, replay
from workbench.tune.samplers import log_values

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "search_spaces"


def drive(name: str, seed: int, space: Points, budget: int) -> list[Observation]:
    sampler, history = make_sampler(name, seed), []
    for number in range(budget):
        row = sampler.propose(space, history, number)
        if row is None:
            break
        value = time_us(space.knobs(row))
        history.append(Observation(row, "failed" if value is None else "done", value))
    return history


def best(history: list[Observation]) -> float:
    return min((o.value for o in history if o.value is not None), default=math.inf)


@pytest.mark.parametrize("name", SAMPLERS)
class TestConformance:
    """What a study relies on, whatever the sampler."""

    def test_never_proposes_a_point_twice(self, name: str) -> None:
        rows = [o.row for o in drive(name, 0, points(), 60)]
        assert len(set(rows)) == 60

    def test_depends_on_the_seed_alone(self, name: str) -> None:
        assert drive(name, 3, points(), 30) == drive(name, 3, points(), 30)
        assert drive(name, 3, points(), 30) != drive(name, 4, points(), 30)

    def test_keeps_no_state_between_calls(self, name: str) -> None:
        """A resumed study, with a fresh sampler, proposes what the uninterrupted one did."""
        history = drive(name, 1, points(), 30)
        for number in (0, 5, 12, 25):
            fresh = make_sampler(name, 1)
            assert fresh.propose(points(), history[:number], number) == history[number].row

    def test_exhausts_a_space_and_ends(self, name: str) -> None:
        small = Points.of(Space({"a": (1, 2, 3, 4), "b": ("x", "y", "z"), "c": (1,)}, ("a != 2",), {}))
        history = []
        sampler = make_sampler(name, 0)
        while (row := sampler.propose(small, history, len(history))) is not None:
            history.append(Observation(row, "done", 1.0 + row))
        assert sorted(o.row for o in history) == list(range(len(small))) and len(small) == 9

    def test_empty_space_ends_at_once(self, name: str) -> None:
        empty = Points.of(Space({"a": (1, 2)}, ("a > 5",), {}))
        assert make_sampler(name).propose(empty, [], 0) is None

    def test_everything_failing_is_survived(self, name: str) -> None:
        history: list[Observation] = []
        sampler, space = make_sampler(name, 0), points()
        for number in range(25):
            row = sampler.propose(space, history, number)
            assert row is not None
            history.append(Observation(row, "failed"))
        assert len({o.row for o in history}) == 25

    def test_running_trials_are_not_proposed_again(self, name: str) -> None:
        history = drive(name, 0, points(), 15)
        sampler, space = make_sampler(name, 0), points()
        for number in range(15, 25):
            row = sampler.propose(space, history, number)
            assert row is not None and row not in {o.row for o in history}
            history.append(Observation(row, "running"))

    def test_mostly_invalid_space_costs_no_budget(self, name: str) -> None:
        """In a space of which a tenth is valid, every one of twenty proposals is valid."""
        knobs = {"a": tuple(range(20)), "b": tuple(range(20))}
        space = Space(knobs, ("a * b % 19 == 3",), {})
        tenth = Points.of(space)
        assert 0 < len(tenth) < 0.1 * 400
        for o in drive_over(name, tenth, min(20, len(tenth))):
            assert space.is_valid(tenth.knobs(o.row))


def drive_over(name: str, space: Points, budget: int) -> list[Observation]:
    sampler, history = make_sampler(name, 0), []
    for number in range(budget):
        row = sampler.propose(space, history, number)
        assert row is not None
        history.append(Observation(row, "done", 1.0 + row % 7))
    return history


def test_tpe_beats_random_on_a_known_landscape() -> None:
    space = points()
    optimum = min(t for t in (time_us(space.knobs(r)) for r in range(len(space))) if t is not None)
    mean = {
        name: sum(optimum / best(drive(name, seed, space, 50)) for seed in range(5)) / 5 for name in SAMPLERS
    }
    assert mean["tpe"] > mean["random"] + 0.02, mean
    assert mean["tpe"] > 0.95


def fractions(names: list[str], seeds: int) -> dict[tuple[str, int], float]:
    """Mean fraction of the optimum over measured spaces, by sampler and budget; skips without the data."""
    files = [DATA / f"{n}.json.gz" for n in names]
    if not all(f.exists() for f in files):
        pytest.skip(f"the measured search spaces are not at {DATA}")
    means: dict[tuple[str, int], float] = {}
    for file in files:
        space = load_space(file)
        for name in SAMPLERS:
            report = replay(space, name, budget=100, seeds=seeds, budgets=(50,))
            for budget, fraction in report.fraction_of_optimum.items():
                assert 0 < fraction <= 1
                means[name, budget] = means.get((name, budget), 0.0) + fraction / len(files)
    return means


def test_tpe_beats_random_on_a_measured_space() -> None:
    mean = fractions(["gemm_RTX_3090"], 2)
    assert mean["tpe", 50] > mean["random", 50] + 0.03 and mean["tpe", 100] > mean["random", 100] + 0.03, mean


@pytest.mark.slow
def test_tpe_beats_random_on_all_measured_spaces() -> None:
    """Over ten seeds random reaches 0.804 and 0.832, Kernel Tuner's best strategies 0.856 and 0.942."""
    spaces = [
        "convolution_A100",
        "convolution_MI250X",
        "dedispersion_A100",
        "dedispersion_W7800",
        "gemm_RTX_3090",
    ]
    mean = fractions(spaces, 3)
    assert mean["tpe", 50] > mean["random", 50] + 0.03 and mean["tpe", 100] > mean["random", 100] + 0.03, mean
    assert mean["tpe", 50] > 0.82 and mean["tpe", 100] > 0.88, mean


def test_unknown_sampler_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="tpe"):
        make_sampler("tpee")


def test_failures_are_worse_than_anything_seen() -> None:
    history = [Observation(0, "done", 3.0), Observation(1, "failed"), Observation(2, "done", 8.0),
               Observation(3, "running")]  # fmt: skip
    assert log_values(history) == [math.log(3.0), math.log(16.0), math.log(8.0), None]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nearest_is_the_brute_force_nearest(data: st.DataObject) -> None:
    import numpy as np

    space = points()
    wish = [data.draw(st.integers(0, len(v) - 1)) for v in space.values.values()]
    taken = data.draw(st.sets(st.integers(0, len(space) - 1), max_size=len(space) - 1))
    free = np.ones(len(space), bool)
    free[list(taken)] = False
    row = space.nearest(wish, free, np.random.default_rng(0))
    assert row is not None and free[row]

    def distance(r: int) -> tuple[int, float]:
        steps = [abs(int(a) - b) for a, b in zip(space.matrix[r], wish, strict=True)]
        scaled = [s / (len(v) - 1) for s, v in zip(steps, space.values.values(), strict=True)]
        return sum(s > 0 for s in steps), sum(scaled)

    nearest = min(distance(r) for r in range(len(space)) if free[r])
    assert distance(row)[0] == nearest[0] and distance(row)[1] == pytest.approx(nearest[1])


def test_points_tell_true_from_one() -> None:
    space = Points.of_list({"a": (0, 1), "b": (False, True)}, [{"a": 1, "b": True}])
    assert space.row({"a": 1, "b": True}) == 0
    assert space.row({"a": True, "b": True}) is None and space.row({"a": 1, "b": 1}) is None
    with pytest.raises(WorkbenchError, match="twice"):
        Points.of_list({"a": (0, 1)}, [{"a": 1}, {"a": 1}])
