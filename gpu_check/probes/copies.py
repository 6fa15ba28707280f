"""Asynchronous copies and the barriers that they complete on: cp.async, bulk copies, mbarrier, clusters."""

from __future__ import annotations

import numpy as np

from gpu_check.probes.builder import Builder
from gpu_check.probes.operands import operands

_THREADS = 64
_SHARED = ".shared .align 8 .b64 bar[8];\n.shared .align 128 .b8 s[8192];"
_START = """mov.u32 %r2, bar;
mov.u32 %r4, s;
shl.b32 %r3, %r0, 2;
mul.wide.u32 %d1, %r1, 4;
add.s64 %d9, %d1, %out;
setp.ne.u32 %p1, %r0, 0;
mov.u32 %r30, %cluster_ctarank;
mov.u32 %r31, %cluster_nctarank;
"""
_LAST = "st.global.b32 [%d9], %r9;"


def _init(count: int, more: str = "") -> str:
    return f"""@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], {count};
mbarrier.init.shared::cta.b64 [%r2+8], {count};
{more}
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
READY:
bar.sync 0;
"""


def _wait(label: str, parity: str = "0", at: str = "[%r2]", how: str = "try_wait.parity") -> str:
    return f"{label}:\nmbarrier.{how}.shared::cta.b64 %p2, {at}, {parity};\n@!%p2 bra {label};\n"


def builders() -> list[Builder]:
    """Four families."""
    return [_cp_async(), _bulk(), _mbarrier(), _cluster()]


