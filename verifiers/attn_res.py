"""Attention residual: the running prefix and the saved blocks mixed by a softmax, then normalised.

    p    = bf16(prefix + delta)
    V    = blocks[0 .. V-2], p                        V rows of N
    l    = (V rsqrt(mean V^2 + 1e-5) norm) query      one logit a row, float32
    mix  = softmax(l) V
    out  = bf16(mix rsqrt(mean mix^2 + 1e-5) out_norm)

In place: `prefix` becomes p; where A, the number of blocks saved afterwards, is V (not V - 1), `blocks[V-1]`
becomes p too. Both are exact. Later blocks must not be read. Rounding `mix` to bf16, as the last layer does,
is honest. Layers without a delta are the case of a zero prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

EPS = 1e-5
Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """x over its root mean square along the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class Residual:
    """How the residual is computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    round_mix: bool = False
    round_prefix: bool = True
    """Without it the float32 sum is mixed; the stored prefix is rounded all the same."""
    normed_keys: bool = True
    """Without it the logits are made from the rows as they are."""
    use_norm: bool = True
    uniform: bool = False
    """The mean of the rows in place of the softmax."""
    mix_normed: bool = False
    """The normalised rows are mixed, not the rows."""
    newest: bool = True
    """Without it the prefix is left out of the mix wherever a block is there."""

    def __call__(self, inputs: Tensors, axes: Axes) -> Tensors:
        """Run the op; shapes and names as in `OP`."""
        saved, dtype = axes["V"] - 1, self.dtype
        norm, query, out_norm = (inputs[n].to(dtype) for n in ("norm", "query", "out_norm"))
        total = inputs["prefix"].to(dtype) + inputs["delta"].to(dtype)
        p = to_bf16(total).to(dtype)
        blocks = inputs["blocks"].to(dtype, copy=True)
        rows = torch.cat((blocks[:, :saved], (p if self.round_prefix else total)[:, None]), 1)
        if not self.newest and saved:
            rows = rows[:, :-1]
        keys = rms(rows) if self.normed_keys else rows
        logits = (keys * norm if self.use_norm else keys) @ query
        weights = torch.softmax(torch.zeros_like(logits) if self.uniform else logits, -1)
        mix = (weights[..., None] * (keys if self.mix_normed else rows)).sum(1)
        if self.round_mix:
            mix = to_bf16(mix).to(dtype)
        if axes["A"] == axes["V"]:
            blocks[:, saved] = p
        return {"out": to_bf16(rms(mix) * out_norm).to(dtype), "prefix": p, "blocks": blocks}


def _fill(
    axes: Axes, seed: int, allocate: Allocate, name: str, std: float = 1.0, sharp: float = 2.0
) -> Tensors:
    """`sharp`: standard deviation of the logits."""
    t = {b.name: allocate(b.name) for b in BUFFERS if b.role.is_input}
    for n in ("prefix", "delta", "blocks"):
        fill_normal(t[n], stream(seed, name, n), std=std)
    for n in ("norm", "out_norm"):
        fill_normal(t[n], stream(seed, name, n), std=0.25, mean=1.0)
    fill_normal(t["query"], stream(seed, name, "query"), std=sharp * axes["N"] ** -0.5)
    return t


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal rows; logits of standard deviation 2."""
    return _fill(axes, seed, allocate, "ordinary")


