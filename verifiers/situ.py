"""SiTU of the dense and shared MLPs: `out = bf16(beta tanh(g / beta) sigmoid(g) lambda tanh(u / lambda))`.

A row of `gate_up` holds I gates, then I ups, rounded to bf16 already. The row of `out` has P >= I columns;
those past I are zero (they pad the next product). float32 inside, one rounding. `tanh.approx` (relative error
2^-11) is admitted; the sigmoid must be accurate relative to its own size, so `0.5 (1 + tanh(g / 2))`, which
cancels for negative gates, is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload, situ
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Activation:
    """How SiTU is computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    swap: bool = False
    interleaved: bool = False
    beta: float = situ.BETA
    lam: float = situ.LAMBDA
    silu: bool = False
    """silu(g) u, the activation of other models."""
    cancelling: bool = False
    """The sigmoid as 0.5 (1 + tanh(g / 2))."""

    def __call__(self, inputs: Tensors, axes: Axes) -> Tensors:
        """Run the op; shapes and names as in `OP`."""
        x = inputs["gate_up"].to(self.dtype)
        gate, up = (x[:, 0::2], x[:, 1::2]) if self.interleaved else x.chunk(2, -1)
        if self.swap:
            gate, up = up, gate
        if self.silu:
            y = torch.nn.functional.silu(gate) * up
        elif self.cancelling:
            half = 0.5 * (1 + situ.tanh_high(gate / 2))
            y = self.beta * self.tanh(gate / self.beta) * half * self.lam * self.tanh(up / self.lam)
        else:
            y = situ.situ(gate, up, self.tanh, self.beta, self.lam)
        out = torch.zeros(axes["B"], axes["P"], dtype=self.dtype)
        out[:, : axes["I"]] = to_bf16(y).to(self.dtype)
        return {"out": out}


def _fill(axes: Axes, seed: int, allocate: Allocate, name: str, std: float = 3.0) -> Tensors:
    x = allocate("gate_up")
    fill_normal(x, stream(seed, name, "gate_up"), std=std)
    return {"gate_up": x}


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Gates and ups of standard deviation 3."""
    return _fill(axes, seed, allocate, "ordinary")


def negative_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Gates from -20 to -8: every result is tiny, and a sigmoid that cancels has none of its digits."""
    t = _fill(axes, seed, allocate, "negative_gates")
    gates = torch.rand(axes["B"], axes["I"], generator=stream(seed, "negative_gates", "gates"))
    t["gate_up"][:, : axes["I"]] = -8 - 12 * gates
    return t


def wide(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Standard deviation 30: both tanh saturate, and their bend is passed."""
    return _fill(axes, seed, allocate, "wide", std=30.0)


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Magnitudes of 2^100: 0 or +-100."""
    return _fill(axes, seed, allocate, "large", std=2.0**100)


def tiny(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Magnitudes of 1e-3: results are g u / 2."""
    return _fill(axes, seed, allocate, "tiny", std=1e-3)


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other element is subnormal."""
    t = _fill(axes, seed, allocate, "denormals")
    t["gate_up"][:, ::2] *= 2.0**-130
    return t


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third element is -0."""
    t = _fill(axes, seed, allocate, "negative_zero")
    t["gate_up"][:, ::3] = -0.0
    return t


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every gate is 2 and every up -3."""
    t = _fill(axes, seed, allocate, "all_equal")
    t["gate_up"][:, : axes["I"]] = 2.0
    t["gate_up"][:, axes["I"] :] = -3.0
    return t


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """One gate is +inf, one -inf, one up of each sign infinite: all finite results; a NaN stays alone."""
    t, i = _fill(axes, seed, allocate, "nan_inf"), axes["I"]
    x = t["gate_up"]
    x[:, 1], x[:, 2] = torch.inf, -torch.inf
    x[:, i + 4], x[:, i + 5] = torch.inf, -torch.inf
    x[0, 7] = torch.nan
    x[0, i + i - 1] = torch.nan
    return t


def _sized(name: str, tokens: int, width: int, padded: int, doc: str = "", real: bool = True) -> Workload:
    return Workload(name, {"B": tokens, "I": width, "P": padded}, real=real, doc=doc)


LOW, HIGH = (Activation(torch.float32, t) for t in (situ.tanh_low, situ.tanh_high))
SINGLE = torch.float32

OP = Op(
    name="situ",
    doc="SiTU of gate and up rows, padded with zeros; one rounding to bf16.",
    buffers=(
        Buffer("gate_up", ("B", "2 * I"), DType.BF16, Role.ACTIVATION, "gates, then ups"),
        Buffer("out", ("B", "P"), DType.BF16, Role.OUTPUT, "activations, zero past I"),
    ),
    workloads=(
        _sized("tp8_b1", 1, 768, 768, "shared expert, one token"),
        _sized("tp8_b8", 8, 768, 768, "shared expert, eight tokens"),
        _sized("tp16_b1", 1, 384, 384, "shared expert, one token"),
        _sized("dense_tp8_b8", 8, 4224, 4224, "MLP of layer 0"),
        _sized("dense_tp16_b8", 8, 2112, 2176, "MLP of layer 0, padded"),
        _sized("small_b1", 1, 96, 96, real=False),
        _sized("small_b3", 3, 96, 128, real=False),
    ),
    reference=Activation(),
    baseline=LOW,
    honest=(HIGH, Activation(SINGLE)),
    generators={
        f.__name__: f
        for f in (
            ordinary,
            negative_gates,
            wide,
            large,
            tiny,
            denormals,
            negative_zero,
            all_equal,
            nan_inf,
        )
    },
    tolerances={"out": Tolerance(factor=2.0, floor_rms=1e-3, floor_worst=8e-3, cap_worst=2e-2)},
    flops=lambda axes: 8 * axes["B"] * axes["I"],
    compulsory_bytes=lambda axes: 2 * axes["B"] * (2 * axes["I"] + axes["P"]),
    constants={"beta": situ.BETA, "lambda": situ.LAMBDA},
    faults={
        "swapped": Fault("swapped-gate-up", "ups are taken for gates", Activation(SINGLE, swap=True)),
        "interleaved": Fault(
            "interleaved-gate-up", "gates and ups are read in turn", Activation(SINGLE, interleaved=True)
        ),
        "silu": Fault("wrong-activation", "silu(gate) * up is computed", Activation(SINGLE, silu=True)),
        "other-beta": Fault("wrong-constant", "beta is 1", Activation(SINGLE, beta=1.0)),
        "cancelling": Fault(
            "cancelling-sigmoid",
            "the sigmoid is 0.5 (1 + tanh(g / 2)), which cancels for negative gates",
            Activation(SINGLE, cancelling=True),
        ),
    },
)
