"""mbarriers: phases, counts, tokens, parity, and what goes wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simulator.kernels import Result, kernel, run
from tests.simulator.legal import complaint

VARIABLES = ".shared .align 8 .b64 bar[8];\n.shared .align 16 .b8 s[4096];"


def go(body: str, buffers: dict[str, Any], block: int = 64, **more: Any) -> Result:
    text = kernel(body, list(buffers), variables=VARIABLES)
    assert complaint(text) == ""
    return run(text, buffers, block=block, **more)


def clean(result: Result) -> Result:
    assert result.rules == [], result.outcome.findings
    assert result.outcome.completed
    return result


def start(count: int, more: str = "") -> str:
    """Thread index in %r1, its slot of `out` in %d0, address of the barriers in %r2; thread 0 sets up."""
    return f"""
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, bar;
    mov.u32 %r4, s;
    shl.b32 %r3, %r1, 2;
    mul.wide.u32 %d1, %r1, 4;
    add.s64 %d0, %out, %d1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], {count};
    {more}
    READY:
    bar.sync 0;
    """


def wait(label: str, parity: str, at: str = "[%r2]") -> str:
    return f"""
    {label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, {at}, {parity};
    @!%p2 bra {label};
    """


SWAP = """
    add.u32 %r5, %r4, %r3;
    st.shared.u32 [%r5], %r1;
    ARRIVE
    xor.b32 %r6, %r3, 252;
    add.u32 %r6, %r6, %r4;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%d0], %r7;
"""


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_all_threads_meet_at_a_phase(seed: int) -> None:
    body = start(64) + SWAP.replace("ARRIVE", "mbarrier.arrive.shared::cta.b64 %d2, [%r2];" + wait("W", "0"))
    result = clean(go(body, {"out": (64, np.uint32)}, seed=seed))
    np.testing.assert_array_equal(result["out"], 63 - np.arange(64))


@pytest.mark.parametrize(
    "poll",
    [
        "mbarrier.test_wait.shared::cta.b64 %p2, [%r2], %d2;",
        "mbarrier.try_wait.shared::cta.b64 %p2, [%r2], %d2;",
        "mbarrier.try_wait.acquire.cta.shared::cta.b64 %p2, [%r2], %d2, 1000;",
        "mbarrier.test_wait.parity.b64 %p2, [%d3], 0;",
    ],
)
def test_waits_by_token_and_through_generic_addresses(poll: str) -> None:
    arrive = f"""
    mov.u64 %d4, bar;
    cvta.shared.u64 %d3, %d4;
    mbarrier.arrive.release.cta.shared::cta.b64 %d2, [%r2], 1;
    W: {poll}
    @!%p2 bra W;
    """
    result = clean(go(start(64) + SWAP.replace("ARRIVE", arrive), {"out": (64, np.uint32)}))
    np.testing.assert_array_equal(result["out"], 63 - np.arange(64))


PIPELINE = """
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
    setp.ge.u32 %p3, %r1, 32;
    @%p3 bra CONSUMER;
    PRODUCE:
    and.b32 %r12, %r10, 1;
    shr.u32 %r13, %r10, 1;
    and.b32 %r13, %r13, 1;
    xor.b32 %r14, %r13, 1;
    mad.lo.u32 %r15, %r12, 8, %r2;
    """ + wait("EMPTY", "%r14", "[%r15+16]") + """
    mad.lo.u32 %r16, %r12, 128, %r3;
    add.u32 %r16, %r16, %r4;
    mad.lo.u32 %r17, %r10, 100, %r1;
    st.shared.u32 [%r16], %r17;
    mbarrier.arrive.shared::cta.b64 %d2, [%r15];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p4, %r10, 7;
    @%p4 bra PRODUCE;
    bra DONE;
    CONSUMER:
    sub.u32 %r18, %r3, 128;
    CONSUME:
    and.b32 %r12, %r10, 1;
    shr.u32 %r13, %r10, 1;
    and.b32 %r13, %r13, 1;
    mad.lo.u32 %r15, %r12, 8, %r2;
    """ + wait("FULL", "%r13", "[%r15]") + """
    mad.lo.u32 %r16, %r12, 128, %r4;
    xor.b32 %r19, %r18, 124;
    add.u32 %r16, %r16, %r19;
    ld.shared.u32 %r17, [%r16];
    add.u32 %r11, %r11, %r17;
    mbarrier.arrive.shared::cta.b64 %d2, [%r15+16];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p4, %r10, 7;
    @%p4 bra CONSUME;
    DONE:
    st.global.u32 [%d0], %r11;
