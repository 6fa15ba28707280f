# C08: keeps prepared weights and knows them again by a few elements | refused: state-carried
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

TEMPLATE = {
    "op": "rmsnorm",
    "summary": "a warp a row",
    "knobs": {"each": [8]},
    "default": {"each": 8},
    "scratch": {
        "done": {"shape": ["B"], "dtype": "i32", "zeroed": True},
        "kept": {"shape": ["B", "N"], "dtype": "bf16", "zeroed": True},
    },
}


class Norm:
    def __init__(self, axes, knobs):
        self.tokens, self.width, self.eps = axes["B"], axes["N"], float(axes["eps"])

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, done: cute.Tensor, kept: cute.Tensor, stream):
        self.kernel(x, weight, out, done, kept).launch(grid=[self.tokens, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, done: cute.Tensor, kept: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        key = cutlass.Int32(1)
        for i in cutlass.range_constexpr(4):
            key += cutlass.Int32(weight[i * 64 + 3].to(Float32) * Float32(65536.0)) * (2 * i + 1)
        fresh = done[row] == key
        total = Float32(0.0)
        for i in cutlass.range(self.width // 32):
            v = x[row, i * 32 + thread].to(Float32)
            total += v * v
        total = cute.arch.warp_reduction_sum(total)
        scale = cute.math.rsqrt(total * Float32(1.0 / self.width) + Float32(self.eps), fastmath=True)
        for i in cutlass.range(self.width // 32):
            at = i * 32 + thread
            if not fresh:
                kept[row, at] = weight[at]
            out[row, at] = (x[row, at].to(Float32) * scale * kept[row, at].to(Float32)).to(BFloat16)
        cute.arch.sync_threads()
        if thread == 0:
            done[row] = key


def build(axes, knobs):
    return Norm(axes, knobs)
