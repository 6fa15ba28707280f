"""Top-k routing of Kimi K3: scores, stable order, renormalised weights.

`s = sigmoid(logit)`; experts by descending `s + bias` (float32), lower id first among equal keys, NaN
keys last; weights `s / (sum of the chosen s + 1e-20)`, rounded once to bf16, in rank order. See
`workbench/ops/routing.py` for near ties. If a NaN is chosen, every weight of that token is NaN; the ids
are still exact.
"""

from collections.abc import Mapping

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload, routing
from workbench.ops.random import choose, fill_normal, stream
from workbench.ops.rounding import to_bf16

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


def reference(inputs: Tensors, axes: Axes) -> Tensors:
    """Golden: keys in float32 as the contract has them, weights in float64."""
    ids, weights = routing.route(inputs["logits"].double(), inputs["bias"], axes["K"])
    return {"ids": ids, "weights": to_bf16(weights).double()}


def baseline(inputs: Tensors, axes: Axes) -> Tensors:
    """Float32 throughout."""
    ids, weights = routing.route(inputs["logits"], inputs["bias"], axes["K"])
    return {"ids": ids, "weights": to_bf16(weights).float()}


def without_bias(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: ordered by score alone."""
    return reference({**inputs, "bias": torch.zeros_like(inputs["bias"])}, axes)


def biased_weights(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: weights from `s + bias`."""
    keys = routing.routing_keys(inputs["logits"], inputs["bias"]).double()
    ids = routing.stable_top(keys.float(), axes["K"])
    chosen = keys.gather(-1, ids)
    return {
        "ids": ids,
        "weights": to_bf16(chosen / (chosen.sum(-1, keepdim=True) + routing.EPSILON)).double(),
    }


def not_renormalised(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: weights are the bare scores."""
    ids = reference(inputs, axes)["ids"]
    return {"ids": ids, "weights": to_bf16(torch.sigmoid(inputs["logits"].double().gather(-1, ids))).double()}


def higher_id_first(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: the higher id wins a tie."""
    flipped = {"logits": inputs["logits"].flip(-1), "bias": inputs["bias"].flip(-1)}
    out = reference(flipped, axes)
    return {"ids": axes["E"] - 1 - out["ids"], "weights": out["weights"]}


def dropped(elements: int):
    """Mistake: the last `elements` experts are never looked at."""

    def run(inputs: Tensors, axes: Axes) -> Tensors:
        logits = inputs["logits"].clone()
        logits[:, axes["E"] - elements :] = torch.nan
        return reference({**inputs, "logits": logits}, axes)

    return run


def _finish(t: Tensors, axes: Axes, seed: int, owner: torch.Tensor | None = None) -> Tensors:
    rng = stream(seed, "separate")
    t["bias"].copy_(routing.separate_bias(t["logits"], t["bias"], axes["K"], rng, owner))
    return t


def _fill(axes: Axes, seed: int, allocate: Allocate, name: str, bias_std: float = 0.1) -> Tensors:
    logits, bias = allocate("logits"), allocate("bias")
    fill_normal(logits, stream(seed, name, "logits"), std=1.5)
    fill_normal(bias, stream(seed, name, "bias"), std=bias_std)
    return {"logits": logits, "bias": bias}


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal logits and biases; neighbouring keys at least `routing.MARGIN` apart."""
    return _finish(_fill(axes, seed, allocate, "ordinary"), axes, seed)


def power_law(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Biases follow the logarithm of a power-law popularity: tokens agree on many experts."""
    t = _fill(axes, seed, allocate, "power_law")
    p = routing.popularity(axes["E"], stream(seed, "power_law", "popularity"))
    t["bias"].copy_(p.log().mul(0.25))
    return _finish(t, axes, seed)


def ties(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Groups of experts with one logit and one bias on top; a tie crosses the last rank."""
    t = _fill(axes, seed, allocate, "ties")
    owner = routing.tie_owners(axes["E"], axes["K"], stream(seed, "ties", "owners"))
    t["logits"].copy_(t["logits"].clone()[:, owner])
    tied = torch.bincount(owner, minlength=axes["E"])[owner] > 1
    t["bias"][tied] += 2.0
    return _finish(t, axes, seed, owner)


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Some logits are NaN (never chosen), one is +inf (score 1, chosen first) and one -inf (score 0)."""
    t = _fill(axes, seed, allocate, "nan_inf")
    first, last, *nans = choose(axes["E"], 2 + max(axes["E"] // 16, 1), stream(seed, "nan_inf", "where"))
    t["logits"][:, first] = torch.inf
    t["bias"][first] = 2.0
    t["logits"][:, last] = -torch.inf
    t["logits"][:, nans] = torch.nan
    return _finish(t, axes, seed)


def nan_chosen(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The last token has only K - 1 numbers: the lowest NaN id comes last and its weights are all NaN."""
    t = _fill(axes, seed, allocate, "nan_chosen")
    numbers = choose(axes["E"], axes["K"] - 1, stream(seed, "nan_chosen", "where"))
    row = t["logits"][-1].clone()
    t["logits"][-1] = torch.nan
    t["logits"][-1, numbers] = row[numbers]
    return _finish(t, axes, seed)


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Logits of magnitude 1e38: scores are 0 or 1 and the biases decide."""
    t = _fill(axes, seed, allocate, "large")
    t["logits"].copy_(torch.where(t["logits"] < 0, -1e38, 1e38))
    return _finish(t, axes, seed)


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Subnormal logits: every score is 0.5 and the biases decide."""
    t = _fill(axes, seed, allocate, "denormals")
    t["logits"].mul_(2.0**-135)
    return _finish(t, axes, seed)


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Logits and biases are +0 or -0: all keys are equal and the lowest ids win."""
    t = _fill(axes, seed, allocate, "negative_zero")
    t["logits"].mul_(0.0)
    t["bias"].mul_(0.0)
    return t


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """All logits are 0.75 and all biases 0.125: the lowest ids win."""
    t = _fill(axes, seed, allocate, "all_equal")
    t["logits"].fill_(0.75)
    t["bias"].fill_(0.125)
    return t


OP = Op(
    name="moe_topk",
    doc="Stable top-K of sigmoid scores with a selection bias; renormalised weights in rank order.",
    buffers=(
        Buffer("logits", ("B", "E"), DType.F32, Role.ACTIVATION, "router logits"),
        Buffer("bias", ("E",), DType.F32, Role.WEIGHT, "selection bias; not part of the weights"),
        Buffer("ids", ("B", "K"), DType.I32, Role.OUTPUT, "chosen experts, best first"),
        Buffer("weights", ("B", "K"), DType.BF16, Role.OUTPUT, "s / (sum of chosen s + 1e-20)"),
    ),
    workloads=(
        Workload("tp8_b1", {"B": 1, "E": 896, "K": 16}, doc="one token"),
        Workload("tp8_b8", {"B": 8, "E": 896, "K": 16}, doc="eight tokens"),
        Workload("tp16_b1", {"B": 1, "E": 896, "K": 16}, doc="as tp8_b1: routing is replicated"),
        Workload("small_b1", {"B": 1, "E": 64, "K": 4}, real=False),
        Workload("small_b3", {"B": 3, "E": 64, "K": 4}, real=False),
    ),
    reference=reference,
    baseline=baseline,
    generators={
        "ordinary": ordinary,
        "power_law": power_law,
        "ties": ties,
        "nan_inf": nan_inf,
        "nan_chosen": nan_chosen,
        "large": large,
        "denormals": denormals,
        "negative_zero": negative_zero,
        "all_equal": all_equal,
    },
    tolerances={
        "ids": Tolerance(exact=True),
        "weights": Tolerance(factor=3.0, floor_rms=3e-3, floor_worst=8e-3, cap_rms=4e-3, cap_worst=8e-3),
    },
    flops=lambda axes: axes["B"] * axes["E"] * 4,
    compulsory_bytes=lambda axes: 4 * axes["E"] * (axes["B"] + 1) + 6 * axes["B"] * axes["K"],
    constants={"scaling": 1.0, "epsilon": routing.EPSILON},
    faults={
        "without-bias": Fault("missing-bias", "experts are ordered without the bias", without_bias),
        "biased-weights": Fault(
            "biased-weights", "weights are made from s + bias, not from s", biased_weights
        ),
        "not-renormalised": Fault("missing-scale", "weights are not divided by their sum", not_renormalised),
        "higher-id-first": Fault("tie-order", "the higher id comes first among equal keys", higher_id_first),
        **{
            f"dropped-{n}": Fault("dropped-tail", f"the last {n} experts are not looked at", dropped(n))
            for n in (1, 32, 64, 128, 256)
        },
    },
)
