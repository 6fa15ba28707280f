"""Routed experts of one rank, two launches of matrix-vector products straight from MXFP4 weights.

    gate_up   hidden[b, k, i]   = bf16(SiTU(w13[e, i] . latent[b], w13[e, I + i] . latent[b]))   e = ids[b, k]
    down      expanded[b, k, l] = bf16(w2[e, l] . hidden[b, k])

Concurrency. A CTA serves one (token, slot) pair, blockIdx.y, and a block of output rows, blockIdx.x. A
group of consecutive lanes computes `rows` outputs; a gate row and its up row belong to the same group, so
SiTU needs no exchange. Groups never talk to each other; a group adds its lanes' sums by shuffles. `hidden`
crosses from the first launch to the second through global memory.

Layout. A row is cut into pieces of 32 elements: 16 bytes of weights, one scale byte, 64 bytes of
activations. Lane j of a group owns pieces j, j + lanes, ...: consecutive lanes read consecutive 16 bytes. A
flight is `flight` pieces of each row; the next one is loaded while one is used. Activations are staged once
a CTA in shared memory as (8 elements, quarter of a piece, lane, step) with the lane innermost after the
elements, so that the 16-byte reads of a warp are free of bank conflicts. Pieces past the end of a row are
zeros, in weights, scales and activations alike.

Arithmetic. float32 accumulation within a piece, then one FMA with the piece's power-of-two scale. `decode`:
"cvt" unpacks with cvt.rn.bf16x2.e2m1x2 (sm_100 and later), "bits" with shifts and masks (any architecture).
`math`: "mixed" is fma.rn.f32.bf16 (sm_100 and later), "f32x2" packed FMA (sm_100 and later), "f32" plain FMA.

Ordering. Which weights to read depends on `ids`, so nothing but addresses precedes the wait; every thread
waits itself, then loads weights, then activations.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

TEMPLATE = {
    "op": "moe_experts",
    "summary": "lane groups a row, 16-byte MXFP4 loads, gate_up + SiTU and down launches",
    "knobs": {
        "threads": [64, 128, 256],
        "lanes": [8, 16, 32],
        "rows": [1, 2],
        "flight": [1, 2, 4, 7],
        "down_lanes": [2, 4],
        "down_rows": [1, 2, 4],
        "decode": ["cvt", "bits"],
        "math": ["mixed", "f32x2", "f32"],
        "tanh": ["exp", "approx"],
    },
    "default": {
        "threads": 128,
        "lanes": 8,
        "rows": 1,
        "flight": 2,
        "down_lanes": 4,
        "down_rows": 2,
        "decode": "cvt",
        "math": "mixed",
        "tanh": "exp",
    },
    "constraints": [
        "L % 32 == 0 and I % 32 == 0",
        "decode == 'cvt' or math == 'f32'",
        # Whole row blocks.
        "I % (threads // lanes * rows) == 0",
        "L % (threads // down_lanes * down_rows) == 0",
        # Two flights in registers, four words a row and piece.
        "2 * rows * min(2 * flight, (L // 32 + lanes - 1) // lanes) <= 16",
    ],
    "scratch": {"hidden": {"shape": ["B", "K", "I"], "dtype": "bf16"}},
}

LOG2_E = 1.4426950408889634


def decode_cvt(word):
    """Eight E2M1 values in a word -> four bf16x2 words, pair p holds elements 2p and 2p + 1."""
    return cute.arch.inline_ptx(
        "{ .reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, {$r0}; "
        "cvt.rn.bf16x2.e2m1x2 {$w0}, b0; cvt.rn.bf16x2.e2m1x2 {$w1}, b1; "
        "cvt.rn.bf16x2.e2m1x2 {$w2}, b2; cvt.rn.bf16x2.e2m1x2 {$w3}, b3; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[word],
    )


def decode_bits(word):
    """Eight E2M1 values in a word -> four bf16x2 words, pair p holds elements p and p + 4.

    The sign moves to the sign bit, exponent and mantissa to bits 8..6: a bfloat16, subnormal for 0.5, whose
    value is the element times 2^-126. One exact multiplication restores it.
    """
    pairs = []
    for p in range(4):
        moved = word >> Uint32(4 * p)
        small = ((moved & Uint32(0x00080008)) << Uint32(12)) | ((moved & Uint32(0x00070007)) << Uint32(6))
        pairs.append(Uint32(cute.arch.fma_packed_bf16x2(Int32(small), Int32(0x7E807E80), Int32(0))))
    return pairs


def halves(pair):
    """The two float32 values of a bf16x2 word, exactly."""
    return [(pair << Uint32(16)).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)]


def dot_mixed(word, x, total=None):
    """Eight products added to `total`, float32 bits (Uint32; None is 0); x: eight bf16 patterns (Uint16)."""
    body = "{ .reg .b8 b0, b1, b2, b3; .reg .b16 l, h; .reg .b32 p; mov.b32 {b0, b1, b2, b3}, {$r0}; "
    addend = "0f00000000" if total is None else "{$r9}"
    for i in range(4):
        body += f"cvt.rn.bf16x2.e2m1x2 p, b{i}; mov.b32 {{l, h}}, p; "
        body += f"fma.rn.f32.bf16 {{$w0}}, l, {{$r{2 * i + 1}}}, {addend}; "
        body += f"fma.rn.f32.bf16 {{$w0}}, h, {{$r{2 * i + 2}}}, {{$w0}}; "
        addend = "{$w0}"
    return cute.arch.inline_ptx(
        body + "}",
        write_only_types=[Uint32],
        read_only_args=[word, *x] if total is None else [word, *x, total],
    )


class Piece:
    """Dot product of 32 E2M1 weights with 32 activations, by the knobs `decode` and `math`."""

    def __init__(self, decode, math):
        self.decode = decode
        self.math = math

    def activations(self, held):
        """Prepare 32 bf16 activations, a register tensor (8, 4), for `dot`."""
        if self.math == "mixed":
            bits = cute.recast_tensor(held, Uint16)
            return [bits[i] for i in range(32)]
        return [held[i].to(Float32) for i in range(32)]

    def dot(self, words, x):
        """Sum of the 32 products without the piece's scale; words: register tensor (4,) Uint32."""
        total = Float32(0.0)
        if self.math == "mixed":
            bits = dot_mixed(words[0], x[:8])
            for q in range(1, 4):
                bits = dot_mixed(words[q], x[8 * q : 8 * q + 8], bits)
            total = bits.bitcast(Float32)
        elif self.math == "f32x2":
            pair = (Float32(0.0), Float32(0.0))
            for q in range(4):
                for p, two in enumerate(decode_cvt(words[q])):
                    i = 8 * q + 2 * p
                    pair = cute.arch.fma_packed_f32x2(tuple(halves(two)), (x[i], x[i + 1]), pair)
            total = pair[0] + pair[1]
        else:
            for q in range(4):
                pairs = decode_cvt(words[q]) if self.decode == "cvt" else decode_bits(words[q])
                first, apart = (2, 1) if self.decode == "cvt" else (1, 4)
                for p in range(4):
                    low, high = halves(pairs[p])
                    i = 8 * q + first * p
                    total = low * x[i] + total
                    total = high * x[i + apart] + total
        return total

    def scale(self, code):
        """E8M0 code (Uint32) -> float32 scale; 255 is NaN."""
        if self.decode == "cvt":
            return cute.arch.inline_ptx(
                "{ .reg .b16 c; .reg .b32 s; cvt.u16.u32 c, {$r0}; cvt.rn.bf16x2.ue8m0x2 s, c; "
                "shl.b32 s, s, 16; mov.b32 {$w0}, s; }",
                write_only_types=[Float32],
                read_only_args=[code],
            )
        bits = code << Uint32(23)
        bits = Uint32(cutlass.select_(code == Uint32(0), Uint32(0x00400000), bits))
        bits = Uint32(cutlass.select_(code == Uint32(255), Uint32(0x7FC00000), bits))
        return bits.bitcast(Float32)


