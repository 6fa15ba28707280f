"""Divergence, loops, barriers, limits and errors."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tests.simulator.kernels import INDEX, kernel, lanes, run
from workbench.errors import WorkbenchError
from workbench.simulator import UnsupportedInstruction


def clean(result):
    assert result.rules == [], result.outcome.findings
    assert result.outcome.completed
    return result


def test_if_else_writes_each_side():
    body = """
    and.b32 %r2, %r0, 1;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra EVEN;
    mad.lo.u32 %r1, %r0, 3, 1;
    bra.uni DONE;
    EVEN:
    shr.u32 %r1, %r0, 1;
    DONE:
    add.u32 %r1, %r1, 7;
    """
    n = np.arange(200)
    result = clean(lanes(body, 200, 40))
    np.testing.assert_array_equal(result["out"], np.where(n % 2, n * 3 + 1, n // 2) + 7)
    assert (
        result.outcome.counters[0].divergent_branches == 10
    )  # 5 CTAs of 40 threads: a whole and a partial warp


def test_divergent_loop_collatz():
    body = """
    add.u32 %r2, %r0, 1;
    mov.u32 %r1, 0;
    LOOP:
    setp.eq.u32 %p1, %r2, 1;
    @%p1 bra DONE;
    and.b32 %r3, %r2, 1;
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra EVEN;
    mad.lo.u32 %r2, %r2, 3, 1;
    bra NEXT;
    EVEN:
    shr.u32 %r2, %r2, 1;
    NEXT:
    add.u32 %r1, %r1, 1;
    bra LOOP;
    DONE:
    """

    def steps(n):
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    result = clean(lanes(body, 320, 64))
    np.testing.assert_array_equal(result["out"], [steps(n + 1) for n in range(320)])


def test_nested_branches_reconverge():
    body = """
    mov.u32 %r1, 0;
    setp.lt.u32 %p1, %r0, 40;
    @!%p1 bra OUT;
    add.u32 %r1, %r1, 1;
    and.b32 %r2, %r0, 3;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra INNER;
    add.u32 %r1, %r1, 10;
    setp.lt.u32 %p3, %r0, 8;
    @%p3 add.u32 %r1, %r1, 100;
    INNER:
    add.u32 %r1, %r1, 1000;
    OUT:
    vote.sync.ballot.b32 %r3, 1, 0xffffffff;
    setp.ne.u32 %p4, %r3, 0xffffffff;
    @%p4 add.u32 %r1, %r1, 50000;
    """
    body = body.replace(
        "vote.sync.ballot.b32 %r3, 1,", "setp.eq.u32 %p5, %r0, %r0;\nvote.sync.ballot.b32 %r3, %p5,"
    )
    n = np.arange(64)
    want = np.where(n < 40, 1001 + np.where(n % 4 == 0, 10, 0) + np.where((n % 4 == 0) & (n < 8), 100, 0), 0)
    np.testing.assert_array_equal(clean(lanes(body, 64, 64))["out"], want)


def test_branch_that_depends_on_the_cta_only():
    body = """
    mov.u32 %r2, %ctaid.x;
    setp.gt.u32 %p1, %r2, 2;
    mov.u32 %r1, %r2;
    @%p1 bra HIGH;
    add.u32 %r1, %r0, 100;
    HIGH:
    add.u32 %r1, %r1, 1;
    """
    n = np.arange(32 * 6)
    want = np.where(n // 32 > 2, n // 32, n + 100) + 1
    np.testing.assert_array_equal(clean(lanes(body, 32 * 6))["out"], want)


def test_early_exit_of_some_lanes():
    body = """
    mov.u32 %r1, 5;
    st.global.u32 [%d0], %r1;
    setp.ge.u32 %p1, %r0, 10;
    @%p1 exit;
    mov.u32 %r1, 6;
    """
    np.testing.assert_array_equal(clean(lanes(body, 64))["out"], np.where(np.arange(64) < 10, 6, 5))


def test_barrier_orders_shared_memory_across_warps():
    body = """
    mov.u32 %r2, %tid.x;
    shl.b32 %r3, %r2, 2;
    mov.u32 %r4, s;
    add.u32 %r5, %r4, %r3;
    setp.lt.u32 %p1, %r2, 64;
    @%p1 bra SKIP;
    mul.lo.u32 %r6, %r0, 7;
    bra JOIN;
    SKIP:
    mul.lo.u32 %r6, %r0, 3;
    JOIN:
    st.shared.u32 [%r5], %r6;
    bar.sync 0;
    xor.b32 %r7, %r3, 508;
    add.u32 %r7, %r7, %r4;
    ld.shared.u32 %r1, [%r7];
    """
    result = clean(lanes(body, 512, 128, variables=".shared .align 4 .b8 s[512];"))
    n = np.arange(512)
    other = (n & ~127) + ((n & 127) ^ 127)
    np.testing.assert_array_equal(result["out"], np.where((other & 127) < 64, other * 3, other * 7))
    assert result.outcome.counters[0].barrier_waits == 16


def test_named_barriers_with_counts_and_arrive():
    # Warps 0 and 1 produce and arrive at barrier 1; warps 2 and 3 wait there for 128 threads.
    body = """
    mov.u32 %r2, %tid.x;
    shl.b32 %r3, %r2, 2;
    mov.u32 %r4, s;
    add.u32 %r5, %r4, %r3;
    setp.lt.u32 %p1, %r2, 64;
    @!%p1 bra CONSUME;
    add.u32 %r1, %r2, 1000;
    st.shared.u32 [%r5], %r1;
    bar.arrive 1, 128;
    bra OUT;
    CONSUME:
    bar.sync 1, 128;
    ld.shared.u32 %r1, [%r5+-256];
    OUT:
    """
    result = clean(lanes(body, 128, 128, variables=".shared .align 4 .b8 s[512];"))
    n = np.arange(128)
    np.testing.assert_array_equal(result["out"], 1000 + n % 64)


@pytest.mark.parametrize(("op", "want"), [("popc.u32", 43), ("and.pred", 0), ("or.pred", 1)])
def test_barrier_reduction(op, want):
    d = "%r1" if "popc" in op else "%p3"
    body = f"""
    mov.u32 %r2, %tid.x;
    rem.u32 %r3, %r2, 3;
    setp.eq.u32 %p1, %r3, 0;
    barrier.cta.red.{op} {d}, 0, %p1;
    """
    if "pred" in op:
        body += "selp.u32 %r1, 1, 0, %p3;"
    np.testing.assert_array_equal(clean(lanes(body, 128, 128))["out"], np.full(128, want))


def test_barrier_that_cannot_complete_is_a_deadlock():
    body = """
    mov.u32 %r1, 0;
    setp.lt.u32 %p1, %r0, 32;
    @%p1 bra OUT;
    bar.sync 1, 96;
    OUT:
    """
    result = lanes(body, 64, 64)
    assert result.rules == ["barrier-divergence"]
    assert not result.outcome.completed
    assert result.outcome.findings[0].ptx_line is not None
    assert "32 of 96" in result.outcome.findings[0].message


def test_warp_divided_at_a_barrier_is_found():
    body = """
    mov.u32 %r1, 0;
    and.b32 %r2, %r0, 1;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra A;
    bar.sync 0;
    bra OUT;
    A:
    add.u32 %r1, %r1, 1;
    bar.sync 0;
    OUT:
    """
    assert "barrier-divergence" in lanes(body, 64, 64).rules


def test_exited_threads_do_not_hold_up_a_barrier_without_count():
    body = """
    mov.u32 %r1, 9;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 exit;
    bar.sync 0;
    """
    result = lanes(body, 64, 64)
    assert result.rules == []
    np.testing.assert_array_equal(result["out"][:32], 9)


def test_endless_loop_hits_the_instruction_budget():
    result = lanes("mov.u32 %r1, 0;\nL: add.u32 %r1, %r1, 1;\nbra L;", 32, max_lane_instructions=100_000)
    assert result.rules == ["time-limit"]
    assert not result.outcome.completed


def test_endless_loop_hits_the_time_limit():
    result = lanes("mov.u32 %r1, 0;\nL: add.u32 %r1, %r1, 1;\nbra L;", 32, time_limit=0.2)
    assert result.rules == ["time-limit"]


FLAG = """
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r1, 0;
    setp.ne.u32 %p1, %r2, {producer};
    @%p1 bra WAIT;
    mov.u32 %r3, 41;
    st.global.u32 [%flag+4], %r3;
    {signal}
    bra OUT;
    WAIT:
    ld.acquire.gpu.global.u32 %r4, [%flag];
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra WAIT;
    ld.global.u32 %r1, [%flag+4];
    OUT:
