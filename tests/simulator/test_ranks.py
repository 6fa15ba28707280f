"""Several ranks: all-reduce through Lamport mailboxes, schedules, deadlocks, what a faulty protocol does."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.simulator.kernels import kernel
from tests.simulator.legal import complaint
from tests.simulator.rank_kernels import SLOT, Reduction, all_reduce, all_reduce_text, expected
from workbench.errors import WorkbenchError
from workbench.isa.ptx import parse
from workbench.simulator import Domain, KernelLaunch, RankLaunch, Schedule, SimulationOptions, simulate_ranks


def rows_of(ranks: int, calls: int = 1, seed: int = 0) -> np.ndarray:
    """Numbers that bf16 can hold; element 0 is zero, element 1 tells the summation orders apart."""
    rows = np.random.default_rng(seed).integers(-64, 64, (calls, ranks, 512)).astype(np.float32)
    rows[:, :, 0] = 0
    rows[:, :, 1] = 0
    rows[:, : min(4, ranks), 1] = [256, 1, 2**-16, 2**-16][:ranks]
    return rows


def reduced(reduction: Reduction, module, rows: np.ndarray, schedule="interleaved", seed=0, late=False):
    for c in range(len(rows)):
        for r in range(rows.shape[1]):
            reduction.fill(r, c, rows[c, r])
    return simulate_ranks(
        reduction.domain,
        reduction.launches(module),
        SimulationOptions(seed=seed),
        schedule=schedule,
        late_stores=late,
    )


@pytest.mark.parametrize("publish", ["multimem", "peers"])
@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_all_reduce_gives_every_rank_the_sum_in_its_order(ranks, schedule, publish):
    rows = rows_of(ranks, 4)
    reduction = Reduction(ranks, 4, publish=publish)
    outcome = reduced(reduction, all_reduce(ranks, publish=publish), rows, schedule, seed=ranks)
    assert outcome.completed
    assert outcome.findings == ()
    for c in range(4):
        for r in range(ranks):
            np.testing.assert_array_equal(reduction.output(r, c), expected(rows[c]))
    assert len(outcome.counters) == 4 * ranks


def test_grouped_and_sequential_sums_differ_where_they_must():
    rows = rows_of(8)
    results = {}
    for order in ("grouped", "sequential"):
        reduction = Reduction(8)
        assert reduced(reduction, all_reduce(8, order), rows).findings == ()
        np.testing.assert_array_equal(reduction.output(3), expected(rows[0], order))
        results[order] = reduction.output(3)[1]
    assert results["grouped"] != results["sequential"]


def test_a_rank_that_does_not_take_part_leaves_the_others_waiting():
    reduction = Reduction(4)
    launches = reduction.launches(all_reduce(4))
    launches[2] = []
    for r in range(4):
        reduction.fill(r, 0, np.ones(512, np.float32))
    outcome = simulate_ranks(reduction.domain, launches)
    assert not outcome.completed
    assert {f.rule for f in outcome.findings} == {"deadlock"}
    assert sorted({f.thread.split()[0] for f in outcome.findings}) == ["rank=0", "rank=1", "rank=3"]


def test_data_equal_to_the_empty_word_hangs_the_receivers():
    reduction = Reduction(2)
    for r in range(2):
        reduction.fill(r, 0, np.ones(512, np.float32))
    reduction.domain.view(1, "x0").view(np.uint32)[5] = 0x80000000
    outcome = simulate_ranks(reduction.domain, reduction.launches(all_reduce(2)))
    assert {f.rule for f in outcome.findings} == {"deadlock"}


def test_a_slot_that_is_not_emptied_gives_old_data_to_its_next_use():
    rows = rows_of(2, 3)
    wrong = Reduction(2, 3)
    outcome = reduced(wrong, all_reduce(2, rearm=False), rows, "skewed")
    assert outcome.completed
    assert any(not np.array_equal(wrong.output(r, 2), expected(rows[2])) for r in range(2))


def test_one_mailbox_parity_is_too_few_when_a_rank_runs_ahead():
    rows = rows_of(2, 4)
    bad = 0
    for seed in range(4):
        reduction = Reduction(2, 4, parities=1)
        outcome = reduced(reduction, all_reduce(2), rows, "skewed", seed)
        right = all(
            np.array_equal(reduction.output(r, c), expected(rows[c])) for r in range(2) for c in range(4)
        )
        bad += not (outcome.completed and right)
    assert bad > 0


@pytest.mark.parametrize("publish", ["multimem", "peers"])
def test_fragments_that_arrive_in_pieces_need_a_test_of_every_word(publish):
    rows = rows_of(4, 2)
    wrong = {1: 0, 4: 0}
    for words in wrong:
        for schedule in Schedule:
            for seed in range(3):
                reduction = Reduction(4, 2, publish=publish)
                outcome = reduced(
                    reduction, all_reduce(4, test_words=words, publish=publish), rows, schedule, seed, True
                )
                right = all(
                    np.array_equal(reduction.output(r, c), expected(rows[c]))
                    for r in range(4)
                    for c in range(2)
                )
                wrong[words] += not (right and outcome.completed and not outcome.findings)
    assert wrong[4] == 0
    assert wrong[1] > 0


def test_findings_name_the_rank_and_its_buffer():
    module = parse(kernel("st.global.u32 [%x+64], 1;", ["x"]))
    domain = Domain(3)
    launches = []
    for r in range(3):
        domain.allocate(r, "x", 128 if r != 1 else 64)
        raw = struct.pack("<Q", domain.address(r, "x"))
        launches.append([RankLaunch(module, KernelLaunch("k", (1, 1, 1), (1, 1, 1), raw))])
    outcome = simulate_ranks(domain, launches)
    assert [(f.rule, f.buffer, f.thread) for f in outcome.findings] == [
        ("out-of-bounds", "x@1", "rank=1 cta=(0,0,0) thread=(0,0,0)")
    ]


def test_peer_pointers_are_plain_addresses_and_module_variables_are_a_ranks_own():
    body = """
