"""One rank's share of Kimi K3's latent MoE: router and down-projection, top-K, routed experts, weighted sum.

    logits         = x @ w_router.T                      float32, not rounded
    latent[:, :D]  = bf16(x @ w_down.T)                  this rank's columns; the gathered others stay
    ids, weights   = route(logits, bias)                 see verifiers/moe_topk.py; weights bf16
    expanded[b, k] = bf16(W2[e] bf16(situ(W13[e] latent)))   see verifiers/moe_experts.py
    out[b]         = bf16(sum over k of weights[b, k] * expanded[b, k])   float32 fma in rank order

The first D columns of `latent` are NaN before the op runs. Experts that no token chose have NaN scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.ops import (
    Allocate,
    Buffer,
    DType,
    Fault,
    Op,
    Role,
    Tolerance,
    Workload,
    experts,
    mxfp4,
    routing,
    situ,
)
from workbench.ops.experts import Magnitudes, Recipe, distinct, fill_experts, run_experts
from workbench.ops.mistakes import MISTAKES
from workbench.ops.random import choose, fill_normal, stream
from workbench.ops.rounding import to_bf16

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """How the op is computed: the experts' recipe, and mistakes of the other parts."""

    recipe: Recipe = experts.GOLDEN
    use_bias: bool = True
    weighted: bool = True
    round_sum: bool = False
    """The running sum over slots rounded to bf16 after each."""
    drop_h: int = 0
    """Elements missing from the end of the sums over H."""
    drop_k: int = 0
    """Slots missing from the end of the weighted sum."""

    def __call__(self, inputs: Tensors, axes: Axes) -> Tensors:
        """Run the op; shapes and names as in `OP`."""
        dtype = self.recipe.dtype
        keep = axes["H"] - self.drop_h
        x = inputs["x"].to(dtype)[:, :keep]
        logits = x @ inputs["w_router"][:, :keep].to(dtype).T
        latent = inputs["latent"].clone()
        latent[:, : axes["D"]] = to_bf16(x @ inputs["w_down"][:, :keep].to(dtype).T)
        bias = inputs["bias"] if self.use_bias else torch.zeros_like(inputs["bias"])
        ids, weights = routing.route(logits, bias, axes["K"])
        weights = to_bf16(weights).to(dtype) if self.weighted else torch.ones_like(weights)
        rows = to_bf16(run_experts(inputs, latent, ids, self.recipe)).to(dtype)
        total = torch.zeros_like(rows[:, 0])
        for k in range(axes["K"] - self.drop_k):
            total = total + weights[:, k, None] * rows[:, k]
            if self.round_sum:
                total = to_bf16(total).to(dtype)
        return {"latent": latent.to(dtype), "out": to_bf16(total).to(dtype)}


reference = Chain()
baseline = Chain(experts.BASELINE)


def _start(axes: Axes, seed: int, allocate: Allocate, name: str) -> Tensors:
    t = {
        n: allocate(n)
        for n in ("x", "w_router", "bias", "w_down", "latent", "w13", "w13_scale", "w2", "w2_scale")
    }
    fan_in = axes["H"] ** -0.5
    fill_normal(t["x"], stream(seed, name, "x"))
    fill_normal(t["w_router"], stream(seed, name, "w_router"), std=1.5 * fan_in)
    fill_normal(t["w_down"], stream(seed, name, "w_down"), std=fan_in)
    fill_normal(t["bias"], stream(seed, name, "bias"), std=0.1)
    fill_normal(t["latent"], stream(seed, name, "latent"))
    t["latent"][:, : axes["D"]] = torch.nan
    return t


def _logits(t: Tensors) -> torch.Tensor:
    return t["x"].double() @ t["w_router"].double().T


def _finish(
    t: Tensors, axes: Axes, seed: int, owner: torch.Tensor | None = None, aim: Magnitudes | None = None
) -> Tensors:
    """Separate the keys and give the experts that are then chosen their weights."""
    logits = _logits(t)
    rng = stream(seed, "separate")
    t["bias"].copy_(routing.separate_bias(logits, t["bias"], axes["K"], rng, owner))
    fill_experts(t, routing.stable_top(routing.routing_keys(logits, t["bias"]), axes["K"]), seed, aim)
    return t


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal inputs; neighbouring keys at least `routing.MARGIN` apart."""
    return _finish(_start(axes, seed, allocate, "ordinary"), axes, seed)


def power_law(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Biases follow the logarithm of a power-law popularity: tokens share experts."""
    t = _start(axes, seed, allocate, "power_law")
    t["bias"].copy_(routing.popularity(axes["E"], stream(seed, "power_law", "popularity")).log().mul(0.25))
    return _finish(t, axes, seed)


