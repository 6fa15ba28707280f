"""What the functions of the package give, one by one."""

from __future__ import annotations

import time

import pytest

from tests.memory_model.litmus_shapes import ONE, TWO, shape
from workbench import memory_model as mm
from workbench.memory_model.explore import LIMIT

MP = shape(TWO, "st.weak x, 1; st.release.gpu f, 1", "ld.acquire.gpu r0, f; ld.weak r1, x")


def test_outcomes_have_registers_and_the_memory_that_was_asked_for() -> None:
    ends = mm.outcomes(MP, ("x", "f"))
    assert {(o.register(1, "r0"), o.register(1, "r1")) for o in ends} == {(0, 0), (0, 1), (1, 1)}
    assert {o.memory for o in ends} == {(("f", (1,)), ("x", (1,)))}
    assert all(o.hung == (False, False) for o in ends)


def test_executions_say_what_each_read_returns() -> None:
    found = {
        tuple(write.line if write else None for _, write in e.reads_from): len(e.races)
        for e in mm.executions(MP)
    }
    # Lines of the stores to f and x; only where the flag is not seen is there a race.
    assert found == {(None, None): 1, (None, 4): 1, (5, 4): 0}


def test_races_name_both_lines() -> None:
    (location,) = {race.first.location for race in mm.races(MP)}
    assert location == "x"
    assert {(r.first.line, r.first.writes, r.second.line, r.second.writes) for r in mm.races(MP)} == {
        (4, True, 5, False)
    }
    assert mm.races(shape(TWO, "ld.weak r0, x", "ld.weak r0, x")) == frozenset()
    assert mm.races(shape(TWO, "st.relaxed.gpu x, 1", "st.relaxed.gpu x, 2")) == frozenset()
    assert mm.races(shape(TWO, "st.relaxed.cta x, 1", "st.relaxed.cta x, 2"))


def test_allows_takes_registers_and_memory() -> None:
    assert mm.allows(MP, {(1, "r0"): 1, (1, "r1"): 1})
    assert not mm.allows(MP, {(1, "r0"): 1, (1, "r1"): 0})
    assert mm.allows(MP, {(1, "r1"): 0}, {"x": (1,)})
    assert not mm.allows(MP, {}, {"x": (0,)})


def test_a_race_before_a_deadlock_is_found_though_it_has_no_outcome() -> None:
    test = shape(
        ONE, "st.weak x, 1; bar.cta.sync 0; bar.cta.sync 1", "st.weak x, 2; bar.cta.sync 1; bar.cta.sync 0"
    )
    assert mm.outcomes(test) == frozenset()
    assert mm.races(test)


def test_a_thread_that_hangs_keeps_what_it_has_set() -> None:
    declared = "x=0; y=0; f=0; m @ mbarrier 2;"
    test = shape(
        ONE,
        "mbarrier.arrive m",
        "mov r0, 7; mbarrier.try_wait.parity m, 0; mov r1, 8",
        declared=declared,
    )
    (end,) = mm.outcomes(test)
    assert end.hung == (False, True)
    assert (end.register(1, "r0"), end.register(1, "r1")) == (7, None)


def test_an_index_outside_the_array_ends_that_run() -> None:
    test = mm.parse(
        "PTX t\n{a[2]={1, 2}; i=0;}\n P0@cta 0,gpu 0 | P1@cta 0,gpu 0;\n ld.weak r0, i | st.weak i, 5;\n"
        " ld.weak r1, a[r0] | ;\nexists (P0:r0 == 5)\n"
    )
    assert mm.decide(test) == mm.Decision(False)


def test_spinning_reads_are_no_loop_without_end() -> None:
    test = shape(
        TWO, "st.weak x, 1; st.release.gpu f, 3", "L:; ld.acquire.gpu r0, f; bne r0, 3, L; ld.weak r1, x"
    )
    assert {o.register(1, "r1") for o in mm.outcomes(test)} == {1}
    assert mm.races(test) == frozenset()


def test_a_loop_with_effects_is_undecided_unless_something_is_found_before() -> None:
    loop = "PTX t\n{x=0;}\n P0@cta 0,gpu 0;\n L: ;\n atom.relaxed.gpu.add r0, x, 1;\n bne r0, 40, L;\n"
    test = mm.parse(loop + "exists (P0:r0 == 40)\n")
    assert mm.decide(test).holds is None and "loop" in mm.decide(test).reason
    with pytest.raises(mm.UndecidedError, match="loop"):
        mm.outcomes(test)
    with pytest.raises(mm.UndecidedError, match="loop"):
        mm.races(test)
    with pytest.raises(mm.UndecidedError, match="loop"):
        mm.allows(test, {(0, "r0"): 40})


@pytest.mark.parametrize(
    "columns",
    [
        ("st.relaxed.gpu x, 1; st.relaxed.gpu x, 2; ld.relaxed.gpu r0, x; ld.relaxed.gpu r1, x",) * 6,
        ("st.relaxed.gpu x, 1; fence.sc.gpu; ld.relaxed.gpu r0, y; fence.sc.gpu; ld.relaxed.gpu r1, x",) * 5,
        ("atom.acq_rel.gpu.add r0, x, 1; atom.acq_rel.gpu.add r1, y, 1; st.relaxed.gpu y, r0",) * 5,
        (
            "L:; ld.weak r0, x; mul r0, r0, 3; add r0, r0, 1; st.weak y, r0;"
            "ld.weak r1, y; st.weak x, r1; goto L",
        )
        * 3,
    ],
)
def test_too_many_executions_are_given_up_soon(columns: tuple[str, ...]) -> None:
    start = time.perf_counter()
    with pytest.raises(mm.UndecidedError):
        mm.outcomes(shape(tuple(f"cta {n},gpu 0" for n in range(len(columns))), *columns), limit=LIMIT // 50)
    assert time.perf_counter() - start < 10


def test_an_arrival_that_nobody_expects_hangs() -> None:
    """More arrivals than a phase has while its copy is under way have no meaning; they are no way to pass."""
    test = shape(
        ONE,
        "mbarrier.arrive.expect_tx m, 1; mbarrier.arrive m",
        "mbarrier.try_wait.parity m, 0; ld.weak r0, x",
        declared="x=0; m @ mbarrier 1;",
    )
    (end,) = mm.outcomes(test)
    assert end.hung == (True, True)


def test_quorums_pair_any_arrivals() -> None:
    test = shape(
        (*ONE, ONE[0]),
        "st.weak x, 1; bar.cta.sync 1, 1, 2",
        "bar.cta.sync 1, 1, 2; ld.weak r0, x",
        "bar.cta.sync 1, 1, 2",
    )
    ends = {(o.hung, o.register(1, "r0")) for o in mm.outcomes(test)}
    assert ends == {
        ((False, False, True), 1),
        ((True, False, False), 0),
        ((True, False, False), 1),
        ((False, True, False), None),
    }
