# found by: dynamic
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

ARGUMENTS = {
    "x": {"shape": [128, 256], "dtype": "f32", "role": "activation"},
    "out": {"shape": [128, 32], "dtype": "f32", "role": "output"},
}
C = cute.arch
STAGES = 3


@cute.kernel
def sums(tma: cute.CopyAtom, src: cute.Tensor, out: cute.Tensor):
    tid, _, _ = C.thread_idx()
    bid, _, _ = C.block_idx()
    warp = C.make_warp_uniform(C.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(
        cutlass.Float32, cute.make_layout((32, 32, STAGES), stride=(32, 1, 1024)), 128
    )
    bars = smem.allocate_array(cutlass.Int64, 2 * STAGES)
    pipe = pipeline.PipelineTmaAsync.create(
        barrier_storage=bars,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
        tx_count=4096,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    parts = cute.local_tile(src, (32, 32), (bid, None))
    s, g = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(parts, 0, 2)
    )
    if warp == 4:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        for k in cutlass.range(8):
            pipe.producer_acquire(state)
            cute.copy(tma, g[None, k], s[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))
            state.advance()
        pipe.producer_tail(state)
    else:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        row = tid // 4
        col = (tid % 4) * 8
        acc = cute.make_rmem_tensor(8, cutlass.Float32)
        acc.fill(0.0)
        for _ in cutlass.range(8):
            pipe.consumer_wait(state)
            pipe.consumer_release(state)
            for j in cutlass.range_constexpr(8):
                acc[j] = acc[j] + tile[row, col + j, state.index]
            state.advance()
        for j in cutlass.range_constexpr(8):
            out[bid * 32 + row, col + j] = acc[j]


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    layout = cute.make_layout((32, 32), stride=(32, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (32, 32))
    sums(atom, tensor, out).launch(grid=[4, 1, 1], block=[160, 1, 1])
