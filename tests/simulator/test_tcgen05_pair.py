"""tcgen05 with cta_group::2: one MMA over the shared and tensor memories of two CTAs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import run
from tests.simulator.tcgen05_kernels import (
    FREE,
    IMAGE,
    SETUP,
    WAIT,
    argument,
    descriptor,
    idesc,
    module,
    place,
    read,
)
from tests.simulator.test_tcgen05 import DESCRIPTORS, scale_image

CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
RANK = f"""
mov.u32 %r8, %ctaid.x;
mul.wide.u32 %d0, %r8, {IMAGE};
add.s64 %image, %image, %d0;
mul.wide.u32 %d0, %r8, OUT;
add.s64 %out, %out, %d0;
and.b32 %r9, %r8, 1;
"""
LEAD = "setp.eq.u32 %p3, %r9, 0;\nand.pred %p4, %p3, %first;\n"
COMMIT = (
    "mov.u16 %h0, 3;\n"
    "@%p4 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
    "[%bar], %h0;\n"
)


def pair(image_pairs, args, columns, *issue, clusters=1):
    """Run a kernel on pairs of CTAs; return the result and `out` as (CTAs, 128, columns) uint32."""
    setup = SETUP.replace("cta_group::1", "cta_group::2")
    free = (CLUSTER + FREE).replace("cta_group::1", "cta_group::2")
    text = module(
        RANK.replace("OUT", str(512 * columns)),
        setup,
        DESCRIPTORS,
        CLUSTER,
        LEAD,
        *issue,
        WAIT,
        read(columns),
        free,
    )
    images = np.zeros((2 * clusters, IMAGE), np.uint8)
    for k, image in enumerate(image_pairs):
        images[k, : len(image)] = image
    buffers = {
        "image": images.ravel(),
        "out": (2 * clusters * 128 * columns, np.uint32),
        "args": np.array(args, np.uint64),
    }
    result = run(text, buffers, grid=2 * clusters, block=128, smem=IMAGE, cluster=(2, 1, 1))
    return result, result["out"].reshape(2 * clusters, 128, columns)


MMA = "@%p4 tcgen05.mma.cta_group::2.kind::f16 [%tm], %a0, %a1, %r2, %p1;\n"


@pytest.mark.parametrize(("m", "n"), [(256, 64), (128, 64), (256, 256)])
@pytest.mark.parametrize("clusters", [1, 2])
def test_one_mma_over_two_ctas(m, n, clusters):
    rng = np.random.default_rng(m + n)
    images, wanted = [], []
    for _ in range(clusters):
        a = rng.standard_normal((m, 64)).astype(np.float16)
        b = rng.standard_normal((n, 64)).astype(np.float16)
        for rank in range(2):
            image = np.zeros(IMAGE, np.uint8)
            place(image, 0, a[rank * m // 2 : (rank + 1) * m // 2], 2)
            place(image, 16384, b[rank * n // 2 : (rank + 1) * n // 2], 2)
            images.append(image)
        wanted.append(a[:, :16].astype(np.float64) @ b[:, :16].astype(np.float64).T)
    args = [descriptor(0, 16, 1024, 2), descriptor(16384, 16, 1024, 2), idesc(m, n)]
    columns = n if m == 256 else n // 2
    result, out = pair(images, args, columns, MMA, COMMIT, clusters=clusters)
    assert result.rules == [], result.outcome.findings
    for k, want in enumerate(wanted):
        got = out[2 * k : 2 * k + 2].view(np.float32)
        if m == 128:  # lanes 64 to 127 have the second half of the columns
            got = got.reshape(2, 2, 64, columns).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(got.reshape(m, n), want, rtol=2e-7, atol=1e-30)


def test_scale_factors_of_two_ctas():
    """A's factors are of each CTA's rows, B's of all columns in both; each CTA copies its own."""
    rng = np.random.default_rng(0)
    m, n = 256, 128
    a, b = (rng.integers(0, 4, (rows, 32), dtype=np.uint8) for rows in (m, n))
    values = np.array([0.0, 2.0**-9, 2.0**-8, 3 * 2.0**-9])
    fa, fb = (rng.integers(120, 134, (rows, 4), dtype=np.uint8) for rows in (m, n))
    images = []
    for rank in range(2):
        image = np.zeros(IMAGE, np.uint8)
        place(image, 0, a[128 * rank : 128 * rank + 128], 6)
        place(image, 4096, b[64 * rank : 64 * rank + 64], 6)
        image[16384:16896] = scale_image(fa[128 * rank : 128 * rank + 128])
        image[16896:17408] = scale_image(fb)
        images.append(image)
    args = [
        descriptor(0, 16, 256, 6), descriptor(4096, 16, 256, 6),
        idesc(m, n, d=0, more=1 << 23 | 1 << 29 | 1 << 4),
        descriptor(16384, 16, 128, 0), descriptor(16896, 16, 128, 0),
    ]  # fmt: skip
    issue = (
        argument(3, "%a2") + argument(4, "%a3") + "add.s64 %a2, %a2, %origin;\nadd.s64 %a3, %a3, %origin;\n"
    )
    issue += "add.u32 %r3, %tm, 256;\nadd.u32 %r4, %tm, 260;\n"
    issue += "@%p4 tcgen05.cp.cta_group::2.32x128b.warpx4 [%r3], %a2;\n"
    issue += "@%p4 tcgen05.cp.cta_group::2.32x128b.warpx4 [%r4], %a3;\n"
    issue += (
        "@%p4 tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.scale_vec::1X "
        "[%tm], %a0, %a1, %r2, [%r3], [%r4], %p1;\n"
    )
    result, out = pair(images, args, n, issue, COMMIT)
    assert result.rules == [], result.outcome.findings
    left = values[a] * 2.0 ** (fa[:, 1:2].astype(int) - 127)
    right = values[b] * 2.0 ** (fb[:, 1:2].astype(int) - 127)
    np.testing.assert_allclose(out.view(np.float32).reshape(m, n), left @ right.T, rtol=2e-7, atol=1e-30)


def test_a_commit_to_one_cta_leaves_the_other_waiting():
    args = [descriptor(0, 16, 1024, 2), descriptor(16384, 16, 1024, 2), idesc(256, 64)]
    images = [np.zeros(IMAGE, np.uint8)] * 2
    result, _ = pair(images, args, 64, MMA, COMMIT.replace("%h0, 3", "%h0, 1"))
    assert "mbarrier-phase" in result.rules


def test_mixed_cta_groups_are_a_finding():
    args = [descriptor(0, 16, 1024, 2), descriptor(16384, 16, 1024, 2), idesc(128, 64)]
    images = [np.zeros(IMAGE, np.uint8)] * 2
    result, _ = pair(images, args, 64, MMA.replace("cta_group::2", "cta_group::1"), COMMIT)
    assert "tmem-lifetime" in result.rules
