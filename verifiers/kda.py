"""One decode step of Kimi Delta Attention: convolution, gates, delta rule, normalised and gated output.

Columns of a row of `projected`: q, k, v (H * D each), the output gate (H * D), f_a (D), beta (H), padding.
Per token of slot s > 0 and per head:

    c = conv(conv[s] ++ q|k|v)            four taps a channel, oldest first; q, k, v = silu(c), not rounded
    q = q rsqrt(sum q^2 + 1e-6) / sqrt(D);  k = k rsqrt(sum k^2 + 1e-6)
    g = bf16(fb f_a);  a = exp(-5 sigmoid(exp(a_log) (g + dt_bias)))      decay of each key channel
    S = S a;  S = S + sigmoid(beta) (v - S k) k^T                         S = state[s, h], rows are values
    o = S q;  out = bf16(o rsqrt(mean o^2 + 1e-5) norm sigmoid(gate))

`state[s]` becomes S (float32), `conv[s]` its last three raw inputs, exactly. A token of slot <= 0 is padding:
its output is 0 and no state is written; what its row and slot 0 hold must not matter. Slots of different
tokens differ. `g` is rounded to bf16, so two honest sums may differ by a step of g.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

EPS, L2_EPS, LOWER_BOUND = 1e-5, 1e-6, -5.0
Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """How the step is computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    parts: int = 1
    """Partial sums of fb f_a."""
    decay: bool = True
    bound: bool = True
    """Without it the decay is exp(-exp(a_log) softplus(g + dt_bias)), the gate of another model."""
    decay_first: bool = True
    use_beta: bool = True
    normalise: bool = True
    gated: bool = True
    transposed: bool = False
    """State rows taken for keys."""
    reversed_taps: bool = False

    def __call__(self, inputs: Tensors, axes: Axes) -> Tensors:
        """Run the op; shapes and names as in `OP`."""
        h, d, dtype = axes["H"], axes["D"], self.dtype
        conv, state = inputs["conv"].to(dtype, copy=True), inputs["state"].to(dtype, copy=True)
        out = torch.zeros(axes["B"], h * d, dtype=dtype)
        live = inputs["slots"] > 0
        at = inputs["slots"][live].long()
        row = inputs["projected"][live].to(dtype)
        w = {n: inputs[n].to(dtype) for n in ("conv_weight", "dt_bias", "a_log", "fb", "norm")}
        taps = torch.cat((conv[at], row[:, None, : 3 * h * d]), 1)  # [B, 4, 3 * H * D]
        order = taps.flip(1) if self.reversed_taps else taps
        c = torch.einsum("btpc,ptc->bpc", order.unflatten(-1, (3, h * d)), w["conv_weight"])
        q, k, v = torch.nn.functional.silu(c).unflatten(-1, (h, d)).unbind(1)  # [B, H, D] each
        if self.normalise:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        q = q * d**-0.5
        a = self._decay(row[:, 4 * h * d : 4 * h * d + d], w, h)
        new, o = self._update(state[at], q, k, v, a, row[:, 4 * h * d + d : 4 * h * d + d + h])
        result = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * w["norm"]
        if self.gated:
            result = result * torch.sigmoid(row[:, 3 * h * d : 4 * h * d].unflatten(-1, (h, d)))
        out[live] = to_bf16(result.flatten(1)).to(dtype)
        state[at] = new
        conv[at] = taps[:, 1:]
        return {"out": out, "state": state, "conv": conv}

    def _decay(self, f_a: torch.Tensor, w: Tensors, heads: int) -> torch.Tensor:
        """Decay factors [B, H, D]."""
        pairs = zip(f_a.chunk(self.parts, -1), w["fb"].chunk(self.parts, -1), strict=True)
        g = to_bf16(torch.stack([x @ y.T for x, y in pairs]).sum(0)).to(self.dtype)
        x = (g + w["dt_bias"]).unflatten(-1, (heads, -1))
        slope = torch.exp(w["a_log"])[:, None]
        if not self.bound:
            return torch.exp(-slope * torch.nn.functional.softplus(x))
        a = torch.exp(LOWER_BOUND * torch.sigmoid(slope * x))
        return a if self.decay else torch.ones_like(a)

    def _update(
        self, s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """State [B, H, V, K] after the step, and S q [B, H, V]."""
        if self.transposed:
            s = s.mT
        if self.decay_first:
            s = s * a[:, :, None]
        rate = torch.sigmoid(beta)[..., None] if self.use_beta else 1.0
        error = v - (s @ k[..., None])[..., 0]
        s = s + (rate * error)[..., None] * k[:, :, None]
        if not self.decay_first:
            s = s * a[:, :, None]
        o = (s @ q[..., None])[..., 0]
        return (s.mT if self.transposed else s), o


reference = Step()
baseline = Step(torch.float32)


def _fill(axes: Axes, seed: int, allocate: Allocate, name: str, std: float = 0.3) -> Tensors:
    t = {b.name: allocate(b.name) for b in BUFFERS if b.role.is_input}
    d = axes["D"]
    for n, width, mean in (
        ("projected", 1.0, 0.0), ("conv_weight", 0.5, 0.0), ("dt_bias", 1.0, 0.0), ("a_log", 0.5, 0.0),
        ("fb", d**-0.5, 0.0), ("norm", 0.2, 1.0), ("conv", 1.0, 0.0), ("state", std, 0.0),
    ):  # fmt: skip
        fill_normal(t[n], stream(seed, name, n), std=width, mean=mean)
    order = torch.randperm(axes["S"] - 1, generator=stream(seed, name, "slots"))
    t["slots"].copy_(order[: axes["B"]] + 1)
    return t


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal inputs; decays over the whole range from exp(-5) to 1."""
    return _fill(axes, seed, allocate, "ordinary")


def _logits(t: Tensors, axes: Axes, values: list[float]) -> Tensors:
    """Give key channels in turn these arguments of the gate's sigmoid: f_a is 0, so g is 0."""
    h, d = axes["H"], axes["D"]
    t["projected"][:, 4 * h * d : 4 * h * d + d] = 0.0
    t["a_log"].zero_()
    t["dt_bias"].copy_(torch.tensor(values).repeat(-(-h * d // len(values)))[: h * d])
    return t


def tame_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every log decay is about -0.05."""
    return _logits(_fill(axes, seed, allocate, "tame_gates"), axes, [-4.59512])


def steep_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Log decays of -5, 0, -0.05 and -2.5 side by side: a channel is forgotten, its neighbour kept."""
    return _logits(_fill(axes, seed, allocate, "steep_gates"), axes, [40.0, -120.0, -4.59512, 0.0])


def closed_gates(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """No decay at all."""
    return _logits(_fill(axes, seed, allocate, "closed_gates"), axes, [-120.0])


def decayed_state(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Key channels whose state has decayed by up to exp(-160): tiny, subnormal and zero beside ordinary."""
    t = _fill(axes, seed, allocate, "decayed_state")
    steps = torch.arange(axes["D"]) % 33
    t["state"].copy_(t["state"].double() * torch.exp(-5.0 * steps.double()))
    return _logits(t, axes, [40.0, -120.0, -4.59512])


def extreme_beta(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Beta is 0 in every other head and 1 in the rest."""
    t, h, d = _fill(axes, seed, allocate, "extreme_beta"), axes["H"], axes["D"]
    sign = torch.where(torch.arange(h) % 2 == 0, -200.0, 200.0)
    t["projected"][:, 4 * h * d + d : 4 * h * d + d + h] = sign.to(torch.bfloat16)
    return t


def large_state(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """States of magnitude 2^20 with ordinary inputs."""
    return _fill(axes, seed, allocate, "large_state", std=2.0**20)


def zero_keys(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """The last head's q and k are zero: only the epsilons keep the norms finite; its output is 0."""
    t, h, d = _fill(axes, seed, allocate, "zero_keys"), axes["H"], axes["D"]
    for part in range(2):
        first = part * h * d + (h - 1) * d
        t["projected"][:, first : first + d] = 0.0
        t["conv"][..., first : first + d] = -0.0
    return t


def denormals(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every other f_a and every third state column is subnormal."""
    t, h, d = _fill(axes, seed, allocate, "denormals"), axes["H"], axes["D"]
    t["projected"][:, 4 * h * d : 4 * h * d + d : 2] *= 2.0**-130
    t["state"][..., ::3] *= 2.0**-130
    return t


def padding(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Unused slots and the padding columns are NaN; so is, with several tokens, the row of one of slot 0."""
    t, h, d = _fill(axes, seed, allocate, "padding"), axes["H"], axes["D"]
    t["projected"][:, 4 * h * d + d + h :] = torch.nan
    if axes["B"] > 1:
        t["slots"][1] = 0
        t["projected"][1] = torch.nan
    used = t["slots"][t["slots"] > 0].long()
    unused = torch.ones(axes["S"], dtype=torch.bool)
    unused[used] = False
    t["state"][unused] = torch.nan
    t["conv"][unused] = torch.nan
    return t


def nan_inf(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """A NaN in v of the last token's first head: that head's output is NaN, and one row of its state.

    The last head's output gate is -inf and +inf in turn: 0, and not gated.
    """
    t, h, d = _fill(axes, seed, allocate, "nan_inf"), axes["H"], axes["D"]
    t["projected"][-1, 2 * h * d + 3] = torch.nan
    t["projected"][:, 4 * h * d - d : 4 * h * d : 2] = -torch.inf
    t["projected"][:, 4 * h * d - d + 1 : 4 * h * d : 2] = torch.inf
    return t


def flops(axes: Axes) -> int:
    """F_B, decay, S k, the update, S q; four taps a channel."""
    h, d = axes["H"], axes["D"]
    return axes["B"] * (9 * h * d * d + 24 * h * d)


def compulsory_bytes(axes: Axes) -> int:
    """Weights once; rows, states and taps in, states, taps and rows out."""
    b, h, d = axes["B"], axes["H"], axes["D"]
    weights = 2 * 12 * h * d + 2 * h * d * d + 4 * (h * d + h + d)
    token = 2 * (4 * h * d + d + h) + 2 * 2 * 9 * h * d + 2 * 4 * h * d * d + 2 * h * d + 4
    return weights + b * token


BUFFERS = (
    Buffer("projected", ("B", "P"), DType.BF16, Role.ACTIVATION, "q | k | v | gate | f_a | beta | padding"),
    Buffer("conv_weight", (3, 4, "H * D"), DType.BF16, Role.WEIGHT, "taps of q, k, v, oldest first"),
    Buffer("dt_bias", ("H * D",), DType.F32, Role.WEIGHT, "added to g"),
    Buffer("a_log", ("H",), DType.F32, Role.WEIGHT, "logarithm of the gate's slope"),
    Buffer("fb", ("H * D", "D"), DType.BF16, Role.WEIGHT, "second factor of the gate's projection"),
    Buffer("norm", ("D",), DType.F32, Role.WEIGHT, "scale of the head norm"),
    Buffer("slots", ("B",), DType.I32, Role.METADATA, "state of each token; <= 0 is padding"),
    Buffer("conv", ("S", 3, "3 * H * D"), DType.BF16, Role.STATE, "last raw q | k | v, oldest first"),
    Buffer("state", ("S", "H", "D", "D"), DType.F32, Role.STATE, "[value, key] of each head"),
    Buffer("out", ("B", "H * D"), DType.BF16, Role.OUTPUT, "normalised and gated heads"),
)


def _sized(name: str, tokens: int, heads: int, pitch: int, doc: str = "", real: bool = True) -> Workload:
    axes = {"B": tokens, "H": heads, "D": 128, "P": pitch, "S": tokens + 1}
    return Workload(name, axes, real=real, doc=doc)


def _wrong(**change: bool) -> Step:
    return Step(torch.float32, **change)  # type: ignore[arg-type]


OP = Op(
    name="kda",
    doc="One KDA decode step of B tokens: conv, gates, delta rule on the state in place, gated head norm.",
    buffers=BUFFERS,
    workloads=(
        _sized("tp8_b1", 1, 12, 6288, "one token"),
        _sized("tp8_b2", 2, 12, 6288, "two tokens"),
        _sized("tp8_b8", 8, 12, 6288, "eight tokens"),
        _sized("tp8_b16", 16, 12, 6288, "sixteen tokens"),
        _sized("tp16_b1", 1, 6, 3216, "one token"),
        _sized("tp16_b2", 2, 6, 3216, "two tokens"),
        _sized("tp16_b16", 16, 6, 3216, "sixteen tokens"),
        _sized("small_b1", 1, 2, 1160, real=False),
        _sized("small_b3", 3, 2, 1160, real=False),
    ),
    reference=reference,
    baseline=baseline,
    honest=(Step(torch.float32, parts=4), Step(torch.float32, parts=16)),
    generators={
        f.__name__: f
        for f in (
            ordinary,
            tame_gates,
            steep_gates,
            closed_gates,
            decayed_state,
            extreme_beta,
            large_state,
            zero_keys,
            denormals,
            padding,
            nan_inf,
        )
    },
    tolerances={
        "out": Tolerance(factor=3.0, floor_rms=3e-3, floor_worst=2e-2, cap_rms=1e-2, cap_worst=4e-2),
        "state": Tolerance(factor=3.0, floor_rms=1e-3, floor_worst=1e-2, cap_rms=3e-3, cap_worst=3e-2),
        "conv": Tolerance(exact=True),
    },
    flops=flops,
    compulsory_bytes=compulsory_bytes,
    constants={"eps": EPS, "l2_eps": L2_EPS, "lower_bound": LOWER_BOUND},
    faults={
        "without-decay": Fault("missing-decay", "the state does not decay", _wrong(decay=False)),
        "other-gate": Fault(
            "wrong-gate", "the decay is exp(-exp(a_log) softplus(g + dt_bias))", _wrong(bound=False)
        ),
        "decay-last": Fault(
            "wrong-order", "the state decays after the delta update", _wrong(decay_first=False)
        ),
        "without-beta": Fault("missing-scale", "the update is not scaled by beta", _wrong(use_beta=False)),
        "without-norm": Fault("missing-scale", "q and k are not normalised", _wrong(normalise=False)),
        "without-gate": Fault("missing-gate", "the output is not gated", _wrong(gated=False)),
        "transposed-state": Fault(
            "transposed", "the state's rows are taken for keys", _wrong(transposed=True)
        ),
        "reversed-taps": Fault(
            "reversed-taps", "the convolution's taps run newest first", _wrong(reversed_taps=True)
        ),
    },
)
