"""Top-K experts of a token and their weights, a CTA a token.

    s = sigmoid(logits); ids = the K experts of largest s + bias, lower id first on ties, NaN last
    weights = bf16(s[ids] / (sum of s[ids] + 1e-20)), in rank order

Concurrency. Every warp picks the best K of its share of the experts by K rounds of "maximum over the warp,
then remove it": a lane holds its keys in registers, redux.sync finds the maximum. With one warp that is the
answer. With more, the warps leave K candidates each in shared memory and, after a barrier, either warp 0
selects again ("rounds") or every candidate counts the candidates above it ("rank": its count is its rank,
no loop of dependent reductions), a second barrier, and warp 0 reads the winners in rank order.

Layout. Expert e belongs to thread e % threads. A key is 64 bits: the score as an unsigned integer of the
same order, then the complement of the id. All keys differ, so "greater" decides ties by itself; NaN scores
become 0, below minus infinity; positions past the last expert have key 0, below every expert.

Ordering. `bias` never changes and is loaded before the wait. `logits` is the predecessor's: every thread
waits itself first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, Uint64, const_expr, range_constexpr

TEMPLATE = {
    "op": "moe_topk",
    "summary": "register keys, redux rounds a warp, candidates merged in shared memory",
    "knobs": {
        "threads": [32, 64, 128, 256, 512],
        "merge": ["rounds", "rank"],
        "sigmoid": ["divide", "approx"],
        "unroll": [1, 2, 4],
    },
    "default": {"threads": 256, "merge": "rank", "sigmoid": "divide", "unroll": 1},
    "constraints": [
        "K <= 32 and K <= E",
        # One warp has nothing to merge.
        "threads > 32 or merge == 'rounds'",
        "K % unroll == 0",
    ],
}

LOG2_E = 1.4426950408889634


def sigmoid(x, how):
    """1 / (1 + exp(-x)), the division rounded ("divide") or rcp.approx ("approx")."""
    below = Float32(1.0) + cute.math.exp2(x * Float32(-LOG2_E), fastmath=True)
    return Float32(1.0) / below if how == "divide" else cute.arch.rcp_approx(below)


def key_of(score, expert):
    """The 64-bit key of an expert: larger is better."""
    bits = score.bitcast(Uint32)
    flipped = bits ^ (Uint32(0x80000000) | (Uint32(0) - (bits >> Uint32(31))))
    ordered = Uint32(cutlass.select_(score == score, flipped, Uint32(0)))
    return (Uint64(ordered) << Uint64(32)) | Uint64(~Uint32(expert))


class Selection:
    """One point of the space; `__call__` is the host function."""

    def __init__(self, axes, knobs):
        self.tokens, self.experts, self.slots = axes["B"], axes["E"], axes["K"]
        self.threads = min(knobs["threads"], -(-self.experts // 32) * 32)
        self.merge = knobs["merge"]
        self.sigmoid = knobs["sigmoid"]
        self.unroll = knobs["unroll"]
        self.warps = self.threads // 32
        self.keys = -(-self.experts // self.threads)
        self.candidates = self.warps * self.slots

    @cute.jit
    def __call__(
        self, logits: cute.Tensor, bias: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor, stream
    ):
        self.kernel(logits, bias, ids, weights).launch(
            grid=[self.tokens, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.jit
    def best(self, keys: cute.Tensor, lane: Int32) -> Uint64:
        """The K largest of a warp's `keys` (a register tensor a lane, emptied): lane r returns number r."""
        kept = Uint64(0)
        for rank in cutlass.range(self.slots, unroll=self.unroll):
            top = keys[0]
            for i in range_constexpr(1, cute.size(keys)):
                top = Uint64(cutlass.select_(keys[i] > top, keys[i], top))
            high, low = Uint32(top >> Uint64(32)), Uint32(top & Uint64(0xFFFFFFFF))
            best_high = Uint32(cute.arch.warp_redux_sync(high, "umax"))
            low = Uint32(cutlass.select_(high == best_high, low, Uint32(0)))
            best_low = Uint32(cute.arch.warp_redux_sync(low, "umax"))
            winner = (Uint64(best_high) << Uint64(32)) | Uint64(best_low)
            for i in range_constexpr(cute.size(keys)):
                keys[i] = Uint64(cutlass.select_(keys[i] == winner, Uint64(0), keys[i]))
            kept = Uint64(cutlass.select_(lane == rank, winner, kept))
        return kept

    @cute.kernel
    def kernel(self, logits: cute.Tensor, bias: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        smem = cutlass.memory.SmemAllocator()
        found = smem.allocate_tensor(Uint64, cute.make_layout(self.candidates), 16)
        ranked = smem.allocate_tensor(Uint64, cute.make_layout(self.slots), 16)

        shift = cute.make_rmem_tensor(self.keys, Float32)
        for i in range_constexpr(self.keys):
            expert = i * self.threads + thread
            shift[i] = Float32(0.0)
            if const_expr((i + 1) * self.threads <= self.experts) or expert < self.experts:
                shift[i] = bias[expert]

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        raw = cute.make_rmem_tensor(self.keys, Float32)
        for i in range_constexpr(self.keys):
            expert = i * self.threads + thread
            raw[i] = Float32(0.0)
            if const_expr((i + 1) * self.threads <= self.experts) or expert < self.experts:
                raw[i] = logits[token, expert]
        keys = cute.make_rmem_tensor(self.keys, Uint64)
        for i in range_constexpr(self.keys):
            expert = i * self.threads + thread
            key = key_of(sigmoid(raw[i], self.sigmoid) + shift[i], expert)
            keys[i] = Uint64(cutlass.select_(expert < self.experts, key, Uint64(0)))
        key = self.best(keys, lane)

        if const_expr(self.warps > 1):
            if lane < self.slots:
                found[warp * self.slots + lane] = key
            cute.arch.sync_threads()
            if const_expr(self.merge == "rank"):
                if thread < self.candidates:
                    mine = found[thread]
                    above = Int32(0)
                    for i in range_constexpr(self.candidates):
                        above += Int32(found[i] > mine)
                    if above < self.slots:
                        ranked[above] = mine
                cute.arch.sync_threads()
            if warp == 0:
                if const_expr(self.merge == "rank"):
                    if lane < self.slots:
                        key = ranked[lane]
                else:
                    share = cute.make_rmem_tensor(-(-self.candidates // 32), Uint64)
                    for i in range_constexpr(cute.size(share)):
                        share[i] = Uint64(0)
                        if i * 32 + lane < self.candidates:
                            share[i] = found[i * 32 + lane]
                    key = self.best(share, lane)

        if warp == 0:
            expert = Int32(~Uint32(key & Uint64(0xFFFFFFFF)))
            score = Float32(0.0)
            if lane < self.slots:
                score = sigmoid(logits[token, expert], self.sigmoid)
            total = cute.arch.warp_reduction_sum(score)
            if lane < self.slots:
                ids[token, lane] = expert
                weights[token, lane] = (score / (total + Float32(1e-20))).to(BFloat16)


Selection.kernel.set_name_prefix("top_k", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(axes, knobs):
    """Return the host function `(logits, bias, ids, weights, stream)`."""
    return Selection(axes, knobs)
