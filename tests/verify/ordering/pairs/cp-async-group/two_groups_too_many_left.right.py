import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

ARGUMENTS = {
    "x": {"shape": [4, 8, 512], "dtype": "f32", "role": "weight"},
    "out": {"shape": [4, 128], "dtype": "f32", "role": "output"},
}
C = cute.arch


@cute.kernel
def stream(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = C.thread_idx()
    bid, _, _ = C.block_idx()
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout((3, 512), stride=(512, 1)), 16)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=128)
    for k in cutlass.range_constexpr(2):
        cute.copy(
            atom, cute.local_tile(x[bid, k, None], (4,), (tid,)), cute.local_tile(tile[k, None], (4,), (tid,))
        )
        C.cp_async_commit_group()
    acc = cutlass.Float32(0.0)
    for k in cutlass.range_constexpr(8):
        C.cp_async_wait_group(1)
        C.sync_threads()
        if cutlass.const_expr(k + 2 < 8):
            cute.copy(
                atom,
                cute.local_tile(x[bid, k + 2, None], (4,), (tid,)),
                cute.local_tile(tile[(k + 2) % 3, None], (4,), (tid,)),
            )
        C.cp_async_commit_group()
        for j in cutlass.range_constexpr(4):
            acc = acc + tile[k % 3, (127 - tid) * 4 + j]
    out[bid, tid] = acc


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    stream(x, out).launch(grid=[4, 1, 1], block=[128, 1, 1])
