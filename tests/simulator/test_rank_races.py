"""Happens-before between ranks: what a flag in a peer's memory orders, and what it does not."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.simulator.kernels import kernel
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator import (
    Domain,
    KernelLaunch,
    Outcome,
    RankLaunch,
    Schedule,
    SimulationOptions,
    simulate_ranks,
)

SENDER = """
mov.u32 %r52, %tid.x;
mul.wide.u32 %d2, %r52, 4;
add.s64 %d3, %data, %d2;
add.u32 %r1, %r52, 7;
st.global.u32 [%d3], %r1;
BARRIER
setp.ne.u32 %p1, %r52, 0;
@%p1 bra END;
RAISE
END:
"""
RECEIVER = """
mov.u32 %r52, %tid.x;
setp.ne.u32 %p1, %r52, 0;
@%p1 bra MEET;
POLL:
LOOK
setp.ne.u32 %p2, %r2, 1;
@%p2 bra POLL;
AFTER
MEET:
BEHIND
mul.wide.u32 %d2, %r52, 4;
add.s64 %d3, %data, %d2;
ld.global.u32 %r1, [%d3];
add.s64 %d3, %out, %d2;
st.global.u32 [%d3], %r1;
"""
RIGHT = {
    "BARRIER": "bar.sync 0;",
    "RAISE": "st.release.sys.global.u32 [%flag], 1;",
    "LOOK": "ld.acquire.sys.global.u32 %r2, [%flag];",
    "AFTER": "",
    "BEHIND": "bar.sync 0;",
}


def handed_over(seed: int = 0, schedule: Schedule = Schedule.INTERLEAVED, **changes: str) -> Outcome:
    """Rank 0 stores 64 words to rank 1's memory and raises a flag there; rank 1 polls it and reads."""
    parts = RIGHT | changes
    modules: list[Module] = []
    for text in (SENDER, RECEIVER):
        for name, what in parts.items():
            text = text.replace(name, what)
        modules.append(parse(kernel(text, ["data", "flag", "out"])))
    domain = Domain(2)
    domain.allocate(1, "data", 256)
    domain.allocate(1, "flag", 4, initialized=True)[:] = 0
    domain.allocate(1, "out", 256)
    raw = struct.pack("<3Q", *(domain.address(1, name) for name in ("data", "flag", "out")))
    launches = [[RankLaunch(m, KernelLaunch("k", (1, 1, 1), (64, 1, 1), raw))] for m in modules]
    options = SimulationOptions(seed=seed, max_lane_instructions=1 << 22)
    outcome = simulate_ranks(domain, launches, options, schedule=schedule)
    if not outcome.findings:
        assert (domain.view(1, "out").view(np.uint32) == np.arange(64) + 7).all()
    return outcome


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"RAISE": "fence.acq_rel.sys; st.relaxed.sys.global.u32 [%flag], 1;"},
        {"RAISE": "membar.sys; st.volatile.global.u32 [%flag], 1;"},
        {"RAISE": "red.release.sys.global.add.u32 [%flag], 1;"},
        {"LOOK": "ld.relaxed.sys.global.u32 %r2, [%flag];", "AFTER": "fence.acq_rel.sys;"},
        {"LOOK": "ld.volatile.global.u32 %r2, [%flag];", "AFTER": "membar.sys;"},
        {"LOOK": "atom.acquire.sys.global.cas.b32 %r2, [%flag], 1, 1;"},
    ],
)
@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_flag_of_sys_scope_orders_ranks(changes: dict[str, str], schedule: Schedule) -> None:
    for seed in (0, 1, 2):
        assert handed_over(seed, schedule, **changes).findings == ()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("scope-too-narrow", {"RAISE": "st.release.gpu.global.u32 [%flag], 1;"}),
        ("scope-too-narrow", {"LOOK": "ld.acquire.gpu.global.u32 %r2, [%flag];"}),
        ("scope-too-narrow", {"RAISE": "fence.acq_rel.gpu; st.relaxed.sys.global.u32 [%flag], 1;"}),
        ("scope-too-narrow", {"LOOK": "ld.relaxed.sys.global.u32 %r2, [%flag];",
                              "AFTER": "fence.acq_rel.gpu;"}),
        ("flag-without-release", {"RAISE": "st.relaxed.sys.global.u32 [%flag], 1;"}),
        ("flag-without-release", {"BARRIER": ""}),
        ("flag-without-acquire", {"LOOK": "ld.relaxed.sys.global.u32 %r2, [%flag];"}),
        ("race", {"BEHIND": ""}),
    ],
)  # fmt: skip
def test_what_does_not_order_ranks_is_found(rule: str, changes: dict[str, str]) -> None:
    for schedule in Schedule:
        outcome = handed_over(schedule=schedule, **changes)
        assert rule in {f.rule for f in outcome.findings}, (schedule, outcome.findings)
        about = next(f for f in outcome.findings if f.rule == rule)
        assert about.thread is not None and about.thread.startswith("rank=")


def test_a_race_names_the_other_rank_and_asks_for_sys_scope() -> None:
    found = [f for f in handed_over(BEHIND="").findings if f.rule == "race"]
    assert len(found) == 1
    assert "'data@1'" in found[0].message and "of CTA 0 of rank 0" in found[0].message
    assert "between the two ranks" in found[0].message and ".sys scope" in found[0].fix


EXCHANGE = """
mov.u32 %r52, %tid.x;
mul.wide.u32 %d2, %r52, 4;
add.s64 %d3, %theirs, %d2;
add.u32 %r1, %r52, %step;
st.global.u32 [%d3], %r1;
bar.sync 0;
setp.ne.u32 %p1, %r52, 0;
@%p1 bra MEET;
red.release.sys.global.add.u32 [%raised], 1;
POLL:
ld.acquire.sys.global.u32 %r2, [%watched];
setp.lt.u32 %p2, %r2, %step;
@%p2 bra POLL;
MEET:
bar.sync 0;
add.s64 %d3, %mine, %d2;
ld.global.u32 %r1, [%d3];
add.s64 %d3, %out, %d2;
st.global.u32 [%d3], %r1;
"""


@pytest.mark.parametrize(("slots", "rules"), [(2, set()), (1, {"race"})])
def test_a_second_launch_must_not_overwrite_what_a_peer_may_still_read(slots: int, rules: set[str]) -> None:
    """Launches of one rank follow each other; a peer that is slower still reads the slot of the last call."""
    module = parse(kernel(EXCHANGE, ["theirs", "mine", "raised", "watched", "out", "step:u32"]))
    found: set[str] = set()
    for schedule in Schedule:
        for seed in range(3):
            domain = Domain(2)
            for r in range(2):
                domain.allocate(r, "box", 128 * slots)
                domain.allocate(r, "flag", 4, initialized=True)[:] = 0
                domain.allocate(r, "out", 128)
            launches = []
            for r in range(2):
                calls = []
                for step in range(1, 4):
                    at = 128 * (step % slots)
                    raw = struct.pack(
                        "<5QI", domain.address(1 - r, "box") + at, domain.address(r, "box") + at,
                        domain.address(1 - r, "flag"), domain.address(r, "flag"),
                        domain.address(r, "out"), step,
                    )  # fmt: skip
                    calls.append(RankLaunch(module, KernelLaunch("k", (1, 1, 1), (32, 1, 1), raw)))
                launches.append(calls)
            options = SimulationOptions(seed=seed)
            found |= {f.rule for f in simulate_ranks(domain, launches, options, schedule=schedule).findings}
    assert found == rules
