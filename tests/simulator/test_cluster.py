"""Clusters: special registers, mapa, distributed shared memory, barrier.cluster, st.async, red.async."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simulator.kernels import Result, kernel, run
from tests.simulator.legal import complaint
from workbench.errors import WorkbenchError

VARIABLES = ".shared .align 8 .b64 bar[8];\n.shared .align 16 .b8 s[4096];"
SYNC = """
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""


def go(body: str, buffers: dict[str, Any], grid: Any, cluster: Any, block: int = 32, **more: Any) -> Result:
    """Run `body` with the global lane index in %r0, rank in %r30, cluster size in %r31, thread in %r1."""
    head = """
    mov.u32 %r50, %ctaid.x;
    mov.u32 %r51, %ntid.x;
    mov.u32 %r1, %tid.x;
    mad.lo.u32 %r0, %r50, %r51, %r1;
    mul.wide.u32 %d50, %r0, 4;
    add.s64 %d0, %out, %d50;
    mov.u32 %r30, %cluster_ctarank;
    mov.u32 %r31, %cluster_nctarank;
    mov.u32 %r2, bar;
    mov.u32 %r4, s;
    shl.b32 %r3, %r1, 2;
    setp.ne.u32 %p1, %r1, 0;
    """
    text = kernel(head + body, list(buffers), variables=VARIABLES)
    assert complaint(text) == ""
    if isinstance(cluster, int):
        cluster = (cluster, 1, 1)
    return run(text, buffers, grid=grid, block=block, cluster=cluster, **more)


def clean(result: Result) -> Result:
    assert result.rules == [], result.outcome.findings
    assert result.outcome.completed
    return result


def wait(label: str, parity: str, at: str = "[%r2]") -> str:
    return f"""
    {label}:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, {at}, {parity};
    @!%p2 bra {label};
    """


