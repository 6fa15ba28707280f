"""Bulk copies and reductions in every direction, their groups, and what a missing wait shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simulator.kernels import Result, kernel, run
from tests.simulator.legal import complaint

VARIABLES = ".shared .align 8 .b64 bar[8];\n.shared .align 16 .b8 s[4096];"


def go(
    body: str, buffers: dict[str, Any], grid: int = 1, cluster: int = 1, block: int = 32, **more: Any
) -> Result:
    """Run `body`; %p1 is true but for thread 0, %d1 is the CTA number."""
    head = """
    mov.u32 %r50, %ctaid.x;
    mov.u32 %r1, %tid.x;
    mov.u32 %r30, %cluster_ctarank;
    mov.u32 %r31, %cluster_nctarank;
    mov.u32 %r2, bar;
    mov.u32 %r4, s;
    cvt.u64.u32 %d1, %r50;
    shl.b32 %r3, %r1, 2;
    setp.ne.u32 %p1, %r1, 0;
    """
    text = kernel(head + body, list(buffers), variables=VARIABLES)
    assert complaint(text) == ""
    return run(text, buffers, grid=grid, block=block, cluster=(cluster, 1, 1), **more)


def clean(result: Result) -> Result:
    assert result.rules == [], result.outcome.findings
    assert result.outcome.completed
    return result


def wait(label: str, parity: str, at: str = "[%r2]") -> str:
    return f"""
    {label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, {at}, {parity};
    @!%p2 bra {label};
    """


INIT = """
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
READY:
bar.sync 0;
"""
LOAD = INIT + """
@%p1 bra ISSUED;
shl.b64 %d2, %d1, 8;
add.s64 %d2, %d2, %x;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
cp.async.bulk.SPACE.global.mbarrier::complete_tx::bytes [%r4+16], [%d2], 256, [%r2];
ISSUED:
WAIT
add.u32 %r5, %r4, %r3;
ld.shared.u32 %r6, [%r5+16];
ld.shared.u32 %r7, [%r5+144];
add.u32 %r6, %r6, %r7;
mad.lo.u32 %r8, %r50, 32, %r1;
mul.wide.u32 %d3, %r8, 4;
add.s64 %d3, %d3, %out;
st.global.u32 [%d3], %r6;
"""  # fmt: skip
X = (np.arange(64 * 8, dtype=np.uint32) * 2654435761) % np.uint32(1 << 20)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_load(space: str, seed: int) -> None:
    body = LOAD.replace("SPACE", space)
    buffers = {"out": (32 * 8, np.uint32), "x": X}
    result = clean(go(body.replace("WAIT", wait("W", "0")), buffers, grid=8, seed=seed, chunk_lanes=64))
    x = X.reshape(8, 2, 32)
    np.testing.assert_array_equal(result["out"], (x[:, 0] + x[:, 1]).ravel())
    missing = go(body.replace("WAIT", ""), buffers, grid=8, seed=seed)
    assert set(missing.rules) <= {"uninitialized-read", "race"} and missing.rules
    assert missing.outcome.completed
    other = go(body.replace("WAIT", wait("W", "1")), buffers, grid=8, seed=seed)
    assert set(other.rules) == {"mbarrier-phase"}  # the phase before the first counts as complete


def test_expect_tx_mismatch_is_a_deadlock_that_names_the_counts() -> None:
    body = LOAD.replace("SPACE", "shared::cta").replace("WAIT", wait("W", "0"))
    body = body.replace("[%r2], 256;", "[%r2], 272;")
    result = go(body, {"out": (32, np.uint32), "x": X})
    assert result.rules == ["mbarrier-phase"]
    message = result.outcome.findings[0].message
    assert "waits for the end of phase 0 of the mbarrier at byte 0 of shared memory of CTA 0" in message
    assert "0 of 1 arrivals pending, tx-count 16" in message


ROUNDS = (
    INIT.replace("READY:", "mbarrier.init.shared::cta.b64 [%r2+8], 1;\nREADY:")
    + """
mov.u32 %r10, 0;
mov.u32 %r11, 0;
mov.u64 %d2, %x;
LOOP:
and.b32 %r12, %r10, 1;
shr.u32 %r13, %r10, 1;
and.b32 %r13, %r13, 1;
mad.lo.u32 %r14, %r12, 8, %r2;
mad.lo.u32 %r15, %r12, 128, %r4;
@%p1 bra SKIP;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r14], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r15], [%d2], 128, [%r14];
SKIP:
WAIT
add.u32 %r16, %r15, %r3;
ld.shared.u32 %r17, [%r16];
add.u32 %r11, %r11, %r17;
bar.sync 0;
add.s64 %d2, %d2, 128;
add.u32 %r10, %r10, 1;
setp.lt.u32 %p4, %r10, 9;
@%p4 bra LOOP;
mul.wide.u32 %d3, %r1, 4;
add.s64 %d3, %d3, %out;
st.global.u32 [%d3], %r11;
"""
)


@pytest.mark.parametrize("seed", [0, 3])
def test_stages_are_refilled_over_nine_rounds(seed: int) -> None:
    buffers = {"out": (32, np.uint32), "x": X}
    body = ROUNDS.replace("WAIT", wait("W", "%r13", "[%r14]"))
    result = clean(go(body, buffers, seed=seed))
    np.testing.assert_array_equal(result["out"], X[: 9 * 32].reshape(9, 32).sum(axis=0, dtype=np.uint32))
    # Waiting for phase 0 every time is enough in the first two rounds only.
    assert go(ROUNDS.replace("WAIT", wait("W", "0", "[%r14]")), buffers, seed=seed).rules


STORE = """
add.u32 %r5, %r4, %r3;
mad.lo.u32 %r6, %r50, 1000, %r1;
st.shared.u32 [%r5], %r6;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 bra DONE;
shl.b64 %d2, %d1, 7;
add.s64 %d2, %d2, %out;
cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r4], 128;
cp.async.bulk.commit_group;
WAIT
DONE:
bar.sync 0;
mov.u32 %r7, 77;
st.shared.u32 [%r5], %r7;
"""


@pytest.mark.parametrize("wait_group", ["cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"])
def test_store(wait_group: str) -> None:
    result = clean(go(STORE.replace("WAIT", wait_group), {"out": (32 * 3, np.uint32)}, grid=3))
    np.testing.assert_array_equal(
        result["out"].reshape(3, 32), np.arange(32)[None, :] + 1000 * np.arange(3)[:, None]
    )


@pytest.mark.parametrize("missing", ["", "cp.async.bulk.wait_group.read 1;"])
def test_source_overwritten_before_it_was_read(missing: str) -> None:
    result = go(STORE.replace("WAIT", missing), {"out": (32, np.uint32)})
    assert result.rules == ["buffer-reuse"]
    assert result["out"][0] == 77


@pytest.mark.parametrize(("kind", "rules"), [("", []), (".read", ["cp-async-group", "uninitialized-read"])])
def test_reading_back_needs_the_whole_wait(kind: str, rules: list[str]) -> None:
    body = STORE.replace("WAIT", f"cp.async.bulk.wait_group{kind} 0;\nld.global.u32 %r9, [%d2];")
    assert go(body, {"out": (32, np.uint32)}).rules == rules


def test_groups_complete_in_order() -> None:
    body = """
    @%p1 bra END;
    mov.u32 %r6, 5;
    st.shared.v4.u32 [%r4], {%r6, %r6, %r6, %r6};
    st.shared.v4.u32 [%r4+16], {%r1, %r1, %r1, %r1};
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r4], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%out+16], [%r4+16], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 1;
    ld.global.u32 %r7, [%out+AT];
    cp.async.bulk.wait_group 0;
    st.global.u32 [%out+32], %r7;
    END:
    """
    out = {"out": (9, np.uint32)}
    assert clean(go(body.replace("AT", "0"), out))["out"].tolist() == [5] * 4 + [0] * 4 + [5]
    assert go(body.replace("AT", "16"), out).rules == ["cp-async-group", "uninitialized-read"]


@pytest.mark.parametrize("seed", [0, 2])
def test_copy_to_a_peer(seed: int) -> None:
    body = INIT + """
    add.u32 %r5, %r4, %r3;
    mad.lo.u32 %r6, %r50, 1000, %r1;
    st.shared.u32 [%r5], %r6;
    fence.proxy.async.shared::cta;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
    bar.sync 0;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    xor.b32 %r7, %r30, 1;
    mapa.shared::cluster.u32 %r8, %r4, %r7;
    mapa.shared::cluster.u32 %r9, %r2, %r7;
    @!%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8+128], [%r4], 128, [%r9];
    """ + wait("W", "0") + """
    ld.shared.u32 %r6, [%r5+128];
    mad.lo.u32 %r10, %r50, 32, %r1;
    mul.wide.u32 %d3, %r10, 4;
    add.s64 %d3, %d3, %out;
    st.global.u32 [%d3], %r6;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """  # fmt: skip
    result = clean(go(body, {"out": (128, np.uint32)}, grid=4, cluster=2, seed=seed))
    n = np.arange(128)
    np.testing.assert_array_equal(result["out"], n % 32 + 1000 * (n // 32 ^ 1))


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("mask", [0xF, 0xB])
def test_multicast(mask: int, seed: int) -> None:
    body = INIT + f"""
    mov.u32 %r20, {mask};
    shr.u32 %r21, %r20, %r30;
    and.b32 %r21, %r21, 1;
    setp.eq.u32 %p5, %r21, 1;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    setp.ne.or.u32 %p6, %r30, 0, %p1;
    mov.b16 %h1, {mask};
    @!%p6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
      [%r4], [%x], 128, [%r2], %h1;
    mov.u32 %r6, 9;
    @!%p5 bra SKIP;
    """ + wait("W", "0") + """
    add.u32 %r5, %r4, %r3;
    ld.shared.u32 %r6, [%r5];
    SKIP:
    mad.lo.u32 %r10, %r50, 32, %r1;
    mul.wide.u32 %d3, %r10, 4;
    add.s64 %d3, %d3, %out;
    st.global.u32 [%d3], %r6;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """  # fmt: skip
    result = clean(go(body, {"out": (128, np.uint32), "x": X}, grid=4, cluster=4, seed=seed))
    for rank in range(4):
        want = X[:32] if mask >> rank & 1 else 9
        np.testing.assert_array_equal(result["out"][32 * rank : 32 * rank + 32], want)


def test_multicast_outside_the_cluster() -> None:
    body = INIT + """
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.b16 %h1, 7;
    @!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
      [%r4], [%x], 128, [%r2], %h1;
    """  # fmt: skip
    assert go(body, {"out": (1, np.uint32), "x": X}, grid=2, cluster=2).rules == ["out-of-bounds"]


REDUCE = {
    ("add", "u32"): (np.uint32, np.add),
    ("min", "s32"): (np.int32, np.minimum),
    ("max", "u64"): (np.uint64, np.maximum),
    ("add", "u64"): (np.uint64, np.add),
    ("and", "b32"): (np.uint32, np.bitwise_and),
    ("or", "b64"): (np.uint64, np.bitwise_or),
    ("xor", "b32"): (np.uint32, np.bitwise_xor),
    ("inc", "u32"): (np.uint32, lambda old, b: np.where(old >= b, 0, old + 1)),
    ("dec", "u32"): (np.uint32, lambda old, b: np.where((old == 0) | (old > b), b, old - 1)),
    ("add", "f32"): (np.float32, np.add),
    ("add", "f64"): (np.float64, np.add),
    ("add.noftz", "f16"): (np.float16, np.add),
    ("max", "f16"): (np.float16, np.maximum),
}


def _numbers(kind: Any, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if np.dtype(kind).kind == "f":
        return rng.standard_normal(count).astype(kind)
    return rng.integers(0, 200, count).astype(kind)


@pytest.mark.parametrize(("op", "kind"), REDUCE)
def test_reduction_into_global_memory(op: str, kind: str) -> None:
    dtype, function = REDUCE[op, kind]
    count = 256 // np.dtype(dtype).itemsize
    x, y = _numbers(dtype, count, 1), _numbers(dtype, count, 2)
    body = (
        INIT
        + f"""
    @%p1 bra END;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%x], 256, [%r2];
    {wait("W", "0")}
    cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind} [%y], [%r4], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    END:
    """
    )
    result = clean(go(body, {"out": (1, np.uint32), "x": x, "y": y}))
    np.testing.assert_array_equal(result["y"], function(y, x).astype(dtype))


def test_bf16_reduction_rounds_once() -> None:
    from ml_dtypes import bfloat16

    x = np.linspace(-3, 3, 128).astype(bfloat16)
    y = np.linspace(0.1, 50, 128).astype(bfloat16)
    body = (
        INIT
        + f"""
    @%p1 bra END;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%x], 256, [%r2];
    {wait("W", "0")}
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%y], [%r4], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    END:
    """
    )
    result = clean(go(body, {"out": (1, np.uint32), "x": x.view(np.uint16), "y": y.view(np.uint16)}))
    want = (x.astype(np.float64) + y.astype(np.float64)).astype(bfloat16)
    np.testing.assert_array_equal(result["y"], want.view(np.uint16))


def test_every_cta_adds_to_one_buffer() -> None:
    body = STORE.replace(
        "cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r4], 128;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%y], [%r4], 128;",
    ).replace("WAIT", "cp.async.bulk.wait_group 0;")
    result = clean(go(body, {"out": (32, np.uint32), "y": np.ones(32, np.uint32)}, grid=6))
    np.testing.assert_array_equal(result["y"], 1 + 6 * np.arange(32) + 15000)


def test_reduction_into_a_peer() -> None:
    body = INIT + """
    add.u32 %r5, %r4, %r3;
    mad.lo.u32 %r6, %r50, 1000, %r1;
    st.shared.u32 [%r5], %r6;
    st.shared.u32 [%r5+128], %r6;
    fence.proxy.async.shared::cta;
    @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
    bar.sync 0;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    xor.b32 %r7, %r30, 1;
    mapa.shared::cluster.u32 %r8, %r4, %r7;
    mapa.shared::cluster.u32 %r9, %r2, %r7;
    @!%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32
      [%r8+128], [%r4], 128, [%r9];
    """ + wait("W", "0") + """
    ld.shared.u32 %r6, [%r5+128];
    mad.lo.u32 %r10, %r50, 32, %r1;
    mul.wide.u32 %d3, %r10, 4;
    add.s64 %d3, %d3, %out;
    st.global.u32 [%d3], %r6;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """  # fmt: skip
    result = clean(go(body, {"out": (64, np.uint32)}, grid=2, cluster=2))
    np.testing.assert_array_equal(result["out"], 2 * (np.arange(64) % 32) + 1000)


def test_byte_mask() -> None:
    body = STORE.replace("WAIT", "cp.async.bulk.wait_group 0;")
    body = body.replace(".bulk_group [%d2], [%r4], 128;", ".bulk_group.cp_mask [%d2], [%r4], 128, %h1;")
    body = "mov.b16 %h1, 0xf00f;\n" + body
    result = clean(go(body, {"out": np.full(32, 9, np.uint32)}))
    want = np.arange(32)
    want[1::4] = want[2::4] = 9
    np.testing.assert_array_equal(result["out"], want)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("[%d2], 256,", "[%d2+8], 256,"), "misaligned"),
        (("[%d2], 256,", "[%d2+2000], 256,"), "out-of-bounds"),
        (("[%r4+16], [", "[%r4+8], ["), "misaligned"),
        (("[%r4+16], [", "[%r4+4080], ["), "out-of-bounds"),
        ((", 256, [%r2]", ", %r9, [%r2]"), "misaligned"),
    ],
)
def test_bad_addresses_and_sizes(change: tuple[str, str], rule: str) -> None:
    body = "mov.u32 %r9, 250;\n" + LOAD.replace("SPACE", "shared::cta").replace("WAIT", "")
    assert change[0] in body
    result = go(body.replace(*change), {"out": (32, np.uint32), "x": X})
    assert rule in result.rules


def test_a_store_of_bytes_that_no_one_wrote_and_to_an_input() -> None:
    body = STORE.replace("[%r4], 128;", "[%r4+128], 128;").replace("WAIT", "")
    assert "uninitialized-read" in go(body, {"out": (32, np.uint32)}).rules


def test_hints_fences_and_register_counts_are_accepted() -> None:
    body = LOAD.replace("SPACE", "shared::cluster").replace("WAIT", wait("W", "0"))
    plain = "bytes [%r4+16], [%d2], 256, [%r2];"
    assert plain in body
    body = body.replace(plain, "bytes.L2::cache_hint [%r4+16], [%d2], 256, [%r2], %d9;")
    body = "createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;\n" + body + """
    fence.proxy.alias;
    fence.proxy.async.global;
    fence.acq_rel.cluster;
    cp.async.bulk.prefetch.L2.global [%x], 64;
    """  # fmt: skip
    result = clean(go(body, {"out": (32, np.uint32), "x": X}))
    np.testing.assert_array_equal(result["out"], X[:32] + X[32:64])


def test_a_store_after_ordinary_stores_needs_a_proxy_fence() -> None:
    body = STORE.replace("WAIT", "cp.async.bulk.wait_group 0;").replace("fence.proxy.async.shared::cta;", "")
    assert go(body, {"out": (32, np.uint32)}).rules == ["proxy-fence-missing"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_groups_of_ctas_that_poll_flags_and_mbarriers(seed: int) -> None:
    """CTA 0 waits for a flag of CTA 1, then loads what CTA 1 stored; its other warp waits for the load."""
    body = INIT + """
    setp.eq.u32 %p4, %r50, 1;
    @%p4 bra WRITER;
    @%p1 bra READER;
    POLL:
    ld.acquire.gpu.global.u32 %r9, [%flag];
    setp.eq.u32 %p3, %r9, 0;
    @%p3 bra POLL;
    fence.proxy.async;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%y], 256, [%r2];
    READER:
    """ + wait("W", "0") + """
    add.u32 %r5, %r4, %r3;
    ld.shared.u32 %r6, [%r5];
    mul.wide.u32 %d3, %r1, 4;
    add.s64 %d3, %d3, %out;
    st.global.u32 [%d3], %r6;
    bra END;
    WRITER:
    add.u32 %r5, %r4, %r3;
    mul.lo.u32 %r6, %r1, 5;
    st.shared.u32 [%r5], %r6;
    fence.proxy.async.shared::cta;
    bar.sync 1;
    @%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%y], [%r4], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    fence.proxy.async;
    mov.u32 %r7, 1;
    st.release.gpu.global.u32 [%flag], %r7;
    END:
    """  # fmt: skip
    buffers = {"out": (64, np.uint32), "flag": np.zeros(1, np.uint32), "y": (64, np.uint32)}
    result = clean(go(body, buffers, grid=2, block=64, chunk_lanes=64, seed=seed))
    np.testing.assert_array_equal(result["out"], 5 * np.arange(64))


def test_reductions_of_many_processes_lose_nothing() -> None:
    body = STORE.replace(
        "cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r4], 128;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%y], [%r4], 128;",
    ).replace("WAIT", "cp.async.bulk.wait_group 0;")
    buffers = {"out": (32, np.uint32), "y": np.zeros(32, np.uint32)}
    result = clean(go(body, buffers, grid=64, processes=2, chunk_lanes=256))
    np.testing.assert_array_equal(result["y"], 64 * np.arange(32) + 1000 * 63 * 32)


@pytest.mark.parametrize(("kind", "rules"), [("", []), (".read", ["cp-async-group"])])
def test_reading_what_a_bulk_store_overwrites_needs_the_whole_wait(kind: str, rules: list[str]) -> None:
    """What was there before has been written too."""
    body = STORE.replace("WAIT", f"cp.async.bulk.wait_group{kind} 0;\nld.global.u32 %r9, [%d2];")
    assert go(body, {"out": np.zeros(32, np.uint32)}).rules == rules
