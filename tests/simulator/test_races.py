"""Races are found although lockstep gives the right numbers, and only real ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import kernel, lanes, run
from workbench.simulator.ordering import shadow

SHARED = ".shared .align 16 .b8 s[1024];"
OWN = "mov.u32 %r10, %tid.x;\nmov.u32 %r11, s;\nmad.lo.u32 %r12, %r10, 4, %r11;\nst.shared.u32 [%r12], %r0;\n"
ACROSS = "xor.b32 %r13, %r10, 64;\nmad.lo.u32 %r13, %r13, 4, %r11;\nld.shared.u32 %r1, [%r13];\n"
WITHIN = "xor.b32 %r13, %r10, 1;\nmad.lo.u32 %r13, %r13, 4, %r11;\nld.shared.u32 %r1, [%r13];\n"
BARRIER = "bar.sync 0;\n"


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        (OWN + BARRIER + ACROSS, []),
        (OWN + ACROSS, ["race"]),
        (OWN + WITHIN, ["race"]),
        (OWN + "bar.warp.sync 0xffffffff;\n" + WITHIN, []),
        (OWN + "bar.warp.sync 0xffffffff;\n" + ACROSS, ["race"]),
        (OWN + BARRIER + ACROSS + "st.shared.u32 [%r12], %r1;\n", ["race"]),
        (OWN + BARRIER + ACROSS + BARRIER + "st.shared.u32 [%r12], %r1;\n", []),
        (OWN + BARRIER + ACROSS + "st.shared.u32 [%r12+512], %r1;\n" + BARRIER, []),
        ("mov.u32 %r1, 7;\nmov.u32 %r11, s;\nst.shared.u32 [%r11], %r1;\n", []),
        ("mov.u32 %r1, 1;\nmov.u32 %r11, s;\nst.shared.u32 [%r11], 0;\n" + BARRIER
         + "red.shared.add.u32 [%r11], 1;\n" + BARRIER + "ld.shared.u32 %r1, [%r11];\n", []),
    ],
)  # fmt: skip
def test_shared_memory_races(body, rules):
    result = lanes(body, 512, 128, variables=SHARED)
    assert result.rules == rules, result.outcome.findings


def test_numbers_are_right_in_spite_of_the_race():
    result = lanes(OWN + ACROSS, 256, 128, variables=SHARED)
    np.testing.assert_array_equal(result["out"], np.arange(256) ^ 64)
    finding = result.outcome.findings[0]
    assert finding.rule == "race"
    assert "thread 64" in finding.message
    assert finding.thread == "cta=(0,0,0) thread=(0,0,0)"
    assert finding.count == 256


@pytest.mark.parametrize("removed", [None, *range(5)])
def test_each_barrier_of_a_tree_reduction_is_needed(removed):
    # 256 threads; the steps below a warp's width need no barrier.
    body = OWN
    steps = [128, 64, 32]
    for k, step in enumerate(steps):
        body += BARRIER if removed != k else ""
        body += f"""
        setp.lt.u32 %p1, %r10, {step};
        @!%p1 bra SKIP{k};
        ld.shared.u32 %r14, [%r12];
        ld.shared.u32 %r15, [%r12+{4 * step}];
        add.u32 %r14, %r14, %r15;
        st.shared.u32 [%r12], %r14;
        SKIP{k}:
        """
    body += BARRIER if removed != 3 else ""
    body += "ld.shared.u32 %r1, [%r11];\nld.shared.u32 %r2, [%r11+124];\nadd.u32 %r1, %r1, %r2;"
    result = lanes(body, 1024, 256, variables=SHARED)
    # Without the last barrier warps 1 to 7 read what warp 0 has just written.
    assert ("race" in result.rules) == (removed is not None and removed < 4)
    n = np.arange(1024).reshape(4, 8, 32).sum(axis=1)
    np.testing.assert_array_equal(result["out"].reshape(4, 256)[:, 0], n[:, 0] + n[:, 31])


def test_neighbouring_bytes_are_no_race():
    body = "mov.u32 %r10, %tid.x;\nmov.u32 %r11, s;\nadd.u32 %r12, %r11, %r10;\nst.shared.u8 [%r12], %r10;\n"
    body += "ld.shared.u8 %r1, [%r12];"
    assert lanes(body, 128, 128, variables=SHARED).rules == []


def test_copies_of_another_warp_need_a_barrier():
    body = """
    mov.u32 %r10, %tid.x; mov.u32 %r11, s;
    mad.lo.u32 %r12, %r10, 4, %r11;
    mad.wide.u32 %d1, %r0, 4, %x;
    cp.async.ca.shared.global [%r12], [%d1], 4;
    cp.async.wait_all;
    """
    x = np.arange(256, dtype=np.uint32)
    assert lanes(body + BARRIER + ACROSS, 256, 128, variables=SHARED, inputs={"x": x}).rules == []
    assert lanes(body + ACROSS, 256, 128, variables=SHARED, inputs={"x": x}).rules == ["cp-async-group"]


def test_named_barriers_between_roles():
    body = OWN + """
    setp.lt.u32 %p1, %r10, 64;
    @%p1 bra FIRST;
    bar.sync 1, 128;
    bra OUT;
    FIRST:
    bar.sync 1, 128;
    OUT:
    """ + ACROSS  # fmt: skip
    assert lanes(body, 128, 128, variables=SHARED).rules == []


def test_the_check_can_be_turned_off():
    assert lanes(OWN + ACROSS, 256, 128, variables=SHARED, check_races=False).rules == []


BULK_READS = """
mov.u32 %r50, %ctaid.x;
mov.u32 %r1, %tid.x;
mov.u32 %r2, bar;
mov.u32 %r4, s;
setp.ne.u32 %p1, %r1, 0;
setp.ne.u32 %p3, %r50, 0;
@%p3 bra OTHER;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
mov.u32 %r10, 0;
mov.u64 %d2, %x;
LOOP:
@%p1 bra SKIP;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%d2], 128, [%r2];
SKIP:
and.b32 %r13, %r10, 1;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r13;
@!%p2 bra WAIT;
bar.sync 0;
add.s64 %d2, %d2, 128;
add.u32 %r10, %r10, 1;
setp.lt.u32 %p4, %r10, 200;
@%p4 bra LOOP;
st.relaxed.gpu.global.u32 [%flag], 1;
bra END;
OTHER:
ld.relaxed.gpu.global.u32 %r11, [%flag];
setp.eq.u32 %p5, %r11, 0;
@%p5 bra OTHER;
mul.wide.u32 %d3, %r1, 4;
add.s64 %d3, %d3, %x;
st.global.u32 [%d3], %r1;
END:
"""


def test_a_copy_is_not_forgotten_because_its_own_cta_knows_of_it() -> None:
    """After very many reads the first ones still race with a store that nothing but a bare flag orders."""
    variables = ".shared .align 8 .b64 bar[1];\n.shared .align 128 .b8 s[128];"
    text = kernel(BULK_READS, ["x", "flag"], variables=variables)
    x = np.full(200 * 32, 7, np.uint32)
    for seed in (0, 1):
        result = run(text, {"x": x, "flag": np.zeros(1, np.uint32)}, grid=2, seed=seed)
        assert result.rules, seed
        assert "writes byte 0 of 'x'" in result.outcome.findings[0].message


def test_reads_that_are_too_many_to_keep_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_MOST_READS", 64)
    variables = ".shared .align 8 .b64 bar[1];\n.shared .align 128 .b8 s[128];"
    text = kernel(BULK_READS, ["x", "flag"], variables=variables)
    buffers = {"x": np.full(200 * 32, 7, np.uint32), "flag": np.zeros(1, np.uint32)}
    result = run(text, buffers, grid=2)
    assert "undecided" in result.rules
    monkeypatch.undo()
    assert "undecided" not in run(text, buffers, grid=2).rules