def test_special_registers_of_a_two_dimensional_cluster() -> None:
    body = """
    mov.u32 %r5, %ctaid.y;
    mov.u32 %r6, %nctaid.x;
    mad.lo.u32 %r5, %r5, %r6, %r50;
    mul.wide.u32 %d1, %r5, 32;
    add.s64 %d1, %out, %d1;
    mov.u32 %r10, %cluster_ctaid.x;
    mov.u32 %r11, %cluster_ctaid.y;
    mov.u32 %r12, %clusterid.x;
    mov.u32 %r13, %clusterid.y;
    mov.u32 %r14, %nclusterid.x;
    mov.u32 %r15, %cluster_nctaid.y;
    st.global.v4.u32 [%d1], {%r10, %r11, %r12, %r13};
    st.global.v4.u32 [%d1+16], {%r14, %r15, %r30, %r31};
    """
    result = clean(go(body, {"out": (6 * 4 * 8, np.uint32)}, (6, 4, 1), (3, 2, 1), block=1))
    out = result["out"].reshape(4, 6, 8)
    for y in range(4):
        for x in range(6):
            want = [x % 3, y % 2, x // 3, y // 2, 2, 2, x % 3 + 3 * (y % 2), 6]
            assert out[y, x].tolist() == want


REDUCE = """
    add.u32 %r5, %r4, %r3;
    mad.lo.u32 %r6, %r0, 7, 3;
    st.shared.u32 [%r5], %r6;
    BARRIER
    mov.u32 %r7, 0;
    mov.u32 %r8, 0;
    EACH:
    mapa.shared::cluster.u32 %r9, %r5, %r8;
    ld.shared::cluster.u32 %r10, [%r9];
    add.u32 %r7, %r7, %r10;
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p2, %r8, %r31;
    @%p2 bra EACH;
    LAST
    st.global.u32 [%d0], %r7;
"""


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_reduction_across_a_cluster(size: int, seed: int) -> None:
    body = REDUCE.replace("BARRIER", SYNC).replace("LAST", SYNC)
    count = 3 * size
    result = clean(
        go(body, {"out": (32 * count, np.uint32)}, count, size, seed=seed, chunk_lanes=32 * size, processes=2)
    )
    values = (np.arange(32 * count) * 7 + 3).reshape(3, size, 32)
    want = np.broadcast_to(values.sum(axis=1, keepdims=True), values.shape)
    np.testing.assert_array_equal(result["out"], want.ravel())


@pytest.mark.parametrize("seed", [0, 5])
def test_reduction_in_a_cluster_of_two_by_two(seed: int) -> None:
    body = """
    mov.u32 %r40, %ctaid.y;
    mov.u32 %r41, %nctaid.x;
    mad.lo.u32 %r50, %r40, %r41, %r50;
    mad.lo.u32 %r0, %r50, %r51, %r1;
    mul.wide.u32 %d50, %r0, 4;
    add.s64 %d0, %out, %d50;
    """ + REDUCE.replace("BARRIER", SYNC).replace("LAST", SYNC)  # fmt: skip
    result = clean(go(body, {"out": (32 * 16, np.uint32)}, (4, 4, 1), (2, 2, 1), seed=seed, chunk_lanes=128))
    values = (np.arange(32 * 16) * 7 + 3).reshape(2, 2, 2, 2, 32)  # y, y in cluster, x, x in cluster, lane
    want = np.broadcast_to(values.sum(axis=(1, 3), keepdims=True), values.shape)
    np.testing.assert_array_equal(result["out"], want.ravel())


def test_without_the_first_barrier_data_may_be_missing() -> None:
    body = """
    setp.eq.u32 %p3, %r30, 0;
    @%p3 bra READ;
    add.u32 %r5, %r4, %r3;
    st.shared.u32 [%r5], %r0;
    bra OUT;
    READ:
    add.u32 %r5, %r4, %r3;
    mapa.shared::cluster.u32 %r9, %r5, 1;
    ld.shared::cluster.u32 %r10, [%r9];
    st.global.u32 [%d0], %r10;
    OUT:
    """ + SYNC  # fmt: skip
    seen = [go(body, {"out": (64, np.uint32)}, 2, 2, seed=seed).rules for seed in range(1, 7)]
    assert all("race" in rules for rules in seen)
    assert any("uninitialized-read" in rules for rules in seen)


def test_exit_while_a_peer_may_read() -> None:
    result = go(REDUCE.replace("BARRIER", SYNC).replace("LAST", ""), {"out": (64, np.uint32)}, 2, 2)
    assert result.rules == ["cluster-barrier"]
    result = go(
        REDUCE.replace("BARRIER", SYNC).replace("LAST", "setp.eq.u32 %p5, %r30, 1;\n@%p5 exit;"),
        {"out": (64, np.uint32)}, 2, 2,
    )  # fmt: skip
    assert result.rules == ["cluster-barrier"]


def test_access_to_a_cta_that_has_exited() -> None:
    body = """
    add.u32 %r5, %r4, %r3;
    st.shared.u32 [%r5], %r0;
    """ + SYNC + """
    setp.ne.u32 %p3, %r30, 0;
    @%p3 exit;
    mapa.shared::cluster.u32 %r9, %r5, 1;
    ld.shared::cluster.u32 %r10, [%r9];
    st.global.u32 [%d0], %r10;
    """  # fmt: skip
    seen = [go(body, {"out": (64, np.uint32)}, 2, 2, seed=seed).rules for seed in range(6)]
    assert ["cluster-barrier"] in seen


def test_unpaired_cluster_barriers() -> None:
    twice = "barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    assert go(twice, {"out": (64, np.uint32)}, 2, 2).rules == ["cluster-barrier"]
    alone = "setp.ne.u32 %p3, %r30, 1;\n@%p3 bra GO;\nbar.sync 1, 64;\nGO:\n" + SYNC
    result = go(alone, {"out": (64, np.uint32)}, 2, 2)
    assert result.rules == ["barrier-divergence"]
    texts = [f.message for f in result.outcome.findings]
    assert "barrier 1 has 32 of 64 threads" in texts[0]
    assert "the cluster barrier has 32 of 64 threads" in texts[0]


def test_exited_threads_do_not_count() -> None:
    body = "setp.eq.u32 %p3, %r30, 1;\n@%p3 exit;\n" + SYNC + "st.global.u32 [%d0], %r0;"
    result = clean(go(body, {"out": (64, np.uint32)}, 2, 2))
    np.testing.assert_array_equal(result["out"][:32], np.arange(32))


def test_generic_addresses_and_spaces() -> None:
    body = """
    mov.u64 %d1, s;
    cvta.shared.u64 %d2, %d1;
    cvt.u64.u32 %d3, %r3;
    add.s64 %d2, %d2, %d3;
    st.u32 [%d2], %r0;
    """ + SYNC + """
    xor.b32 %r5, %r30, 1;
    mapa.u64 %d4, %d2, %r5;
    ld.u32 %r6, [%d4];
    isspacep.shared::cta %p3, %d4;
    isspacep.shared::cluster %p4, %d4;
    isspacep.global %p5, %d4;
    isspacep.shared::cta %p6, %d2;
    isspacep.shared::cluster %p7, %d2;
    selp.u32 %r7, 100000, 0, %p3;
    add.u32 %r6, %r6, %r7;
    selp.u32 %r7, 1000, 0, %p4;
    add.u32 %r6, %r6, %r7;
    selp.u32 %r7, 100000, 0, %p5;
    add.u32 %r6, %r6, %r7;
    selp.u32 %r7, 2000, 0, %p6;
    add.u32 %r6, %r6, %r7;
    selp.u32 %r7, 4000, 0, %p7;
    add.u32 %r6, %r6, %r7;
    getctarank.u64 %r8, %d4;
    mad.lo.u32 %r6, %r8, 10000, %r6;
    atom.add.u32 %r9, [%d4], 5;
    cvta.to.shared.u64 %d6, %d4;
    cvt.u32.u64 %r10, %d6;
    ld.shared::cluster.u32 %r11, [%r10];
    sub.u32 %r11, %r11, %r9;
    add.u32 %r6, %r6, %r11;
    st.global.u32 [%d0], %r6;
    """.replace("cvta.to.shared.u64", "cvta.to.shared::cluster.u64") + SYNC  # fmt: skip
    result = clean(go(body, {"out": (128, np.uint32)}, 4, 2))
    n = np.arange(128)
    np.testing.assert_array_equal(result["out"], (n ^ 32) + 7005 + (1 - n // 32 % 2) * 10000)


def test_atomics_on_distributed_shared_memory() -> None:
    body = """
    @!%p1 st.shared.u32 [%r4], %r30;
    """ + SYNC + """
    mapa.shared::cluster.u32 %r9, %r4, 0;
    red.relaxed.cluster.shared::cluster.add.u32 [%r9], 1;
    """ + SYNC + """
    ld.shared.u32 %r10, [%r4];
    st.global.u32 [%d0], %r10;
    """  # fmt: skip
    result = clean(go(body, {"out": (32 * 4, np.uint32)}, 4, 4))
    np.testing.assert_array_equal(result["out"].reshape(4, 32)[:, 0], [128, 1, 2, 3])


def test_a_rank_outside_the_cluster() -> None:
    body = "mapa.shared::cluster.u32 %r9, %r4, 2;\nst.shared::cluster.u32 [%r9], %r0;\n" + SYNC
    assert go(body, {"out": (64, np.uint32)}, 2, 2, block=1).rules == ["out-of-bounds"]


REMOTE = """
    @!%p1 mbarrier.init.shared::cta.b64 [%r2], COUNT;
    @!%p1 EXPECT
    fence.mbarrier_init.release.cluster;
""" + SYNC + """
    xor.b32 %r6, %r30, 1;
    add.u32 %r5, %r4, %r3;
    mapa.shared::cluster.u32 %r7, %r5, %r6;
    mapa.shared::cluster.u32 %r8, %r2, %r6;
"""  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_remote_arrive(seed: int) -> None:
    body = REMOTE.replace("COUNT", "32").replace("@!%p1 EXPECT", "") + """
    st.shared::cluster.u32 [%r7], %r0;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
    """ + wait("W", "0") + "ld.shared.u32 %r9, [%r5];\nst.global.u32 [%d0], %r9;"  # fmt: skip
    result = clean(go(body, {"out": (128, np.uint32)}, 4, 2, seed=seed))
    np.testing.assert_array_equal(result["out"], np.arange(128) ^ 32)


EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], BYTES;"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_st_async_exchange(seed: int) -> None:
    body = REMOTE.replace("COUNT", "1").replace("EXPECT", EXPECT.replace("BYTES", "128")) + """
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r0, [%r8];
    WAIT
    ld.shared.u32 %r9, [%r5];
    st.global.u32 [%d0], %r9;
    """  # fmt: skip
    out = {"out": (128, np.uint32)}
    result = clean(go(body.replace("WAIT", wait("W", "0")), out, 4, 2, seed=seed))
    np.testing.assert_array_equal(result["out"], np.arange(128) ^ 32)
    assert go(body.replace("WAIT", ""), out, 4, 2, seed=seed).rules == ["uninitialized-read"]
    stuck = go(body.replace("WAIT", wait("W", "0")).replace(", 128;", ", 192;"), out, 4, 2, seed=seed)
    assert set(stuck.rules) == {"mbarrier-phase"}
    assert "0 of 1 arrivals pending, tx-count 64" in stuck.outcome.findings[0].message


def test_st_async_of_vectors() -> None:
    body = REMOTE.replace("COUNT", "1").replace("EXPECT", EXPECT.replace("BYTES", "512")) + """
    mad.lo.u32 %r5, %r1, 16, %r4;
    mapa.shared::cluster.u32 %r7, %r5, %r6;
    add.u32 %r10, %r0, 1000;
    add.u32 %r11, %r0, 2000;
    add.u32 %r12, %r0, 3000;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r7], {%r0, %r10, %r11, %r12}, [%r8];
    """ + wait("W", "0") + """
    ld.shared.v4.b32 {%r13, %r14, %r15, %r16}, [%r5];
    add.u32 %r13, %r13, %r14;
    add.u32 %r13, %r13, %r15;
    add.u32 %r13, %r13, %r16;
    st.global.u32 [%d0], %r13;
    """  # fmt: skip
    result = clean(go(body, {"out": (64, np.uint32)}, 2, 2))
    np.testing.assert_array_equal(result["out"], 4 * (np.arange(64) ^ 32) + 6000)


@pytest.mark.parametrize(
    ("op", "kind", "want"),
    [
        ("add", "u32", 32 * 5 + 7),
        ("max", "s32", 7),
        ("min", "u32", 5),
        ("and", "b32", 5),
        ("or", "b32", 7),
        ("inc", "u32", 31 % 6),  # from 7, above the bound 5, to 0, then 31 steps
    ],
)
def test_red_async(op: str, kind: str, want: int) -> None:
    body = """
    mov.u32 %r20, 7;
    @!%p1 st.shared.u32 [%r4], %r20;
    """ + REMOTE.replace("COUNT", "1").replace("EXPECT", EXPECT.replace("BYTES", "128")) + f"""
    mov.u32 %r21, 5;
    mapa.shared::cluster.u32 %r7, %r4, %r6;
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}.{kind} [%r7], %r21, [%r8];
    """ + wait("W", "0") + "ld.shared.u32 %r9, [%r4];\nst.global.u32 [%d0], %r9;"  # fmt: skip
    result = clean(go(body, {"out": (64, np.uint32)}, 2, 2))
    assert set(result["out"].tolist()) == {want}


def test_data_and_barrier_in_different_ctas() -> None:
    body = REMOTE.replace("COUNT", "1").replace("@!%p1 EXPECT", "") + """
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r0, [%r2];
    """ + SYNC  # fmt: skip
    result = go(body, {"out": (64, np.uint32)}, 2, 2)
    assert result.rules == ["mbarrier-phase"]
    assert "mbarrier is in another" in result.outcome.findings[0].message


def test_an_arrival_releases_a_warp_that_waits_already() -> None:
    """Warp 1 waits at the cluster barrier and signals warp 0, which arrives first and waits afterwards."""
    body = f"""
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 32;
    READY:
    bar.sync 0;
    setp.lt.u32 %p3, %r1, 32;
    @%p3 bra FIRST;
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    mbarrier.arrive.shared.b64 %d1, [%r2];
    bra END;
    FIRST:
    barrier.cluster.arrive.relaxed;
    mov.u32 %r9, 0;
    {wait("POLL", "%r9")}
    barrier.cluster.wait;
    END:
    mov.u32 %r8, 7;
    st.global.u32 [%d0], %r8;
    """
    result = clean(go(body, {"out": np.zeros(128, np.uint32)}, grid=2, cluster=2, block=64))
    assert (result["out"] == 7).all()


def test_a_grid_that_is_no_multiple_of_the_cluster() -> None:
    with pytest.raises(WorkbenchError, match="cannot be divided into clusters"):
        go(SYNC, {"out": (64, np.uint32)}, 3, 2)


@pytest.mark.parametrize("multicast", ["", ".multicast::cluster::all"])
def test_no_launch_is_left_to_cancel(multicast: str) -> None:
    body = f"""
    @!%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
    {SYNC}
    setp.eq.u32 %p3, %r30, 0;
    setp.eq.and.u32 %p3, %r1, 0, {'%p3' if multicast else '%p10'};
    @%p3 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{multicast}.b128
      [%r4], [%r2];
    """.replace("setp.eq.u32 %p3", "setp.eq.u32 %p10, %r0, %r0;\nsetp.eq.u32 %p3", 1) + wait("W", "0") + """
    {
    .reg .b128 response;
    .reg .pred canceled;
    ld.shared.b128 response, [%r4];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 canceled, response;
    mov.u32 %r9, 7;
    @canceled clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r9, %r10, %r11, _}, response;
    }
    st.global.u32 [%d0], %r9;
    """ + SYNC  # fmt: skip
    result = clean(go(body, {"out": (128, np.uint32)}, 4, 2))
    assert set(result["out"].tolist()) == {7}
