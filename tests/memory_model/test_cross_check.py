"""No schedule of the simulator ends a small kernel in a way that the model forbids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, note, settings

from tests.memory_model.litmus_kernels import FEW, MANY, OWN, PUBLIC, compare, fitting
from tests.memory_model.litmus_shapes import SHAPES, small_programs
from workbench import memory_model as mm


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_classic_shapes(name: str) -> None:
    assert compare(SHAPES[name], FEW).ends == ()


@pytest.mark.parametrize("path", fitting(OWN), ids=lambda path: path.stem)
def test_own_litmus_tests(path: Path) -> None:
    """Also those with copies, mbarriers, clusters and dependent grids."""
    found = compare(mm.read(path), FEW)
    assert found.ends == ()


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public litmus tests are not beside the project")
def test_public_litmus_tests() -> None:
    paths = fitting(PUBLIC)
    assert len(paths) > 70
    for path in paths:
        assert compare(mm.read(path), FEW).ends == (), path


def _check(test: mm.Litmus, seeds: int) -> None:
    note(mm.render(test))
    try:
        found = compare(test, seeds).ends
    except mm.UndecidedError:
        assume(False)
    assert found == ()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs())
def test_random_programs(test: mm.Litmus) -> None:
    _check(test, FEW)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs())
def test_many_random_programs(test: mm.Litmus) -> None:
    _check(test, MANY)
