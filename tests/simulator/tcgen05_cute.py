"""CuTe DSL sources with tcgen05 GEMM tiles: f16, and block-scaled; one CTA."""

# ruff: noqa: E501

GEMM = '''
"""f16 tcgen05 GEMM tile: ordinary stores to swizzled shared memory, one MMA warp, epilogue from tensor memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float16, Int32, Int64
from cutlass.cute.nvgpu import tcgen05
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as bh

C = cute.arch


class Gemm:
    def __init__(self, axes, knobs):
        self.m, self.n, self.k = axes["M"], axes["N"], axes["K"]

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        op = tcgen05.MmaF16BF16Op(Float16, Float32, (self.m, self.n, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, tcgen05.OperandMajorMode.K, tcgen05.OperandMajorMode.K)
        tm = cute.make_tiled_mma(op)
        la = bh.make_smem_layout_a(tm, (self.m, self.n, self.k), Float16, 1)
        lb = bh.make_smem_layout_b(tm, (self.m, self.n, self.k), Float16, 1)
        tid, _, _ = C.thread_idx()
        warp = C.make_warp_uniform(C.warp_idx())
        sm = utils.SmemAllocator()
        bar = sm.allocate_array(Int64, 1)
        slot = sm.allocate_array(Int32, 1)
        sa = sm.allocate_tensor(Float16, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(Float16, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        if warp == 0:
            C.alloc_tmem(self.n, slot)
        if tid == 0:
            C.mbarrier_init(bar, 1)
        C.mbarrier_init_fence()
        thr = tm.get_slice(0)
        ga = thr.partition_A(a)
        gb = thr.partition_B(b)
        for i in cutlass.range(cute.size(ga) // 128, unroll=1):
            e = i * 128 + tid
            sa[e] = ga[e]
        for i in cutlass.range(cute.size(gb) // 128, unroll=1):
            e = i * 128 + tid
            sb[e] = gb[e]
        C.fence_proxy("async.shared", space="cta")
        C.sync_threads()
        tp = C.retrieve_tmem_ptr(Float32, 16, slot)
        acc = cute.make_tensor(tp, tm.make_fragment_C(tm.partition_shape_C((self.m, self.n))).layout)
        fa = tm.make_fragment_A(sa)
        fb = tm.make_fragment_B(sb)
        if warp == 0:
            tm.set(tcgen05.Field.ACCUMULATE, False)
            for kb in cutlass.range_constexpr(cute.size(fa, mode=[2])):
                cute.gemm(tm, acc, fa[None, None, kb, 0], fb[None, None, kb, 0], acc)
                tm.set(tcgen05.Field.ACCUMULATE, True)
            with C.elect_one():
                tcgen05.commit(bar)
        C.mbarrier_wait(bar, 0)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        tc = tcgen05.make_tmem_copy(atom, acc[(None, None), 0, 0])
        th = tc.get_slice(tid)
        src = th.partition_S(acc[(None, None), 0, 0])
        dst = th.partition_D(c)
        reg = cute.make_rmem_tensor(dst.shape, Float32)
        cute.copy(tc, src, reg)
        C.fence_view_async_tmem_load()
        cute.autovec_copy(reg, dst)
        C.sync_threads()
        if warp == 0:
            C.relinquish_tmem_alloc_permit()
            C.dealloc_tmem(tp, self.n)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        self.kernel(a, b, c).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def build(axes, knobs):
    return Gemm(axes, knobs)
'''

