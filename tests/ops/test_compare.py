"""Acceptance of one output: classes of number, scale, exactness."""

import itertools
import math

import pytest
import torch

from workbench.ops.compare import Errors, Limits, compare, measure
from workbench.ops.model import Tolerance

KINDS = {"finite": 1.0, "+inf": math.inf, "-inf": -math.inf, "nan": math.nan}
NONE = Errors(0.0, 0.0)
LOOSE = Tolerance(floor_rms=1e9, floor_worst=1e9, cap_rms=1e9, cap_worst=1e9)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("allow_inf", [True, False])
@pytest.mark.parametrize(("want", "got"), list(itertools.product(KINDS, KINDS)))
def test_truth_table(want: str, got: str, allow_inf: bool) -> None:
    """However loose the tolerance, a number of another kind never passes, in either direction."""
    tolerance = Tolerance(**{**LOOSE.__dict__, "allow_inf": allow_inf})
    outcome = compare(tensor(2.0, KINDS[want]), tensor(2.0, KINDS[got]), tolerance, NONE)
    right = want == got and (allow_inf or "inf" not in want)
    assert outcome.passed == right
    if not right:
        assert outcome.index == (1,) and outcome.bad == 1
        assert math.isnan(outcome.got) if got == "nan" else outcome.got == KINDS[got]


def test_one_nan_among_many_is_named() -> None:
    golden = torch.zeros(4, 8, dtype=torch.float64) + 1
    out = golden.clone()
    out[2, 5] = math.nan
    assert compare(golden, out, LOOSE, NONE).index == (2, 5)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e20])
def test_the_verdict_does_not_depend_on_the_scale(scale: float) -> None:
    golden = torch.linspace(-1, 1, 101, dtype=torch.float64) * scale
    assert not compare(golden, torch.zeros_like(golden), Tolerance(), NONE).passed
    assert not compare(golden, golden * 1.02, Tolerance(), NONE).passed
    assert compare(golden, golden * (1 + 5e-5), Tolerance(), NONE).passed


def test_one_element_far_off_fails_although_the_rms_is_small() -> None:
    golden = torch.ones(1_000_000, dtype=torch.float64)
    out = golden.clone()
    out[123_456] = 1.05
    outcome = compare(golden, out, Tolerance(), NONE)
    assert outcome.errors.rms < 1e-4 and not outcome.passed
    assert outcome.index == (123_456,) and outcome.got == pytest.approx(1.05)


def test_golden_of_zeros_accepts_zeros_of_either_sign_only() -> None:
    golden = torch.zeros(4, dtype=torch.float64)
    assert compare(golden, -golden, Tolerance(), NONE).passed
    assert not compare(golden, golden + 1e-30, Tolerance(), NONE).passed


def test_a_negative_zero_is_refused_where_it_marks_an_empty_slot() -> None:
    golden, mail = tensor(0.0, 1.0, 0.0), Tolerance(positive_zero=True)
    assert compare(golden, golden, mail, NONE).passed
    outcome = compare(golden, tensor(0.0, 1.0, -0.0), mail, NONE)
    assert "-0" in outcome.reason and outcome.index == (2,) and outcome.bad == 1


def test_exact_outputs() -> None:
    ids = torch.tensor([[3, 1, 2]])
    exact = Tolerance(exact=True)
    assert compare(ids, ids.int(), exact, NONE).passed
    outcome = compare(ids, torch.tensor([[3, 2, 1]], dtype=torch.int32), exact, NONE)
    assert not outcome.passed and outcome.bad == 2 and outcome.index == (0, 1)
    assert (outcome.expected, outcome.got) == (1, 2)


def test_a_wrong_shape_is_said() -> None:
    outcome = compare(torch.zeros(2, 3), torch.zeros(3, 2), Tolerance(), NONE)
    assert "shape [3, 2], not [2, 3]" in outcome.reason


def test_limits_follow_the_honest_error_between_floor_and_cap() -> None:
    t = Tolerance(factor=2.0, floor_rms=1e-3, floor_worst=4e-3, cap_rms=1e-2, cap_worst=8e-2)
    assert Limits.of(t, NONE) == Limits(1e-3, 4e-3)
    assert Limits.of(t, Errors(2e-3, 1e-2)) == Limits(4e-3, 2e-2)
    assert Limits.of(t, Errors(1.0, 1.0)) == Limits(1e-2, 8e-2)


def test_measures_by_hand() -> None:
    golden, out = tensor(3.0, 4.0), tensor(3.0, 5.0)
    rms = math.sqrt(25 / 2)
    e = measure(golden, out)
    assert e.rms == pytest.approx(math.sqrt(0.5) / rms) and e.worst == pytest.approx(1 / (4 + rms))
    assert e.worst_index == (1,)


def test_huge_differences_do_not_overflow() -> None:
    golden = tensor(1e300, -1e300)
    assert measure(golden, -golden).rms == pytest.approx(2.0)
    assert not compare(golden, -golden, Tolerance(), NONE).passed
    assert not compare(golden * 1e8, golden * -1e8, Tolerance(), NONE).passed
