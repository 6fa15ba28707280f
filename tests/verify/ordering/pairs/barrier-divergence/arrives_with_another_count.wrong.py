# found by: static
import cutlass
import cutlass.cute as cute

ARGUMENTS = {
    "x": {"shape": [8, 128], "dtype": "f32", "role": "activation"},
    "out": {"shape": [8, 128], "dtype": "f32", "role": "output"},
}
C = cute.arch


@cute.kernel
def swap(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = C.thread_idx()
    bid, _, _ = C.block_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(cutlass.Float32, cute.make_layout(128), 16)
    warp = C.make_warp_uniform(C.warp_idx())
    if warp < 4:
        row[tid] = x[bid, tid]
        C.barrier_arrive(barrier_id=1, number_of_threads=128)
    else:
        C.barrier(barrier_id=1, number_of_threads=256)
        out[bid, tid - 128] = row[255 - tid]


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    swap(x, out).launch(grid=[8, 1, 1], block=[256, 1, 1])
