"""The routed experts with MXFP8 activations, as block-scaled tensor cores compute them:
`expanded[b, k] = bf16(W2[e] mx(situ(gate, up)))`, `(gate, up) = W13[e] mx(latent)`, `e = ids[b, k]`.

`mx` rounds to e4m3 with a scale for 32 elements (`workbench/ops/mxfp8.py`): the latent's scale is rounded up
where e4m3 would saturate, the hidden's never (it saturates). Gate and up are the wide accumulators; the
hidden is quantised from float32, without a bf16 rounding. Accumulation is float32 in any order. An activation
of `tanh.approx` may move a hidden element to the next e4m3 number, an eighth of its size away: the tolerance
is what that costs. Weights are in checkpoint order, as in `moe_experts`; unchosen experts have NaN scales.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload, experts, situ
from workbench.ops.experts import Magnitudes, Recipe, fill_experts, run_experts
from workbench.ops.mistakes import MISTAKES
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16
from workbench.ops.routing import choose_experts

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


def with_recipe(recipe: Recipe, quantised: bool = True):
    """The op under one way of computing it."""
    recipe = replace(recipe, mxfp8=quantised)

    def run(inputs: Tensors, axes: Axes) -> Tensors:
        rows = run_experts(inputs, inputs["latent"], inputs["ids"], recipe)
        return {"expanded": to_bf16(rows).to(recipe.dtype)}

    return run


def _fill(
    axes: Axes,
    seed: int,
    allocate: Allocate,
    name: str,
    power_law: bool = False,
    aim: Magnitudes | None = None,
) -> Tensors:
    t = {n: allocate(n) for n in ("latent", "ids", "w13", "w13_scale", "w2", "w2_scale")}
    fill_normal(t["latent"], stream(seed, name, "latent"))
    rng = stream(seed, name, "ids")
    t["ids"].copy_(choose_experts(axes["B"], axes["E"], axes["K"], rng, power_law))
    fill_experts(t, t["ids"], seed, aim)
    return t


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal latents, uniform routing; gates of root mean square about 2."""
    return _fill(axes, seed, allocate, "ordinary")


def power_law(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Power-law routing: tokens share experts."""
    return _fill(axes, seed, allocate, "power_law", power_law=True)


def saturating(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every block's largest latent has the mantissa 1.9: its scale must be rounded up."""
    t = _fill(axes, seed, allocate, "saturating")
    t["latent"].clamp_(-3.5, 3.5)
    t["latent"][:, ::32] = 3.796875
    return t


def uneven_blocks(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Blocks of very different sizes, and some of zeros: each needs its own scale."""
    t = _fill(axes, seed, allocate, "uneven_blocks")
    blocks = t["latent"].view(axes["B"], -1, 32)
    blocks[:, 1::3] *= 2.0**-20
    blocks[:, 2::7] = 0.0
    return t


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Latents of 2^40: SiTU saturates to 0 or +-100."""
    t = _fill(axes, seed, allocate, "large", aim=Magnitudes(hidden=70.0))
    t["latent"] *= 2.0**40
    return t


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third latent is -0."""
    t = _fill(axes, seed, allocate, "negative_zero")
    t["latent"][:, ::3] = -0.0
    return t


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every latent is 1 and all tokens choose the same experts."""
    t = _fill(axes, seed, allocate, "all_equal")
    t["latent"].fill_(1.0)
    first = t["ids"][:1].clone()
    t["ids"].copy_(first.expand_as(t["ids"]))
    fill_experts(t, t["ids"], seed)
    return t


def compulsory_bytes(axes: Axes) -> int:
    """Distinct experts' weights, latents, ids, rows out."""
    tokens, k, latent = axes["B"], axes["K"], axes["L"]
    return experts.expert_bytes(axes) + 2 * tokens * latent + 4 * tokens * k + 2 * tokens * k * latent


OP = Op(
    name="moe_experts_mx",
    doc="MXFP4 routed experts with MXFP8 activations and SiTU; unweighted rows out.",
    buffers=(
        Buffer("latent", ("B", "L"), DType.BF16, Role.ACTIVATION, "down-projected tokens"),
        Buffer("ids", ("B", "K"), DType.I32, Role.ACTIVATION, "experts of each token, distinct"),
        Buffer("w13", ("E", "2 * I", "L"), DType.E2M1, Role.WEIGHT, "gate rows, then up rows"),
        Buffer("w13_scale", ("E", "2 * I", "L // 32"), DType.E8M0, Role.WEIGHT, "one for 32 along L"),
        Buffer("w2", ("E", "L", "I"), DType.E2M1, Role.WEIGHT, "second projection"),
        Buffer("w2_scale", ("E", "L", "I // 32"), DType.E8M0, Role.WEIGHT, "one for 32 along I"),
        Buffer("expanded", ("B", "K", "L"), DType.BF16, Role.OUTPUT, "unweighted expert outputs"),
    ),
    workloads=(
        Workload("tp8_b1", {"B": 1, "E": 896, "K": 16, "L": 3584, "I": 384}, doc="one token"),
        Workload("tp8_b8", {"B": 8, "E": 896, "K": 16, "L": 3584, "I": 384}, doc="eight tokens"),
        Workload("small_b1", {"B": 1, "E": 32, "K": 4, "L": 128, "I": 64}, real=False),
        Workload("small_b3", {"B": 3, "E": 32, "K": 4, "L": 128, "I": 64}, real=False),
    ),
    reference=with_recipe(experts.GOLDEN),
    baseline=with_recipe(experts.BASELINE),
    honest=(with_recipe(experts.HIGH), with_recipe(Recipe(dtype=torch.float32))),
    generators={
        f.__name__: f
        for f in (ordinary, power_law, saturating, uneven_blocks, large, negative_zero, all_equal)
    },
    tolerances={
        "expanded": Tolerance(factor=2.0, floor_rms=5e-3, floor_worst=3e-2, cap_rms=4e-2, cap_worst=3e-1)
    },
    flops=experts.expert_flops,
    compulsory_bytes=compulsory_bytes,
    constants={"beta": situ.BETA, "lambda": situ.LAMBDA},
    faults={
        "not-quantised": Fault(
            "wrong-rounding",
            "the activations are not quantised to MXFP8",
            with_recipe(Recipe(dtype=torch.float32), quantised=False),
        ),
        **{
            name: Fault(m.rule, m.summary, with_recipe(m.recipe), m.recipe.applies)
            for name, m in MISTAKES.items()
        },
    },
)
