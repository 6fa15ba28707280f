# found by: static
import cutlass
import cutlass.cute as cute

ARGUMENTS = {
    "x": {"shape": [8, 512], "dtype": "f32", "role": "activation"},
    "out": {"shape": [8, 512], "dtype": "f32", "role": "output"},
}


@cute.kernel
def scale(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    if tid < 32:
        cute.arch.griddepcontrol_wait()
    cute.arch.sync_threads()
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), cutlass.Float32, num_bits_per_copy=128, invariant=True)
    rows = cute.zipped_divide(x, (1, 4))
    source = rows[None, (bid, tid)]
    fragment = cute.make_fragment_like(source)
    cute.copy(atom, source, fragment)
    into = cute.zipped_divide(out, (1, 4))[None, (bid, tid)]
    into.store(fragment.load() * 2.0)


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    scale(x, out).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
