"""Top-K experts of a token and their weights, a CTA a token.

    s = sigmoid(logits); ids = the K experts of largest s + bias, lower id first on ties, NaN last
    weights = bf16(s[ids] / (sum of s[ids] + 1e-20)), in rank order

Concurrency. Every warp picks the best K of its share of the experts in K rounds: redux.sync finds the
largest score among the lanes' best keys, the lane that owns it writes its key to shared memory and removes
it. `lane` says how a lane knows its best key: it sorts its keys first ("sort"), or looks through them every
round ("scan"). With one warp that is the answer. With more, after a barrier, either warp 0 selects again
among the candidates of all warps (`merge` "rounds"), or every candidate counts the candidates above it, which
is its rank ("rank": no loop of dependent reductions) and, after another barrier, warp 0 has them in order.

Layout. Expert e belongs to thread e % threads. A key is 64 bits: the score as an unsigned integer of the
same order, then the complement of the id. All keys differ, so "greater" decides ties by itself; NaN scores
become 0, below minus infinity, and so do positions past the last expert, whose ids are larger.

Ordering. `bias` never changes and is loaded before the wait. `logits` is the predecessor's: every thread
waits itself first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, Uint64, const_expr, range_constexpr

TEMPLATE = {
    "op": "moe_topk",
    "summary": "keys in registers, redux rounds a warp, candidates merged in shared memory",
    "knobs": {
        "threads": [32, 64, 128, 256, 512],
        "merge": ["rounds", "rank"],
        "sigmoid": ["divide", "approx"],
        "lane": ["sort", "scan"],
    },
    "default": {"threads": 256, "merge": "rank", "sigmoid": "divide", "lane": "sort"},
    "constraints": [
        "K <= 16 and K <= E and K % 2 == 0",
        # One warp has nothing to merge.
        "threads > 32 or merge == 'rounds'",
        # A sorting network of more keys a lane would cost more than it saves.
        "lane == 'scan' or (E + threads - 1) // threads <= 8",
        # Two threads a candidate take pairs of candidates in turn.
        "merge == 'rounds' or (min(threads, (E + 31) // 32 * 32) // 32 * K) % 4 == 0",
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
        self.sort = knobs["lane"] == "sort"
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
    def best(self, keys: cute.Tensor, lane: Int32, out: cute.Tensor):
        """Write the K largest of a warp's `keys` (registers of each lane, used up) to `out` (K,) in order."""
        count = const_expr(cute.size(keys))
        if const_expr(self.sort):
            for last in range_constexpr(count - 1, 0, -1):
                for i in range_constexpr(last):
                    left, right = keys[i], keys[i + 1]
                    keys[i] = Uint64(cutlass.select_(left > right, left, right))
                    keys[i + 1] = Uint64(cutlass.select_(left > right, right, left))
        for rank in cutlass.range(self.slots, unroll=1):
            head = keys[0]
            if const_expr(not self.sort):
                for i in range_constexpr(1, count):
                    head = Uint64(cutlass.select_(keys[i] > head, keys[i], head))
            top = Uint32(head >> Uint64(32))
            wins = top == Uint32(cute.arch.warp_redux_sync(top, "umax"))
            winners = cute.arch.vote_ballot_sync(wins)
            if winners & (winners - 1) != 0:
                tie = Uint32(cutlass.select_(wins, Uint32(head & Uint64(0xFFFFFFFF)), Uint32(0)))
                wins = wins and tie == Uint32(cute.arch.warp_redux_sync(tie, "umax"))
            if wins:
                out[rank] = head
                for i in range_constexpr(count):
                    if const_expr(self.sort):
                        keys[i] = keys[i + 1] if const_expr(i + 1 < count) else Uint64(0)
                    else:
                        keys[i] = Uint64(cutlass.select_(keys[i] == head, Uint64(0), keys[i]))

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
        # Positions past the last expert rank like NaN scores of ids that no expert has: below every expert.
        keys = cute.make_rmem_tensor(self.keys, Uint64)
        for i in range_constexpr(self.keys):
            expert = i * self.threads + thread
            score = sigmoid(raw[i], self.sigmoid) + shift[i]
            score = Float32(cutlass.select_(expert < self.experts, score, Float32(float("nan"))))
            keys[i] = key_of(score, expert)
        if const_expr(self.warps == 1):
            self.best(keys, lane, ranked)
            cute.arch.sync_warp()
        else:
            self.best(keys, lane, cute.local_tile(found, (self.slots,), (warp,)))
            cute.arch.sync_threads()
            if const_expr(self.merge == "rank"):
                # Two threads a candidate count the candidates above it, each in every other pair.
                mine, above = Uint64(0), Int32(0)
                if thread // 2 < self.candidates:
                    mine = found[thread // 2]
                    for i in range_constexpr(0, self.candidates, 4):
                        pair = i + 2 * (thread % 2)
                        above += Int32(found[pair] > mine) + Int32(found[pair + 1] > mine)
                above += cute.arch.shuffle_sync_bfly(above, offset=1)
                if thread % 2 == 0 and thread // 2 < self.candidates and above < self.slots:
                    ranked[above] = mine
                cute.arch.sync_threads()
            elif warp == 0:
                share = cute.make_rmem_tensor(-(-self.candidates // 32), Uint64)
                for i in range_constexpr(cute.size(share)):
                    share[i] = Uint64(0)
                    if i * 32 + lane < self.candidates:
                        share[i] = found[i * 32 + lane]
                self.best(share, lane, ranked)
                cute.arch.sync_warp()

        if warp == 0:
            expert = Int32(0)
            score = Float32(0.0)
            if lane < self.slots:
                expert = Int32(~Uint32(ranked[lane] & Uint64(0xFFFFFFFF)))
                score = sigmoid(logits[token, expert], self.sigmoid)
            total = cute.arch.warp_reduction_sum(score)
            if lane < self.slots:
                ids[token, lane] = expert
                weights[token, lane] = (score / (total + Float32(1e-20))).to(BFloat16)


Selection.kernel.set_name_prefix("top_k", remove_cutlass_symbol=True, keep_mangled_name=False)


def build(axes, knobs):
    """Return the host function `(logits, bias, ids, weights, stream)`."""
    return Selection(axes, knobs)
