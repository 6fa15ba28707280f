"""A warp-specialised GEMM of CuTe DSL for sm_90a (TMA, a ring of mbarriers, wgmma), and faults in it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.test_matrix_cute import compiled, executed, server
from workbench.ops.dtypes import DType

__all__ = ["server"]

GEMM = '''
"""One producer warp loads tiles by TMA into a ring, warpgroups multiply them; a CTA a tile of C."""
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hh
from cutlass import BFloat16, Float32, Int64
from cutlass.tensor_utils import LayoutEnum
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

C = cute.arch
TM, TN, TK, STAGES = 128, 64, 64, 3


class Gemm:
    def __init__(self, axes, knobs):
        self.m, self.n, self.k = axes["M"], axes["N"], axes["K"]

    @cute.kernel
    def kernel(self, tm: cute.TiledMma, ta: cute.CopyAtom, a: cute.Tensor, tb: cute.CopyAtom, b: cute.Tensor,
               c: cute.Tensor, la: cute.ComposedLayout, lb: cute.ComposedLayout):
        tid, _, _ = C.thread_idx()
        bm, bn, _ = C.block_idx()
        warp = C.make_warp_uniform(C.warp_idx())
        sm = cutlass.memory.SmemAllocator()
        full = sm.allocate_array(Int64, STAGES)
        empty = sm.allocate_array(Int64, STAGES)
        sa = sm.allocate_tensor(BFloat16, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(BFloat16, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        if tid == 0:
            for s in cutlass.range_constexpr(STAGES):
                C.mbarrier_init(full + s, 1)
                C.mbarrier_init(empty + s, 2 * TM)
            C.mbarrier_init_fence()
        C.sync_threads()
        ga = cute.local_tile(a, (TM, TK), (bm, None))
        gb = cute.local_tile(b, (TN, TK), (bn, None))
        one = cute.make_layout(1)
        das, dag = cpasync.tma_partition(ta, 0, one, cute.group_modes(sa, 0, 2), cute.group_modes(ga, 0, 2))
        dbs, dbg = cpasync.tma_partition(tb, 0, one, cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2))
        tiles = self.k // TK
        if warp == 2 * TM // 32:
            for t in cutlass.range(tiles, unroll=1):
                s = t % STAGES
                {reuse}
                with C.elect_one():
                    C.mbarrier_arrive_and_expect_tx(full + s, {nbytes})
                cute.copy(ta, dag[(None, t)], das[(None, s)], tma_bar_ptr=full + s)
                cute.copy(tb, dbg[(None, t)], dbs[(None, s)], tma_bar_ptr=full + s)
        if warp < 2 * TM // 32:
            thr = tm.get_slice(tid)
            ra = tm.make_fragment_A(thr.partition_A(sa))
            rb = tm.make_fragment_B(thr.partition_B(sb))
            gc = thr.partition_C(cute.local_tile(c, (TM, TN), (bm, bn)))
            acc = cute.make_rmem_tensor(gc.shape, Float32)
            acc.fill(0.0)
            tm.set(warpgroup.Field.ACCUMULATE, True)
            for t in cutlass.range(tiles, unroll=1):
                s = t % STAGES
                {wait}
                warpgroup.fence()
                for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                    cute.gemm(tm, acc, ra[None, None, k, s], rb[None, None, k, s], acc)
                warpgroup.commit_group()
                warpgroup.wait_group({left})
                C.mbarrier_arrive(empty + s)
            warpgroup.wait_group(0)
            cute.autovec_copy(acc, gc)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        tm = hh.make_trivial_tiled_mma(BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32,
                                       (TM // 64, 1, 1), (64, TN))
        la = hh.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TM, TN, TK), BFloat16, STAGES)
        lb = hh.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TM, TN, TK), BFloat16, STAGES)
        op = cpasync.CopyBulkTensorTileG2SOp()
        ta, ga = cpasync.make_tiled_tma_atom(op, a, cute.slice_(la, (None, None, 0)), (TM, TK))
        tb, gb = cpasync.make_tiled_tma_atom(op, b, cute.slice_(lb, (None, None, 0)), (TN, TK))
        grid = [self.m // TM, self.n // TN, 1]
        self.kernel(tm, ta, ga, tb, gb, c, la, lb).launch(grid=grid, block=[2 * TM + 32, 1, 1], stream=stream)


def build(axes, knobs):
    return Gemm(axes, knobs)
'''
RIGHT = {
    "reuse": "C.mbarrier_wait(empty + s, ((t // STAGES) & 1) ^ 1)",
    "wait": "C.mbarrier_wait(full + s, (t // STAGES) & 1)",
    "nbytes": "(TM + TN) * TK * 2",
    "left": "0",
}
AXES = {"M": 256, "N": 128, "K": 512}


def test_gemm(server):
    artifact = compiled(server, GEMM.format(**RIGHT), AXES, DType.BF16, "sm_90a")
    assert "cp.async.bulk.tensor" in artifact.ptx and "wgmma.mma_async" in artifact.ptx
    outcome, c, want = executed(artifact, AXES, ml_dtypes.bfloat16)
    assert outcome.completed and outcome.findings == (), outcome.findings
    np.testing.assert_allclose(c, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "fault", "rule"),
    [
        ("wait", "C.mbarrier_wait(full + s, ((t // STAGES) & 1) ^ 1)", "uninitialized-read"),
        ("nbytes", "(TM + TN) * TK * 2 + 16", "mbarrier-phase"),
        ("reuse", "pass", "mbarrier-phase"),
        ("left", "1", "buffer-reuse"),
    ],
)
def test_faults_are_found(server, part, fault, rule):
    """A wrong phase, wrong bytes, a stage refilled too early, a stage handed back while it is read."""
    source = GEMM.format(**{**RIGHT, part: fault})
    outcome, _, _ = executed(compiled(server, source, AXES, DType.BF16, "sm_90a"), AXES, ml_dtypes.bfloat16)
    assert rule in {f.rule for f in outcome.findings}