def tanh(z, how):
    """tanh by `how`: "exp" is accurate to a few ulp at any magnitude, "approx" is tanh.approx.f32."""
    if how == "approx":
        return cute.math.tanh(z, fastmath=True)
    size = cute.math.absf(z)
    e = cute.math.exp2(size * Float32(-2.0 * LOG2_E), fastmath=True)
    large = (Float32(1.0) - e) * cute.arch.rcp_approx(Float32(1.0) + e)
    # 1 - e cancels for small z; there the series is exact to float32.
    small = size - size * size * size * Float32(1.0 / 3.0)
    return cute.math.copysign(cutlass.select_(size < Float32(0.02), small, large), z)


def situ(gate, up, beta, lam, how):
    """beta * tanh(gate / beta) * sigmoid(gate) * lam * tanh(up / lam) in float32."""
    sigmoid = cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(gate * Float32(-LOG2_E), fastmath=True))
    left = Float32(beta) * tanh(gate * Float32(1.0 / beta), how) * sigmoid
    return left * (Float32(lam) * tanh(up * Float32(1.0 / lam), how))


class Rows:
    """Products of a few weight rows with one activation vector by a group of `lanes` lanes.

    Args:
        depth: elements of a row, a multiple of 32.
        lanes: lanes that share a row.
        flight: pieces of each row loaded at once; the next flight is loaded while one is used.
    """

    def __init__(self, depth, lanes, flight, piece):
        self.pieces = depth // 32
        self.lanes = lanes
        self.steps = -(-self.pieces // lanes)
        self.flight = min(flight, self.steps)
        self.piece = piece
        self.whole = self.steps * lanes == self.pieces

    def layout(self):
        """Shared-memory layout of the activations: (element, quarter, lane, step)."""
        return cute.make_layout(
            (8, 4, self.lanes, self.steps), stride=(1, 8 * self.lanes, 8, 32 * self.lanes)
        )

    @cute.jit
    def stage(self, vector: cute.Tensor, shared: cute.Tensor, thread: Int32, threads: cutlass.Constexpr):
        """Copy `vector` (depth,) bf16 to `shared`, zeros past its end; the caller then needs a barrier."""
        chunks = 4 * self.lanes * self.steps
        for turn in range_constexpr(-(-chunks // threads)):
            chunk = turn * threads + thread
            if const_expr((turn + 1) * threads <= chunks) or chunk < chunks:
                piece = chunk // 4
                target = shared[None, chunk % 4, piece % self.lanes, piece // self.lanes]
                if const_expr(self.whole) or piece < self.pieces:
                    cute.autovec_copy(cute.local_tile(vector, (8,), (chunk,)), target)
                else:
                    target.fill(BFloat16(0.0))

    @cute.jit
    def load(self, weights, scales, lane: Int32, begin: cutlass.Constexpr):
        """Start loading the flight that begins with this lane's piece `begin`.

        Args:
            weights: list of row tensors (depth / 8,) Uint32.
            scales: list of row tensors (depth / 32,) Uint8.

        Returns:
            Register tensors: words (4, rows, flight) and codes (rows, flight), zeros past the rows' end.
        """
        count, length = len(weights), min(self.flight, self.steps - begin)
        words = cute.make_rmem_tensor((4, count, length), Uint32)
        codes = cute.make_rmem_tensor((count, length), Uint8)
        stream = cute.make_copy_atom(
            CopyG2ROp(), Uint32, num_bits_per_copy=128, l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE
        )
        for s in range_constexpr(length):
            piece = (begin + s) * self.lanes + lane
            inside = (begin + s + 1) * self.lanes <= self.pieces
            if const_expr(not inside):
                words[None, None, s].fill(Uint32(0))
                codes[None, s].fill(Uint8(0))
            if const_expr(inside) or piece < self.pieces:
                for r in range_constexpr(count):
                    cute.copy(stream, cute.local_tile(weights[r], (4,), (piece,)), words[None, r, s])
                    codes[r, s] = scales[r][piece]
        return words, codes

    @cute.jit
    def accumulate(self, sums, words, codes, shared: cute.Tensor, lane: Int32, begin: cutlass.Constexpr):
        """Return `sums`, one float32 a row, plus what `load` fetched times the activations in `shared`."""
        sums = list(sums)
        for s in range_constexpr(cute.size(codes, mode=[1])):
            held = cute.make_rmem_tensor((8, 4), BFloat16)
            for quarter in range_constexpr(4):
                cute.autovec_copy(shared[None, quarter, lane, begin + s], held[None, quarter])
            x = self.piece.activations(held)
            for r in range_constexpr(len(sums)):
                scale = self.piece.scale(Uint32(codes[r, s]))
                sums[r] = self.piece.dot(words[None, r, s], x) * scale + sums[r]
        return sums

    @cute.jit
    def products(
        self, vector: cute.Tensor, weights, scales, lane: Int32, thread: Int32, threads: cutlass.Constexpr
    ):
        """One float32 a row of `weights`, the same in all lanes of the group. Every thread calls it.

        The first flight of weights is on its way before the activations are staged: the compiler does not
        move these loads below the barrier.
        """
        shared = cutlass.memory.SmemAllocator().allocate_tensor(BFloat16, self.layout(), 16)
        words, codes = self.load(weights, scales, lane, 0)
        self.stage(vector, shared, thread, threads)
        cute.arch.sync_threads()
        sums = [Float32(0.0) for _ in weights]
        for begin in range_constexpr(0, self.steps, self.flight):
            ready = words, codes
            if const_expr(begin + self.flight < self.steps):
                words, codes = self.load(weights, scales, lane, begin + self.flight)
            sums = self.accumulate(sums, *ready, shared, lane, begin)
        return [cute.arch.warp_reduction_sum(v, threads_in_group=self.lanes) for v in sums]


class Experts:
    """One point of the space; `__call__` is the host function."""

    def __init__(self, axes, knobs):
        self.tokens, self.slots = axes["B"], axes["K"]
        self.latent_width, self.width = axes["L"], axes["I"]
        self.beta, self.lam = float(axes["beta"]), float(axes["lambda"])
        self.threads = knobs["threads"]
        self.rows, self.down_rows = knobs["rows"], knobs["down_rows"]
        self.tanh = knobs["tanh"]
        piece = Piece(knobs["decode"], knobs["math"])
        self.up = Rows(self.latent_width, knobs["lanes"], knobs["flight"], piece)
        down_steps = -(-(self.width // 32) // knobs["down_lanes"])
        self.down = Rows(self.width, knobs["down_lanes"], down_steps, piece)

    @cute.jit
    def __call__(
        self,
        latent: cute.Tensor,
        ids: cute.Tensor,
        w13: cute.Tensor,
        w13_scale: cute.Tensor,
        w2: cute.Tensor,
        w2_scale: cute.Tensor,
        hidden: cute.Tensor,
        expanded: cute.Tensor,
        stream,
    ):
        pairs = self.tokens * self.slots
        self.gate_up_kernel(latent, ids, cute.recast_tensor(w13, Uint32), w13_scale, hidden).launch(
            grid=[self.width // (self.threads // self.up.lanes * self.rows), pairs, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        self.down_kernel(hidden, ids, cute.recast_tensor(w2, Uint32), w2_scale, expanded).launch(
            grid=[self.latent_width // (self.threads // self.down.lanes * self.down_rows), pairs, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def gate_up_kernel(
        self,
        latent: cute.Tensor,
        ids: cute.Tensor,
        w13: cute.Tensor,
        w13_scale: cute.Tensor,
        hidden: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, pair, _ = cute.arch.block_idx()
        token, slot = pair // self.slots, pair % self.slots
        lane, group = thread % self.up.lanes, thread // self.up.lanes
        first = (block * (self.threads // self.up.lanes) + group) * self.rows

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        expert = ids[token, slot]
        wanted = [first + r for r in range(self.rows)] + [self.width + first + r for r in range(self.rows)]
        sums = self.up.products(
            latent[token, None],
            [w13[expert, row, None] for row in wanted],
            [w13_scale[expert, row, None] for row in wanted],
            lane,
            thread,
            self.threads,
        )
        if lane == 0:
            for r in range_constexpr(self.rows):
                gate, up = sums[r], sums[self.rows + r]
                hidden[token, slot, first + r] = situ(gate, up, self.beta, self.lam, self.tanh).to(BFloat16)

    @cute.kernel
    def down_kernel(
        self,
        hidden: cute.Tensor,
        ids: cute.Tensor,
        w2: cute.Tensor,
        w2_scale: cute.Tensor,
        expanded: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, pair, _ = cute.arch.block_idx()
        token, slot = pair // self.slots, pair % self.slots
        lane, group = thread % self.down.lanes, thread // self.down.lanes
        first = (block * (self.threads // self.down.lanes) + group) * self.down_rows

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        expert = ids[token, slot]
        wanted = [first + r for r in range(self.down_rows)]
        sums = self.down.products(
            hidden[token, slot, None],
            [w2[expert, row, None] for row in wanted],
            [w2_scale[expert, row, None] for row in wanted],
            lane,
            thread,
            self.threads,
        )
        if lane == 0:
            for r in range_constexpr(self.down_rows):
                expanded[token, slot, first + r] = sums[r].to(BFloat16)


for _kernel, _name in ((Experts.gate_up_kernel, "gate_up"), (Experts.down_kernel, "down")):
    _kernel.set_name_prefix(_name, remove_cutlass_symbol=True, keep_mangled_name=False)


def build(axes, knobs):
    """Return the host function over (latent, ids, w13, w13_scale, w2, w2_scale, hidden, expanded, stream)."""
    return Experts(axes, knobs)