SCALED = '''
"""Block-scaled tcgen05 GEMM tile; operands by ordinary stores, scale factors by tcgen05.cp."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Int32, Int64, Uint8
from cutlass.cute.nvgpu import tcgen05
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as bh
import cutlass.utils.blockscaled_layout as bl

C = cute.arch


class Gemm:
    def __init__(self, axes, knobs):
        self.tile = (axes["M"], axes["N"], axes["K"])
        self.dtype = Float4E2M1FN if axes["bits"] == 4 else Float8E4M3FN
        self.vec = axes["vec"]
        self.sf = Float8E8M0FNU if axes["vec"] == 32 else Float8E4M3FN

    @cute.jit
    def fill(self, target, source, tid):
        for i in cutlass.range(cute.size(source) // 128, unroll=1):
            e = i * 128 + tid
            target[e] = source[e]

    @cute.jit
    def octets(self, tensor, layout):
        pointer = cute.recast_ptr(tensor.iterator, layout.inner, dtype=Uint8)
        return cute.make_tensor(pointer, cute.recast_layout(8, self.dtype.width, layout.outer))

    @cute.jit
    def scales(self, tm, s, t):
        sc, tc = cute.filter_zeros(s), cute.filter_zeros(t)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), self.sf)
        tiled = tcgen05.make_s2t_copy(atom, tc)
        th = tiled.get_slice(0)
        src = tcgen05.get_s2t_smem_desc_tensor(tiled, th.partition_S(sc))
        dst = th.partition_D(tc)
        cute.copy(tiled, src[None, None, None, None, 0], dst)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, fa: cute.Tensor, fb: cute.Tensor, c: cute.Tensor):
        K = tcgen05.OperandMajorMode.K
        tm = bh.make_blockscaled_trivial_tiled_mma(self.dtype, self.dtype, K, K, self.sf, self.vec, tcgen05.CtaGroup.ONE, self.tile[:2])
        la = bh.make_smem_layout_a(tm, self.tile, self.dtype, 1)
        lb = bh.make_smem_layout_b(tm, self.tile, self.dtype, 1)
        lsa = bl.make_smem_layout_sfa(tm, self.tile, self.vec, 1)
        lsb = bl.make_smem_layout_sfb(tm, self.tile, self.vec, 1)
        tid, _, _ = C.thread_idx()
        warp = C.make_warp_uniform(C.warp_idx())
        sm = utils.SmemAllocator()
        bar = sm.allocate_array(Int64, 1)
        slot = sm.allocate_array(Int32, 1)
        sa = sm.allocate_tensor(self.dtype, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(self.dtype, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        ssa = sm.allocate_tensor(self.sf, lsa, byte_alignment=128)
        ssb = sm.allocate_tensor(self.sf, lsb, byte_alignment=128)
        if warp == 0:
            C.alloc_tmem(512, slot)
        if tid == 0:
            C.mbarrier_init(bar, 1)
        C.mbarrier_init_fence()
        thr = tm.get_slice(0)
        ga = cute.recast_tensor(thr.partition_A(cute.recast_tensor(a, self.dtype)), Uint8)
        gb = cute.recast_tensor(thr.partition_B(cute.recast_tensor(b, self.dtype)), Uint8)
        self.fill(self.octets(sa, la), ga, tid)
        self.fill(self.octets(sb, lb), gb, tid)
        pa = cute.recast_ptr(ssa.iterator, dtype=Uint8)
        pb = cute.recast_ptr(ssb.iterator, dtype=Uint8)
        self.fill(cute.make_tensor(pa, cute.make_layout(cute.size(fa))), fa, tid)
        self.fill(cute.make_tensor(pb, cute.make_layout(cute.size(fb))), fb, tid)
        C.fence_proxy("async.shared", space="cta")
        C.sync_threads()
        tp = C.retrieve_tmem_ptr(Float32, 16, slot)
        acc = cute.make_tensor(tp, tm.make_fragment_C(tm.partition_shape_C(self.tile[:2])).layout)
        pt = cute.recast_ptr(tp + tcgen05.find_tmem_tensor_col_offset(acc), dtype=self.sf)
        ta = cute.make_tensor(pt, bl.make_tmem_layout_sfa(tm, self.tile, self.vec, cute.slice_(lsa, (None, None, None, 0))))
        pu = cute.recast_ptr(tp + tcgen05.find_tmem_tensor_col_offset(acc) + tcgen05.find_tmem_tensor_col_offset(ta), dtype=self.sf)
        tb = cute.make_tensor(pu, bl.make_tmem_layout_sfb(tm, self.tile, self.vec, cute.slice_(lsb, (None, None, None, 0))))
        ra = tm.make_fragment_A(sa)
        rb = tm.make_fragment_B(sb)
        if warp == 0:
            with C.elect_one():
                pass
            self.scales(tm, ssa, ta)
            self.scales(tm, ssb, tb)
            tm.set(tcgen05.Field.ACCUMULATE, False)
            for kb in cutlass.range_constexpr(cute.size(ra, mode=[2])):
                tm.set(tcgen05.Field.SFA, ta[None, None, kb].iterator)
                tm.set(tcgen05.Field.SFB, tb[None, None, kb].iterator)
                cute.gemm(tm, acc, ra[None, None, kb, 0], rb[None, None, kb, 0], acc)
                tm.set(tcgen05.Field.ACCUMULATE, True)
            with C.elect_one():
                tcgen05.commit(bar)
        C.mbarrier_wait(bar, 0)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        tc = tcgen05.make_tmem_copy(atom, acc[(None, None), 0, 0])
        th = tc.get_slice(tid)
        src = th.partition_S(acc[(None, None), 0, 0])
        dst = th.partition_D(c)
        reg = cute.make_rmem_tensor(dst.shape, Float32)
        cute.copy(tc, src, reg)
        C.fence_view_async_tmem_load()
        cute.autovec_copy(reg, dst)
        C.sync_threads()
        if warp == 0:
            C.relinquish_tmem_alloc_permit()
            C.dealloc_tmem(tp, 512)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, fa: cute.Tensor, fb: cute.Tensor, c: cute.Tensor, stream):
        self.kernel(a, b, fa, fb, c).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def build(axes, knobs):
    return Gemm(axes, knobs)
'''
