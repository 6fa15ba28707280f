"""The MoE block of one rank: a chain of three to five launches.

    front     logits[b, e] = w_router[e] . x[b] (float32)      latent[b, d] = bf16(w_down[d] . x[b]), d < D
    top_k     ids, weights of the K chosen experts
    gate_up   hidden[b, k, i] = bf16(SiTU(w13[e, i] . latent[b], w13[e, I + i] . latent[b])),  e = ids[b, k]
    down      expanded[b, k, l] = bf16(w2[e, l] . hidden[b, k])
    combine   out[b, l] = bf16(sum over k in rank order of weights[b, k] * expanded[b, k, l]), float32 FMA

top_k is a launch of its own (`route` "launch"), or every CTA of gate_up selects for itself ("inline").
combine is a launch of its own (`combine` "separate"), or the end of down ("fused").

Concurrency.
- front: `front_split` warps share `front_rows` rows of the stacked router and down-projection weights and
  serve all tokens; their sums meet in shared memory. A CTA has router rows or down-projection rows, never
  both.
- top_k: a CTA a token. A lane sorts its keys; K times a warp removes the best of its lanes' heads (redux).
  The warps' candidates meet in shared memory; each counts the candidates above it: the count is its rank.
- gate_up: a CTA serves one (token, slot) pair; groups of `lanes` lanes compute `rows` gate rows and the up
  rows that belong to them, so SiTU needs no exchange.
- down: groups of `down_lanes` lanes compute `down_rows` rows. "separate": a CTA serves one (token, slot)
  pair. "fused": a CTA serves a token; its warps share out the K slots, the rounded products meet in shared
  memory and are combined in rank order.

Layout. An MXFP4 row is cut into pieces of 32 elements: 16 bytes of weights, one scale byte, 64 bytes of
activations. Lane j of a group owns pieces j, j + lanes, ...: consecutive lanes read consecutive 16 bytes. A
flight is `flight` pieces of each row; the next one is loaded while one is used. Activations are staged in
shared memory as (8 elements, quarter of a piece, lane, step) so that 16-byte reads of a warp are free of
bank conflicts. Pieces past the end of a row are zeros, in weights, scales and activations alike.

Arithmetic. float32 accumulation within a piece, then one FMA with the piece's power-of-two scale. `decode`:
"cvt" unpacks with cvt.rn.bf16x2.e2m1x2 (sm_100 and later), "bits" with shifts and masks (any architecture).
`math`: "mixed" is fma.rn.f32.bf16 (sm_100 and later), "f32x2" packed FMA (sm_100 and later), "f32" plain FMA.

Ordering. Each launch may start while its predecessor runs; every thread of every launch waits itself before
it touches anything but weights, so a launch also sees what the launches before its predecessor wrote. front
loads its weights, the selection the bias before the wait. gate_up and down cannot: their weights depend on
`ids`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint16, Uint32, Uint64, const_expr, range_constexpr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

TEMPLATE = {
    "op": "moe",
    "summary": "front, top-k, gate_up + SiTU, down, combine: PDL chain of matrix-vector products",
    "knobs": {
        "threads": [128, 256],
        "front_rows": [1, 2],
        "front_split": [2, 4],
        "lanes": [8, 16],
        "rows": [1, 2],
        "flight": [1, 2, 7],
        "down_rows": [1, 2, 4],
        "down_warps": [8, 16],
        "route": ["launch", "inline"],
        "combine": ["fused", "separate"],
        "decode": ["cvt", "bits"],
        "math": ["mixed", "f32x2", "f32"],
    },
    "default": {
        "threads": 128,
        "front_rows": 2,
        "front_split": 4,
        "lanes": 8,
        "rows": 1,
        "flight": 2,
        "down_rows": 1,
        "down_warps": 8,
        "route": "launch",
        "combine": "fused",
        "decode": "cvt",
        "math": "mixed",
    },
    "constraints": [
        "decode == 'cvt' or math == 'f32'",
        # gate_up: whole row blocks; two flights in registers, four words a row and piece.
        "I % (threads // lanes * rows) == 0",
        "2 * rows * min(2 * flight, (L // 32 + lanes - 1) // lanes) <= 16",
        # down: whole row blocks; fused, the warps share out the slots.
        "L % (8 * down_rows * (1 if combine == 'fused' else down_warps)) == 0",
        "combine == 'separate' or K % min(down_warps, K) == 0",
        "combine == 'separate' or (I // 32 + 3) // 4 * down_rows * (K // min(down_warps, K)) <= 16",
        # front: router and down-projection rows in different CTAs, the weights of a warp in registers.
        "E % (threads // (32 * front_split) * front_rows) == 0",
        "D % (threads // (32 * front_split) * front_rows) == 0",
        "(H // 8 + 32 * front_split - 1) // (32 * front_split) * front_rows <= 16",
        "L % 32 == 0 and I % 32 == 0 and H % 8 == 0 and K <= 16 and K <= E",
    ],
    "scratch": {
        "logits": {"shape": ["B", "E"], "dtype": "f32"},
        "ids": {"shape": ["B", "K"], "dtype": "i32"},
        "weights": {"shape": ["B", "K"], "dtype": "bf16"},
        "hidden": {"shape": ["B", "K", "I"], "dtype": "bf16"},
        "expanded": {"shape": ["B", "K", "L"], "dtype": "bf16"},
    },
}

LOG2_E = 1.4426950408889634
TOP_K_THREADS = 128
DOWN_LANES = 4


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


def tanh(z):
    """tanh, accurate to a few ulp at any magnitude."""
    size = cute.math.absf(z)
    e = cute.math.exp2(size * Float32(-2.0 * LOG2_E), fastmath=True)
    large = (Float32(1.0) - e) * cute.arch.rcp_approx(Float32(1.0) + e)
    # 1 - e cancels for small z; there the series is exact to float32.
    small = size - size * size * size * Float32(1.0 / 3.0)
    return cute.math.copysign(cutlass.select_(size < Float32(0.02), small, large), z)


def situ(gate, up, beta, lam):
    """beta * tanh(gate / beta) * sigmoid(gate) * lam * tanh(up / lam) in float32."""
    left = Float32(beta) * tanh(gate * Float32(1.0 / beta)) * sigmoid(gate)
    return left * (Float32(lam) * tanh(up * Float32(1.0 / lam)))


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
    def products(self, weights, scales, words, codes, shared: cute.Tensor, lane: Int32):
        """One float32 a row of `weights`, the same in all lanes of the group.

        `words` and `codes` are the first flight, loaded before the barrier that made `shared` visible.
        """
        sums = [Float32(0.0) for _ in weights]
        for begin in range_constexpr(0, self.steps, self.flight):
            ready = words, codes
            if const_expr(begin + self.flight < self.steps):
                words, codes = self.load(weights, scales, lane, begin + self.flight)
            sums = self.accumulate(sums, *ready, shared, lane, begin)
        return [cute.arch.warp_reduction_sum(v, threads_in_group=self.lanes) for v in sums]


def sigmoid(x):
    """1 / (1 + exp(-x)), a few ulp at any magnitude."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2_E), fastmath=True))