def sharp(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Logits in the hundreds: the softmax picks a row, and exp of a logit itself overflows."""
    return _fill(axes, seed, allocate, "sharp", sharp=300.0)


def deep(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Rows of very different sizes, the newest the largest, as deep in the network."""
    t = _fill(axes, seed, allocate, "deep")
    for v in range(axes["M"]):
        t["blocks"][:, v] *= 2.0 ** (v - 4)
    t["prefix"] *= 32.0
    return t


def tiny(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Rows of standard deviation 1e-3: epsilon decides."""
    return _fill(axes, seed, allocate, "tiny", std=1e-3)


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Rows of magnitude 2^52: squares stay below the largest float32 even summed over a row."""
    return _fill(axes, seed, allocate, "large", std=2.0**52)


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other element of the rows is subnormal."""
    t = _fill(axes, seed, allocate, "denormals")
    for n in ("prefix", "delta", "blocks"):
        t[n][..., ::2] *= 2.0**-130
    return t


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third element of the rows is -0; with several tokens the first has no delta but -0."""
    t = _fill(axes, seed, allocate, "negative_zero")
    for n in ("prefix", "delta", "blocks"):
        t[n][..., ::3] = -0.0
    if axes["B"] > 1:
        t["delta"][0] = -0.0
    return t


def no_prefix(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The prefix is zero: the delta replaces it."""
    t = _fill(axes, seed, allocate, "no_prefix")
    t["prefix"].zero_()
    return t


def all_equal(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Rows that are all the same: every row has the same weight."""
    t = _fill(axes, seed, allocate, "all_equal")
    t["delta"].zero_()
    t["blocks"].copy_(t["prefix"][:, None].expand_as(t["blocks"]))
    return t


def unused(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Blocks that are not saved yet are NaN."""
    t = _fill(axes, seed, allocate, "unused")
    t["blocks"][:, axes["V"] - 1 :] = torch.nan
    return t


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The output norm holds an infinity and a NaN: their columns alone are not finite. With several tokens
    the first token's delta holds a NaN: its output row is NaN, and one element of its prefix."""
    t, n = _fill(axes, seed, allocate, "nan_inf"), axes["N"]
    t["out_norm"][1] = torch.inf
    t["out_norm"][n - 1] = torch.nan
    if axes["B"] > 1:
        t["delta"][0, n // 2] = torch.nan
    return t


BUFFERS = (
    Buffer("prefix", ("B", "N"), DType.BF16, Role.STATE, "running sum; becomes bf16(prefix + delta)"),
    Buffer("delta", ("B", "N"), DType.BF16, Role.ACTIVATION, "what the layer before adds"),
    Buffer("blocks", ("B", "M", "N"), DType.BF16, Role.STATE, "saved prefixes, V - 1 of them in use"),
    Buffer("norm", ("N",), DType.BF16, Role.WEIGHT, "scale of the keys"),
    Buffer("query", ("N",), DType.BF16, Role.WEIGHT, "makes a logit of a key"),
    Buffer("out_norm", ("N",), DType.BF16, Role.WEIGHT, "scale of the output"),
    Buffer("out", ("B", "N"), DType.BF16, Role.OUTPUT, "normalised mix"),
)


def _sized(name: str, b: int, rows: int, after: int, doc: str = "", n: int = 7168, m: int = 8) -> Workload:
    axes = {"B": b, "N": n, "V": rows, "A": after, "M": m}
    return Workload(name, axes, real=n == 7168, doc=doc)


def compulsory_bytes(axes: Axes) -> int:
    """Rows read once, prefix and output written, a block where one is saved; three vectors of weights."""
    rows = axes["V"] - 1 + 2 + 2 + (axes["A"] == axes["V"])
    return 2 * axes["N"] * (axes["B"] * rows + 3)


def _wrong(**change: bool) -> Residual:
    return Residual(torch.float32, **change)  # type: ignore[arg-type]


def _several(axes: Axes) -> bool:
    return axes["V"] > 1


OP = Op(
    name="attn_res",
    doc="Attention residual: prefix and saved blocks mixed by a softmax of one logit a row, RMS-normalised.",
    buffers=BUFFERS,
    workloads=(
        _sized("tp8_b1", 1, 5, 4, "between block writes, four blocks saved; the same at TP16"),
        _sized("tp8_b8", 8, 5, 4, "eight tokens"),
        _sized("tp16_b1", 1, 5, 4, "as tp8_b1: the residual is replicated"),
        _sized("write_b1", 1, 5, 5, "layer 48 saves its block"),
        _sized("first_b1", 1, 1, 1, "layer 0: nothing to mix, the block is saved"),
        _sized("last_b1", 1, 9, 8, "after the last layer: all eight blocks"),
        _sized("small_b1", 1, 3, 3, n=256, m=4),
        _sized("small_b3", 3, 4, 3, n=256, m=4),
    ),
    reference=Residual(),
    baseline=Residual(torch.float32),
    honest=(Residual(torch.float32, round_mix=True),),
    generators={
        f.__name__: f
        for f in (
            ordinary,
            sharp,
            deep,
            tiny,
            large,
            denormals,
            negative_zero,
            no_prefix,
            all_equal,
            unused,
            nan_inf,
        )
    },
    tolerances={
        "out": Tolerance(factor=2.0, floor_rms=3e-3, floor_worst=1.2e-2, cap_rms=8e-3, cap_worst=3e-2),
        "prefix": Tolerance(exact=True),
        "blocks": Tolerance(exact=True),
    },
    flops=lambda axes: axes["B"] * axes["N"] * (6 * axes["V"] + 6),
    compulsory_bytes=compulsory_bytes,
    constants={"eps": EPS},
    faults={
        "keys-not-normed": Fault(
            "missing-scale",
            "the logits are made from rows that are not normalised",
            _wrong(normed_keys=False),
        ),
        "without-norm": Fault(
            "missing-scale", "the keys' norm weight is not applied", _wrong(use_norm=False)
        ),
        "uniform": Fault("missing-softmax", "the rows are averaged", _wrong(uniform=True), _several),
        "mix-normed": Fault("wrong-rows", "the normalised rows are mixed", _wrong(mix_normed=True), _several),
        "without-prefix": Fault(
            "dropped-tail", "the newest row is not in the mix", _wrong(newest=False), _several
        ),
    },
)