"""


@pytest.mark.parametrize("producer", [0, 1, 5])
def test_spin_on_a_flag_of_another_cta(producer):
    signal = "mov.u32 %r5, 1;\nst.release.gpu.global.u32 [%flag], %r5;"
    body = FLAG.format(producer=producer, signal=signal)
    result = clean(lanes(body, 192, 32, inputs={"flag": np.zeros(2, np.uint32)}, chunk_lanes=32))
    np.testing.assert_array_equal(
        result["out"].reshape(6, 32)[:, 0], [0 if c == producer else 41 for c in range(6)]
    )


def test_spin_on_a_flag_that_no_one_sets_is_a_deadlock():
    body = FLAG.format(producer=0, signal="")
    result = lanes(body, 64, 32, inputs={"flag": np.zeros(2, np.uint32)}, chunk_lanes=32)
    assert "deadlock" in result.rules
    assert not result.outcome.completed


def test_spin_within_a_warp():
    # Lane 0 sets the flag that the other lanes of its warp poll.
    body = """
    mov.u32 %r1, 3;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 bra SET;
    WAIT:
    ld.volatile.global.u32 %r4, [%flag];
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra WAIT;
    bra OUT;
    SET:
    mov.u32 %r5, 1;
    st.volatile.global.u32 [%flag], %r5;
    OUT:
    bar.warp.sync 0xffffffff;
    """
    np.testing.assert_array_equal(clean(lanes(body, 32, inputs={"flag": np.zeros(1, np.uint32)}))["out"], 3)


def test_trap_is_a_finding():
    result = lanes("mov.u32 %r1, 0;\nsetp.eq.u32 %p1, %r0, 5;\n@%p1 trap;", 32)
    assert result.rules == ["trap"]
    assert result.outcome.findings[0].thread == "cta=(0,0,0) thread=(5,0,0)"
    assert not result.outcome.completed


@pytest.mark.parametrize(
    "text",
    ["frob.u32 %r1, %r0;", "add.u33 %r1, %r0, %r0;", "tcgen05.frob.sync.aligned;", "mov.u32 %r1, %pm0;",
     "ld.global.v3.u32 {%r1, %r2, %r3}, [%out];", "ld.global.fancy.u32 %r1, [%out];",
     "atom.global.frob.u32 %r1, [%out], 1;",
     "shfl.sync.round.b32 %r1, %r0, 0, 31, -1;"],
)  # fmt: skip
def test_unknown_instruction_is_named(text):
    with pytest.raises(UnsupportedInstruction) as error:
        lanes(text, 32)
    assert error.value.line > 10
    assert text.split()[0].rstrip(";") in str(error.value)


def test_multidimensional_grid_and_block():
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;
    mov.u32 %r7, %ntid.x; mov.u32 %r8, %ntid.y; mov.u32 %r9, %ntid.z;
    mov.u32 %r10, %nctaid.x; mov.u32 %r11, %nctaid.y;
    mad.lo.u32 %r12, %r3, %r8, %r2; mad.lo.u32 %r12, %r12, %r7, %r1;
    mad.lo.u32 %r13, %r6, %r11, %r5; mad.lo.u32 %r13, %r13, %r10, %r4;
    mul.lo.u32 %r14, %r7, %r8; mul.lo.u32 %r14, %r14, %r9;
    mad.lo.u32 %r15, %r13, %r14, %r12;
    mul.wide.u32 %d1, %r15, 4; add.s64 %d1, %d1, %out;
    mov.u32 %r16, %laneid; mov.u32 %r17, %warpid;
    shl.b32 %r17, %r17, 5; add.u32 %r17, %r17, %r16;
    st.global.u32 [%d1], %r17;
    """
    result = clean(
        run(kernel(body, ["out"]), {"out": (2 * 3 * 2 * 40, np.uint32)}, grid=(2, 3, 2), block=(5, 4, 2))
    )
    np.testing.assert_array_equal(result["out"], np.tile(np.arange(40), 12))