def key_of(score, expert):
    """64-bit key, larger is better: the score's bits made monotone (NaN is 0), then ~id."""
    bits = score.bitcast(Uint32)
    flipped = bits ^ (Uint32(0x80000000) | (Uint32(0) - (bits >> Uint32(31))))
    ordered = Uint32(cutlass.select_(score == score, flipped, Uint32(0)))
    return (Uint64(ordered) << Uint64(32)) | Uint64(~Uint32(expert))


def expert_of(key):
    """The expert of a key."""
    return Int32(~Uint32(key & Uint64(0xFFFFFFFF)))


class Moe:
    """One point of the space; `__call__` is the host function."""

    def __init__(self, axes, knobs):
        self.tokens, self.slots, self.experts = axes["B"], axes["K"], axes["E"]
        self.model_width, self.share = axes["H"], axes["D"]
        self.latent_width, self.width = axes["L"], axes["I"]
        self.beta, self.lam = float(axes["beta"]), float(axes["lambda"])
        self.threads = knobs["threads"]
        self.front_rows, self.front_split = knobs["front_rows"], knobs["front_split"]
        self.front_groups = self.threads // (32 * self.front_split)
        self.front_block = self.front_groups * self.front_rows
        self.rows, self.down_rows = knobs["rows"], knobs["down_rows"]
        self.inline = knobs["route"] == "inline"
        self.fused = knobs["combine"] == "fused"
        self.down_warps = min(knobs["down_warps"], self.slots) if self.fused else knobs["down_warps"]
        piece = Piece(knobs["decode"], knobs["math"])
        self.up = Rows(self.latent_width, knobs["lanes"], knobs["flight"], piece)
        self.down = Rows(self.width, DOWN_LANES, -(-(self.width // 32) // DOWN_LANES), piece)
        self.up_block = self.threads // self.up.lanes * self.rows
        self.down_block = 32 // DOWN_LANES * self.down_rows * (1 if self.fused else self.down_warps)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_router: cute.Tensor,
        bias: cute.Tensor,
        w_down: cute.Tensor,
        latent: cute.Tensor,
        w13: cute.Tensor,
        w13_scale: cute.Tensor,
        w2: cute.Tensor,
        w2_scale: cute.Tensor,
        logits: cute.Tensor,
        ids: cute.Tensor,
        weights: cute.Tensor,
        hidden: cute.Tensor,
        expanded: cute.Tensor,
        out: cute.Tensor,
        stream,
    ):
        pairs = self.tokens * self.slots
        w13 = cute.recast_tensor(w13, Uint32)
        w2 = cute.recast_tensor(w2, Uint32)
        self.front(x, w_router, w_down, logits, latent).launch(
            grid=[(self.experts + self.share) // self.front_block, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        if const_expr(not self.inline):
            self.top_k(logits, bias, ids, weights).launch(
                grid=[self.tokens, 1, 1], block=[TOP_K_THREADS, 1, 1], stream=stream, use_pdl=True
            )
        self.gate_up(latent, logits, bias, ids, weights, w13, w13_scale, hidden).launch(
            grid=[self.width // self.up_block, pairs, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        if const_expr(self.fused):
            self.down_fused(hidden, ids, weights, w2, w2_scale, out).launch(
                grid=[self.latent_width // self.down_block, self.tokens, 1],
                block=[32 * self.down_warps, 1, 1],
                stream=stream,
                use_pdl=True,
            )
        else:
            self.down_separate(hidden, ids, w2, w2_scale, expanded).launch(
                grid=[self.latent_width // self.down_block, pairs, 1],
                block=[32 * self.down_warps, 1, 1],
                stream=stream,
                use_pdl=True,
            )
            self.combine(expanded, weights, out).launch(
                grid=[cute.ceil_div(self.latent_width, self.threads), self.tokens, 1],
                block=[self.threads, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    @cute.jit
    def front_weights(self, matrix: cute.Tensor, first: Int32, part: Int32, held: cute.Tensor):
        """Load this lane's share of `front_rows` rows of `matrix` (rows, H) into `held` (8, step, row)."""
        for r in range_constexpr(self.front_rows):
            for s in range_constexpr(cute.size(held, mode=[1])):
                vector = s * 32 * self.front_split + part
                held[None, s, r].fill(BFloat16(0.0))
                if vector < self.model_width // 8:
                    source = cute.local_tile(matrix[first + r, None], (8,), (vector,))
                    cute.autovec_copy(source, held[None, s, r])

    @cute.kernel
    def front(
        self,
        x: cute.Tensor,
        w_router: cute.Tensor,
        w_down: cute.Tensor,
        logits: cute.Tensor,
        latent: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        vectors = self.model_width // 8
        steps = -(-vectors // (32 * self.front_split))
        group, split = warp // self.front_split, warp % self.front_split
        part = split * 32 + lane
        row = block * self.front_block + group * self.front_rows
        sums = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.front_split, self.front_block, self.tokens)), 16
        )

        held = cute.make_rmem_tensor((8, steps, self.front_rows), BFloat16)
        router = block < self.experts // self.front_block
        if router:
            self.front_weights(w_router, row, part, held)
        else:
            self.front_weights(w_down, row - self.experts, part, held)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for token in cutlass.range(self.tokens, unroll=1):
            totals = [Float32(0.0) for _ in range(self.front_rows)]
            for s in range_constexpr(steps):
                vector = s * 32 * self.front_split + part
                values = cute.make_rmem_tensor(8, BFloat16)
                values.fill(BFloat16(0.0))
                if vector < vectors:
                    cute.autovec_copy(cute.local_tile(x[token, None], (8,), (vector,)), values)
                for r in range_constexpr(self.front_rows):
                    for i in range_constexpr(8):
                        totals[r] += held[i, s, r].to(Float32) * values[i].to(Float32)
            for r in range_constexpr(self.front_rows):
                total = cute.arch.warp_reduction_sum(totals[r])
                if lane == 0:
                    sums[split, group * self.front_rows + r, token] = total
        cute.arch.sync_threads()

        for turn in range_constexpr(-(-self.front_block * self.tokens // self.threads)):
            item = turn * self.threads + thread
            if item < self.front_block * self.tokens:
                local, token = item % self.front_block, item // self.front_block
                total = Float32(0.0)
                for s in range_constexpr(self.front_split):
                    total += sums[s, local, token]
                if router:
                    logits[token, block * self.front_block + local] = total
                else:
                    latent[token, block * self.front_block + local - self.experts] = total.to(BFloat16)

    @cute.jit
    def choose(self, logits: cute.Tensor, bias: cute.Tensor, token: Int32, threads: cutlass.Constexpr):
        """The token's K best experts as keys in shared memory, in rank order; every thread of a CTA calls it.

        The bias is loaded, then the predecessor waited for, then the logits are loaded.
        """
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.warp_idx()
        count = -(-self.experts // threads)
        candidates = threads // 32 * self.slots
        smem = cutlass.memory.SmemAllocator()
        found = smem.allocate_tensor(Uint64, cute.make_layout(candidates), 16)
        ranked = smem.allocate_tensor(Uint64, cute.make_layout(self.slots), 16)

        shift = cute.make_rmem_tensor(count, Float32)
        raw = cute.make_rmem_tensor(count, Float32)
        keys = cute.make_rmem_tensor(count, Uint64)
        for i in range_constexpr(count):
            shift[i] = Float32(0.0)
            if i * threads + thread < self.experts:
                shift[i] = bias[i * threads + thread]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for i in range_constexpr(count):
            raw[i] = Float32(0.0)
            if i * threads + thread < self.experts:
                raw[i] = logits[token, i * threads + thread]
        # Positions past the last expert rank like NaN scores of ids that no expert has: below every expert.
        for i in range_constexpr(count):
            expert = i * threads + thread
            score = cutlass.select_(expert < self.experts, sigmoid(raw[i]) + shift[i], Float32(float("nan")))
            keys[i] = key_of(Float32(score), expert)
        for last in range_constexpr(count - 1, 0, -1):
            for i in range_constexpr(last):
                high, low = keys[i], keys[i + 1]
                keys[i] = Uint64(cutlass.select_(high > low, high, low))
                keys[i + 1] = Uint64(cutlass.select_(high > low, low, high))

        for rank in cutlass.range(self.slots, unroll=1):
            head = keys[0]
            top = Uint32(head >> Uint64(32))
            wins = top == Uint32(cute.arch.warp_redux_sync(top, "umax"))
            winners = cute.arch.vote_ballot_sync(wins)
            if winners & (winners - 1) != 0:
                tie = Uint32(cutlass.select_(wins, Uint32(head & Uint64(0xFFFFFFFF)), Uint32(0)))
                wins = wins and tie == Uint32(cute.arch.warp_redux_sync(tie, "umax"))
            if wins:
                found[warp * self.slots + rank] = head
                for i in range_constexpr(count):
                    keys[i] = keys[i + 1] if const_expr(i + 1 < count) else Uint64(0)
        cute.arch.sync_threads()

        # Two threads a candidate count the candidates above it, each in every other pair.
        mine, above = Uint64(0), Int32(0)
        if thread // 2 < candidates:
            mine = found[thread // 2]
            for i in range_constexpr(0, candidates, 4):
                pair = i + 2 * (thread % 2)
                above += Int32(found[pair] > mine) + Int32(found[pair + 1] > mine)
        above += cute.arch.shuffle_sync_bfly(above, offset=1)
        if thread % 2 == 0 and thread // 2 < candidates and above < self.slots:
            ranked[above] = mine
        cute.arch.sync_threads()
        return ranked

    @cute.jit
    def publish(
        self,
        ranked: cute.Tensor,
        logits: cute.Tensor,
        token: Int32,
        first: Int32,
        count: cutlass.Constexpr,
        ids: cute.Tensor,
        weights: cute.Tensor,
    ):
        """One warp writes the ids and weights of ranks `first` to `first + count`."""
        lane = cute.arch.lane_idx()
        expert = Int32(0)
        score = Float32(0.0)
        if lane < self.slots:
            expert = expert_of(ranked[lane])
            score = sigmoid(logits[token, expert])
        total = cute.arch.warp_reduction_sum(score)
        if lane >= first and lane < first + count:
            ids[token, lane] = expert
            weights[token, lane] = (score / (total + Float32(1e-20))).to(BFloat16)

    @cute.kernel
    def top_k(self, logits: cute.Tensor, bias: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor):
        token, _, _ = cute.arch.block_idx()
        ranked = self.choose(logits, bias, token, TOP_K_THREADS)
        if cute.arch.warp_idx() == 0:
            self.publish(ranked, logits, token, Int32(0), self.slots, ids, weights)

    @cute.kernel
    def gate_up(
        self,
        latent: cute.Tensor,
        logits: cute.Tensor,
        bias: cute.Tensor,
        ids: cute.Tensor,
        weights: cute.Tensor,
        w13: cute.Tensor,
        w13_scale: cute.Tensor,
        hidden: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, pair, _ = cute.arch.block_idx()
        token, slot = pair // self.slots, pair % self.slots
        lane, group = thread % self.up.lanes, thread // self.up.lanes
        first = block * self.up_block + group * self.rows
        shared = cutlass.memory.SmemAllocator().allocate_tensor(BFloat16, self.up.layout(), 16)

        if const_expr(self.inline):
            ranked = self.choose(logits, bias, token, self.threads)
            expert = expert_of(ranked[slot])
            # One CTA of each slot tells the launches that follow.
            if block == 0 and cute.arch.warp_idx() == 0:
                self.publish(ranked, logits, token, slot, 1, ids, weights)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            expert = ids[token, slot]

        wanted = [first + r for r in range(self.rows)] + [self.width + first + r for r in range(self.rows)]
        matrix = [w13[expert, row, None] for row in wanted]
        scales = [w13_scale[expert, row, None] for row in wanted]
        # Weights first: the compiler does not move their loads below the barrier.
        words, codes = self.up.load(matrix, scales, lane, 0)
        self.up.stage(latent[token, None], shared, thread, self.threads)
        cute.arch.sync_threads()
        sums = self.up.products(matrix, scales, words, codes, shared, lane)
        if lane == 0:
            for r in range_constexpr(self.rows):
                hidden[token, slot, first + r] = situ(sums[r], sums[self.rows + r], self.beta, self.lam).to(
                    BFloat16
                )

    @cute.kernel
    def down_separate(
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
        lane, group = thread % DOWN_LANES, thread // DOWN_LANES
        first = block * self.down_block + group * self.down_rows
        shared = cutlass.memory.SmemAllocator().allocate_tensor(BFloat16, self.down.layout(), 16)

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        expert = ids[token, slot]
        matrix = [w2[expert, first + r, None] for r in range(self.down_rows)]
        scales = [w2_scale[expert, first + r, None] for r in range(self.down_rows)]
        words, codes = self.down.load(matrix, scales, lane, 0)
        self.down.stage(hidden[token, slot, None], shared, thread, 32 * self.down_warps)
        cute.arch.sync_threads()
        sums = self.down.products(matrix, scales, words, codes, shared, lane)
        if lane == 0:
            for r in range_constexpr(self.down_rows):
                expanded[token, slot, first + r] = sums[r].to(BFloat16)

    @cute.kernel
    def combine(self, expanded: cute.Tensor, weights: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, token, _ = cute.arch.block_idx()
        column = block * self.threads + thread
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < self.latent_width:
            total = Float32(0.0)
            for slot in range_constexpr(self.slots):
                total = weights[token, slot].to(Float32) * expanded[token, slot, column].to(Float32) + total
            out[token, column] = total.to(BFloat16)

    @cute.kernel
    def down_fused(
        self,
        hidden: cute.Tensor,
        ids: cute.Tensor,
        weights: cute.Tensor,
        w2: cute.Tensor,
        w2_scale: cute.Tensor,
        out: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, token, _ = cute.arch.block_idx()
        in_warp, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        lane, group = in_warp % DOWN_LANES, in_warp // DOWN_LANES
        local = group * self.down_rows
        turns = self.slots // self.down_warps
        smem = cutlass.memory.SmemAllocator()
        staged = [smem.allocate_tensor(BFloat16, self.slotted(), 16) for _ in range(turns)]
        products = smem.allocate_tensor(Float32, cute.make_layout((self.down_block, self.slots)), 16)

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        first = block * self.down_block + local
        loaded = []
        for turn in range_constexpr(turns):
            slot = turn * self.down_warps + warp
            expert = ids[token, slot]
            matrix = [w2[expert, first + r, None] for r in range(self.down_rows)]
            scales = [w2_scale[expert, first + r, None] for r in range(self.down_rows)]
            loaded.append((matrix, scales, *self.down.load(matrix, scales, lane, 0)))
        for turn in range_constexpr(turns):
            slot = turn * self.down_warps + warp
            target = staged[turn][None, None, None, None, warp]
            self.down.stage(hidden[token, slot, None], target, in_warp, 32)
        cute.arch.sync_threads()
        for turn in range_constexpr(turns):
            sums = self.down.products(*loaded[turn], staged[turn][None, None, None, None, warp], lane)
            if lane == 0:
                for r in range_constexpr(self.down_rows):
                    products[local + r, turn * self.down_warps + warp] = sums[r].to(BFloat16).to(Float32)
        cute.arch.sync_threads()
        if thread < self.down_block:
            total = Float32(0.0)
            for slot in range_constexpr(self.slots):
                total = weights[token, slot].to(Float32) * products[thread, slot] + total
            out[token, block * self.down_block + thread] = total.to(BFloat16)

    def slotted(self):
        """The staging layout with a fifth mode, the warp."""
        inner = self.down.layout()
        return cute.append(inner, cute.make_layout(self.down_warps, stride=cute.cosize(inner)))


for _kernel in (Moe.front, Moe.top_k, Moe.gate_up, Moe.down_separate, Moe.down_fused, Moe.combine):
    _kernel.set_name_prefix(_kernel.__name__, remove_cutlass_symbol=True, keep_mangled_name=False)


def build(axes, knobs):
    """Return the host function over the op's buffers, the scratch buffers and the stream."""
    return Moe(axes, knobs)
