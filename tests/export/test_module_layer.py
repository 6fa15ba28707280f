from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.export.module_winners import REPOSITORY_OPS, SimulatedProgram
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

Tensors = dict[str, torch.Tensor]
H, HEADS, D, E, K, L, WIDE, S = 256, 2, 128, 32, 4, 128, 64, 64
KDA_PITCH = 4 * HEADS * D + D + HEADS + 6
Q, LATENT, R, HEAD = 64, 32, 16, 128
MLA_GATE = Q + LATENT + R
MLA_PITCH = MLA_GATE + HEADS * HEAD
BLOCKS = 8


def bf16(*shape: int, name: str, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    made = torch.empty(*shape, dtype=torch.bfloat16)
    fill_normal(made, stream(0, name), std=std, mean=mean)
    return made


def f32(*shape: int, name: str, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    return bf16(*shape, name=name, std=std, mean=mean).float()


def common(pitch: int, width: int) -> Tensors:
    norms = ("res_norm", "input_norm", "post_res_norm", "post_norm")
    return {
        **{n: bf16(H, name=n, std=0.2, mean=1.0) for n in norms},
        **{n: bf16(H, name=n, std=H**-0.5) for n in ("res_query", "post_res_query")},
        "w_in": bf16(pitch, H, name="w_in", std=H**-0.5),
        "w_o": bf16(H, width, name="w_o", std=width**-0.5),
    }


def kda() -> Tensors:
    return {
        **common(KDA_PITCH, HEADS * D),
        "conv_weight": bf16(3, 4, HEADS * D, name="conv", std=0.5),
        "dt_bias": f32(HEADS * D, name="dt"),
        "a_log": f32(HEADS, name="a_log", std=0.5),
        "fb": bf16(HEADS * D, D, name="fb", std=D**-0.5),
        "head_norm": f32(D, name="head_norm", std=0.2, mean=1.0),
    }


def mla() -> Tensors:
    return {
        **common(MLA_PITCH, HEADS * HEAD),
        **{n: bf16(w, name=n, std=0.2, mean=1.0) for n, w in (("q_norm", Q), ("kv_norm", LATENT))},
        "qb": bf16(HEADS * (HEAD + R), Q, name="qb", std=Q**-0.5),
        "uk": bf16(HEADS, HEAD, LATENT, name="uk", std=HEAD**-0.5),
        "kv_b": bf16(HEADS, 2 * HEAD, LATENT, name="kv_b", std=LATENT**-0.5),
        "q_inv": torch.tensor([8.0]),
        "k_inv": torch.tensor([4.0]),
    }


def moe(columns: int, up: int) -> Tensors:
    """Weights of one rank that holds so many latent columns and rows of the up-projection."""
    rng = stream(0, "experts")

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(119, 122, shape, generator=rng, dtype=torch.uint8)

    return {
        "w_router": bf16(E, H, name="w_router", std=1.5 * H**-0.5),
        "bias": f32(E, name="bias", std=0.1),
        "w_down": bf16(L, H, name="w_down", std=H**-0.5)[:columns].clone(),
        "w13": codes(E, 2 * WIDE, L // 2),
        "w13_scale": scales(E, 2 * WIDE, L // 32),
        "w2": codes(E, L, WIDE // 2),
        "w2_scale": scales(E, L, WIDE // 32),
        "latent_norm": bf16(L, name="latent_norm", std=0.2, mean=1.0),
        "w_up": bf16(H, L, name="w_up", std=L**-0.5)[:up].clone(),
        "shared_gate_up": bf16(2 * S, H, name="shared_gate_up", std=H**-0.5),
        "shared_down": bf16(H, S, name="shared_down", std=S**-0.5),
    }


def dense() -> Tensors:
    return {
        "gate_up": bf16(2 * 96, H, name="gate_up", std=H**-0.5),
        "down": bf16(H, 128, name="down", std=0.1),
    }


def caches(kind: str, batch: int) -> Tensors:
    if kind == "kda":
        slots = torch.arange(1, batch + 1, dtype=torch.int32)
        state = f32(batch + 1, HEADS, D, D, name="state", std=0.1)
        return {"slots": slots, "conv": bf16(batch + 1, 3, 3 * HEADS * D, name="taps"), "state": state}
    cache = bf16(4 * batch, 4, LATENT + R, name="cache").to(torch.float8_e4m3fn).view(torch.uint8)
    pages = torch.arange(4 * batch, dtype=torch.int32).view(batch, 4).flip(0)
    lengths = torch.tensor([5, 0, 16, 9][:batch], dtype=torch.int32)
    slots = pages[:, 0].long() * 4 + 1
    slots[lengths == 0] = -1
    return {"slots": slots, "cache": cache, "pages": pages, "lengths": lengths}


def start(batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        bf16(batch, H, name="prefix"),
        bf16(batch, H, name="delta"),
        bf16(batch, BLOCKS, H, name="blocks"),
    )


# An independent composition of the verifiers' references


def by_reference(op: str, axes: dict[str, int], **inputs: torch.Tensor) -> Tensors:
    contract = REPOSITORY_OPS(op)
    results = contract.reference(inputs, axes)
    kinds = {b.name: getattr(torch, b.dtype.torch_name) for b in contract.buffers}
    return {n: t.to(kinds[n]) for n, t in results.items()}


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return to_bf16(x.double() @ weight.double().T)


def reference_layer(
    spec: Any, w: Tensors, prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor, held: Tensors
) -> Tensors:
    """The layer on one rank; what it leaves, by name."""
    batch, rows = prefix.shape[0], spec.saved + 1
    res = {"norm": w["res_norm"], "query": w["res_query"], "out_norm": w["input_norm"]}
    axes = {"B": batch, "N": H, "V": rows, "A": rows - (not spec.writes), "M": BLOCKS}
    one = by_reference("attn_res", axes, prefix=prefix, delta=delta, blocks=blocks, **res)
    projected = product(one["out"], w["w_in"])
    left: Tensors = {}
    if spec.attention == "kda":
        axes = {"B": batch, "H": HEADS, "D": D, "P": KDA_PITCH, "S": batch + 1}
        names = ("conv_weight", "dt_bias", "a_log", "fb")
        step = by_reference(
            "kda", axes, projected=projected, norm=w["head_norm"], **{n: w[n] for n in names}, **held
        )
        local, left = step["out"], {"conv": step["conv"], "state": step["state"]}
    else:
        axes = {"B": batch, "H": HEADS, "D": HEAD, "R": R, "Q": Q, "L": LATENT, "P": MLA_PITCH}
        axes |= {"S": held["cache"].shape[0], "Z": 4, "G": MLA_GATE}
        names = ("q_norm", "kv_norm", "qb", "uk", "q_inv", "k_inv")
        cache = held["cache"].view(torch.float8_e4m3fn)
        made = by_reference(
            "mla_query",
            axes,
            projected=projected,
            slots=held["slots"],
            cache=cache,
            **{n: w[n] for n in names},
        )
        latent = torch.zeros(batch, HEADS, LATENT, dtype=torch.float64)
        for b in range(batch):
            n = int(held["lengths"][b])
            keys = made["cache"].double()[held["pages"][b].long()].flatten(0, 1)[:n] / 4.0
            if n:
                scores = torch.softmax(made["query"][b].double() / 8.0 @ keys.T * spec.softmax_scale, -1)
                latent[b] = scores @ keys[:, :LATENT]
        value = {"latent": to_bf16(latent), "kv_b": w["kv_b"], "projected": projected}
        local = by_reference("mla_value", axes, lengths=held["lengths"], **value)["out"]
        left = {"cache": made["cache"].view(torch.uint8)}
    attended = by_reference("o_proj", {"B": batch, "N": H, "K": local.shape[1]}, x=local, weight=w["w_o"])[
        "out"
    ]
    prefix = torch.zeros_like(one["prefix"]) if spec.writes else one["prefix"]
    rows += spec.writes
    res = {"norm": w["post_res_norm"], "query": w["post_res_query"], "out_norm": w["post_norm"]}
    axes = {"B": batch, "N": H, "V": rows, "A": rows - 1, "M": BLOCKS}
    two = by_reference("attn_res", axes, prefix=prefix, delta=attended, blocks=one["blocks"], **res)
    x = two["out"]
    if spec.feed_forward == "dense":
        out = mlp(x, w["gate_up"], w["down"])
    else:
        axes = {"B": batch, "H": H, "E": E, "K": K, "L": L, "I": WIDE, "D": L}
        names = ("w_router", "bias", "w_down", "w13", "w13_scale", "w2", "w2_scale")
        latent = torch.zeros(batch, L, dtype=torch.bfloat16)
        routed = by_reference("moe", axes, x=x, latent=latent, **{n: w[n] for n in names})["out"]
        normed = by_reference("rmsnorm", {"B": batch, "N": L}, x=routed, weight=w["latent_norm"])["out"]
        shared = mlp(x, w["shared_gate_up"], w["shared_down"])
        out = to_bf16(product(normed, w["w_up"]).double() + shared.double())
    return {"out": out, "prefix": two["prefix"], "blocks": two["blocks"], **left}


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    axes = {"B": x.shape[0], "I": gate_up.shape[0] // 2, "P": down.shape[1]}
    return product(by_reference("situ", axes, gate_up=product(x, gate_up))["out"], down)


SPECS = {
    "kda, moe": ("kda", "moe", 2, False),
    "kda, moe, saves a block": ("kda", "moe", 1, True),
    "mla, moe": ("mla", "moe", 3, False),
    "kda, dense, layer 0": ("kda", "dense", 0, True),
}


def built(package: ModuleType, name: str) -> tuple[Any, Tensors]:
    attention, feed_forward, saved, writes = SPECS[name]
    spec = package.layer.LayerSpec(
        attention, feed_forward, saved, writes, chosen=K, gate_column=MLA_GATE, softmax_scale=48**-0.5
    )
    weights = {
        **(kda() if attention == "kda" else mla()),
        **(moe(L, H) if feed_forward == "moe" else dense()),
    }
    return spec, weights


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("batch", [1, 3])
def test_the_layer_equals_the_reference(package: ModuleType, name: str, batch: int) -> None:
    spec, weights = built(package, name)
    prefix, delta, blocks = start(batch)
    held = caches(spec.attention, batch)
    want = reference_layer(spec, weights, *start(batch), {n: t.clone() for n, t in held.items()})
    layer = package.layer.DecodeLayer(spec, weights)
    out = layer(prefix, delta, blocks, held)
    left = {"out": out, "prefix": prefix, "blocks": blocks, **held}
    assert out.abs().max() > 0.1 and not out.isnan().any()
    for part, tensor in want.items():
        assert torch.equal(left[part], tensor), part


def test_the_layers_of_the_model(package: ModuleType) -> None:
    specs = [package.layer.LayerSpec.of_k3(i) for i in range(93)]
    assert sum(s.attention == "kda" for s in specs) == 69 and specs[92].attention == "mla"
    assert [i for i, s in enumerate(specs) if s.writes] == list(range(0, 93, 12))
    assert [s.feed_forward for s in specs].count("moe") == 92 and specs[0].feed_forward == "dense"
    assert (specs[0].saved, specs[1].saved, specs[12].saved, specs[13].saved, specs[92].saved) == (
        0,
        1,
        1,
        2,
        8,
    )
    with pytest.raises(ValueError, match="0 to 92, not 93"):
        package.layer.LayerSpec.of_k3(93)


def test_what_is_missing_is_named(package: ModuleType) -> None:
    spec, weights = built(package, "kda, moe")
    del weights["w_up"]
    with pytest.raises(ValueError, match="lacks the weights w_up"):
        package.layer.DecodeLayer(spec, weights)
    layer = package.layer.DecodeLayer(*built(package, "kda, moe"))
    with pytest.raises(ValueError, match="lacks the caches conv, state"):
        layer(*start(1), {"slots": torch.ones(1, dtype=torch.int32)})


def test_the_plan_says_which_step_runs_what(package: ModuleType) -> None:
    spec, weights = built(package, "kda, moe")
    layer = package.layer.DecodeLayer(spec, weights)
    shapes = {"conv": (4, 3, 3 * HEADS * D), "state": (4, HEADS, D, D)}
    steps = {s.step: s for s in layer.plan(3, shapes, arch="sm_103a")}
    assert {n for n, s in steps.items() if s.kernel} == {"routed experts", "latent norm"}
    assert steps["KDA step"].reason == "op: no kernel of kda was verified yet"
    added = steps["sum of routed and shared experts"]
    assert added.op is None and "no op" in str(added)
    assert not any(s.kernel for s in layer.plan(4, shapes, arch="sm_103a"))
    assert not any(s.kernel for s in layer.plan(3, shapes, arch="sm_100a"))
    assert all("no CUDA device" in s.reason for s in layer.plan(3, shapes) if s.op == "rmsnorm")
    spec, weights = built(package, "mla, moe")
    steps = package.layer.DecodeLayer(spec, weights).plan(
        2, {"cache": (8, 4, 48), "pages": (2, 4)}, arch="sm_103a"
    )
    assert [s.op for s in steps].count(None) == 2 and "attention over the cache" in {s.step for s in steps}


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("off", ["", "moe"])
def test_the_layer_with_kernels_agrees_with_the_reference(
    package: ModuleType,
    simulated: type[SimulatedProgram],
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    off: str,
) -> None:
    """The block by one kernel; with that one off, part by part."""
    monkeypatch.setenv("K3_DECODE_DISABLE", off)
    spec, weights = built(package, "kda, moe")
    want = reference_layer(spec, weights, *start(batch), caches("kda", batch))
    out = package.layer.DecodeLayer(spec, weights)(*start(batch), caches("kda", batch))
    assert torch.allclose(out.double(), want["out"].double(), rtol=3e-2, atol=3e-2)
    fallbacks = {op for op, _ in package.counts().fallbacks}
    assert {op for op, _ in package.counts().kernels} == {"moe_topk" if off else "moe", "rmsnorm"}
    assert fallbacks >= {"kda", "attn_res", "o_proj"} and ("moe_experts" in fallbacks) == bool(off)
    assert "moe" not in fallbacks


# Several ranks


class Meeting:
    """Ranks as threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier = ranks, threading.Barrier(ranks, timeout=120)
        self.held: list[Any] = [None] * ranks

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.held[rank] = tensor
        self.barrier.wait()
        parts = list(self.held)
        self.barrier.wait()
        return parts


class Rank:
    def __init__(self, package: ModuleType, meeting: Meeting, rank: int) -> None:
        self.glue, self.meeting, self.rank, self.ranks = package.layer.glue, meeting, rank, meeting.ranks

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return self.glue.ordered_sum(self.meeting.exchange(self.rank, partial))

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, columns), -1)


def sharded(weights: Tensors, rank: int, ranks: int) -> Tensors:
    """A rank's share of the MoE part; attention and the shared expert are rank 0's alone, zero elsewhere."""
    mine = dict(weights)
    for name, rows in (("w_down", L // ranks), ("w_up", H // ranks)):
        mine[name] = weights[name][rank * rows : (rank + 1) * rows].clone()
    if rank:
        for name in ("w_o", "shared_down", "w2"):
            mine[name] = torch.zeros_like(weights[name])
    return mine


@pytest.mark.parametrize("kernels", [False, True])
def test_four_ranks_together_make_the_layer(
    package: ModuleType, kernels: bool, request: pytest.FixtureRequest
) -> None:
    if kernels:
        request.getfixturevalue("simulated")
    spec, weights = built(package, "kda, moe")
    ranks, batch = 4, 3
    meeting, results = Meeting(ranks), [torch.empty(0)] * 4

    def run(rank: int) -> None:
        layer = package.layer.DecodeLayer(spec, sharded(weights, rank, ranks), Rank(package, meeting, rank))
        assert bool(layer.repacked_bytes) == bool(rank)
        results[rank] = layer(*start(batch), caches("kda", batch))

    package.reset()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    want = reference_layer(spec, weights, *start(batch), caches("kda", batch))["out"].double()
    for out in results:
        assert torch.equal(out, results[0])
        assert torch.allclose(out.double(), want, rtol=3e-2, atol=3e-2)
    ran = {op for op, _ in package.counts().kernels}
    assert ran == ({"moe", "rmsnorm"} if kernels else set())


def test_partials_are_summed_in_four_groups(package: ModuleType) -> None:
    values = [256.0, 1.0, 2.0**-16, 2.0**-16, 0.0, 0.0, 0.0, 0.0]
    partials = [torch.tensor([v], dtype=torch.bfloat16) for v in values]
    grouped = torch.tensor((256.0 + 1.0) + (2.0**-16 + 2.0**-16), dtype=torch.float32).to(torch.bfloat16)
    assert torch.equal(package.layer.glue.ordered_sum(partials)[0], grouped)
    odd = package.layer.glue.ordered_sum(partials[:3])
    assert torch.equal(odd, torch.tensor([257.0]).to(torch.bfloat16))