def _cp_async() -> Builder:
    b = Builder("cp.async", "16, 8 and 4 bytes, zero fill, groups")
    b.give("x", operands("u32", 0, 4096))

    def add(form: str, body: str, covers: tuple[str, ...]) -> None:
        text = f"{_START}\nmov.u32 %r9, 0;\n{body}\n{_LAST}"
        b.entry(form, text, ("x",), [("u32", _THREADS)], block=_THREADS, variables=_SHARED, covers=covers)

    for cache, size in (("cg", 16), ("ca", 16), ("ca", 8), ("ca", 4)):
        read = "xor.b32 %r5, %r0, 21;\n" + f"mad.lo.u32 %r5, %r5, {size}, %r4;\n"
        read += "".join(
            f"ld.shared.b32 %r6, [%r5+{4 * k}];\nmad.lo.u32 %r9, %r9, 3, %r6;\n" for k in range(size // 4)
        )
        copy = f"mul.wide.u32 %d2, %r0, {size};\nadd.s64 %d2, %d2, %x;\nmad.lo.u32 %r7, %r0, {size}, %r4;\n"
        form = f"cp.async.{cache}.shared.global"
        add(
            f"{form} {size}",
            f"{copy}{form} [%r7], [%d2], {size};\ncp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 0;\n{read}",
            (form, "cp.async.commit_group", "cp.async.wait_group"),
        )
        part = f"and.b32 %r8, %r0, {size - 1};\n"
        add(
            f"{form} {size}, source shorter",
            f"{copy}{part}{form} [%r7], [%d2], {size}, %r8;\ncp.async.wait_all;\nbar.sync 0;\n{read}",
            (form, "cp.async.wait_all"),
        )
    groups = "".join(
        f"cp.async.ca.shared.global [%r7+{1024 * k}], [%d2+{256 * k}], 4;\ncp.async.commit_group;\n"
        for k in range(4)
    )
    reads = "".join(
        f"cp.async.wait_group {3 - k};\nld.shared.b32 %r6, [%r7+{1024 * k}];\nmad.lo.u32 %r9, %r9, 5, %r6;\n"
        for k in range(4)
    )
    copy = "mul.wide.u32 %d2, %r0, 4;\nadd.s64 %d2, %d2, %x;\nadd.u32 %r7, %r4, %r3;\n"
    add("cp.async groups, own bytes", copy + groups + reads, ("cp.async.wait_group",))
    noinc = _init(_THREADS) + copy + "cp.async.ca.shared.global [%r7], [%d2], 4;\n"
    noinc += "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2];\n" + _wait("W")
    noinc += "xor.b32 %r5, %r3, 252;\nadd.u32 %r5, %r5, %r4;\nld.shared.b32 %r9, [%r5];"
    add("cp.async.mbarrier.arrive.noinc", noinc, ("cp.async.mbarrier.arrive.noinc.shared::cta.b64",))
    return b


def _bulk() -> Builder:
    b = Builder("bulk copies", "cp.async.bulk in every direction, multicast, reductions, groups")
    b.give("x", operands("u32", 3, 4096))
    b.give("f", np.random.default_rng(5).integers(-50, 51, 4096).astype(np.float32))

    def add(
        form: str,
        body: str,
        covers: tuple[str, ...],
        cluster: int = 1,
        results: list[tuple[str, int]] | None = None,
        takes: tuple[str, ...] = ("x",),
    ) -> None:
        grid = (4 if cluster > 1 else 2, 1, 1)
        outputs = results or [("u32", _THREADS * grid[0])]
        last = "" if results else _LAST
        b.entry(form, f"{_START}\n{body}\n{last}", takes, outputs, block=_THREADS, grid=grid,
                cluster=(cluster, 1, 1), variables=_SHARED, covers=covers)  # fmt: skip

    source = "mul.wide.u32 %d2, %r298, 512;\nadd.s64 %d2, %d2, %x;\n"
    read = "add.u32 %r5, %r4, %r3;\nld.shared.b32 %r6, [%r5];\nld.shared.b32 %r7, [%r5+256];\nmad.lo.u32 %r9, %r6, 3, %r7;"
    for space in ("shared::cluster", "shared::cta"):
        form = f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes"
        issue = (
            "@%p1 bra ISSUED;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;\n"
            f"{form} [%r4], [%d2], 512, [%r2];\nISSUED:\n"
        )
        add(form, _init(1) + source + issue + _wait("W") + read,
            (form, "mbarrier.arrive.expect_tx.shared::cta.b64", "mbarrier.try_wait.parity.shared::cta.b64"))  # fmt: skip
    form = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    sync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
    multicast = (
        _init(1)
        + "@%p1 bra EXPECTED;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;\nEXPECTED:\n"
        + sync
        + source
        # Only rank 0 copies, to ranks 0 and 1; every rank waits on its own barrier.
        + "setp.ne.u32 %p3, %r30, 0;\nor.pred %p3, %p3, %p1;\n@%p3 bra ISSUED;\nmov.u16 %h1, 3;\n"
        + f"{form} [%r4], [%d2], 512, [%r2], %h1;\nISSUED:\n"
        + _wait("W")
        + read
        + "\n"
        + sync
    )
    add(form, multicast, (form,), cluster=2)
    fill = (
        "mul.wide.u32 %d3, %r1, 4;\nadd.s64 %d3, %d3, %x;\nld.global.b32 %r6, [%d3];\nadd.u32 %r5, %r4, %r3;\n"
        "st.shared.b32 [%r5], %r6;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n@%p1 bra DONE;\n"
        "mul.wide.u32 %d2, %r298, 256;\nadd.s64 %d2, %d2, %out;\n"
    )
    group = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE:\n"
    form = "cp.async.bulk.global.shared::cta.bulk_group"
    add(form, fill + f"{form} [%d2], [%r4], 256;\n" + group, (form, "cp.async.bulk.commit_group", "cp.async.bulk.wait_group"),
        results=[("u32", 2 * _THREADS)])  # fmt: skip
    form = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    peer = (
        _init(1)
        + "@%p1 bra EXPECTED;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;\nEXPECTED:\n"
        + "mul.wide.u32 %d3, %r1, 4;\nadd.s64 %d3, %d3, %x;\nld.global.b32 %r6, [%d3];\nadd.u32 %r5, %r4, %r3;\n"
        + "st.shared.b32 [%r5], %r6;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
        + sync
        + "@%p1 bra ISSUED;\nxor.b32 %r8, %r30, 1;\nadd.u32 %r10, %r4, 1024;\n"
        + "mapa.shared::cluster.u32 %r11, %r10, %r8;\nmapa.shared::cluster.u32 %r12, %r2, %r8;\n"
        + f"{form} [%r11], [%r4], 256, [%r12];\nISSUED:\n"
        + _wait("W")
        + "ld.shared.b32 %r9, [%r5+1024];\n"
        + sync
    )
    add(form, peer, (form, "mapa.shared::cluster.u32"), cluster=2)
    for kind, name, fmt in (
        ("add.u32", "x", "u32"),
        ("min.u32", "x", "u32"),
        ("and.b32", "x", "u32"),
        ("add.f32", "f", "f32"),
    ):
        form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{kind}"
        # CTA after CTA would be in any order: both add to the same zeroed words, and the sum is exact.
        body = fill.replace("%x", f"%{name}").replace("mul.wide.u32 %d2, %r298, 256;\nadd.s64 %d2, %d2, %out;",
                                                      "mov.b64 %d2, %out;")  # fmt: skip
        b.entry(
            form,
            f"{_START}\nmov.u32 %r20, 0;\nst.global.b32 [%d9], %r20;\nfence.proxy.async.global;\nbar.sync 0;\n"
            f"{body}{form} [%d2], [%r4], 256;\n{group}",
            (name,),
            [(fmt, _THREADS)],
            block=_THREADS,
            variables=_SHARED,
            covers=(form,),
        )
    return b


def _mbarrier() -> Builder:
    b = Builder("mbarrier", "phases, counts, parity, tokens, transactions")

    def add(form: str, body: str, covers: tuple[str, ...] = ()) -> None:
        b.entry(form, f"{_START}\n{body}\n{_LAST}", (), [("u32", _THREADS)], block=_THREADS, variables=_SHARED,
                covers=covers or (form,))  # fmt: skip

    swap = (
        "add.u32 %r5, %r4, %r3;\nst.shared.b32 [%r5], %r1;\nARRIVE\nxor.b32 %r6, %r3, 252;\nadd.u32 %r6, %r6, %r4;\n"
        "ld.shared.b32 %r9, [%r6];"
    )
    arrive = "mbarrier.arrive.shared::cta.b64 %d2, [%r2];\n"
    for how, parity in (("try_wait.parity", "0"), ("test_wait.parity", "0"), ("test_wait", "%d2"), ("try_wait", "%d2"),
                        ("try_wait.parity.acquire.cta", "0")):  # fmt: skip
        form = f"mbarrier.{how}.shared::cta.b64"
        add(form, _init(_THREADS) + swap.replace("ARRIVE", arrive + _wait("W", parity, how=how)),
            (form, "mbarrier.arrive.shared::cta.b64", "mbarrier.init.shared::cta.b64"))  # fmt: skip
    phases = (
        _init(_THREADS)
        + "mov.u32 %r9, 0;\nmov.u32 %r10, 0;\nLOOP:\nadd.u32 %r5, %r4, %r3;\nmad.lo.u32 %r6, %r10, 97, %r1;\n"
        + "st.shared.b32 [%r5], %r6;\n"
        + arrive
        + "and.b32 %r11, %r10, 1;\n"
        + _wait("W", "%r11")
        + "xor.b32 %r6, %r3, 4;\nadd.u32 %r6, %r6, %r4;\nld.shared.b32 %r7, [%r6];\nmad.lo.u32 %r9, %r9, 3, %r7;\n"
        + "mbarrier.arrive.shared::cta.b64 %d3, [%r2+8];\n"
        + _wait("V", "%r11", "[%r2+8]")
        + "add.u32 %r10, %r10, 1;\nsetp.lt.u32 %p3, %r10, 7;\n@%p3 bra LOOP;"
    )
    add("seven phases of two barriers", phases, ("mbarrier.try_wait.parity.shared::cta.b64",))
    add(
        "mbarrier.pending_count.b64",
        _init(_THREADS)
        + "mov.u32 %r9, 0;\n@%p1 bra ARRIVED;\n"
        + arrive
        + "mbarrier.pending_count.b64 %r9, %d2;\nARRIVED:",
    )
    add(
        "mbarrier.arrive.noComplete.shared::cta.b64",
        _init(_THREADS)
        + "@%p1 bra ARRIVED;\nmbarrier.arrive.noComplete.shared::cta.b64 %d2, [%r2], 5;\n"
        + "mbarrier.arrive.shared::cta.b64 %d3, [%r2], 59;\nARRIVED:\n"
        + _wait("W")
        + "mov.u32 %r9, 1;",
    )
    add(
        "mbarrier.arrive_drop.shared::cta.b64",
        _init(_THREADS)
        + "@%p1 bra STAY;\nmbarrier.arrive_drop.shared::cta.b64 %d2, [%r2];\nbra.uni GONE;\nSTAY:\n"
        + arrive
        + "GONE:\n"
        + _wait("W")
        + "@!%p1 bra LAST;\n"
        + arrive
        + "LAST:\n"
        + _wait("V", "1")
        + "mov.u32 %r9, 2;",
    )
    add(
        "a phase that is not over",
        _init(_THREADS)
        + "mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], 0;\nmbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], 1;\n"
        + "selp.u32 %r9, 1, 0, %p2;\nselp.u32 %r5, 2, 0, %p3;\nadd.u32 %r9, %r9, %r5;\nbar.sync 0;",
        ("mbarrier.test_wait.parity.shared::cta.b64",),
    )
    transactions = (
        _init(1)
        + "@%p1 bra ISSUED;\nmbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 48;\n"
        + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 16;\n"
        + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;\n"
        + "mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], 0;\n"
        + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 48;\nISSUED:\n"
        + _wait("W")
        + "mov.u32 %r9, 4;\n@%p1 bra TOLD;\nselp.u32 %r9, 1, 0, %p3;\nTOLD:"
    )
    add("transactions without copies", transactions, ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64",))
    return b


def _cluster() -> Builder:
    b = Builder(
        "clusters", "distributed shared memory, barrier.cluster, st.async, remote arrivals and atomics"
    )
    b.give("x", operands("u32", 5, 4096))
    sync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
    mine = "mul.wide.u32 %d3, %r1, 4;\nadd.s64 %d3, %d3, %x;\nld.global.b32 %r6, [%d3];\nadd.u32 %r5, %r4, %r3;\n"

    def add(form: str, body: str, covers: tuple[str, ...], sizes: tuple[int, ...] = (2, 4, 8)) -> None:
        for size in sizes:
            b.entry(f"{form}, {size} CTAs", f"{_START}\n{body}\n{_LAST}", ("x",), [("u32", _THREADS * 2 * size)],
                    block=_THREADS, grid=(2 * size, 1, 1), cluster=(size, 1, 1), variables=_SHARED, covers=covers)  # fmt: skip

    each = (
        "mov.u32 %r9, 0;\nmov.u32 %r8, 0;\nEACH:\nmapa.shared::cluster.u32 %r7, %r5, %r8;\n"
        "ld.shared::cluster.b32 %r10, [%r7];\nmad.lo.u32 %r9, %r9, 3, %r10;\nadd.u32 %r8, %r8, 1;\n"
        "setp.lt.u32 %p2, %r8, %r31;\n@%p2 bra EACH;\n"
    )
    add("ld.shared::cluster of every rank", mine + "st.shared.b32 [%r5], %r6;\n" + sync + each + sync,
        ("ld.shared::cluster.b32", "mapa.shared::cluster.u32", "barrier.cluster.arrive.release.aligned",
         "barrier.cluster.wait.acquire.aligned"))  # fmt: skip
    target = (
        "add.u32 %r8, %r30, 1;\nsetp.eq.u32 %p2, %r8, %r31;\nselp.u32 %r8, 0, %r8, %p2;\n"
        "mapa.shared::cluster.u32 %r7, %r5, %r8;\nmapa.shared::cluster.u32 %r12, %r2, %r8;\n"
    )
    add("st.shared::cluster to the next rank", mine + target + "st.shared::cluster.b32 [%r7], %r6;\n" + sync + "ld.shared.b32 %r9, [%r5];",
        ("st.shared::cluster.b32",))  # fmt: skip
    for kind, size in (("b32", 4), ("b64", 8)):
        form = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
        value = "%r6" if size == 4 else "%d6"
        body = (
            _init(1)
            + f"@%p1 bra EXPECTED;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size * _THREADS};\nEXPECTED:\n"
            + sync
            + mine
            + f"mad.lo.u32 %r5, %r0, {size}, %r4;\ncvt.u64.u32 %d6, %r6;\nshl.b64 %d7, %d6, 32;\nor.b64 %d6, %d6, %d7;\n"
            + target
            + f"{form} [%r7], {value}, [%r12];\n"
            + _wait("W")
            + f"ld.shared.b32 %r9, [%r5+{size - 4}];\n"
            + sync
        )
        add(form, body, (form,), (2, 4))
    remote = (
        _init(_THREADS)
        + sync
        + mine
        + target
        + "st.shared::cluster.b32 [%r7], %r6;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];\n"
        + _wait("W", how="try_wait.parity.acquire.cluster")
        + "ld.shared.b32 %r9, [%r5];\n"
        + sync
    )
    add("mbarrier.arrive at the next rank", remote, ("mbarrier.arrive.release.cluster.shared::cluster.b64",))
    atomics = (
        "add.u32 %r5, %r4, %r3;\nmov.u32 %r20, 0;\nst.shared.b32 [%r5], %r20;\n"
        + sync
        + mine
        + "mov.u32 %r8, 0;\nEACH:\nmapa.shared::cluster.u32 %r7, %r5, %r8;\n"
        + "atom.shared::cluster.add.u32 %r10, [%r7], %r6;\nadd.u32 %r8, %r8, 1;\nsetp.lt.u32 %p2, %r8, %r31;\n"
        + "@%p2 bra EACH;\n"
        + sync
        + "ld.shared.b32 %r9, [%r5];"
    )
    add("atom.shared::cluster.add at every rank", atomics, ("atom.shared::cluster.add.u32",))
    add("getctarank, cvta of a remote address",
        mine + "st.shared.b32 [%r5], %r6;\n" + sync + target
        + "getctarank.shared::cluster.u32 %r9, %r7;\nmov.u64 %d10, s;\ncvt.u64.u32 %d11, %r7;\n"
        + "cvta.shared::cluster.u64 %d12, %d11;\nld.b32 %r13, [%d12];\nadd.u32 %r9, %r9, %r13;\n" + sync,
        ("getctarank.shared::cluster.u32",))  # fmt: skip
    return b