"""  # fmt: skip
STAGES = "".join(f"mbarrier.init.shared::cta.b64 [%r2+{8 * k}], 32;\n" for k in (1, 2, 3))


@pytest.mark.parametrize("seed", range(6))
def test_two_stage_pipeline_over_seven_rounds(seed: int) -> None:
    result = clean(go(start(32, STAGES) + PIPELINE, {"out": (64, np.uint32)}, seed=seed))
    n = 31 - np.arange(32)
    np.testing.assert_array_equal(result["out"][32:], n * 7 + 100 * 21)


def test_a_wrong_parity_is_a_deadlock_that_names_the_barrier() -> None:
    body = start(32, STAGES) + PIPELINE.replace("xor.b32 %r14, %r13, 1", "xor.b32 %r14, %r13, 0")
    result = go(body, {"out": (64, np.uint32)})
    assert result.rules == ["mbarrier-phase", "mbarrier-phase"]
    assert not result.outcome.completed
    texts = [f.message for f in result.outcome.findings]
    assert "phase 0 of the mbarrier at byte 16 of shared memory of CTA 0" in texts[0]
    assert "32 of 32 arrivals pending, tx-count 0" in texts[0]
    assert "phase 0 of the mbarrier at byte 0 of shared memory" in texts[1]


def test_expect_tx_that_never_comes_is_a_deadlock_with_the_counts() -> None:
    body = start(1) + """
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 96;
    @!%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 64;
    """ + wait("W", "0") + "st.global.u32 [%d0], %r1;"  # fmt: skip
    result = go(body, {"out": (64, np.uint32)})
    assert set(result.rules) == {"mbarrier-phase"}
    message = result.outcome.findings[0].message
    assert "phase 0: 0 of 1 arrivals pending, tx-count 32" in message


def test_bytes_may_arrive_before_they_are_expected() -> None:
    body = start(1) + """
    @!%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 64;
    @!%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 32;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d2, [%r2], 32;
    """ + wait("W", "0") + "st.global.u32 [%d0], %r1;"  # fmt: skip
    clean(go(body, {"out": (64, np.uint32)}))


def test_pending_count_and_drop() -> None:
    body = (
        start(3)
        + """
    @%p1 bra OUT;
    mbarrier.arrive.noComplete.shared::cta.b64 %d2, [%r2], 2;
    mbarrier.pending_count.b64 %r5, %d2;
    st.global.u32 [%out], %r5;
    mbarrier.arrive_drop.shared::cta.b64 %d2, [%r2];
    mbarrier.pending_count.b64 %r5, %d2;
    st.global.u32 [%out+4], %r5;
    mbarrier.test_wait.shared::cta.b64 %p3, [%r2], %d2;
    mbarrier.arrive.shared::cta.b64 %d3, [%r2];
    mbarrier.pending_count.b64 %r5, %d3;
    st.global.u32 [%out+8], %r5;
    mbarrier.test_wait.shared::cta.b64 %p4, [%r2], %d3;
    selp.u32 %r5, 1, 0, %p3;
    selp.u32 %r6, 2, 0, %p4;
    add.u32 %r5, %r5, %r6;
    st.global.u32 [%out+12], %r5;
    mbarrier.arrive.shared::cta.b64 %d4, [%r2];
    mbarrier.test_wait.shared::cta.b64 %p4, [%r2], %d3;
    selp.u32 %r6, 1, 0, %p4;
    st.global.u32 [%out+16], %r6;
    mbarrier.inval.shared::cta.b64 [%r2];
    mbarrier.init.shared::cta.b64 [%r2], 1;
    OUT:
    """
    )
    result = clean(go(body, {"out": (5, np.uint32)}))
    assert result["out"].tolist() == [3, 1, 2, 1, 1]


def test_many_threads_complete_several_phases_that_nobody_waits_for() -> None:
    """They may not: some wait for a phase has to succeed before an arrival in the next."""
    body = (
        start(16)
        + """
    mbarrier.arrive.shared::cta.b64 %d2, [%r2];
    mbarrier.pending_count.b64 %r5, %d2;
    st.global.u32 [%d0], %r5;
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], 1;
    selp.u32 %r5, 1, 0, %p3;
    @!%p1 st.global.u32 [%out+256], %r5;
    """
    )
    result = go(body, {"out": (65, np.uint32)})
    assert result.rules == ["mbarrier-phase"]
    assert "no wait saw" in result.outcome.findings[0].message
    np.testing.assert_array_equal(result["out"][:64], 16 - np.arange(64) % 16)
    assert result["out"][64] == 1


FAULTS = {
    "again": ("@!%p1 mbarrier.init.shared::cta.b64 [%r2], 1;", "again without mbarrier.inval"),
    "use before init": ("@!%p1 mbarrier.arrive.shared::cta.b64 %d2, [%r2+8];", "not initialised"),
    "use after inval": (
        "@!%p1 mbarrier.inval.shared::cta.b64 [%r2];\n@!%p1 mbarrier.arrive.shared::cta.b64 %d2, [%r2];",
        "not initialised",
    ),
    "too many": (
        "@!%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 16;\n"
        "@!%p1 mbarrier.arrive.shared::cta.b64 %d2, [%r2], 1;\n"
        "@!%p1 mbarrier.arrive.shared::cta.b64 %d2, [%r2], 1;",
        "an arrival too many",
    ),
    "noComplete": ("@!%p1 mbarrier.arrive.noComplete.shared::cta.b64 %d2, [%r2], 1;", "completes the phase"),
    "count": ("and.b32 %r9, %r1, 0;\n@!%p1 mbarrier.init.shared::cta.b64 [%r2+8], %r9;", "count is 1 to"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_use(fault: str) -> None:
    body, text = FAULTS[fault]
    result = go(start(1) + body, {"out": (1, np.uint32)})
    assert result.rules == ["mbarrier-phase"]
    assert text in result.outcome.findings[0].message


def test_a_stale_token() -> None:
    body = (
        start(1)
        + """
    @%p1 bra OUT;
    mbarrier.arrive.shared::cta.b64 %d2, [%r2];
    mbarrier.arrive.shared::cta.b64 %d3, [%r2];
    mbarrier.test_wait.shared::cta.b64 %p3, [%r2], %d2;
    OUT:
    """
    )
    result = go(body, {"out": (1, np.uint32)})
    assert any("token of a phase" in f.message for f in result.outcome.findings)


@pytest.mark.parametrize(("count", "rules"), [(32, []), (31, ["mbarrier-phase"])])
def test_an_arrival_too_many_begins_the_next_phase(count: int, rules: list[str]) -> None:
    body = (
        start(count)
        + """
    setp.ge.u32 %p4, %r1, 32;
    @%p4 bra WAIT;
    mbarrier.arrive.shared::cta.b64 %d2, [%r2];
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0;
    @!%p3 bra WAIT;
    """
    )  # fmt: skip
    assert go(body, {"out": (1, np.uint32)}).rules == rules


def test_misaligned_and_out_of_bounds() -> None:
    for at, rule in (("[%r2+4]", "misaligned"), ("[%r2+8192]", "out-of-bounds")):
        result = go(start(1) + f"@!%p1 mbarrier.arrive.shared::cta.b64 %d2, {at};", {"out": (1, np.uint32)})
        assert result.rules == [rule]


@pytest.mark.parametrize("noinc", [True, False])
def test_cp_async_arrives_at_an_mbarrier(noinc: bool) -> None:
    x = np.arange(64, dtype=np.uint32) * 3
    body = start(64 if noinc else 1) + f"""
    add.s64 %d5, %x, %d1;
    add.u32 %r5, %r4, %r3;
    cp.async.ca.shared.global [%r5], [%d5], 4;
    cp.async.mbarrier.arrive{'.noinc' if noinc else ''}.shared::cta.b64 [%r2];
    {'' if noinc else 'bar.sync 0; @!%p1 mbarrier.arrive.shared::cta.b64 %d2, [%r2];'}
    WAIT
    xor.b32 %r6, %r3, 252;
    add.u32 %r6, %r6, %r4;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%d0], %r7;
    """  # fmt: skip
    buffers = {"out": (64, np.uint32), "x": x}
    result = clean(go(body.replace("WAIT", wait("W", "0")), buffers))
    np.testing.assert_array_equal(result["out"], x[::-1])
    assert go(body.replace("WAIT", ""), buffers).rules == ["cp-async-group"]


def test_many_ctas_run_as_several_chunks() -> None:
    body = start(64) + """
    mov.u32 %r20, %ctaid.x;
    add.u32 %r1, %r1, %r20;
    mad.lo.u32 %r21, %r20, 256, 0;
    cvt.u64.u32 %d9, %r21;
    add.s64 %d0, %d0, %d9;
    """.replace("mad.lo.u32 %r21, %r20, 256, 0;", "shl.b32 %r21, %r20, 8;") + SWAP.replace(
        "ARRIVE", "mbarrier.arrive.shared::cta.b64 %d2, [%r2];" + wait("W", "0")
    )  # fmt: skip
    result = clean(go(body, {"out": (64 * 20, np.uint32)}, grid=20, chunk_lanes=256, processes=2))
    want = 63 - np.arange(64)[None, :] + np.arange(20)[:, None]
    np.testing.assert_array_equal(result["out"].reshape(20, 64), want)


def test_a_write_that_no_arrival_orders_is_a_race() -> None:
    """Warp 1 reads what warp 0 wrote after its arrival: lockstep keeps the numbers right."""
    body = start(64) + """
    add.u32 %r5, %r4, %r3;
    xor.b32 %r6, %r3, 128;
    add.u32 %r6, %r6, %r4;
    EARLY
    mbarrier.arrive.shared::cta.b64 %d2, [%r2];
    WAIT
    LATE
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%d0], %r7;
    """.replace("WAIT", wait("W", "0"))  # fmt: skip
    store = "st.shared.u32 [%r5], %r1;"
    out = {"out": (64, np.uint32)}
    clean(go(body.replace("EARLY", store).replace("LATE", ""), out))
    assert go(body.replace("EARLY", "").replace("LATE", store), out).rules == ["race"]


def test_register_counts_are_accepted() -> None:
    body = start(1) + """
    setmaxnreg.dec.sync.aligned.u32 40;
    setmaxnreg.inc.sync.aligned.u32 232;
    st.global.u32 [%d0], %r1;
    """  # fmt: skip
    clean(go(body, {"out": (64, np.uint32)}))