mov.u64 %d1, counter;
atom.global.add.u32 %r1, [%d1], 5;
ld.global.u32 %r2, [%d1];
st.global.u32 [%peer], %r2;
"""
    module = parse(kernel(body, ["peer"], module=".global .u32 counter = 7;\n"))
    domain = Domain(2)
    for r in range(2):
        domain.allocate(r, "x", 4)
    launches = [
        [
            RankLaunch(
                module,
                KernelLaunch("k", (1, 1, 1), (1, 1, 1), struct.pack("<Q", domain.address(1 - r, "x"))),
            )
        ]
        * (r + 1)
        for r in range(2)
    ]
    assert simulate_ranks(domain, launches).findings == ()
    assert domain.view(1, "x").view(np.uint32)[0] == 12
    assert domain.view(0, "x").view(np.uint32)[0] == 17


def test_a_flag_counted_by_all_ranks_in_one_memory():
    """A barrier of all ranks: each adds to a counter of rank 0 and polls it; nobody passes early."""
    body = """
atom.add.release.sys.global.u32 %r1, [%flag], 1;
POLL:
ld.acquire.sys.global.u32 %r2, [%flag];
setp.lt.u32 %p1, %r2, 5;
@%p1 bra POLL;
st.global.u32 [%out], %r2;
"""
    module = parse(kernel(body, ["flag", "out"]))
    for schedule in Schedule:
        domain = Domain(5)
        domain.allocate(0, "flag", 4, initialized=True)
        launches = []
        for r in range(5):
            domain.allocate(r, "out", 4)
            raw = struct.pack("<2Q", domain.address(0, "flag"), domain.address(r, "out"))
            launches.append([RankLaunch(module, KernelLaunch("k", (1, 1, 1), (1, 1, 1), raw))])
        outcome = simulate_ranks(domain, launches, SimulationOptions(seed=1), schedule=schedule)
        assert outcome.completed
        assert outcome.findings == ()
        assert [int(domain.view(r, "out").view(np.uint32)[0]) for r in range(5)] == [5] * 5


def test_a_rank_that_computes_for_long_is_no_deadlock():
    slow = """
setp.ne.u32 %p3, %rank, 0;
@%p3 bra POLL;
mov.u32 %r1, 0;
LOOP:
add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 3000;
@%p1 bra LOOP;
st.relaxed.sys.global.u32 [%flag], %r1;
POLL:
ld.relaxed.sys.global.u32 %r2, [%flag];
setp.eq.u32 %p2, %r2, 0;
@%p2 bra POLL;
"""
    module = parse(kernel(slow, ["flag", "rank:u32"]))
    domain = Domain(2)
    domain.allocate(0, "flag", 4, initialized=True)
    launches = [
        [
            RankLaunch(
                module,
                KernelLaunch("k", (1, 1, 1), (32, 1, 1), struct.pack("<QI", domain.address(0, "flag"), r)),
            )
        ]
        for r in range(2)
    ]
    for schedule in Schedule:
        domain.view(0, "flag")[:] = 0
        outcome = simulate_ranks(domain, launches, schedule=schedule)
        assert (outcome.completed, outcome.findings) == (True, ())


@pytest.mark.parametrize("ranks", [0, 1, 17])
def test_domains_have_2_to_16_ranks(ranks):
    with pytest.raises(WorkbenchError, match="2 to 16"):
        Domain(ranks)


def test_bad_ranks_names_and_lists_are_refused():
    domain = Domain(2)
    with pytest.raises(WorkbenchError, match="0 to 1"):
        domain.allocate(2, "x", 4)
    with pytest.raises(WorkbenchError, match="symmetric"):
        domain.multicast("box")
    with pytest.raises(WorkbenchError, match="2 ranks"):
        simulate_ranks(domain, [[]])
    assert SLOT % 16 == 0


@pytest.mark.parametrize("publish", ["multimem", "peers"])
@pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
def test_the_kernels_are_legal(publish, arch):
    assert "error" not in complaint(all_reduce_text(8, publish=publish), arch)
