"""CuTe DSL kernels with matrix instructions of warps and warpgroups, run from their PTX, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import CompileRequest, CompileServer, compile_candidate
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.simulator import Memory, Outcome, simulate

WARP = '''
"""A tile by four warps: ordinary stores to swizzled shared memory, ldmatrix, mma.sync m16n8k16."""
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.nvgpu import warp

T = {dtype}


class Gemm:
    def __init__(self, axes, knobs):
        self.m, self.n, self.k = axes["M"], axes["N"], axes["K"]

    @cute.kernel
    def kernel(self, tm: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor,
               la: cute.ComposedLayout, lb: cute.ComposedLayout):
        tid, _, _ = cute.arch.thread_idx()
        sm = cutlass.memory.SmemAllocator()
        sa = sm.allocate_tensor(T, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(T, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        for i in cutlass.range(tid, self.m * self.k, 128):
            sa[(i // self.k, i % self.k)] = a[(i // self.k, i % self.k)]
        for i in cutlass.range(tid, self.n * self.k, 128):
            {store_b}
        {barrier}
        thr = tm.get_slice(tid)
        ra = tm.make_fragment_A(thr.partition_A(sa))
        rb = tm.make_fragment_B(thr.partition_B({view_b}))
        gc = thr.partition_C(c)
        acc = cute.make_rmem_tensor(gc.shape, Float32)
        acc.fill(0.0)
        ca = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), T), tm)
        cb = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp({trans}, 2), T), tm)
        ta, tb = ca.get_slice(tid), cb.get_slice(tid)
        cute.copy(ca, ta.partition_S(sa), ta.retile(ra))
        cute.copy(cb, tb.partition_S({view_b}), tb.retile(rb))
        for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
            cute.gemm(tm, acc, ra[None, None, k], rb[None, None, k], acc)
        cute.autovec_copy(acc, gc)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        tm = cute.make_tiled_mma(warp.MmaF16BF16Op(T, Float32, (16, 8, 16)), cute.make_layout((2, 2, 1)))
        rows = cute.make_layout((8, 64), stride=(64, 1))
        atom = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, rows)
        la = cute.tile_to_shape(atom, (self.m, self.k), (0, 1))
        lb = cute.tile_to_shape(atom, {shape_b}, (0, 1))
        self.kernel(tm, a, b, c, la, lb).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def build(axes, knobs):
    return Gemm(axes, knobs)
'''

WARPGROUP = '''
"""A tile by warpgroups: ordinary stores to swizzled shared memory, wgmma with A in shared memory."""
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hh
from cutlass import BFloat16, Float16, Float32
from cutlass.tensor_utils import LayoutEnum
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

T = {dtype}


class Gemm:
    def __init__(self, axes, knobs):
        self.m, self.n, self.k = axes["M"], axes["N"], axes["K"]
        self.threads = self.m * 2

    @cute.kernel
    def kernel(self, tm: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor,
               la: cute.ComposedLayout, lb: cute.ComposedLayout):
        tid, _, _ = cute.arch.thread_idx()
        sm = cutlass.memory.SmemAllocator()
        sa = sm.allocate_tensor(T, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(T, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        for i in cutlass.range(tid, self.m * self.k, self.threads):
            sa[(i // self.k, i % self.k, 0)] = a[(i // self.k, i % self.k)]
        for i in cutlass.range(tid, self.n * self.k, self.threads):
            sb[(i // self.k, i % self.k, 0)] = b[(i // self.k, i % self.k)]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()
        thr = tm.get_slice(tid)
        ra = tm.make_fragment_A(thr.partition_A(sa))
        rb = tm.make_fragment_B(thr.partition_B(sb))
        gc = thr.partition_C(c)
        acc = cute.make_rmem_tensor(gc.shape, Float32)
        tm.set(warpgroup.Field.ACCUMULATE, False)
        {fence}
        for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
            cute.gemm(tm, acc, ra[None, None, k, 0], rb[None, None, k, 0], acc)
            tm.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        {wait}
        cute.autovec_copy(acc, gc)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        tm = hh.make_trivial_tiled_mma(T, T, OperandMajorMode.K, OperandMajorMode.K, Float32,
                                       (self.m // 64, 1, 1), (64, self.n))
        tile = (self.m, self.n, self.k)
        la = hh.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, T, 1)
        lb = hh.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, T, 1)
        self.kernel(tm, a, b, c, la, lb).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream)


def build(axes, knobs):
    return Gemm(axes, knobs)
'''
PIPELINE = '''
"""A GEMM over K in two stages: the product of one stage is under way while the next one is filled."""
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hh
from cutlass import BFloat16, Float16, Float32
from cutlass.tensor_utils import LayoutEnum
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

T = {dtype}
KT = 64


class Gemm:
    def __init__(self, axes, knobs):
        self.m, self.n, self.k = axes["M"], axes["N"], axes["K"]
        self.threads = self.m * 2

    @cute.kernel
    def kernel(self, tm: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor,
               la: cute.ComposedLayout, lb: cute.ComposedLayout):
        tid, _, _ = cute.arch.thread_idx()
        sm = cutlass.memory.SmemAllocator()
        sa = sm.allocate_tensor(T, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(T, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        thr = tm.get_slice(tid)
        ra = tm.make_fragment_A(thr.partition_A(sa))
        rb = tm.make_fragment_B(thr.partition_B(sb))
        gc = thr.partition_C(c)
        acc = cute.make_rmem_tensor(gc.shape, Float32)
        acc.fill(0.0)
        tm.set(warpgroup.Field.ACCUMULATE, True)
        for t in cutlass.range(self.k // KT, unroll=1):
            stage = t % 2
            for i in cutlass.range(tid, self.m * KT, self.threads):
                sa[(i // KT, i % KT, stage)] = a[(i // KT, t * KT + i % KT)]
            for i in cutlass.range(tid, self.n * KT, self.threads):
                sb[(i // KT, i % KT, stage)] = b[(i // KT, t * KT + i % KT)]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier()
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                cute.gemm(tm, acc, ra[None, None, k, stage], rb[None, None, k, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group({left})
            cute.arch.barrier()
        warpgroup.wait_group(0)
        cute.autovec_copy(acc, gc)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        tm = hh.make_trivial_tiled_mma(T, T, OperandMajorMode.K, OperandMajorMode.K, Float32,
                                       (self.m // 64, 1, 1), (64, self.n))
        tile = (self.m, self.n, KT)
        la = hh.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, T, 2)
        lb = hh.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, T, 2)
        self.kernel(tm, a, b, c, la, lb).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream)


def build(axes, knobs):
    return Gemm(axes, knobs)
'''
NUMBERS = {
    "f16": (DType.F16, np.float16, "Float16"),
    "bf16": (DType.BF16, ml_dtypes.bfloat16, "BFloat16"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[CompileServer]:
    with CompileServer() as s:
        yield s


def compiled(server: CompileServer, source: str, axes: dict[str, Any], kind: Any, arch: str) -> Artifact:
    m, n, k = axes["M"], axes["N"], axes["K"]
    buffers = (
        BoundBuffer(name="a", shape=(m, k), dtype=kind, role=Role.ACTIVATION),
        BoundBuffer(name="b", shape=(n, k), dtype=kind, role=Role.WEIGHT),
        BoundBuffer(name="c", shape=(m, n), dtype=DType.F32, role=Role.OUTPUT),
    )
    request = CompileRequest(
        op="gemm", workload="tile", axes=axes, template="test", knobs={}, arch=arch, source=source,
        buffers=buffers,
    )  # fmt: skip
    return compile_candidate(request, server=server)


def executed(artifact: Artifact, axes: dict[str, Any], dtype: Any) -> tuple[Outcome, Any, Any]:
    rng = np.random.default_rng(1)
    m, n, k = axes["M"], axes["N"], axes["K"]
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)
    memory = Memory(1 << 26)
    for name, array in (("a", a), ("b", b)):
        memory.allocate(name, array.nbytes, initialized=True)[:] = array.view(np.uint8).ravel()
    memory.allocate("c", m * n * 4)
    outcome = simulate(artifact, memory)
    c = memory.view("c").view(np.float32).reshape(m, n)
    return outcome, c, a.astype(np.float64) @ b.astype(np.float64).T


PLAIN = {
    "store_b": "sb[(i // self.k, i % self.k)] = b[(i // self.k, i % self.k)]",
    "view_b": "sb", "trans": "False", "shape_b": "(self.n, self.k)", "barrier": "cute.arch.barrier()",
}  # fmt: skip
TURNED = {
    **PLAIN,
    "store_b": "sb[(i % self.k, i // self.k)] = b[(i // self.k, i % self.k)]",
    "view_b": "cute.composition(sb, cute.make_layout((self.n, self.k), stride=(self.k, 1)))",
    "trans": "True",
    "shape_b": "(self.k, self.n)",
}


@pytest.mark.parametrize(("kind", "parts"), [("f16", PLAIN), ("bf16", PLAIN), ("bf16", TURNED)])
def test_mma_with_ldmatrix(server, kind, parts):
    dtype, number, name = NUMBERS[kind]
    axes = {"M": 64, "N": 64, "K": 128}
    artifact = compiled(server, WARP.format(dtype=name, **parts), axes, dtype, "sm_103a")
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in artifact.ptx
    assert (".x2.trans.shared.b16" in artifact.ptx) == (parts is TURNED)
    assert "mma.sync.aligned.m16n8k16" in artifact.ptx
    outcome, c, want = executed(artifact, axes, number)
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)
    assert outcome.counters[0].warp_instructions["tensor"] == 64 * 64 * 128 // (16 * 8 * 16)


def test_a_missing_barrier_before_ldmatrix_is_found(server):
    axes = {"M": 64, "N": 64, "K": 128}
    source = WARP.format(dtype="BFloat16", **{**PLAIN, "barrier": "pass"})
    outcome, _, _ = executed(compiled(server, source, axes, DType.BF16, "sm_103a"), axes, ml_dtypes.bfloat16)
    assert "race" in {f.rule for f in outcome.findings}


@pytest.mark.parametrize(("kind", "m", "n", "k"), [("bf16", 64, 64, 128), ("f16", 128, 128, 64)])
def test_wgmma(server, kind, m, n, k):
    dtype, number, name = NUMBERS[kind]
    axes = {"M": m, "N": n, "K": k}
    source = WARPGROUP.format(dtype=name, fence="warpgroup.fence()", wait="warpgroup.wait_group(0)")
    artifact = compiled(server, source, axes, dtype, "sm_90a")
    assert f"wgmma.mma_async.sync.aligned.m64n{n}k16" in artifact.ptx
    outcome, c, want = executed(artifact, axes, number)
    assert outcome.completed and outcome.findings == ()
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["fence", "wait"])
def test_wgmma_without_its_fence_or_wait_is_found(server, fault):
    axes = {"M": 64, "N": 64, "K": 128}
    parts = {"fence": "warpgroup.fence()", "wait": "warpgroup.wait_group(0)"}
    source = WARPGROUP.format(dtype="BFloat16", **{**parts, fault: "pass"})
    outcome, _, _ = executed(compiled(server, source, axes, DType.BF16, "sm_90a"), axes, ml_dtypes.bfloat16)
    assert "wgmma-order" in {f.rule for f in outcome.findings}


@pytest.mark.parametrize("left", [0, 1, 2])
def test_wgmma_in_two_stages(server, left):
    """One group may be under way while the other stage is filled; with two the operands are overwritten."""
    axes = {"M": 128, "N": 64, "K": 384}
    artifact = compiled(server, PIPELINE.format(dtype="BFloat16", left=left), axes, DType.BF16, "sm_90a")
    outcome, c, want = executed(artifact, axes, ml_dtypes.bfloat16)
    assert outcome.completed
    if left == 2:
        assert {f.rule for f in outcome.findings} == {"buffer-reuse"}
        assert not np.allclose(c, want, rtol=1e-2, atol=1e-2)
    else:
        assert outcome.findings == ()
        np.testing.assert_allclose(c, want, rtol=1e-4, atol=1e-4)
