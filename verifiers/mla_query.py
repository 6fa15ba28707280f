"""The query end of MLA decode: norms, query up-projection, absorbed keys, e4m3, and the cache insert.

Columns of a row of `projected`: the query's latent (Q), the key-value latent (L), k_pe (R).

    q  = bf16(bf16(rms(x[:Q]) q_norm) qb.T)                    D + R a head
    query[h]    = e4m3([bf16(q[h, :D] uk[h]), q[h, D:]] q_inv)
    cache[slot] = e4m3([bf16(rms(x[Q:Q+L]) kv_norm), k_pe] k_inv)

rms(x) is x rsqrt(mean x^2 + 1e-5). The scales are multiplied in float32; e4m3 is nearest even, saturating. A
negative slot writes nothing. Other slots stay as they are. `q` and the absorbed query pass through bf16, so
that an honest sum may land on the neighbouring e4m3 number, an eighth of its size away, now and then.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.ops import Allocate, Buffer, DType, Fault, Op, Role, Tolerance, Workload
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16, to_e4m3

EPS = 1e-5
Axes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Query:
    """How the op is computed. The defaults are the golden; other values are a dtype or a mistake."""

    dtype: torch.dtype = torch.float64
    scaled: bool = True
    absorbed: bool = True
    normed: bool = True
    insert: bool = True

    def __call__(self, inputs: Tensors, axes: Axes) -> Tensors:
        """Run the op; shapes and names as in `OP`."""
        latent_q, latent, h, d = axes["Q"], axes["L"], axes["H"], axes["D"]
        x = inputs["projected"].to(self.dtype)
        w = {n: inputs[n].to(self.dtype) for n in ("q_norm", "kv_norm", "qb", "uk", "q_inv", "k_inv")}
        q = self._rounded(self._rms(x[:, :latent_q]) * w["q_norm"])
        kv = self._rounded(self._rms(x[:, latent_q : latent_q + latent]) * w["kv_norm"])
        heads = self._rounded(q @ w["qb"].T).unflatten(-1, (h, -1))
        absorbed = self._rounded(torch.einsum("bhd,hdl->bhl", heads[..., :d], w["uk"]))
        if not self.absorbed:
            absorbed = torch.zeros_like(absorbed)
        query = torch.cat((absorbed, heads[..., d:]), -1)
        row = torch.cat((kv, x[:, latent_q + latent : latent_q + latent + axes["R"]]), -1)
        if self.scaled:
            query, row = query * w["q_inv"], row * w["k_inv"]
        cache = inputs["cache"].to(self.dtype, copy=True)
        live = inputs["slots"] >= 0
        if self.insert:
            cache.flatten(0, 1)[inputs["slots"][live]] = to_e4m3(row[live]).to(self.dtype)
        return {"query": to_e4m3(query).to(self.dtype), "cache": cache}

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return to_bf16(x).to(self.dtype)

    def _rms(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) if self.normed else x


def _fill(axes: Axes, seed: int, allocate: Allocate, name: str, std: float = 1.0) -> Tensors:
    t = {b.name: allocate(b.name) for b in BUFFERS if b.role.is_input}
    fill_normal(t["projected"], stream(seed, name, "projected"), std=std)
    for n in ("q_norm", "kv_norm"):
        fill_normal(t[n], stream(seed, name, n), std=0.2, mean=1.0)
    fill_normal(t["qb"], stream(seed, name, "qb"), std=axes["Q"] ** -0.5)
    fill_normal(t["uk"], stream(seed, name, "uk"), std=axes["D"] ** -0.5)
    t["q_inv"].fill_(8.0)
    t["k_inv"].fill_(4.0)
    old = torch.randint(0, 127, t["cache"].shape, generator=stream(seed, name, "cache"), dtype=torch.uint8)
    t["cache"].copy_(old.view(torch.float8_e4m3fn))
    slots = torch.randperm(axes["S"] * axes["Z"], generator=stream(seed, name, "slots"))
    t["slots"].copy_(slots[: axes["B"]])
    return t


def ordinary(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Normal rows; scaled queries of standard deviation 8."""
    return _fill(axes, seed, allocate, "ordinary")


