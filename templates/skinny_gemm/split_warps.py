"""Projection of a few tokens, a row's K elements split over warps: out[b, n] = bf16(weight[n] . x[b]).

Concurrency. A group of `split` warps computes `rows` neighbouring weight rows for all tokens; a CTA holds
threads / 32 / split groups. Each warp sums its share of K in registers, reduces over its lanes by shuffles,
and lane 0 leaves one float32 a row and token in shared memory. After the barrier one thread a result adds
the `split` parts in order and rounds once. Nothing crosses CTAs.

Layout. A row is cut into vectors of 8 elements (16 bytes); lane j of warp w of a group owns vectors
32 w + j, 32 (split + w) + j, ...: a warp reads 512 consecutive bytes. A flight is `flight` vectors of each
row, loaded at once while the flight before is used; `flight` 0 loads the whole share of a row. Vectors past
the end of a row are zeros. `operand` "shared": the tokens are staged in shared memory by the whole CTA;
"direct": each warp loads the vectors it needs.

Arithmetic. `math`: "mixed" is fma.rn.f32.bf16, "f32x2" packed FMA (both sm_100 and later), "f32" plain FMA.

Ordering. `weight` never changes while the kernel can run: its first flight is loaded before the wait, and
the latency hides behind the predecessor. `x` is the predecessor's output: every thread waits before it
loads x.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

TEMPLATE = {
    "op": "skinny_gemm",
    "summary": "dot products of a few weight rows a group of warps, K split over the warps",
    "knobs": {
        "threads": [64, 128, 256],
        "split": [1, 2, 4, 8],
        "rows": [1, 2, 4],
        "flight": [0, 1, 2, 4],
        "operand": ["shared", "direct"],
        "math": ["mixed", "f32x2", "f32"],
    },
    "default": {
        "threads": 128,
        "split": 4,
        "rows": 2,
        "flight": 0,
        "operand": "direct",
        "math": "mixed",
    },
    "constraints": [
        "K % 8 == 0",
        "threads >= 32 * split",
        # Every warp has something to do.
        "32 * (split - 1) < K // 8",
        # The weights in flight stay in registers: at most 64 words, two flights unless it is the only one.
        "flight == 0 or flight < (K // 8 + 32 * split - 1) // (32 * split)",
        "(2 * flight or (K // 8 + 32 * split - 1) // (32 * split)) * rows <= 16",
        # So do the sums, and the unrolled code stays short.
        "rows * B <= 32",
        "(K // 8 + 32 * split - 1) // (32 * split) * rows * B <= 128",
        "operand == 'direct' or 2 * B * K <= 196608",
    ],
}


def mixed(w, x, total):
    """Two bf16 products added to `total`, float32; w, x: bf16 pairs in a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b, c, d; mov.b32 {a, b}, {$r0}; mov.b32 {c, d}, {$r1}; "
        "fma.rn.f32.bf16 {$w0}, a, c, {$r2}; fma.rn.f32.bf16 {$w0}, b, d, {$w0}; }",
        write_only_types=[Float32],
        read_only_args=[w, x, total],
    )


def halves(pair):
    """The two float32 values of a bf16 pair, exactly."""
    return (pair << Uint32(16)).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)


