# found by: static, dynamic
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

ARGUMENTS = {
    "x": {"shape": [128, 32], "dtype": "f32", "role": "activation"},
    "out": {"shape": [128, 32], "dtype": "f32", "role": "output"},
}
C = cute.arch


@cute.kernel
def take(tma: cute.CopyAtom, src: cute.Tensor, out: cute.Tensor):
    tid, _, _ = C.thread_idx()
    bid, _, _ = C.block_idx()
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout((32, 32), stride=(32, 1)), 128)
    bar = smem.allocate_array(cutlass.Int64, 1)
    if tid == 0:
        C.mbarrier_init(bar, 1)
        C.mbarrier_init_fence()
    C.sync_threads()
    part = cute.local_tile(src, (32, 32), (bid, 0))
    s, g = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(part, 0, 2)
    )
    if tid < 32:
        with C.elect_one():
            C.mbarrier_arrive_and_expect_tx(bar, 2048)
        cute.copy(tma, g, s, tma_bar_ptr=bar)
    C.mbarrier_wait(bar, 0)
    row = tid // 4
    for j in cutlass.range_constexpr(8):
        out[bid * 32 + row, (tid % 4) * 8 + j] = tile[row, (tid % 4) * 8 + j] * 2.0


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    layout = cute.make_layout((32, 32), stride=(32, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (32, 32))
    take(atom, tensor, out).launch(grid=[4, 1, 1], block=[128, 1, 1])