def ties(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Groups of experts with one router row and one bias on top; a tie crosses the last rank."""
    t = _start(axes, seed, allocate, "ties")
    owner = routing.tie_owners(axes["E"], axes["K"], stream(seed, "ties", "owners"))
    t["w_router"].copy_(t["w_router"][owner])
    tied = torch.bincount(owner, minlength=axes["E"])[owner] > 1
    t["bias"][tied] += 2.0
    return _finish(t, axes, seed, owner)


def negative_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Latents about 1 and gate rows of mostly negative sign: gates about -20, where rounding them costs
    most."""
    t = _start(axes, seed, allocate, "negative_gates")
    t["x"][:, 0] = 4.0
    t["w_down"] *= 0.1
    t["w_down"][:, 0] = 0.25
    shared = t["latent"][:, axes["D"] :]
    shared.mul_(0.1).add_(1.0)
    return _finish(t, axes, seed, aim=experts.negative_gates(axes["L"]))


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """x and latents of 2^30: SiTU saturates, all scores are equal (the biases decide) and every weight is
    1 / K.

    Nothing but the order of sums differs between honest kernels here, so a rounding of the running sum shows.
    """
    t = _start(axes, seed, allocate, "large")
    t["x"] *= 2.0**30
    t["x"][:, 1] = 2.0**30
    t["w_router"].zero_()
    t["w_router"][:, 1] = 2.0**-30
    t["latent"] *= 2.0**30
    return _finish(t, axes, seed, aim=Magnitudes(latent=2.0**30, gate=2.0**30, hidden=70.0))


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other x, every other gathered latent and every fourth router column are subnormal."""
    t = _start(axes, seed, allocate, "denormals")
    t["x"][:, ::2] *= 2.0**-130
    t["latent"][:, ::2] *= 2.0**-130
    t["w_router"][:, ::4] *= 2.0**-130
    return _finish(t, axes, seed)


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third x and gathered latent is -0."""
    t = _start(axes, seed, allocate, "negative_zero")
    t["x"][:, ::3] = -0.0
    t["latent"][:, axes["D"] :: 3] = -0.0
    return _finish(t, axes, seed)


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every x is 1, all router rows and biases are alike: the lowest ids win with equal weights."""
    t = _start(axes, seed, allocate, "all_equal")
    t["x"].fill_(1.0)
    t["w_router"].copy_(t["w_router"][:1].clone().expand_as(t["w_router"]))
    t["bias"].fill_(0.125)
    return _finish(t, axes, seed, owner=torch.zeros(axes["E"], dtype=torch.int64))


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Router rows with a NaN (never chosen), with an infinite logit (chosen first) and with -inf (score 0).

    One gathered latent of every token is infinite and meets no zero weight: outputs stay finite. With
    several tokens, the first also gathers a NaN: its whole output is NaN and no other.
    """
    t = _start(axes, seed, allocate, "nan_inf")
    t["x"][:, 1] = 1.0
    best, worst, *nans = choose(axes["E"], 2 + max(axes["E"] // 16, 1), stream(seed, "nan_inf", "where"))
    t["w_router"][best, 1] = torch.inf
    t["bias"][best] = 2.0
    t["w_router"][worst, 1] = -torch.inf
    t["w_router"][nans, 2] = torch.nan
    column = (axes["D"] + axes["L"]) // 2 + 1
    t["latent"][:, column] = torch.where(t["latent"][:, column] < 0, -torch.inf, torch.inf)
    if axes["B"] > 1:
        t["latent"][0, axes["L"] - 1] = torch.nan
    _finish(t, axes, seed, aim=Magnitudes(hidden=70.0))
    ids = routing.stable_top(routing.routing_keys(_logits(t), t["bias"]), axes["K"])
    for e in distinct(ids):
        codes = mxfp4.unpack(t["w13"][e])
        codes[:, column] = (codes[:, column] & 8) | 2
        t["w13"][e] = mxfp4.pack(codes)
    return t


def compulsory_bytes(axes: Axes) -> int:
    """Router, bias, down-projection, distinct experts; x in, the latent written and the other columns
    read, out."""
    tokens, hidden = axes["B"], axes["H"]
    weights = 2 * hidden * (axes["E"] + axes["D"]) + 4 * axes["E"] + experts.expert_bytes(axes)
    return weights + 2 * tokens * (hidden + 2 * axes["L"])


def flops(axes: Axes) -> int:
    """Router, down-projection, experts, weighted sum."""
    tokens = axes["B"]
    front = 2 * tokens * axes["H"] * (axes["E"] + axes["D"])
    return front + experts.expert_flops(axes) + 2 * tokens * axes["K"] * axes["L"]


FLOAT32 = Recipe(dtype=torch.float32)


def _drops(field: str, axis: str, counts: tuple[int, ...]) -> dict[str, Fault]:
    return {
        f"dropped-{axis.lower()}-{n}": Fault(
            "dropped-tail",
            f"the last {n} elements are left out of the sum over {axis}",
            Chain(FLOAT32, **{field: n}),
            lambda axes, n=n: n < axes[axis],
        )
        for n in counts
    }


REAL = {"H": 7168, "E": 896, "K": 16, "L": 3584}
SMALL = {"H": 256, "E": 32, "K": 4, "L": 128, "I": 64, "D": 32}

OP = Op(
    name="moe",
    doc="Latent MoE of one rank: router, down-projection, stable top-K, MXFP4 experts, weighted sum.",
    buffers=(
        Buffer("x", ("B", "H"), DType.BF16, Role.ACTIVATION, "normalised hidden states"),
        Buffer("w_router", ("E", "H"), DType.BF16, Role.WEIGHT, "router"),
        Buffer("bias", ("E",), DType.F32, Role.WEIGHT, "selection bias"),
        Buffer("w_down", ("D", "H"), DType.BF16, Role.WEIGHT, "this rank's rows of the down-projection"),
        Buffer(
            "latent", ("B", "L"), DType.BF16, Role.STATE, "columns 0..D-1 written here, the rest gathered"
        ),
        Buffer("w13", ("E", "2 * I", "L"), DType.E2M1, Role.WEIGHT, "gate rows, then up rows"),
        Buffer("w13_scale", ("E", "2 * I", "L // 32"), DType.E8M0, Role.WEIGHT, "one for 32 along L"),
        Buffer("w2", ("E", "L", "I"), DType.E2M1, Role.WEIGHT, "second projection"),
        Buffer("w2_scale", ("E", "L", "I // 32"), DType.E8M0, Role.WEIGHT, "one for 32 along I"),
        Buffer("out", ("B", "L"), DType.BF16, Role.OUTPUT, "weighted sum of the experts"),
    ),
    workloads=(
        Workload("tp8_b1", {"B": 1, **REAL, "I": 384, "D": 448}, doc="one token"),
        Workload("tp8_b8", {"B": 8, **REAL, "I": 384, "D": 448}, doc="eight tokens"),
        Workload("tp16_b1", {"B": 1, **REAL, "I": 192, "D": 224}, doc="one token"),
        Workload("small_b1", {"B": 1, **SMALL}, real=False),
        Workload("small_b3", {"B": 3, **SMALL}, real=False),
    ),
    reference=reference,
    baseline=baseline,
    honest=(Chain(experts.HIGH), Chain(FLOAT32)),
    generators={
        "ordinary": ordinary,
        "power_law": power_law,
        "ties": ties,
        "negative_gates": negative_gates,
        "large": large,
        "denormals": denormals,
        "negative_zero": negative_zero,
        "all_equal": all_equal,
        "nan_inf": nan_inf,
    },
    tolerances={
        "latent": Tolerance(factor=3.0, floor_rms=1e-3, floor_worst=8e-3),
        "out": Tolerance(factor=2.0, floor_rms=1e-3, floor_worst=8e-3),
    },
    flops=flops,
    compulsory_bytes=compulsory_bytes,
    constants={"beta": situ.BETA, "lambda": situ.LAMBDA, "epsilon": routing.EPSILON},
    faults={
        **{name: Fault(m.rule, m.summary, Chain(m.recipe), m.recipe.applies) for name, m in MISTAKES.items()},
        "without-bias": Fault(
            "wrong-expert", "experts are chosen without the bias", Chain(FLOAT32, use_bias=False)
        ),
        "unweighted": Fault(
            "missing-scale", "the routing weights are not applied", Chain(FLOAT32, weighted=False)
        ),
        "rounded-sum": Fault(
            "wrong-rounding", "the running sum over slots is rounded to bf16", Chain(FLOAT32, round_sum=True)
        ),
        **_drops("drop_h", "H", (8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
        **_drops("drop_k", "K", (1, 2)),
    },
)