def test_processes_give_the_same_result_and_counters():
    body = """
    mov.u32 %r1, 0;
    and.b32 %r2, %r0, 15;
    L:
    mad.lo.u32 %r1, %r1, 5, %r0;
    sub.u32 %r2, %r2, 1;
    setp.ge.s32 %p1, %r2, 0;
    @%p1 bra L;
    setp.eq.u32 %p2, %r0, 4000;
    @%p2 ld.global.u32 %r3, [%out+1000000];
    """
    one, two = lanes(body, 8192, 128, processes=1), lanes(body, 8192, 128, processes=2)
    np.testing.assert_array_equal(one["out"], two["out"])
    assert one.outcome.counters == two.outcome.counters
    assert one.outcome.findings == two.outcome.findings
    assert one.rules == ["out-of-bounds"]


def test_kernels_with_global_atomics_stay_exact_with_processes():
    body = "mov.u32 %r2, 1;\natom.global.add.u32 %r1, [%n], %r2;"
    result = lanes(body, 8192, 128, processes=2, inputs={"n": np.zeros(1, np.uint32)})
    assert result["n"][0] == 8192
    np.testing.assert_array_equal(np.sort(result["out"]), np.arange(8192))


def test_counters_count_lanes_and_warps():
    result = clean(lanes("mov.u32 %r1, 7;", 96, 48))
    c = result.outcome.counters[0]
    assert (c.ctas, c.warps) == (2, 4)
    assert c.lane_instructions == 96 * 10
    assert c.warp_instructions["store_global"] == 4
    assert c.longest_warp == {k: v // 4 for k, v in c.warp_instructions.items()}
    assert c.global_store_bytes == 96 * 4


def test_printf():
    module = (
        ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
        ".global .align 1 .b8 text[12] = {105, 61, 37, 100, 32, 102, 61, 37, 103, 10, 0, 0};"
    )
    body = """
    mov.b64 %d1, depot;
    cvta.local.u64 %d2, %d1;
    st.local.u32 [%d1], %r0;
    mov.f64 %e, 0d3FF8000000000000;
    st.local.f64 [%d1+8], %e;
    mov.u64 %d3, text;
    cvta.global.u64 %d4, %d3;
    { .param .b64 p0; .param .b64 p1; .param .b32 r0;
    st.param.b64 [p0], %d4;
    st.param.b64 [p1], %d2;
    call.uni (r0), vprintf, (p0, p1);
    ld.param.b32 %r1, [r0];
    }
    """
    result = clean(
        lanes(body, 2, 2, module=module, variables=".local .align 8 .b8 depot[16];\n.reg .f64 %e;")
    )
    assert result.outcome.printed == ("i=0 f=1.5\n", "i=1 f=1.5\n")


def test_index_is_what_the_other_tests_assume():
    np.testing.assert_array_equal(clean(lanes("mov.u32 %r1, %r0;", 100, 50))["out"], np.arange(100))
    assert INDEX.count("%d0") == 1


def test_branch_table():
    body = """
    T: .branchtargets A, B, C;
    rem.u32 %r2, %r0, 3;
    brx.idx %r2, T;
    A: mov.u32 %r1, 10; bra OUT;
    B: mov.u32 %r1, 20; bra OUT;
    C: mov.u32 %r1, 30;
    OUT:
    """
    np.testing.assert_array_equal(
        clean(lanes(body, 64, 64))["out"], np.array([10, 20, 30])[np.arange(64) % 3]
    )


def test_registers_that_were_never_written_hold_poison():
    result = clean(lanes("setp.lt.u32 %p1, %r0, 5;\n@%p1 mov.u32 %r1, 1;", 32))
    np.testing.assert_array_equal(result["out"], [1] * 5 + [0x7FF7DEAD] * 27)
    assert np.isnan(np.array([0x7FF7DEAD], np.uint32).view(np.float32))


@pytest.mark.parametrize("load", ["ld.volatile.global.u32 %r3, [%x];", "atom.global.add.u32 %r3, [%x], 0;"])
def test_long_loop_over_strong_loads_is_no_deadlock(load):
    body = f"""
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
    L:
    {load}
    add.u32 %r1, %r1, %r3;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 300;
    @%p1 bra L;
    """
    result = clean(lanes(body, 64, inputs={"x": np.full(1, 2, np.uint32)}))
    np.testing.assert_array_equal(result["out"], 600)


def in_children(action):
    parent = os.getpid()

    def observer(*_):
        if os.getpid() != parent:
            action()

    return observer


def test_an_error_in_a_forked_process_reaches_the_caller():
    def fail():
        raise ValueError("from the child")

    with pytest.raises(ValueError, match="from the child"):
        lanes("mov.u32 %r1, 0;", 8192, 128, processes=2, observer=in_children(fail))


def test_a_forked_process_that_dies_is_an_error():
    with pytest.raises(WorkbenchError, match="ended early"):
        lanes("mov.u32 %r1, 0;", 8192, 128, processes=2, observer=in_children(lambda: os._exit(3)))


def test_an_error_here_ends_the_forked_processes(tmp_path):
    note = tmp_path / "child"

    def observer(*_):
        if os.getpid() != parent:
            note.write_text(str(os.getpid()))
            time.sleep(60)
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
        raise ValueError("from the parent")

    parent = os.getpid()
    with pytest.raises(ValueError, match="from the parent"):
        lanes("mov.u32 %r1, 0;", 8192, 128, processes=2, observer=observer)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_schedules_change_no_result(seed):
    signal = "mov.u32 %r5, 1;\nst.release.gpu.global.u32 [%flag], %r5;"
    body = FLAG.format(producer=5, signal=signal)
    inputs = {"flag": np.zeros(2, np.uint32)}
    result = clean(lanes(body, 192, 32, inputs=inputs, chunk_lanes=32, seed=seed))
    np.testing.assert_array_equal(result["out"].reshape(6, 32)[:, 0], [0 if c == 5 else 41 for c in range(6)])


def test_an_instruction_may_overwrite_its_own_predicate():
    body = """
    setp.lt.u32 %p1, %r0, 16;
    setp.lt.u32 %p2, %r0, 100;
    @%p1 setp.lt.u32 %p1|%p2, %r0, 8;
    selp.u32 %r1, 1, 0, %p1;
    selp.u32 %r2, 2, 0, %p2;
    add.u32 %r1, %r1, %r2;
    """
    n = np.arange(32)
    np.testing.assert_array_equal(clean(lanes(body, 32))["out"], np.where(n < 8, 1, 2))