def padding(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """With several tokens the second has the slot -1."""
    t = _fill(axes, seed, allocate, "padding")
    if axes["B"] > 1:
        t["slots"][1] = -1
    return t


def saturating(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Scales of 200: most numbers are beyond 448."""
    t = _fill(axes, seed, allocate, "saturating")
    t["q_inv"].fill_(200.0)
    t["k_inv"].fill_(200.0)
    return t


def tiny(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Rows of standard deviation 1e-3: epsilon decides, and k_pe is subnormal in e4m3."""
    return _fill(axes, seed, allocate, "tiny", std=1e-3)


def large(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Latents of magnitude 2^50: the norms bring them back; k_pe saturates."""
    return _fill(axes, seed, allocate, "large", std=2.0**50)


def negative_zero(axes: Axes, seed: int, allocate: Allocate) -> Tensors:
    """Every third element of the row is -0."""
    t = _fill(axes, seed, allocate, "negative_zero")
    t["projected"][:, ::3] = -0.0
    return t


BUFFERS = (
    Buffer("projected", ("B", "P"), DType.BF16, Role.ACTIVATION, "query latent | latent | k_pe | not used"),
    Buffer("q_norm", ("Q",), DType.BF16, Role.WEIGHT, "scale of the query latent's norm"),
    Buffer("kv_norm", ("L",), DType.BF16, Role.WEIGHT, "scale of the latent's norm"),
    Buffer("qb", ("H * (D + R)", "Q"), DType.BF16, Role.WEIGHT, "query up-projection"),
    Buffer("uk", ("H", "D", "L"), DType.BF16, Role.WEIGHT, "absorbed key up-projection"),
    Buffer("q_inv", (1,), DType.F32, Role.WEIGHT, "1 / scale of the queries"),
    Buffer("k_inv", (1,), DType.F32, Role.WEIGHT, "1 / scale of the cache"),
    Buffer("slots", ("B",), DType.I64, Role.METADATA, "cache row of each token; negative is padding"),
    Buffer("cache", ("S", "Z", "L + R"), DType.E4M3, Role.STATE, "pages of Z rows"),
    Buffer("query", ("B", "H", "L + R"), DType.E4M3, Role.OUTPUT, "scaled absorbed query | scaled q_pe"),
)


def compulsory_bytes(axes: Axes) -> int:
    """Weights once; rows and slots in, queries and cache rows out."""
    h, d, r, q, latent = (axes[n] for n in ("H", "D", "R", "Q", "L"))
    weights = 2 * (q + latent + h * (d + r) * q + h * d * latent) + 8
    return weights + axes["B"] * (2 * (q + latent + r) + 8 + (h + 1) * (latent + r))


def flops(axes: Axes) -> int:
    """The two products."""
    h, d, r = axes["H"], axes["D"], axes["R"]
    return 2 * axes["B"] * h * ((d + r) * axes["Q"] + d * axes["L"])


def _sized(name: str, b: int, h: int, pitch: int, doc: str = "") -> Workload:
    axes = {"B": b, "H": h, "D": 128, "R": 64, "Q": 1536, "L": 512, "P": pitch, "S": 8, "Z": 64}
    return Workload(name, axes, doc=doc)


def _small(name: str, b: int) -> Workload:
    axes = {"B": b, "H": 2, "D": 16, "R": 16, "Q": 64, "L": 32, "P": 120, "S": 1, "Z": 4}
    return Workload(name, axes, real=False)


def _wrong(**change: bool) -> Query:
    return Query(torch.float32, **change)


STEP = Tolerance(factor=2.0, floor_rms=1.2e-2, floor_worst=0.13, cap_rms=2e-2, cap_worst=0.15)
"""A few numbers in a hundred a step of e4m3 off."""

OP = Op(
    name="mla_query",
    doc="MLA decode before attention: norms, query projections, absorbed keys, e4m3, cache insert.",
    buffers=BUFFERS,
    workloads=(
        _sized("tp8_b1", 1, 12, 3648, "one token"),
        _sized("tp8_b8", 8, 12, 3648, "eight tokens"),
        _sized("tp16_b1", 1, 6, 2880, "one token"),
        _sized("tp16_b2", 2, 6, 2880, "two tokens"),
        _small("small_b1", 1),
        _small("small_b3", 3),
    ),
    reference=Query(),
    baseline=Query(torch.float32),
    generators={f.__name__: f for f in (ordinary, padding, saturating, tiny, large, negative_zero)},
    tolerances={"query": STEP, "cache": STEP},
    flops=flops,
    compulsory_bytes=compulsory_bytes,
    constants={"eps": EPS},
    faults={
        "not-scaled": Fault("missing-scale", "the scales are not applied", _wrong(scaled=False)),
        "not-absorbed": Fault("dropped-part", "the absorbed part is zero", _wrong(absorbed=False)),
        "not-normed": Fault("missing-scale", "the latents are not normalised", _wrong(normed=False)),
        "not-inserted": Fault("state-not-updated", "nothing is put into the cache", _wrong(insert=False)),
    },
)
