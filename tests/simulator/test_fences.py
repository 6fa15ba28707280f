"""What fences, barriers and relaxed accesses order together, and each ingredient left out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.simulator.kernels import INDEX, kernel, run
from workbench.findings import Severity
from workbench.simulator.ordering import clocks

# Every thread stores and fences, one thread counts after a barrier; the CTA that comes last reads all of it.
LAST = (
    INDEX
    + """
mul.wide.u32 %d1, %r0, 4;
add.s64 %d2, %part, %d1;
st.global.u32 [%d2], %r0;
fence.acq_rel.gpu; // release
bar.sync 0;        // before
setp.ne.u32 %p1, %r52, 0;
@%p1 bra COUNTED;
atom.relaxed.gpu.global.add.u32 %r1, [%count], 1;
st.shared.u32 [last], %r1;
COUNTED:
bar.sync 0;
ld.shared.u32 %r2, [last];
mov.u32 %r3, %nctaid.x;
sub.u32 %r3, %r3, 1;
setp.ne.u32 %p2, %r2, %r3;
@%p2 bra DONE;
fence.acq_rel.gpu; // acquire
mul.wide.u32 %d3, %r52, 4;
add.s64 %d4, %part, %d3;
mov.u32 %r4, 0;
mov.u32 %r6, 0;
SUM:
ld.global.u32 %r5, [%d4];
add.u32 %r4, %r4, %r5;
add.s64 %d4, %d4, 256;
add.u32 %r6, %r6, 1;
setp.le.u32 %p3, %r6, %r3;
@%p3 bra SUM;
add.s64 %d5, %out, %d3;
st.global.u32 [%d5], %r4;
DONE:
"""
)


def last(*changes: tuple[str, str]) -> list[str]:
    body = LAST
    for pattern, new in changes:
        body, count = re.subn(pattern, new, body)
        assert count == 1
    text = kernel(body, ["part", "count", "out"], variables=".shared .b32 last;")
    buffers = {"part": 192, "count": np.zeros(1, np.uint32), "out": 64}
    done = run(text, {k: v if k == "count" else np.zeros(v, np.uint32) for k, v in buffers.items()},
               grid=3, block=64)  # fmt: skip
    if not changes:
        assert done["out"].tolist() == [3 * t + 192 for t in range(64)]
    return sorted(set(done.rules))


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ([], []),
        ([(r"fence.* // release", "")], ["flag-without-release"]),
        ([(r"fence.acq_rel.gpu; // release", "fence.acq_rel.cta;")], ["scope-too-narrow"]),
        ([(r"fence.acq_rel.gpu; // acquire", "fence.acq_rel.cta;")], ["scope-too-narrow"]),
        ([(r"fence.* // acquire", "")], ["flag-without-acquire"]),
        ([(r"fence.acq_rel.gpu; // release", "membar.gl;")], []),
        ([(r"fence.acq_rel.gpu; // acquire", "membar.gl;")], []),
        ([(r"fence.acq_rel.gpu; // release", "membar.cta;")], ["scope-too-narrow"]),
        ([(r"bar.* // before", "bar.warp.sync -1;")], ["flag-without-release"]),
    ],
)
def test_all_threads_fence_and_one_counts(changes: list[tuple[str, str]], rules: list[str]) -> None:
    found = last(*changes)
    if changes and "warp" in changes[0][1]:
        # The other warp's stores come before nothing; those of the counting thread's warp are in order.
        assert found and set(found) <= {"race", *rules}
    else:
        assert found == rules


def test_a_fence_counts_though_its_thread_has_gone_on_to_the_next() -> None:
    """Warp 1 is at its second fence when warp 0 publishes what it did before the first."""
    body = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    setp.ne.u32 %p0, %r2, 0;
    @%p0 bra READ;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra COUNT;
    st.global.u32 [%data], 7;
    fence.acq_rel.gpu;
    bar.sync 0;
    st.global.u32 [%data+64], 7;
    fence.acq_rel.gpu;
    st.relaxed.gpu.global.u32 [%flag+4], 1;
    bra DONE;
    COUNT:
    bar.sync 0;
    WAIT:
    ld.relaxed.gpu.global.u32 %r3, [%flag+4];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra WAIT;
    st.relaxed.gpu.global.u32 [%flag], 1;
    bra DONE;
    READ:
    ld.acquire.gpu.global.u32 %r3, [%flag];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra READ;
    ld.global.u32 %r4, [%data];
    st.global.u32 [%out], %r4;
    DONE:
    """
    zeros = np.zeros(32, np.uint32)
    done = run(
        kernel(body, ["data", "flag", "out"]),
        {"data": zeros, "flag": zeros.copy(), "out": zeros.copy()}, grid=2, block=64,
    )  # fmt: skip
    assert done.rules == []
    assert done["out"][0] == 7


CLUSTER = (
    INDEX
    + """
mov.u32 %r1, box;
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r4, %r1, %r3;
shl.b32 %r5, %r52, 2;
add.u32 %r4, %r4, %r5;
add.u32 %r1, %r1, %r5;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
st.shared::cluster.u32 [%r4], %r0;
FENCE
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
ld.shared.u32 %r6, [%r1];
st.global.u32 [%d0], %r6;
"""
)


@pytest.mark.parametrize(
    ("fence", "rules"),
    [
        ("fence.acq_rel.cluster;", []),
        ("fence.sc.cluster;", []),
        ("fence.acq_rel.gpu;", []),
        ("fence.acq_rel.cta;", ["cluster-barrier"]),
        ("", ["cluster-barrier"]),
    ],
)
def test_a_relaxed_cluster_arrival_hands_over_what_is_fenced(fence: str, rules: list[str]) -> None:
    """The ISA's own example of barrier.cluster.arrive.relaxed."""
    text = kernel(CLUSTER.replace("FENCE", fence), ["out"], variables=".shared .b32 box[32];")
    done = run(text, {"out": np.zeros(64, np.uint32)}, grid=2, block=32, cluster=(2, 1, 1))
    assert sorted(set(done.rules)) == rules


def test_threads_of_too_many_kinds_are_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "MOST_CLASSES", 1)
    body = INDEX + "setp.lt.u32 %p1, %r52, 3;\n@%p1 st.release.gpu.global.u32 [%flag], 1;\nbar.sync 0;"
    done = run(
        kernel(body, ["flag", "out"]), dict.fromkeys(("flag", "out"), np.zeros(64, np.uint32)), block=64
    )
    (finding,) = done.outcome.findings
    assert (finding.rule, finding.severity) == ("undecided", Severity.INFO)
