"""The value end of MLA decode: `out = bf16(bf16(latent kv_b[h, D:].T) sigmoid(gate))`, a head at a time.

`latent` is what attention over the compressed cache leaves, `kv_b` the up-projection whose second D rows a
head make values. The gate's logits are columns G.. of the input projection's row. A request of length 0 is
padding: its output row is zero, whatever (NaN) its gates hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Value:
    """How the op is computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    gated: bool = True
    round_product: bool = True
    keys: bool = False
    """The head's first D rows in place of its second."""

    def __call__(self, inputs: Tensors, axes: Axes) -> Tensors:
        """Run the op; shapes and names as in `OP`."""
        h, d, first = axes["H"], axes["D"], axes["G"]
        rows = inputs["kv_b"][:, :d] if self.keys else inputs["kv_b"][:, d:]
        product = torch.einsum("bhl,hdl->bhd", inputs["latent"].to(self.dtype), rows.to(self.dtype))
        if self.round_product:
            product = to_bf16(product).to(self.dtype)
        gate = inputs["projected"][:, first : first + h * d].to(self.dtype).unflatten(-1, (h, d))
        out = to_bf16(product * torch.sigmoid(gate) if self.gated else product).to(self.dtype).flatten(1)
        return {"out": torch.where((inputs["lengths"] > 0)[:, None], out, 0.0)}


def _fill(axes: Axes, seed: int, allocate: Allocate, name: str, std: float = 1.0) -> Tensors:
    t = {n: allocate(n) for n in ("latent", "kv_b", "projected", "lengths")}
    fill_normal(t["latent"], stream(seed, name, "latent"), std=std)
    fill_normal(t["kv_b"], stream(seed, name, "kv_b"), std=axes["L"] ** -0.5)
    fill_normal(t["projected"], stream(seed, name, "projected"), std=2.0)
    t["projected"][:, : axes["G"]] = torch.nan  # not this op's columns
    t["lengths"].fill_(1)
    return t


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal latents; gates of standard deviation 2."""
    return _fill(axes, seed, allocate, "ordinary")


def padding(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """With several requests the second has the length 0 and NaN for a gate and a latent."""
    t = _fill(axes, seed, allocate, "padding")
    if axes["B"] > 1:
        t["lengths"][1] = 0
        t["projected"][1] = torch.nan
        t["latent"][1] = torch.nan
    return t


def steep_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Gates of -12 and 200 in turn: results that are nearly gone beside ones that are not gated."""
    t = _fill(axes, seed, allocate, "steep_gates")
    t["projected"][:, axes["G"] :: 2] = -12.0
    t["projected"][:, axes["G"] + 1 :: 2] = 200.0
    return t


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Latents of magnitude 2^100."""
    return _fill(axes, seed, allocate, "large", std=2.0**100)


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other latent is subnormal."""
    t = _fill(axes, seed, allocate, "denormals")
    t["latent"][..., ::2] *= 2.0**-130
    return t


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third latent is -0."""
    t = _fill(axes, seed, allocate, "negative_zero")
    t["latent"][..., ::3] = -0.0
    return t


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """A NaN in the first head of the last request, an infinite gate of each sign in the last head."""
    t, h, d = _fill(axes, seed, allocate, "nan_inf"), axes["H"], axes["D"]
    t["latent"][-1, 0, 5] = torch.nan
    end = axes["G"] + h * d
    t["projected"][:, end - 2], t["projected"][:, end - 1] = -torch.inf, torch.inf
    return t


def compulsory_bytes(axes: Axes) -> int:
    """The value half of kv_b once; latents, gates and lengths in, rows out."""
    b, h, d, latent = axes["B"], axes["H"], axes["D"], axes["L"]
    return 2 * h * d * latent + b * (2 * h * latent + 4 * h * d + 4)


def _sized(name: str, b: int, h: int, pitch: int, doc: str = "") -> Workload:
    return Workload(name, {"B": b, "H": h, "D": 128, "L": 512, "P": pitch, "G": 2112}, doc=doc)


def _small(name: str, b: int) -> Workload:
    return Workload(name, {"B": b, "H": 2, "D": 16, "L": 64, "P": 96, "G": 64}, real=False)


OP = Op(
    name="mla_value",
    doc="Values of MLA decode from the attended latent, gated; zero rows for empty requests.",
    buffers=(
        Buffer("latent", ("B", "H", "L"), DType.BF16, Role.ACTIVATION, "attended latent of each head"),
        Buffer(
            "kv_b", ("H", "2 * D", "L"), DType.BF16, Role.WEIGHT, "key rows, then value rows, of each head"
        ),
        Buffer("projected", ("B", "P"), DType.BF16, Role.ACTIVATION, "gate logits from column G"),
        Buffer("lengths", ("B",), DType.I32, Role.METADATA, "tokens of each request; 0 is padding"),
        Buffer("out", ("B", "H * D"), DType.BF16, Role.OUTPUT, "gated values"),
    ),
    workloads=(
        _sized("tp8_b1", 1, 12, 3648, "one request"),
        _sized("tp8_b8", 8, 12, 3648, "eight requests"),
        _sized("tp16_b1", 1, 6, 2880, "one request"),
        _sized("tp16_b16", 16, 6, 2880, "sixteen requests"),
        _small("small_b1", 1),
        _small("small_b3", 3),
    ),
    reference=Value(),
    baseline=Value(torch.float32),
    honest=(Value(torch.float32, round_product=False),),
    generators={
        f.__name__: f for f in (ordinary, padding, steep_gates, large, denormals, negative_zero, nan_inf)
    },
    tolerances={"out": Tolerance(factor=2.0, floor_rms=2e-3, floor_worst=1.2e-2, cap_worst=3e-2)},
    flops=lambda axes: 2 * axes["B"] * axes["H"] * axes["D"] * axes["L"],
    compulsory_bytes=compulsory_bytes,
    faults={
        "without-gate": Fault("missing-gate", "the values are not gated", Value(torch.float32, gated=False)),
        "key-rows": Fault(
            "wrong-rows", "the head's key rows are taken for its value rows", Value(torch.float32, keys=True)
        ),
    },
)
