"""Tensor copies in clusters: multicast, and mbarriers in the other CTA of a pair."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.simulator.legal import complaint
from workbench.isa.ptx import parse
from workbench.simulator import KernelLaunch, Memory, Outcome, SimulationOptions, simulate_module
from workbench.simulator.swizzle import SWIZZLE_128B, swizzled
from workbench.simulator.tensormap import BY_NAME, TensorMap, encode

TILE = 1024
"""Bytes of a tile: 8 rows of 128."""

KERNEL = """.version 9.0
.target sm_103a
.address_size 64
.visible .entry k(.param .align 64 .b8 p_m[128], .param .u64 p_out)
{{
.reg .pred %p<8>;
.reg .b16 %h<4>;
.reg .b32 %r<40>;
.reg .b64 %d<12>;
.shared .align 1024 .b8 tile[1024];
.shared .align 8 .b64 bar;
mov.b64 %d1, p_m;
cvta.param.u64 %d2, %d1;
ld.param.u64 %d3, [p_out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
mov.u32 %r3, bar;
mov.u32 %r9, %cluster_ctarank;
mov.u32 %r10, %ctaid.x;
mov.u32 %r20, 0;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
{body}
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
shl.b32 %r5, %r1, 2;
mul.lo.u32 %r11, %r10, 1024;
DUMP:
add.u32 %r6, %r2, %r5;
ld.shared.u32 %r7, [%r6];
add.u32 %r12, %r11, %r5;
cvt.u64.u32 %d5, %r12;
add.u64 %d6, %d3, %d5;
st.global.u32 [%d6], %r7;
add.u32 %r5, %r5, 128;
setp.lt.u32 %p2, %r5, 1024;
@%p2 bra DUMP;
ret;
}}
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;
@!%p3 bra WAIT;
"""
X = np.arange(64 * 32, dtype=np.uint32).reshape(64, 32)


def run(body: str, ctas: int, cluster: int) -> tuple[Outcome, np.ndarray]:
    """Run on `ctas` CTAs; return their tiles with the swizzle undone, (ctas, 8, 32)."""
    text = KERNEL.format(body=body)
    assert complaint(text) == ""
    memory = Memory(1 << 24)
    memory.allocate("x", X.nbytes, align=256, initialized=True)[:] = X.view(np.uint8).ravel()
    memory.allocate("out", ctas * TILE)
    m = TensorMap(memory.address("x"), BY_NAME["u32"], (32, 64), (128,), (32, 8), swizzle=SWIZZLE_128B)
    block = encode(m) + struct.pack("<Q", memory.address("out"))
    launch = KernelLaunch("k", (ctas, 1, 1), (32, 1, 1), block, (cluster, 1, 1))
    outcome = simulate_module(parse(text), [launch], memory, SimulationOptions())
    raw = memory.view("out").reshape(ctas, TILE)[:, swizzled(SWIZZLE_128B, np.arange(TILE))]
    return outcome, np.ascontiguousarray(raw).view(np.uint32).reshape(ctas, 8, 32)


def load(form: str, *operands: str) -> str:
    more = "".join(f", {o}" for o in operands)
    kind = f"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{form}"
    return f"{kind} [%r2], [%d2, {{%r20, %r21}}], [%r3]{more};\n"


@pytest.mark.parametrize(("cluster", "mask"), [(2, 3), (4, 0b1011), (4, 0b0100), (8, 0xFF)])
def test_multicast_reaches_the_ctas_of_the_mask(cluster: int, mask: int) -> None:
    """Rank 0 of each of two clusters sends rows that depend on the cluster; every CTA of the mask waits."""
    body = f"""
mov.u16 %h1, {mask};
div.u32 %r21, %r10, {cluster};
mul.lo.u32 %r21, %r21, 8;
setp.eq.and.u32 %p4, %r9, 0, %p1;
shr.u32 %r22, {mask}, %r9;
and.b32 %r22, %r22, 1;
setp.eq.u32 %p5, %r22, 1;
and.pred %p6, %p1, %p5;
@%p6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {TILE};
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@%p4 {load(".multicast::cluster", "%h1")}
@!%p5 bra SKIP;
{WAIT}
SKIP:
@%p5 bra END;
mov.u32 %r23, 0;
shl.b32 %r24, %r1, 2;
ZERO:
add.u32 %r25, %r2, %r24;
st.shared.u32 [%r25], %r23;
add.u32 %r24, %r24, 128;
setp.lt.u32 %p2, %r24, 1024;
@%p2 bra ZERO;
END:
"""
    outcome, tiles = run(body, 2 * cluster, cluster)
    assert outcome.completed and outcome.findings == ()
    for cta in range(2 * cluster):
        rows = X[cta // cluster * 8 :][:8]
        assert (tiles[cta] == (rows if mask >> cta % cluster & 1 else 0)).all()


PAIR = f"""
mul.lo.u32 %r21, %r10, 8;
and.b32 %r23, %r9, 1;
setp.eq.and.u32 %p4, %r23, 0, %p1;
@%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {2 * TILE};
and.b32 %r30, %r3, 4278190079;
add.u32 %r31, %r30, 0;
@%p1 {load(".cta_group::2").replace("[%r3]", "[%r31]")}
setp.eq.u32 %p5, %r23, 1;
@%p5 bra SKIP;
{WAIT}
SKIP:
"""


def test_both_ctas_of_a_pair_signal_the_leader() -> None:
    """Each loads its own tile; the even one's mbarrier counts both, as two-CTA MMA pipelines do."""
    outcome, tiles = run(PAIR, 4, 4)
    assert outcome.completed and outcome.findings == ()
    assert (tiles == X[:32].reshape(4, 8, 32)).all()


def test_a_multicast_of_a_pair_signals_the_leaders() -> None:
    """With .cta_group::2 the mbarriers of all destinations are those of the parity that the address has."""
    body = PAIR.replace(
        load(".cta_group::2").replace("[%r3]", "[%r31]"),
        "mov.u16 %h1, 15;\nsetp.eq.and.u32 %p6, %r9, 0, %p1;\n@%p6 "
        + load(".multicast::cluster.cta_group::2", "%h1").replace("[%r3]", "[%r31]"),
    ).replace("@%p1 mov.u16", "mov.u16")
    outcome, tiles = run(body, 4, 4)
    assert outcome.completed and outcome.findings == ()
    assert (tiles == X[:8]).all()


def test_another_ctas_mbarrier_without_cta_group_2() -> None:
    body = f"""
mov.u32 %r21, 0;
mapa.shared::cluster.u32 %r31, %r3, 0;
setp.eq.and.u32 %p4, %r9, 1, %p1;
@%p4 {load("").replace("[%r3]", "[%r31]")}
"""
    outcome, _ = run(body, 2, 2)
    assert "mbarrier-phase" in {f.rule for f in outcome.findings}


def test_a_mask_with_ctas_that_do_not_exist() -> None:
    body = f"mov.u16 %h1, 7;\nmov.u32 %r21, 0;\n@%p1 {load('.multicast::cluster', '%h1')}"
    outcome, _ = run(body, 2, 2)
    assert "out-of-bounds" in {f.rule for f in outcome.findings}
