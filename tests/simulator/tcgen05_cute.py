"""CuTe DSL sources with tcgen05 GEMM tiles: f16, block-scaled, and pipelined with TMA."""

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

PIPELINE = '''
"""TMA and tcgen05 GEMM: multi-stage mbarrier pipeline, warp roles, one or two CTAs a tile."""
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as bh

C = cute.arch
K = tcgen05.OperandMajorMode.K


class Gemm:
    def __init__(self, axes, knobs):
        self.ctas, self.stages = axes["ctas"], axes["stages"]
        self.tile = (128 * self.ctas, axes["TN"], 64)
        self.m, self.n = axes["M"], axes["N"]

    def mma(self):
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        op = tcgen05.MmaF16BF16Op(Float16, Float32, (*self.tile[:2], 16), group, tcgen05.OperandSource.SMEM, K, K)
        return cute.make_tiled_mma(op)

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor, c: cute.Tensor,
        la: cute.ComposedLayout, lb: cute.ComposedLayout,
    ):
        tm = self.mma()
        tid, _, _ = C.thread_idx()
        bx, by, _ = C.block_idx()
        warp = C.make_warp_uniform(C.warp_idx())
        rank = C.make_warp_uniform(C.block_idx_in_cluster())
        half = bx % self.ctas
        leader = half == 0
        vmnk = cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (tm.thr_id,))
        sm = utils.SmemAllocator()
        ab_bars = sm.allocate_array(Int64, 2 * self.stages)
        acc_bars = sm.allocate_array(Int64, 2)
        dealloc_bar = sm.allocate_array(Int64, 1)
        slot = sm.allocate_array(Int32, 1)
        sa = sm.allocate_tensor(Float16, la.outer, byte_alignment=1024, swizzle=la.inner)
        sb = sm.allocate_tensor(Float16, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        tx = (cute.size_in_bytes(Float16, cute.select(la, mode=[0, 1, 2])) + cute.size_in_bytes(Float16, cute.select(lb, mode=[0, 1, 2]))) * self.ctas
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        producer, consumer = pipeline.PipelineTmaUmma.create(
            barrier_storage=ab_bars, num_stages=self.stages, producer_group=one, consumer_group=one,
            tx_count=tx, cta_layout_vmnk=vmnk,
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            barrier_storage=acc_bars, num_stages=1, producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.ctas), cta_layout_vmnk=vmnk,
        ).make_participants()
        alloc_bar = pipeline.NamedBarrier(barrier_id=2, num_threads=160)
        tmem = utils.TmemAllocator(
            slot, barrier_for_retrieve=alloc_bar, allocator_warp_id=0, is_two_cta=self.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=dealloc_bar,
        )
        thr = tm.get_slice(half)
        ga = thr.partition_A(cute.local_tile(a, (self.tile[0], self.tile[2]), (bx // self.ctas, None)))
        gb = thr.partition_B(cute.local_tile(b, (self.tile[1], self.tile[2]), (by, None)))
        gc = thr.partition_C(cute.local_tile(c, self.tile[:2], (bx // self.ctas, by)))
        alone = cute.make_layout(1)
        ta, tga = cpasync.tma_partition(tma_a, 0, alone, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3))
        tb, tgb = cpasync.tma_partition(tma_b, 0, alone, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3))
        ra = tm.make_fragment_A(sa)
        rb = tm.make_fragment_B(sb)
        fake = tm.make_fragment_C(tm.partition_shape_C(self.tile[:2]))
        if self.ctas == 2:
            C.cluster_arrive()
            C.cluster_wait()
        else:
            C.sync_threads()
        steps = cute.size(tga, mode=[1])
        if warp == 5:
            for k in cutlass.range(steps, unroll=1):
                handle = producer.acquire_and_advance()
                cute.copy(tma_a, tga[None, k], ta[None, handle.index], tma_bar_ptr=handle.barrier)
                cute.copy(tma_b, tgb[None, k], tb[None, handle.index], tma_bar_ptr=handle.barrier)
            producer.tail()
        if warp == 4:
            tmem.wait_for_alloc()
            acc = cute.make_tensor(tmem.retrieve_ptr(Float32), fake.layout)
            if leader:
                empty = acc_producer.acquire_and_advance()
                for k in cutlass.range(steps, unroll=1):
                    handle = consumer.wait_and_advance()
                    tm.set(tcgen05.Field.ACCUMULATE, k != 0)
                    for kb in cutlass.range_constexpr(4):
                        cute.gemm(tm, acc, ra[None, None, kb, handle.index], rb[None, None, kb, handle.index], acc)
                        tm.set(tcgen05.Field.ACCUMULATE, True)
                    handle.release()
                empty.commit()
            acc_producer.tail()
        if warp < 4:
            tmem.allocate(512)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            acc = cute.make_tensor(pointer, fake.layout)
            full = acc_consumer.wait_and_advance()
            atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
            tc = tcgen05.make_tmem_copy(atom, acc[(None, None), 0, 0])
            th = tc.get_slice(tid)
            dst = th.partition_D(gc[(None, None), 0, 0])
            reg = cute.make_rmem_tensor(dst.shape, Float32)
            cute.copy(tc, th.partition_S(acc[(None, None), 0, 0]), reg)
            C.fence_view_async_tmem_load()
            with C.elect_one():
                full.release()
            cute.autovec_copy(reg, dst)
            tmem.relinquish_alloc_permit()
            pipeline.NamedBarrier(barrier_id=1, num_threads=128).arrive_and_wait()
            tmem.free(pointer)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        tm = self.mma()
        la = bh.make_smem_layout_a(tm, self.tile, Float16, self.stages)
        lb = bh.make_smem_layout_b(tm, self.tile, Float16, self.stages)
        vmnk = cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (tm.thr_id,))
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        op = cpasync.CopyBulkTensorTileG2SOp(group)
        ta, xa = cute.nvgpu.make_tiled_tma_atom_A(op, a, cute.slice_(la, (None, None, None, 0)), self.tile, tm, vmnk.shape)
        tb, xb = cute.nvgpu.make_tiled_tma_atom_B(op, b, cute.slice_(lb, (None, None, None, 0)), self.tile, tm, vmnk.shape)
        self.kernel(ta, xa, tb, xb, c, la, lb).launch(
            grid=[self.m // 128, self.n // self.tile[1], 1], block=[192, 1, 1], cluster=[self.ctas, 1, 1], stream=stream
        )


def build(axes, knobs):
    return Gemm(axes, knobs)
'''


