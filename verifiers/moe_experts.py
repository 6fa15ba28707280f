"""The routed experts: `expanded[b, k] = bf16(W2[e] h)`, `h = bf16(situ(gate, up))`, `e = ids[b, k]`,
unweighted.

Gate and up are the wide accumulators themselves (not rounded). Accumulation is float32 in any order.
`tanh.approx` (relative error 2^-11), `ex2.approx` and `rcp.approx` are admitted; the sigmoid must be
accurate relative to its own size, so `0.5 + 0.5 tanh(g / 2)` with `tanh.approx` is not. Subnormals may be
flushed. Weights are in checkpoint order: rows 0..I-1 of w13 are gate, I..2I-1 up. Experts that no token
chose have NaN scales: a kernel that reads one returns NaN.
"""

from collections.abc import Mapping

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload, experts, mxfp4, situ
from workbench.ops.experts import Magnitudes, Recipe, distinct, fill_experts, run_experts
from workbench.ops.mistakes import MISTAKES
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16
from workbench.ops.routing import choose_experts

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


def with_recipe(recipe: Recipe):
    """The op under one way of computing it."""

    def run(inputs: Tensors, axes: Axes) -> Tensors:
        rows = run_experts(inputs, inputs["latent"], inputs["ids"], recipe)
        return {"expanded": to_bf16(rows).to(recipe.dtype)}

    return run


reference = with_recipe(experts.GOLDEN)
baseline = with_recipe(experts.BASELINE)


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


def negative_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Positive latents and gate rows of mostly negative sign: gates about -20, where rounding them costs
    most."""
    t = _fill(axes, seed, allocate, "negative_gates", aim=experts.negative_gates(axes["L"]))
    fill_normal(t["latent"], stream(seed, "negative_gates", "positive"), std=0.1, mean=1.0)
    return t


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Latents of 2^40: SiTU saturates to 0 or +-100; no accumulator comes near the largest float32."""
    t = _fill(axes, seed, allocate, "large", aim=Magnitudes(hidden=70.0))
    t["latent"] *= 2.0**40
    return t


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other latent is subnormal; every third block has the scale 2^-127, itself subnormal in
    float32."""
    t = _fill(axes, seed, allocate, "denormals")
    t["latent"][:, ::2] *= 2.0**-130
    for e in distinct(t["ids"]):
        t["w13_scale"][e, :, ::3] = 0
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


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """One latent of every token is infinite, and no weight of its column is zero: gates and ups are
    infinite, SiTU is 0 or +-100, outputs are finite. With several tokens, the first also holds a NaN: all
    of its rows are NaN, no others.
    """
    t = _fill(axes, seed, allocate, "nan_inf", aim=Magnitudes(hidden=70.0))
    column = axes["L"] // 2 + 1
    for e in distinct(t["ids"]):
        codes = mxfp4.unpack(t["w13"][e])
        codes[:, column] = (codes[:, column] & 8) | 2
        t["w13"][e] = mxfp4.pack(codes)
    t["latent"][:, column] = torch.where(t["latent"][:, column] < 0, -torch.inf, torch.inf)
    if axes["B"] > 1:
        t["latent"][0, 3] = torch.nan
    return t


def compulsory_bytes(axes: Axes) -> int:
    """Distinct experts' weights, latents, ids, rows out."""
    tokens, k, latent = axes["B"], axes["K"], axes["L"]
    return experts.expert_bytes(axes) + 2 * tokens * latent + 4 * tokens * k + 2 * tokens * k * latent


OP = Op(
    name="moe_experts",
    doc="MXFP4 routed experts with SiTU on K experts a token; unweighted rows out.",
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
        Workload("tp16_b1", {"B": 1, "E": 896, "K": 16, "L": 3584, "I": 192}, doc="one token"),
        Workload("small_b1", {"B": 1, "E": 32, "K": 4, "L": 128, "I": 64}, real=False),
        Workload("small_b3", {"B": 3, "E": 32, "K": 4, "L": 128, "I": 64}, real=False),
    ),
    reference=reference,
    baseline=baseline,
    honest=(with_recipe(experts.HIGH), with_recipe(Recipe(dtype=torch.float32))),
    generators={
        "ordinary": ordinary,
        "power_law": power_law,
        "negative_gates": negative_gates,
        "large": large,
        "denormals": denormals,
        "negative_zero": negative_zero,
        "all_equal": all_equal,
        "nan_inf": nan_inf,
    },
    tolerances={"expanded": Tolerance(factor=2.0, floor_rms=1e-3, floor_worst=8e-3)},
    flops=experts.expert_flops,
    compulsory_bytes=compulsory_bytes,
    constants={"beta": situ.BETA, "lambda": situ.LAMBDA},
    faults={
        name: Fault(m.rule, m.summary, with_recipe(m.recipe), m.recipe.applies)
        for name, m in MISTAKES.items()
    },
)
