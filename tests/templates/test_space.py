"""Enumeration of a space against the plain product of all values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ContentError
from workbench.expressions import names_in
from workbench.templates import Space

CONSTRAINTS = (
    "a * b <= 12", "a % 2 == 0 or c == 'x'", "N % (a + d) == 0", "d", "a < b", "min(a, b) > 1",
    "N // (b - 2) > 3", "c in ('x', 'y')", "not d or a > 2", "N > 5",
)  # fmt: skip


def plain(space: Space) -> list[dict[str, object]]:
    product = itertools.product(*space.knobs.values())
    points = [dict(zip(space.knobs, values, strict=True)) for values in product]
    return [p for p in points if space.is_valid(p)]


@settings(max_examples=80, deadline=None)
@given(
    constraints=st.lists(st.sampled_from(CONSTRAINTS), unique=True, max_size=4),
    order=st.permutations(["a", "b", "c", "d"]),
)
def test_points_are_those_of_the_plain_product_in_its_order(constraints: list[str], order: list[str]) -> None:
    values: dict[str, tuple[int | str | bool, ...]] = {
        "a": (1, 2, 3, 4, 6), "b": (3, 1, 4, 8), "c": ("x", "y", "z"), "d": (True, False),
    }  # fmt: skip
    space = Space({k: values[k] for k in order}, tuple(constraints), {"N": 24})
    assert list(space.points()) == plain(space)


def test_constraint_that_divides_by_zero_is_guarded_by_one_before_it() -> None:
    space = Space({"b": (0, 1, 2), "a": (1, 2)}, ("b > 0 and a > 0", "8 % b == 0"), {})
    assert list(space.points()) == plain(space) and len(plain(space)) == 4


def test_constraint_with_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ContentError, match="unknown name 'tile'"):
        list(Space({"a": (1, 2)}, ("tile > 1",), {}).points())


def test_space_without_knobs_has_one_point() -> None:
    assert list(Space({}, (), {"N": 1}).points()) == [{}]
    assert list(Space({}, ("N > 1",), {"N": 1}).points()) == []


def test_names_of_an_expression() -> None:
    assert names_in("min(a, b) + N // c if d else 3") == {"a", "b", "c", "d", "N"}
