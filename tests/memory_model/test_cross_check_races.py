"""The simulator finds the races that the model finds, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, note, settings

from tests.memory_model.litmus_kernels import FEW, MANY, OWN, PUBLIC, compare, fitting
from tests.memory_model.litmus_shapes import (
    SHAPES,
    TWO,
    decorated_programs,
    dependent_programs,
    shape,
    small_programs,
)
from workbench import memory_model as mm
from workbench.memory_model import program as p


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_classic_shapes(name: str) -> None:
    found = compare(SHAPES[name], FEW)
    assert (found.missed, found.false_alarms) == (False, ())


def beyond_clocks(test: mm.Litmus) -> bool:
    """True if a race may be excluded by what the simulator does not follow; see `ORDERINGS`.

    That is the order of fence.sc in several threads, and what a thread gains by accessing a location twice.
    """
    fences = 0
    for thread in test.threads:
        fences += any(isinstance(i, p.Fence) and i.order is p.Order.SC for i in thread.code)
        names = [i.address.name for i in thread.code if isinstance(i, p.Load | p.Store | p.Atomic)]
        if len(set(names)) < len(names):
            return True
    return fences > 1


def credited(test: mm.Litmus) -> bool:
    """True if the simulator may credit a fence to a strong write of another thread, ordered after it.

    The hardware does; the ISA has fence and write in one thread. It takes a thread between two others, or a
    relaxed arrival at a cluster barrier.
    """
    code = [i for t in test.threads for i in t.code]
    fenced = any(isinstance(i, p.Fence) for i in code)
    return fenced and (len(test.threads) > 2 or any(isinstance(i, p.ClusterBarrier) for i in code))


def _check(test: mm.Litmus, seeds: int) -> None:
    note(mm.render(test))
    try:
        found = compare(test, seeds)
    except mm.UndecidedError:
        assume(False)
    assert not found.missed or credited(test)
    assert found.false_alarms == () or beyond_clocks(test)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs(distinct=True))
def test_random_programs(test: mm.Litmus) -> None:
    _check(test, FEW)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(decorated_programs())
def test_decorated_skeletons(test: mm.Litmus) -> None:
    _check(test, FEW)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(dependent_programs())
def test_dependent_grids(test: mm.Litmus) -> None:
    _check_dependent(test, FEW)


def _check_dependent(test: mm.Litmus, seeds: int) -> None:
    note(mm.render(test))
    found = compare(test, seeds)
    assert (found.ends, found.missed, found.false_alarms) == ((), False, ())


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(dependent_programs())
def test_many_dependent_grids(test: mm.Litmus) -> None:
    _check_dependent(test, MANY)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs(distinct=True))
def test_many_random_programs(test: mm.Litmus) -> None:
    _check(test, MANY)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(decorated_programs())
def test_many_decorated_skeletons(test: mm.Litmus) -> None:
    _check(test, MANY)


ORDERED = frozenset(("cluster-barrier-relaxed-fence",))
"""Own tests whose race is none to the simulator: the ISA's text on barrier.cluster fences before a relaxed
arrival, which its memory model does not mention."""


@pytest.mark.parametrize("path", fitting(OWN), ids=lambda path: path.stem)
def test_own_litmus_tests(path: Path) -> None:
    """Also those with copies, mbarriers, clusters and dependent grids."""
    found = compare(mm.read(path), FEW)
    assert found.false_alarms == ()
    assert found.missed == (path.stem in ORDERED)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public litmus tests are not beside the project")
def test_public_litmus_tests() -> None:
    for path in fitting(PUBLIC):
        found = compare(mm.read(path), FEW)
        assert not found.missed, path
        assert found.false_alarms == (), path


@pytest.mark.parametrize(
    ("test", "missed", "alarm"),
    [
        # Two writes of the same value are no race to the simulator.
        (shape(TWO, "st.weak x, 1", "st.weak x, 1"), True, False),
        # Data that are their own flag: an ordinary store to what strong loads read.
        (shape(TWO, "st.weak x, 1", "ld.acquire.gpu r0, x"), False, False),
        # A failed compare-and-swap is a write to the simulator and a read in the dialect.
        (shape(TWO, "ld.weak r0, x", "atom.relaxed.gpu.cas r0, x, 5, 6"), False, True),
    ],
)
def test_known_differences(test: mm.Litmus, missed: bool, alarm: bool) -> None:
    """Where the two differ on purpose."""
    found = compare(test, FEW)
    assert (found.missed, bool(found.false_alarms)) == (missed, alarm)
    assert found.ends == ()


ORDERINGS = {
    "a relaxed store after a release to the same place is part of the release pattern": (
        "st.weak x, 1; st.release.gpu f, 1; st.relaxed.gpu f, 2",
        "L:; ld.acquire.gpu r0, f; bne r0, 2, L; ld.weak r1, x",
    ),
    "who observes a strong write is ordered after it on that location, released or not": (
        "st.relaxed.gpu f, 1",
        "L:; ld.acquire.gpu r0, f; bne r0, 1, L; st.weak f, 0",
    ),
    "who observes a strong write is ordered after it on that location, acquired or not": (
        "st.relaxed.gpu f, 1",
        "L:; ld.relaxed.gpu r0, f; bne r0, 1, L; ld.weak r1, f",
    ),
    "fence.sc are ordered": (
        "st.release.gpu x, 1; fence.sc.gpu; ld.acquire.cta r1, y",
        "st.release.gpu y, 2; fence.sc.gpu; ld.acquire.gpu r1, x",
    ),
    "an atomic operation that acquires has acquired before it writes": (
        "atom.acq_rel.gpu.add r0, x, 2",
        "ld.weak r0, x; atom.acq_rel.gpu.add r1, x, 1",
    ),
}
"""Programs without a race, by what orders the accesses."""


@pytest.mark.parametrize("why", sorted(ORDERINGS))
def test_orders_that_are_easily_overlooked(why: str) -> None:
    found = compare(shape(TWO, *ORDERINGS[why]), FEW)
    assert (found.ends, found.missed, found.false_alarms) == ((), False, ())
