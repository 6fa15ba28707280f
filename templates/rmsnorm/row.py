"""RMSNorm, a CTA for a few rows: out = bf16(x * rsqrt(mean(x^2) + eps) * weight).

Concurrency. The grid has ceil(B / rows) CTAs; a CTA owns `rows` whole rows and nothing crosses CTAs. Each
thread keeps its share of every row in registers, so x is read once. A sum of squares is reduced in the warp
by shuffles, then across warps through shared memory: one float32 a warp and row, written by lane 0, read by
all threads after the only barrier.

Layout. A row is cut into vectors of `vec` elements; thread t owns vectors t, t + threads, t + 2 * threads,
..., so that a warp reads consecutive bytes. Where N is not a multiple of threads * vec, the vectors past
the end are predicated off and count as zeros. A CTA has no more warps than a row has vectors for.

Ordering. `weight` never changes while the kernel can run: it is loaded before the wait, the latency hidden
behind the predecessor. `x` is the predecessor's output: every thread waits itself before it loads x.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CopyG2ROp

TEMPLATE = {
    "op": "rmsnorm",
    "summary": "a CTA for a few rows, row kept in registers, shuffle and shared-memory reduction",
    "knobs": {
        "threads": [32, 64, 128, 256, 512, 1024],
        "vec": [2, 4, 8],
        "rows": [1, 2, 4],
        "weight_early": [True, False],
    },
    "default": {"threads": 256, "vec": 8, "rows": 1, "weight_early": True},
    "constraints": [
        "N % vec == 0",
        # A thread holds at most 64 elements of x.
        "(N + threads * vec - 1) // (threads * vec) * vec * rows <= 64",
        "rows < 2 * B",
    ],
}


class RowNorm:
    """One point of the space; `__call__` is the host function."""

    def __init__(self, axes, knobs):
        self.tokens = axes["B"]
        self.width = axes["N"]
        self.eps = float(axes["eps"])
        self.vec = knobs["vec"]
        self.vectors = self.width // self.vec
        self.threads = min(knobs["threads"], -(-self.vectors // 32) * 32)
        self.rows = knobs["rows"]
        self.weight_early = knobs["weight_early"]
        self.warps = self.threads // 32
        self.steps = -(-self.vectors // self.threads)

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(x, weight, out).launch(
            grid=[cute.ceil_div(self.tokens, self.rows), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def load(self, row: cute.Tensor, thread: cutlass.Int32) -> cute.Tensor:
        """This thread's vectors of `row` (N,) as a register tensor (vec, steps), zero past the end."""
        atom = cute.make_copy_atom(CopyG2ROp(), BFloat16, num_bits_per_copy=16 * self.vec)
        held = cute.make_rmem_tensor((self.vec, self.steps), BFloat16)
        for step in range_constexpr(self.steps):
            vector = step * self.threads + thread
            if const_expr((step + 1) * self.threads <= self.vectors):
                cute.copy(atom, cute.local_tile(row, (self.vec,), (vector,)), held[None, step])
            else:
                held[None, step].fill(BFloat16(0.0))
                if vector < self.vectors:
                    cute.copy(atom, cute.local_tile(row, (self.vec,), (vector,)), held[None, step])
        return held

    @cute.jit
    def store(self, held: cute.Tensor, row: cute.Tensor, thread: cutlass.Int32):
        """The inverse of `load`."""
        for step in range_constexpr(self.steps):
            vector = step * self.threads + thread
            if vector < self.vectors:
                cute.autovec_copy(held[None, step], cute.local_tile(row, (self.vec,), (vector,)))

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.rows, self.warps)), 16)

        if const_expr(self.weight_early):
            w = self.load(weight, thread)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        held = []
        for r in range_constexpr(self.rows):
            # A CTA past the last row repeats it: the loads stay in bounds and the result is not stored.
            row = cutlass.min(block * self.rows + r, self.tokens - 1)
            held.append(self.load(x[row, None], thread))
        if const_expr(not self.weight_early):
            w = self.load(weight, thread)

        for r in range_constexpr(self.rows):
            v = held[r].load().to(Float32)
            square = (v * v).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            square = cute.arch.warp_reduction_sum(square)
            if lane == 0:
                sums[r, warp] = square
        cute.arch.sync_threads()

        for r in range_constexpr(self.rows):
            total = Float32(0.0)
            for other in range_constexpr(self.warps):
                total += sums[r, other]
            scale = cute.math.rsqrt(total * Float32(1.0 / self.width) + Float32(self.eps), fastmath=True)
            result = cute.make_rmem_tensor((self.vec, self.steps), BFloat16)
            result.store((held[r].load().to(Float32) * scale * w.load().to(Float32)).to(BFloat16))
            row = block * self.rows + r
            if row < self.tokens:
                self.store(result, out[row, None], thread)


RowNorm.kernel.set_name_prefix("rms_norm", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(axes, knobs):
    """Return the host function `(x, weight, out, stream)`."""
    return RowNorm(axes, knobs)
