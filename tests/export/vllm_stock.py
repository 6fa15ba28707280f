"""A small model of Kimi K3's shape with the attributes of vLLM's modules, its stock forward in float64
PyTorch, and the steps with their attention metadata as vLLM makes them.

Nothing here uses the package: formulas, caches and speculation are written out token by token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from workbench.ops.mxfp4 import decode
from workbench.ops.random import fill_normal, stream
from workbench.ops.rounding import to_bf16

Tensors = dict[str, torch.Tensor]
H, HEADS, D, E, K, L, WIDE, SHARED, DENSE = 256, 2, 128, 32, 4, 128, 64, 64, 128
Q, LATENT, R, PAGE, VOCAB, BLOCK = 64, 32, 16, 4, 64, 2
KINDS = ("kda", "kda", "mla", "kda", "mla")
"""Attention by layer; layer 0 has a dense MLP, every BLOCK-th layer saves a block."""
GATE = Q + LATENT + R
EPS = 1e-5
Q_SCALE, K_SCALE = 0.125, 0.25


def normal(name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    made = torch.empty(*shape, dtype=torch.bfloat16)
    fill_normal(made, stream(0, "vllm", name), std=std, mean=mean)
    return made


@functools.cache
def layer_weights(index: int) -> Tensors:
    """All of a layer's weights, as one rank would hold them."""
    n = f"layer{index}"

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return normal(f"{n}.{name}", rows, columns, std=scale * columns**-0.5)

    def norm(name: str, width: int) -> torch.Tensor:
        return normal(f"{n}.{name}", width, std=0.2, mean=1.0)

    w = {m: norm(m, H) for m in ("res_norm", "input_norm", "post_res_norm", "post_norm")}
    w |= {m: normal(f"{n}.{m}", H, std=2 * H**-0.5) for m in ("res_query", "post_res_query")}
    w["w_o"] = matrix("w_o", H, HEADS * D)
    if KINDS[index] == "kda":
        w["w_in"] = matrix("w_in", 4 * HEADS * D + D + HEADS, H)
        w["taps"] = normal(f"{n}.taps", 3 * HEADS * D, 4, std=0.5).float()
        w["dt_bias"] = normal(f"{n}.dt", HEADS * D).float()
        w["a_log"] = normal(f"{n}.a_log", HEADS, std=0.5).float()
        w["fb"] = matrix("fb", HEADS * D, D)
        w["head_norm"] = norm("head_norm", D)
    else:
        w["w_in"] = matrix("w_in", GATE + HEADS * D, H)
        w["q_norm"], w["kv_norm"] = norm("q_norm", Q), norm("kv_norm", LATENT)
        w["qb"] = matrix("qb", HEADS * (D + R), Q)
        w["kv_b"] = matrix("kv_b", HEADS * 2 * D, LATENT)
    if index == 0:
        w["gate_up"], w["down"] = matrix("gate_up", 2 * DENSE, H), matrix("down", H, DENSE)
        return w
    rng = stream(0, n, "experts")
    for name, rows, columns in (("w13", 2 * WIDE, L), ("w2", L, WIDE)):
        w[name] = torch.randint(0, 256, (E, rows, columns // 2), generator=rng, dtype=torch.uint8)
        shape = (E, rows, columns // 32)
        w[f"{name}_scale"] = torch.randint(119, 123, shape, generator=rng, dtype=torch.uint8)
    w["router"], w["bias"] = matrix("router", E, H, 3.0), normal(f"{n}.bias", E, std=0.1).float()
    w["latent_down"], w["latent_up"] = matrix("latent_down", L, H), matrix("latent_up", H, L)
    w["latent_norm"] = norm("latent_norm", L)
    w["shared_gate_up"] = matrix("shared_gate_up", 2 * SHARED, H)
    w["shared_down"] = matrix("shared_down", H, SHARED)
    return w


# One rank's share, in vLLM's modules


def heads_of(rows: torch.Tensor, parts: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """This rank's share of each part of the rows: parts of 0 mean a part that every rank has whole."""
    pieces = []
    for part, size in zip(rows.split([abs(p) for p in parts]), parts, strict=True):
        pieces.append(part if size < 0 else part.chunk(ranks)[rank])
    return torch.cat(pieces)


def share(w: Tensors, kind: str, rank: int, ranks: int) -> Tensors:
    """A rank's share of a layer's weights."""
    w, wide = dict(w), HEADS * D
    w["w_o"] = w["w_o"].chunk(ranks, 1)[rank].contiguous()
    if kind == "kda":
        own = heads_of(w["w_in"], (wide, wide, wide, wide, -D, HEADS), rank, ranks)
        w["w_in"] = torch.nn.functional.pad(own, (0, 0, 0, -own.shape[0] % 16), value=0.25)
        w["taps"] = heads_of(w["taps"], (wide, wide, wide), rank, ranks)
        for name in ("dt_bias", "a_log", "fb"):
            w[name] = w[name].chunk(ranks)[rank].contiguous()
    else:
        w["w_in"] = heads_of(w["w_in"], (-GATE, wide), rank, ranks)
        for name in ("qb", "kv_b"):
            w[name] = w[name].chunk(ranks)[rank].contiguous()
    for name, size in (("gate_up", DENSE), ("shared_gate_up", SHARED)):
        if name in w:
            w[name] = heads_of(w[name], (size, size), rank, ranks)
    for name in ("down", "shared_down"):
        if name in w:
            w[name] = w[name].chunk(ranks, 1)[rank].contiguous()
    if "w13" in w:
        for name in ("w13", "w13_scale"):
            gate, up = w[name].chunk(2, 1)
            w[name] = torch.cat((gate.chunk(ranks, 1)[rank], up.chunk(ranks, 1)[rank]), 1)
        for name in ("w2", "w2_scale"):
            w[name] = w[name].chunk(ranks, 2)[rank].contiguous()
    return w


def linear(weight: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, bias=None)


class Norm:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.variance_epsilon = weight, EPS

    def __call__(self, x: torch.Tensor, residual: None = None) -> torch.Tensor:
        return to_bf16(rms(x.double()) * self.weight.double())


class Layer:
    """vLLM's decoder layer: what is read of it, and what is called."""

    def __init__(self, model: Backbone, index: int, weights: Tensors, experts: Any = None) -> None:
        self.model, self.layer_idx, self.kind, self.w = model, index, KINDS[index], weights
        self.hidden_size, self.is_moe_layer = H, index > 0
        self.is_block_write_layer, self.prev_valid_blocks = index % BLOCK == 0, -(-index // BLOCK)
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(weights["input_norm"]),
            Norm(weights["post_norm"]),
        )
        self.self_attention_res_norm, self.mlp_res_norm = (
            Norm(weights["res_norm"]),
            Norm(weights["post_res_norm"]),
        )
        self.self_attention_res_proj = linear(weights["res_query"][None])
        self.mlp_res_proj = linear(weights["post_res_query"][None])
        self.self_attn: Any = Attention(self)
        self.mlp: Any = Mlp(self, experts)

    def _pre_attn_norm(self, delta: Any, blocks: torch.Tensor, prefix: torch.Tensor) -> Any:
        self.model.stock_calls.append((self.layer_idx, "before"))
        if delta is not None:
            prefix.copy_(add(prefix, delta))
        y = mixed(prefix, blocks[:, : self.prev_valid_blocks], self.w["res_norm"], self.w["res_query"])
        if self.is_block_write_layer:
            blocks[:, self.layer_idx // BLOCK] = prefix
        return self.input_layernorm(y), prefix, blocks

    def _post_attn_norm(self, attended: torch.Tensor, blocks: torch.Tensor, prefix: torch.Tensor) -> Any:
        self.model.stock_calls.append((self.layer_idx, "after"))
        if self.is_block_write_layer:
            prefix = attended
        else:
            prefix.copy_(add(prefix, attended))
        valid = self.prev_valid_blocks + self.is_block_write_layer
        y = mixed(prefix, blocks[:, :valid], self.w["post_res_norm"], self.w["post_res_query"])
        return self.post_attention_layernorm(y), prefix, blocks

    def __call__(self, positions: torch.Tensor, delta: Any, prefix: Any, blocks: Any) -> Any:
        y, prefix, blocks = self._pre_attn_norm(delta, blocks, prefix)
        attended = self.self_attn(hidden_states=y, positions=positions)
        x, prefix, blocks = self._post_attn_norm(attended, blocks, prefix)
        return self.mlp(x), prefix, blocks


class Attention:
    """Either attention of vLLM."""

    def __init__(self, layer: Layer) -> None:
        self.layer, w = layer, layer.w
        self.o_proj = linear(w["w_o"])
        self.kv_cache: Any = None
        if layer.kind == "kda":
            self.prefix = f"model.layers.{layer.layer_idx}.self_attn"
            self.in_proj_qkvgfab, self.f_b_proj = linear(w["w_in"]), linear(w["fb"])
            self.conv1d, self.dt_bias, self.A_log = linear(w["taps"][:, None]), w["dt_bias"], w["a_log"]
            self.o_norm = SimpleNamespace(weight=w["head_norm"], eps=EPS)
            self.gate_lower_bound, self.head_dim, self.conv_size = -5.0, D, 4
            return
        self.layer_name = f"model.layers.{layer.layer_idx}.self_attn"
        self.fused_qkv_a_g_proj, self.q_b_proj, self.kv_b_proj = (
            linear(w[n]) for n in ("w_in", "qb", "kv_b")
        )
        self.q_a_layernorm, self.kv_a_layernorm = Norm(w["q_norm"]), Norm(w["kv_norm"])
        both = w["kv_b"].view(-1, 2 * D, LATENT)
        self.W_UK_T, self.W_UV = both[:, :D], both[:, D:].mT
        self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim = Q, LATENT, R, D
        self.scale = (D + R) ** -0.5
        self._q_scale_float, self._k_scale_float = Q_SCALE, K_SCALE
        self._q_scale_inv, self._k_scale_inv = torch.tensor([1 / Q_SCALE]), torch.tensor([1 / K_SCALE])

    @property
    def name(self) -> str:
        return str(getattr(self, "layer_name", None) or self.prefix)

    def __call__(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        layer.model.stock_calls.append((layer.layer_idx, "attention"))
        projected = product(hidden_states, layer.w["w_in"])
        run = self._kda if layer.kind == "kda" else self._mla
        local = torch.zeros(hidden_states.shape[0], layer.w["w_o"].shape[1], dtype=torch.bfloat16)
        context = layer.model.context
        if context is not None:
            run(projected, context.metadata[self.name].segments, local)
        return layer.model.reduce(product(local, layer.w["w_o"]))

    def _kda(self, projected: torch.Tensor, segments: Sequence[Segment], local: torch.Tensor) -> None:
        w = {n: t.double() for n, t in self.layer.w.items()}
        heads = w["a_log"].shape[0]
        wide, (conv, state) = heads * D, self.kv_cache
        for s in segments:
            taps = [row.clone() for row in conv[s.window, s.first : s.first + 3]]
            held = state[s.source].double()
            if not s.context:
                taps, held = [torch.zeros_like(row) for row in taps], torch.zeros_like(held)
            raw = list(taps[1:])
            for t in range(s.tokens):
                x = projected[s.row + t]
                raw.append(x[: 3 * wide].clone())
                window = torch.stack([*taps, x[: 3 * wide]]).double()
                taps = [*taps[1:], x[: 3 * wide]]
                c = torch.einsum("tc,ct->c", window, w["taps"])
                q, k, v = torch.nn.functional.silu(c).view(3, heads, D)
                q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
                g = product(x[None, 4 * wide : 4 * wide + D], self.layer.w["fb"])[0].double()
                gate = (g + w["dt_bias"]).view(heads, D)
                held = held * torch.exp(-5 * torch.sigmoid(w["a_log"].exp()[:, None] * gate))[:, None]
                beta = torch.sigmoid(x[4 * wide + D : 4 * wide + D + heads].double())[:, None]
                error = beta * (v - torch.einsum("hvk,hk->hv", held, k))
                held = held + error[:, :, None] * k[:, None]
                o = torch.einsum("hvk,hk->hv", held, q) * D**-0.5
                normed = (
                    rms(o) * w["head_norm"] * torch.sigmoid(x[3 * wide : 4 * wide].double().view(heads, D))
                )
                local[s.row + t] = to_bf16(normed.flatten())
                if s.targets:
                    state[s.targets[t]] = held.float()
            if s.targets:
                conv[s.window, : len(raw)] = torch.stack(raw)
            else:
                state[s.source] = held.float()
                conv[s.window, :3] = torch.stack(taps)

    def _mla(self, projected: torch.Tensor, segments: Sequence[Segment], local: torch.Tensor) -> None:
        w, cache = self.layer.w, self.kv_cache
        uk, uv = self.W_UK_T.double(), self.W_UV.double()
        for s in segments:
            for t in range(s.tokens):
                x, at = projected[s.row + t], s.context + t
                kv = Norm(w["kv_norm"])(x[None, Q : Q + LATENT])[0]
                entry = torch.cat((kv, x[Q + LATENT : GATE])).float() / K_SCALE
                cache[s.pages[at // PAGE], at % PAGE] = e4m3(entry).view(torch.uint8)
                q = product(Norm(w["q_norm"])(x[None, :Q]), w["qb"])[0].view(-1, D + R)
                absorbed = to_bf16(torch.einsum("hd,hdl->hl", q[:, :D].double(), uk))
                query = e4m3(torch.cat((absorbed, q[:, D:]), -1).float() / Q_SCALE).double() * Q_SCALE
                keys = cache[s.pages[: at // PAGE + 1]].flatten(0, 1)[: at + 1]
                keys = keys.view(torch.float8_e4m3fn).double() * K_SCALE
                latent = to_bf16(torch.softmax(query @ keys.T * self.scale, -1) @ keys[:, :LATENT])
                value = to_bf16(torch.einsum("hl,hld->hd", latent.double(), uv)).double()
                local[s.row + t] = to_bf16((value * torch.sigmoid(x[GATE:].double().view(-1, D))).flatten())


class Mlp:
    """vLLM's `KimiMoE` or `KimiMLP`."""

    def __init__(self, layer: Layer, experts: Any) -> None:
        self.layer, w = layer, layer.w
        if not layer.is_moe_layer:
            self.gate_up_proj, self.down_proj = linear(w["gate_up"]), linear(w["down"])
            self.act_fn = activation
            return
        self.gate = SimpleNamespace(weight=w["router"], bias=None, e_score_correction_bias=w["bias"])
        self.routed_expert_down_proj, self.routed_expert_up_proj = (
            linear(w["latent_down"]),
            linear(w["latent_up"]),
        )
        self.routed_expert_norm = Norm(w["latent_norm"])
        shared = {"gate_up_proj": linear(w["shared_gate_up"]), "down_proj": linear(w["shared_down"])}
        self.shared_experts = SimpleNamespace(**shared, act_fn=activation)
        names = {
            "w13": "w13_weight",
            "w13_scale": "w13_weight_scale",
            "w2": "w2_weight",
            "w2_scale": "w2_weight_scale",
        }
        method = SimpleNamespace(mxfp4_backend=SimpleNamespace(name="EMULATION"))
        plain = SimpleNamespace(quant_method=method, **{a: w[n] for n, a in names.items()})
        self.experts = SimpleNamespace(routed_experts=experts(plain) if experts else plain)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer, w = self.layer, self.layer.w
        layer.model.stock_calls.append((layer.layer_idx, "feed_forward"))
        if not layer.is_moe_layer:
            return layer.model.reduce(mlp(x, w["gate_up"], w["down"]))
        scores = torch.sigmoid(x.double() @ w["router"].double().T)
        ids = (scores + w["bias"].double()).float().sort(descending=True, stable=True).indices[:, :K]
        chosen = scores.gather(1, ids)
        chosen = to_bf16(chosen / chosen.sum(-1, keepdim=True)).double()
        latent, routed = product(x, w["latent_down"]).double(), []
        for row in range(x.shape[0]):
            total = torch.zeros(L, dtype=torch.float64)
            for e, weight in zip(ids[row].tolist(), chosen[row], strict=True):
                both = decode(w["w13"][e], w["w13_scale"][e]) @ latent[row]
                hidden = to_bf16(situ(both)).double()
                total += weight * to_bf16(decode(w["w2"][e], w["w2_scale"][e]) @ hidden).double()
            routed.append(to_bf16(total))
        normed = self.routed_expert_norm(layer.model.reduce(torch.stack(routed)))
        shared = layer.model.reduce(mlp(x, w["shared_gate_up"], w["shared_down"]))
        return add(product(normed, w["latent_up"]), shared)


class Backbone:
    """vLLM's `KimiLinearModel` on one rank.

    Args:
        rank, ranks: whose share of the weights.
        experts: makes another layout of the routed experts' module.
        spec: draft tokens.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, experts: Any = None, spec: int = 0) -> None:
        self.rank, self.ranks = rank, ranks
        self.layers: list[Any] = []
        self.context: Any = None
        self.reduce: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial
        self.stock_calls: list[tuple[int, str]] = []
        for i, kind in enumerate(KINDS):
            self.layers.append(Layer(self, i, share(layer_weights(i), kind, rank, ranks), experts))
        self.start_layer, self.end_layer = 0, len(KINDS)
        self.num_attn_res_blocks = math.ceil(len(KINDS) / BLOCK)
        self.config = SimpleNamespace(num_experts_per_token=K)
        self.embed_tokens = normal("embedding", VOCAB, H)
        self.norm = Norm(normal("norm", H, std=0.2, mean=1.0))
        self.output_attn_res_norm = Norm(normal("last_norm", H, std=0.2, mean=1.0))
        self.output_attn_res_proj = linear(normal("last_query", 1, H, std=2 * H**-0.5))
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.bind(spec)

    def bind(self, spec: int, slots: int = 64, pages: int = 48) -> None:
        """Give every layer caches as vLLM lays them: strided views of pages, slot 0 and unused slots NaN."""
        for layer in self.layers:
            if layer.kind == "mla":
                raw = torch.full((pages, PAGE * (LATENT + R) + 32), 0x7F, dtype=torch.uint8)
                layer.self_attn.kv_cache = raw[:, :-32].unflatten(1, (PAGE, LATENT + R))
                continue
            heads = HEADS // self.ranks
            conv, state = (3 + spec) * 3 * heads * D, heads * D * D
            raw = torch.full((slots, 2 * conv + 4 * state + 64), 0xFF, dtype=torch.uint8)
            taps = raw[:, : 2 * conv].view(torch.bfloat16).unflatten(1, (3 + spec, 3 * heads * D))
            held = raw[:, 2 * conv : -64].view(torch.float32).unflatten(1, (heads, D, D))
            layer.self_attn.kv_cache = [taps, held]

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens[ids]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The stock forward: hidden states before the final norm, and the auxiliary streams."""
        prefix = self.embed_input_ids(ids).clone()
        blocks = torch.full((len(ids), self.num_attn_res_blocks, H), torch.nan, dtype=torch.bfloat16)
        delta, aux = None, []
        for layer in self.layers:
            if layer.layer_idx in self.aux_hidden_state_layers:
                aux.append(prefix.clone() if delta is None else add(prefix, delta))
            delta, prefix, blocks = layer(positions, delta, prefix, blocks)
        if self.end_layer in self.aux_hidden_state_layers:
            aux.append(add(prefix, delta))
        out = stock_residual(self, prefix, delta, blocks)
        return (out, aux) if aux else out


def stock_residual(model: Any, prefix: torch.Tensor, delta: Any, blocks: torch.Tensor) -> torch.Tensor:
    """The last residual before the final norm: the only one whose mix is rounded."""
    last = model.output_attn_res_proj.weight[0]
    return to_bf16(mixed(add(prefix, delta), blocks, model.output_attn_res_norm.weight, last))


def mixed(
    prefix: torch.Tensor, blocks: torch.Tensor, norm: torch.Tensor, query: torch.Tensor
) -> torch.Tensor:
    rows = torch.cat((blocks, prefix[:, None]), 1).double()
    logits = (rms(rows) * norm.double()) @ query.double()
    return (torch.softmax(logits, -1)[..., None] * rows).sum(1)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return to_bf16(a.double() + b.double())


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return to_bf16(x.double() @ weight.double().T)


def situ(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def activation(both: torch.Tensor) -> torch.Tensor:
    return to_bf16(situ(both.double()))


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return product(activation(product(x, gate_up)), down)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


# Steps


@dataclass(frozen=True)
class Segment:
    """One request's rows in a step, as the stock forward of this module takes them."""

    row: int
    tokens: int
    context: int
    """Tokens in the cache before."""
    pages: torch.Tensor
    source: int = 0
    """Slot of the state before the first token."""
    window: int = 0
    """Slot of the convolution's window, whose taps begin at `first`."""
    first: int = 0
    targets: tuple[int, ...] = ()
    """Slots for the state after each token, in a verify step."""


@dataclass
class Request:
    """A request: its tokens so far, its own pages and state slots."""

    number: int
    spec: int
    context: int = 0
    accepted: int = 1
    """Tokens of the last verify step that were accepted."""
    pages: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))

    def __post_init__(self) -> None:
        own = torch.arange(4, dtype=torch.int32) + 4 * self.number
        self.pages = own.flip(0)  # page 0 belongs to a request, out of order
        self.slots = tuple(1 + self.number * (1 + self.spec) + i for i in range(1 + self.spec))


@dataclass(frozen=True)
class Batch:
    """What a forward gets."""

    ids: torch.Tensor
    positions: torch.Tensor
    context: Any
    """With `metadata`, `slot_mapping` and `piecewise` as the executor's host gives them."""
    live: int
    """Rows that are no padding."""


def batch(
    work: Sequence[tuple[Request, int]],
    ids: Sequence[int],
    tokens: int = 1,
    pad_to: int = 0,
    piecewise: bool = False,
) -> Batch:
    """A step in which each request has so many new tokens; `tokens` is 1 + drafts of the deployment.

    A request with more than one new token and no context, or another number than `tokens`, is a prefill. Rows
    are padded by whole requests up to `pad_to`.
    """
    decodes = [r for r, n in work if r.context and n == 1]
    verifies = [r for r, n in work if r.context and n == tokens > 1]
    prefills = len(work) - len(decodes) - len(verifies)
    segments, mla, row = [], [], 0
    for r, n in work:
        verify = r in verifies
        state = r.slots[r.accepted - 1] if tokens > 1 else r.slots[0]
        segments.append(
            Segment(
                row, n, r.context, r.pages, state, r.slots[0], r.accepted - 1 if verify else 0,
                r.slots if verify else (),
            )
        )  # fmt: skip
        mla += [int(r.pages[(r.context + t) // PAGE]) * PAGE + (r.context + t) % PAGE for t in range(n)]
        row += n
    each = tokens if verifies and not decodes and not prefills else 1
    total = max(pad_to, row)
    requests = total // each
    lack = requests - len(work)
    pages = torch.stack([*(r.pages for r, _ in work), *[torch.zeros(4, dtype=torch.int32)] * lack])
    lengths = torch.tensor([r.context + n for r, n in work] + [0] * lack, dtype=torch.int32)
    slots = torch.tensor([r.slots[0] for r, _ in work] + [0] * lack, dtype=torch.int32)
    staged = torch.tensor([r.slots for r in verifies] + [(0,) * tokens] * lack, dtype=torch.int32)
    accepted = torch.tensor([r.accepted for r in verifies] + [1] * lack, dtype=torch.int32)
    kda = SimpleNamespace(
        num_prefills=prefills, num_decodes=len(decodes) + (lack if each == 1 else 0),
        num_decode_tokens=len(decodes) + (lack if each == 1 else 0),
        num_spec_decodes=len(verifies), num_spec_decode_tokens=len(verifies) * tokens,
        spec_state_indices_tensor=staged if verifies else None,
        non_spec_state_indices_tensor=None if each > 1 else slots,
        num_accepted_tokens=accepted if verifies else None,
        segments=segments,
    )  # fmt: skip
    mqa = 0 if prefills else requests
    latent = SimpleNamespace(
        num_prefills=prefills, num_decodes=mqa, num_decode_tokens=mqa * each,
        decode=SimpleNamespace(block_table=pages, seq_lens=lengths) if mqa else None, segments=segments,
    )  # fmt: skip
    mapping = torch.tensor(mla + [-1] * (total - row), dtype=torch.int64)
    names = [f"model.layers.{i}.self_attn" for i in range(len(KINDS))]
    context = SimpleNamespace(
        metadata={n: kda if kind == "kda" else latent for n, kind in zip(names, KINDS, strict=True)},
        slot_mapping=dict.fromkeys(names, mapping), piecewise=piecewise,
    )  # fmt: skip
    padded = torch.tensor([*ids, *[0] * (total - row)])
    return Batch(padded, torch.arange(total), context, row)