class SplitWarps:
    """One point of the space; `__call__` is the host function."""

    def __init__(self, axes, knobs):
        self.tokens, self.outputs, self.depth = axes["B"], axes["N"], axes["K"]
        self.threads, self.split, self.rows = knobs["threads"], knobs["split"], knobs["rows"]
        self.math, self.shared = knobs["math"], knobs["operand"] == "shared"
        self.groups = self.threads // (32 * self.split)
        self.vectors = self.depth // 8
        self.stride = 32 * self.split
        self.steps = -(-self.vectors // self.stride)
        self.flight = knobs["flight"] or self.steps

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(cute.recast_tensor(x, Uint32), cute.recast_tensor(weight, Uint32), out).launch(
            grid=[cute.ceil_div(self.outputs, self.groups * self.rows), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def load(
        self, rows, first: Int32, begin: cutlass.Constexpr, length: cutlass.Constexpr, keep: cutlass.Constexpr
    ):
        """Vectors of `length` steps from `begin`: a register tensor (4, rows, length), zeros past the end.

        Args:
            rows: list of row tensors (K / 2,) Uint32.
            first: this lane's first vector.
            keep: whether the first-level cache is to keep the lines.
        """
        held = cute.make_rmem_tensor((4, len(rows), length), Uint32)
        if const_expr(keep):
            atom = cute.make_copy_atom(CopyG2ROp(), Uint32, num_bits_per_copy=128)
        else:
            atom = cute.make_copy_atom(
                CopyG2ROp(),
                Uint32,
                num_bits_per_copy=128,
                l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE,
            )
        for s in range_constexpr(length):
            vector = (begin + s) * self.stride + first
            inside = (begin + s + 1) * self.stride <= self.vectors
            if const_expr(not inside):
                held[None, None, s].fill(Uint32(0))
            if const_expr(inside) or vector < self.vectors:
                for r in range_constexpr(len(rows)):
                    cute.copy(atom, cute.local_tile(rows[r], (4,), (vector,)), held[None, r, s])
        return held

    @cute.jit
    def read(self, tile: cute.Tensor, first: Int32, step: cutlass.Constexpr):
        """The tokens' vectors of one step from shared memory: a register tensor (4, tokens)."""
        held = cute.make_rmem_tensor((4, self.tokens), Uint32)
        vector = step * self.stride + first
        inside = (step + 1) * self.stride <= self.vectors
        if const_expr(not inside):
            held.fill(Uint32(0))
        if const_expr(inside) or vector < self.vectors:
            for b in range_constexpr(self.tokens):
                cute.autovec_copy(tile[None, vector, b], held[None, b])
        return held

    def dot(self, w, x, total):
        """Eight products added to `total`: a float32, or a pair of them for "f32x2"."""
        for q in range(4):
            if self.math == "mixed":
                total = mixed(w[q], x[q], total)
            elif self.math == "f32x2":
                total = cute.arch.fma_packed_f32x2(halves(w[q]), halves(x[q]), total)
            else:
                for a, b in zip(halves(w[q]), halves(x[q]), strict=True):
                    total = a * b + total
        return total

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        group, part = warp // self.split, warp % self.split
        first = part * 32 + lane
        start = (block * self.groups + group) * self.rows
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(
            Float32, cute.make_layout((self.split, self.tokens, self.groups * self.rows)), 16
        )
        if const_expr(self.shared):
            tile = smem.allocate_tensor(Uint32, cute.make_layout((4, self.vectors, self.tokens)), 16)

        # Rows past the last repeat it: the loads stay in bounds and the results are not stored.
        rows = [weight[cutlass.min(start + r, self.outputs - 1), None] for r in range(self.rows)]
        tokens = [x[b, None] for b in range(self.tokens)]
        w = self.load(rows, first, 0, self.flight, False)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.shared):
            for b in range_constexpr(self.tokens):
                for turn in range_constexpr(-(-self.vectors // self.threads)):
                    vector = turn * self.threads + thread
                    if const_expr((turn + 1) * self.threads <= self.vectors) or vector < self.vectors:
                        cute.autovec_copy(cute.local_tile(tokens[b], (4,), (vector,)), tile[None, vector, b])
            cute.arch.sync_threads()

        zero = (Float32(0.0), Float32(0.0)) if self.math == "f32x2" else Float32(0.0)
        totals = [[zero for _ in range(self.tokens)] for _ in range(self.rows)]
        for begin in range_constexpr(0, self.steps, self.flight):
            ready, length = w, min(self.flight, self.steps - begin)
            after = begin + self.flight
            if const_expr(after < self.steps):
                w = self.load(rows, first, after, min(self.flight, self.steps - after), False)
            for s in range_constexpr(length):
                if const_expr(self.shared):
                    held = self.read(tile, first, begin + s)
                else:
                    held = self.load(tokens, first, begin + s, 1, True)[None, None, 0]
                for b in range_constexpr(self.tokens):
                    for r in range_constexpr(self.rows):
                        totals[r][b] = self.dot(ready[None, r, s], held[None, b], totals[r][b])
        for r in range_constexpr(self.rows):
            for b in range_constexpr(self.tokens):
                total = totals[r][b]
                if const_expr(self.math == "f32x2"):
                    total = total[0] + total[1]
                total = cute.arch.warp_reduction_sum(total)
                if lane == 0:
                    sums[part, b, group * self.rows + r] = total
        cute.arch.sync_threads()

        count = self.groups * self.rows
        for turn in range_constexpr(-(-count * self.tokens // self.threads)):
            index = turn * self.threads + thread
            row = block * count + index % count
            if index < count * self.tokens and row < self.outputs:
                total = sums[0, index // count, index % count]
                for p in range_constexpr(1, self.split):
                    total += sums[p, index // count, index % count]
                out[index // count, row] = total.to(BFloat16)


SplitWarps.kernel.set_name_prefix("split_warps", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(axes, knobs):
    """Return the host function `(x, weight, out, stream)`."""
    return SplitWarps(axes, knobs)
