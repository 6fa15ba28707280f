"""Adversarial schedules: starved threads, few resident CTAs, overlapping launches, and who is to blame."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from kernels import HEADER, INDEX, Result, kernel, run

from workbench.isa.ptx import parse
from workbench.simulator import (
    Adversary,
    KernelLaunch,
    Memory,
    Outcome,
    Pick,
    SimulationOptions,
    Starved,
    Torn,
    Unit,
    simulate_module,
)

OUT = {"out": (256, np.uint32)}
# Warp 0 writes shared memory, warp 1 reads it; a bar.sync between them is left out.
HANDOVER = (
    INDEX
    + """
mov.u32 %r1, s;
setp.ge.u32 %p1, %r52, 32;
shl.b32 %r2, %r52, 2;
and.b32 %r2, %r2, 127;
add.u32 %r3, %r1, %r2;
@%p1 bra READ;
st.shared.u32 [%r3], %r0;
BARRIER
bra END;
READ:
BARRIER
ld.shared.u32 %r4, [%r3];
st.global.u32 [%d0], %r4;
END:
"""
)


def handover(barrier: str, adversary: Adversary, **options: Any) -> Result:
    text = kernel(HANDOVER.replace("BARRIER", barrier), ["out"], ".shared .align 4 .b8 s[128];")
    return run(text, OUT, grid=2, block=64, adversary=adversary, **options)


SCHEDULES = [
    Adversary(),
    Adversary(pick=Pick.HIGHEST),
    *(
        Adversary(starved=Starved(unit, n, ahead))
        for unit in Unit
        for n in (0, 1, -1)
        for ahead in (False, True)
    ),
]


@pytest.mark.parametrize("adversary", SCHEDULES, ids=str)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_right_kernel_is_right_under_every_schedule(adversary: Adversary, seed: int) -> None:
    result = handover("bar.sync 0;", adversary, seed=seed)
    assert result.rules == []
    assert (result["out"][32:64] == np.arange(32)).all()


def test_a_missing_barrier_shows_when_the_producer_is_last() -> None:
    plain = handover("", Adversary(), check_races=False)
    assert plain.rules == []
    starved = handover("", Adversary(starved=Starved(Unit.WARP, 0)), check_races=False)
    assert starved.rules == ["uninitialized-read"]


# CTA 0 waits until all others have counted up; the last lane says what it saw.
MEETING = (
    INDEX
    + """
setp.ne.u32 %p2, %r52, 0;
@%p2 bra END;
setp.eq.u32 %p1, %r50, LEADER;
@%p1 bra LOOP;
red.release.gpu.global.add.u32 [%flag], 1;
bra END;
LOOP:
ld.acquire.gpu.global.u32 %r5, [%flag];
setp.lt.u32 %p3, %r5, 7;
@%p3 bra LOOP;
st.global.u32 [%out], %r5;
END:
"""
)


def meeting(leader: int, resident: int | None) -> Result:
    text = kernel(MEETING.replace("LEADER", str(leader)), ["out", "flag"])
    buffers = {"out": (64, np.uint32), "flag": np.zeros(1, np.uint32)}
    return run(text, buffers, grid=8, block=32, adversary=Adversary(resident=resident))


def test_a_spin_on_ctas_without_room() -> None:
    assert meeting(0, None).rules == []
    assert meeting(0, 2).rules == []
    result = meeting(0, 1)
    assert result.rules == ["not-co-resident"]
    (finding,) = result.outcome.findings
    assert "byte 0 of 'flag' (it holds 0x0)" in finding.message
    assert "CTAs 1 to 7" in finding.message
    assert meeting(7, 1)["out"][0] == 7


def test_the_cause_of_a_deadlock_is_told_from_those_who_wait_behind_it() -> None:
    body = """
    mov.u32 %r52, %tid.x;
    setp.ge.u32 %p1, %r52, 32;
    @%p1 bra MEET;
    LOOP:
    ld.volatile.global.u32 %r5, [%flag];
    setp.eq.u32 %p3, %r5, 0;
    @%p3 bra LOOP;
    MEET:
    bar.sync 0;
    """
    result = run(kernel(body, ["flag"]), {"flag": np.zeros(1, np.uint32)}, block=128)
    assert result.rules == ["deadlock"]
    (finding,) = result.outcome.findings
    assert "polls byte 0 of 'flag'" in finding.message
    assert "96 threads wait behind them" in finding.message
    assert "barrier 0 has 96 of 128 threads" in finding.message


def test_an_ordinary_load_that_polls_is_recognised() -> None:
    body = """
    LOOP:
    ld.global.u32 %r5, [%flag];
    setp.eq.u32 %p3, %r5, 0;
    @%p3 bra LOOP;
    """
    result = run(kernel(body, ["flag"]), {"flag": np.zeros(1, np.uint32)}, max_lane_instructions=10**6)
    assert result.rules == ["deadlock"]


# -- overlapping launches ----------------------------------------------------------------------------

CHAIN = (
    HEADER
    + """
