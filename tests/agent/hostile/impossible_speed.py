# H20: as fast as no memory is: the first sector of a row stands for all of it | refused: impossible-speed
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

TEMPLATE = {
    "op": "rmsnorm",
    "summary": "a warp a row",
    "knobs": {"each": [8]},
    "default": {"each": 8},
}


class Norm:
    def __init__(self, axes, knobs):
        self.tokens, self.width, self.eps = axes["B"], axes["N"], float(axes["eps"])

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(x, weight, out).launch(grid=[self.tokens, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        v = x[row, thread % 16].to(Float32)
        total = cute.arch.warp_reduction_sum(v * v)
        scale = cute.math.rsqrt(total * Float32(1.0 / 32.0) + Float32(self.eps), fastmath=True)
        y = (v * scale * weight[thread % 16].to(Float32)).to(BFloat16)
        for i in cutlass.range(self.width // 32):
            out[row, i * 32 + thread] = y


def build(axes, knobs):
    return Norm(axes, knobs)