def edited(source: str, *changes: tuple[str, str]) -> str:
    """A source with texts replaced, each of which stands there once."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


STORED = edited(
    PIPELINE,
    ("c: cute.Tensor,\n        la:", "tma_c: cute.CopyAtom, c: cute.Tensor,\n        la:"),
    (
        "        tx = ",
        "        sc = sm.allocate_tensor(Float32, cute.make_layout((128, self.tile[1]), stride=(self.tile[1], 1)), byte_alignment=1024)\n"
        "        tx = ",
    ),
    ("        gc = thr.partition_C(cute.local_tile(c, self.tile[:2], (bx // self.ctas, by)))\n", ""),
    (
        "        ra = tm.make_fragment_A(sa)\n",
        "        gc = cute.local_tile(c, (128, self.tile[1]), (bx, by))\n"
        "        ts, tgc = cpasync.tma_partition(tma_c, 0, alone, cute.group_modes(sc, 0, 2), cute.group_modes(gc, 0, 2))\n"
        "        ra = tm.make_fragment_A(sa)\n",
    ),
    ("            dst = th.partition_D(gc[(None, None), 0, 0])\n", "            dst = th.partition_D(sc)\n"),
    (
        "            tmem.relinquish_alloc_permit()\n",
        '            C.fence_proxy("async.shared", space="cta")\n'
        "            tmem.relinquish_alloc_permit()\n",
    ),
    (
        "            tmem.free(pointer)\n",
        "            if warp == 0:\n"
        "                cute.copy(tma_c, ts, tgc)\n"
        "                C.cp_async_bulk_commit_group()\n"
        "                C.cp_async_bulk_wait_group(0, read=True)\n"
        "            tmem.free(pointer)\n",
    ),
    (
        "        self.kernel(ta, xa, tb, xb, c, la, lb)",
        "        lc = cute.make_layout((128, self.tile[1]), stride=(self.tile[1], 1))\n"
        "        tc, xc = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, lc, (128, self.tile[1]))\n"
        "        self.kernel(ta, xa, tb, xb, tc, xc, la, lb)",
    ),
)
"""The pipeline with its epilogue through shared memory and a TMA store."""