.visible .entry producer(.param .u64 x, .param .u64 y) {
.reg .b32 %r<9>; .reg .b64 %d<9>;
ld.param.u64 %d1, [y]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
TRIGGER_EARLY
add.u32 %r2, %r1, 5;
st.global.u32 [%d3], %r2;
TRIGGER_LATE
ret;
}
.visible .entry consumer(.param .u64 x, .param .u64 y) {
.reg .b32 %r<9>; .reg .b64 %d<9>;
ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
ld.param.u64 %d4, [y]; add.s64 %d5, %d4, %d2;
griddepcontrol.launch_dependents;
WAIT
ld.global.u32 %r2, [%d3];
st.global.u32 [%d5], %r2;
ret;
}
.visible .entry idle(.param .u64 x, .param .u64 y) { WAIT_IDLE ret; }
"""
)


def chain(
    kernels: list[str], early: bool, waits: bool = True, idle_waits: bool = True, fence: str = ""
) -> tuple[Any, Outcome]:
    trigger = "griddepcontrol.launch_dependents;"
    text = CHAIN.replace("TRIGGER_EARLY", trigger if early else "")
    text = text.replace("TRIGGER_LATE", "" if early else fence + trigger)
    text = text.replace("WAIT_IDLE", "griddepcontrol.wait;" if idle_waits else "")
    text = text.replace("WAIT", "griddepcontrol.wait;" if waits else "")
    memory = Memory(1 << 24)
    memory.allocate("x", 128, initialized=True)[:] = 0
    memory.allocate("y", 128)
    memory.allocate("z", 128)
    address = {"producer": ("x", "y"), "consumer": ("y", "z"), "idle": ("x", "x")}
    launches = [
        KernelLaunch(k, (1, 1, 1), (32, 1, 1), struct.pack("<QQ", *map(memory.address, address[k])), pdl=True)
        for k in kernels
    ]
    options = SimulationOptions(adversary=Adversary(overlap=True))
    outcome = simulate_module(parse(text), launches, memory, options)
    return memory.view("z").view(np.uint32), outcome


def test_a_dependent_that_waits_sees_its_predecessor() -> None:
    for early in (True, False):
        z, outcome = chain(["producer", "consumer"], early)
        assert outcome.findings == ()
        assert (z == np.arange(32) + 5).all()


def test_a_dependent_that_does_not_wait_runs_ahead() -> None:
    _, outcome = chain(["producer", "consumer"], early=True, waits=False)
    assert [f.rule for f in outcome.findings] == ["pdl-early-trigger", "uninitialized-read"]
    # The trigger stands after the store, but publishes nothing without a fence in its thread.
    _, outcome = chain(["producer", "consumer"], early=False, waits=False)
    assert [(f.rule, f.kernel) for f in outcome.findings] == [("pdl-early-trigger", "producer")]
    for fence in ("fence.acq_rel.gpu;", "bar.sync 0; fence.acq_rel.cta;", "fence.acq_rel.gpu; bar.sync 0;"):
        # Any thread's trigger may be the first, and its fence covers what it is ordered after.
        _, outcome = chain(["producer", "consumer"], early=False, waits=False, fence=fence)
        assert [(f.rule, f.kernel) for f in outcome.findings] == [("pdl-early-trigger", "producer")], fence
    _, outcome = chain(
        ["producer", "consumer"], early=False, waits=False, fence="bar.sync 0; fence.acq_rel.gpu;"
    )
    assert outcome.findings == ()


def test_a_grid_without_a_wait_may_complete_before_its_predecessor() -> None:
    kernels = ["producer", "idle", "consumer"]
    assert chain(kernels, early=True)[1].findings == ()
    _, outcome = chain(kernels, early=True, idle_waits=False)
    assert [(f.rule, f.kernel) for f in outcome.findings] == [
        ("pdl-chain-not-transitive", "idle"),
        ("uninitialized-read", "consumer"),
    ]


def test_the_grid_before_the_first_launch_completes_when_all_wait_for_it() -> None:
    memory = Memory(1 << 24)
    memory.allocate("y", 128)
    memory.allocate("z", 128)

    def arrive() -> None:
        memory.view("y")[:] = 1
        memory.mark_written("y")

    parameters = struct.pack("<QQ", memory.address("y"), memory.address("z"))
    launch = KernelLaunch("consumer", (1, 1, 1), (32, 1, 1), parameters, pdl=True)
    options = SimulationOptions(adversary=Adversary(overlap=True))
    for wait, rules in (("griddepcontrol.wait;", []), ("", ["uninitialized-read"])):
        memory.poison("y", 0xFF)
        module = parse(CHAIN.replace("WAIT_IDLE", "").replace("WAIT", wait).replace("TRIGGER_EARLY", "")
                       .replace("TRIGGER_LATE", ""))  # fmt: skip
        outcome = simulate_module(module, [launch], memory, options, arrive)
        assert [f.rule for f in outcome.findings] == rules


# Lane 0 of CTA 0 stores a vector; CTA 1 polls for it and hands on what it then finds.
FRAGMENT = """
mov.u32 %r50, %ctaid.x;
setp.ne.u32 %p1, %r50, 0;
mov.u32 %r1, 7;
@%p1 bra POLL;
st.relaxed.gpu.global.v4.u32 [%mail], {%r1, %r1, %r1, %r1};
bra END;
POLL:
ld.relaxed.gpu.global.v4.u32 {%r2, %r3, %r4, %r5}, [%mail];
setp.eq.u32 %p2, WORD, 0;
@%p2 bra POLL;
add.u32 %r6, %r2, %r3;
add.u32 %r7, %r4, %r5;
add.u32 %r6, %r6, %r7;
st.volatile.global.v2.u32 [%out], {%r6, %r6};
END:
"""


@pytest.mark.parametrize("torn", list(Torn))
def test_words_of_a_vector_arrive_one_after_the_other(torn: Torn) -> None:
    def total(word: str) -> int:
        text = kernel(FRAGMENT.replace("WORD", word), ["mail", "out"])
        buffers = {"mail": np.zeros(4, np.uint32), "out": (2, np.uint32)}
        result = run(text, buffers, grid=2, block=1, adversary=Adversary(torn=torn))
        assert result["out"][0] == result["out"][1]
        return int(result["out"][0])

    late, early = ("%r5", "%r2") if torn is Torn.FIRST else ("%r2", "%r5")
    assert total(late) == 28
    assert total(early) == 7


@pytest.mark.parametrize("adversary", [Adversary(pick=Pick.HIGHEST), Adversary(starved=Starved(Unit.CTA, 3))])
def test_a_schedule_does_not_depend_on_the_number_of_processes(adversary: Adversary) -> None:
    body = INDEX + "st.global.u32 [%d0+3200], %r0;\n"  # the last CTAs write past the end
    text = kernel(body, ["out"])
    results = [
        run(
            text,
            {"out": (1024, np.uint32)},
            grid=8,
            block=64,
            adversary=adversary,
            seed=5,
            processes=processes,
            parallel_work=0,
            chunk_lanes=128,
        ).outcome
        for processes in (1, 2, 1, 2)
    ]
    assert [f.rule for f in results[0].findings] == ["out-of-bounds"]
    assert all(r.findings == results[0].findings for r in results[1:])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("left", [1, 31, 33, 50, 64])
def test_lanes_that_have_exited_are_not_missed_at_a_barrier(left: int, seed: int) -> None:
    body = f"""
setp.ge.u32 %p1, %r52, {left};
@%p1 ret;
mov.u32 %r1, s;
shl.b32 %r2, %r52, 2;
add.u32 %r3, %r1, %r2;
st.shared.u32 [%r3], %r52;
bar.sync 0;
ld.shared.u32 %r4, [s];
st.global.u32 [%d0], %r4;
"""
    text = kernel(INDEX + body, ["out"], ".shared .align 4 .b8 s[256];")
    assert run(text, OUT, block=64, seed=seed).rules == []
