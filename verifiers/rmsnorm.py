"""RMSNorm: `out = bf16(x * rsqrt(mean(x^2) + eps) * weight)`, one rounding.

Subnormal inputs may be flushed to zero: the tolerance is relative to the whole output.
"""

from collections.abc import Mapping

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

EPS = 1e-5
Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


def normalise(inputs: Tensors, dtype: torch.dtype, eps: float = EPS, keep: int | None = None) -> Tensors:
    """The op in `dtype`; `keep` leaves the tail of the row out of the mean."""
    x, weight = inputs["x"].to(dtype), inputs["weight"].to(dtype)
    mean = x[:, :keep].square().sum(-1, keepdim=True) / x.shape[-1]
    return {"out": to_bf16(x * torch.rsqrt(mean + eps) * weight).to(dtype)}


def reference(inputs: Tensors, axes: Axes) -> Tensors:
    """Golden, float64."""
    return normalise(inputs, torch.float64)


def baseline(inputs: Tensors, axes: Axes) -> Tensors:
    """Float32 arithmetic."""
    return normalise(inputs, torch.float32)


def without_eps(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: no epsilon."""
    return normalise(inputs, torch.float64, eps=0.0)


def without_weight(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: the weight is not applied."""
    return normalise({**inputs, "weight": torch.ones_like(inputs["weight"])}, torch.float64)


def rounded_twice(inputs: Tensors, axes: Axes) -> Tensors:
    """Mistake: rounded to bf16 before the weight is applied."""
    ones = torch.ones_like(inputs["weight"])
    plain = normalise({**inputs, "weight": ones}, torch.float64)["out"]
    return {"out": to_bf16(plain * inputs["weight"].double()).double()}


def dropped(elements: int):
    """Mistake: the last `elements` of a row do not count in the mean."""
    return lambda inputs, axes: normalise(inputs, torch.float64, keep=max(axes["N"] - elements, 1))


def _fill(seed: int, allocate: Allocate, name: str, std: float = 2.0) -> Tensors:
    x, weight = allocate("x"), allocate("weight")
    fill_normal(x, stream(seed, name, "x"), std=std)
    fill_normal(weight, stream(seed, name, "weight"), std=0.25, mean=1.0)
    return {"x": x, "weight": weight}


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal x of standard deviation 2, weights about 1."""
    return _fill(seed, allocate, "ordinary")


def tiny(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """x of standard deviation 2e-3: epsilon decides."""
    return _fill(seed, allocate, "tiny", std=2e-3)


def uneven(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The last sixteenth of each row is 16 times as large: a mean that misses it is far off."""
    t = _fill(seed, allocate, "uneven")
    t["x"][:, -(axes["N"] // 16) :] *= 16
    return t


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """|x| about 2^56: squares stay below the largest float32 even summed over the row."""
    return _fill(seed, allocate, "large", std=2.0**54)


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other element of x and every fourth weight is subnormal."""
    t = _fill(seed, allocate, "denormals")
    t["x"][:, ::2] *= 2.0**-130
    t["weight"][::4] = 2.0**-130
    return t


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third element is -0."""
    t = _fill(seed, allocate, "negative_zero")
    t["x"][:, ::3] = -0.0
    return t


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every x is 3."""
    t = _fill(seed, allocate, "all_equal")
    t["x"].fill_(3.0)
    return t


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The first row holds a NaN: all of it must be NaN and no other row. With one row only a weight is NaN.

    The second weight is +inf: its column is an infinity with the sign of x (x there is made non-zero).
    """
    t = _fill(seed, allocate, "nan_inf")
    n = axes["N"]
    t["x"][:, 1] = torch.where(t["x"][:, 1] < 0, -1.5, 1.5)
    t["weight"][1] = torch.inf
    t["weight"][n - 1] = torch.nan
    if axes["B"] > 1:
        t["x"][0, n // 2] = torch.nan
    return t


OP = Op(
    name="rmsnorm",
    doc="Root-mean-square normalisation of B rows of N elements, scaled by a weight, one rounding to bf16.",
    buffers=(
        Buffer("x", ("B", "N"), DType.BF16, Role.ACTIVATION, "rows to normalise"),
        Buffer("weight", ("N",), DType.BF16, Role.WEIGHT, "scale of each column"),
        Buffer("out", ("B", "N"), DType.BF16, Role.OUTPUT, "bf16(x * rsqrt(mean(x^2) + eps) * weight)"),
    ),
    workloads=(
        Workload("tp8_b1", {"B": 1, "N": 7168}, doc="hidden size, one token"),
        Workload("tp8_b8", {"B": 8, "N": 7168}, doc="hidden size, eight tokens"),
        Workload("tp16_b1", {"B": 1, "N": 7168}, doc="as tp8_b1: the norm is replicated"),
        Workload("latent_b1", {"B": 1, "N": 3584}, doc="norm of the combined latent"),
        Workload("latent_b8", {"B": 8, "N": 3584}, doc="norm of the combined latent"),
        Workload("small_b1", {"B": 1, "N": 256}, real=False),
        Workload("small_b3", {"B": 3, "N": 256}, real=False),
    ),
    reference=reference,
    baseline=baseline,
    generators={
        "ordinary": ordinary,
        "tiny": tiny,
        "uneven": uneven,
        "large": large,
        "denormals": denormals,
        "negative_zero": negative_zero,
        "all_equal": all_equal,
        "nan_inf": nan_inf,
    },
    tolerances={"out": Tolerance(factor=3.0, floor_rms=1e-3, floor_worst=8e-3, cap_rms=2e-3, cap_worst=8e-3)},
    flops=lambda axes: axes["B"] * axes["N"] * 4,
    compulsory_bytes=lambda axes: 2 * axes["N"] * (2 * axes["B"] + 1),
    constants={"eps": EPS},
    faults={
        "without-eps": Fault("missing-epsilon", "epsilon is not added to the mean of squares", without_eps),
        "without-weight": Fault("missing-scale", "the weight is not applied", without_weight),
        "rounded-twice": Fault(
            "wrong-rounding", "rounded to bf16 before the weight is applied", rounded_twice
        ),
        **{
            f"dropped-{n}": Fault(
                "dropped-tail", f"the last {n} elements of a row are not in the mean", dropped(n)
            )
            for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024)
        },
    },
)
