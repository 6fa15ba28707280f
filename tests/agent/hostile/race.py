# H22: reads what another warp may not have written yet | refused: race
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
        self.kernel(x, weight, out).launch(grid=[self.tokens, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
        wide, _, _ = cute.arch.thread_idx()
        thread = wide % 32
        row, _, _ = cute.arch.block_idx()
        held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((64,)), 16)
        total = Float32(0.0)
        for i in cutlass.range(self.width // 32):
            v = x[row, i * 32 + thread].to(Float32)
            total += v * v
        total = cute.arch.warp_reduction_sum(total)
        held[wide] = total
        total = held[63 - wide]
        scale = cute.math.rsqrt(total * Float32(1.0 / self.width) + Float32(self.eps), fastmath=True)
        for i in cutlass.range(self.width // 32):
            at = i * 32 + thread
            out[row, at] = (x[row, at].to(Float32) * scale * weight[at].to(Float32)).to(BFloat16)


def build(axes, knobs):
    return Norm(axes, knobs)
