"""A decoder layer of vLLM in four parts, each of which the package or vLLM's own modules can run.

    before         residual before attention        `layer._pre_attn_norm`
    attention      projection, KDA or MLA, o_proj   `layer.self_attn`
    after          residual after attention         `layer._post_attn_norm`
    feed_forward   MoE or dense MLP                 `layer.mlp`

`before` and `after` are the part `residual` of the settings. A part is the package's if its weights lie right
and its ops have kernels for the step; `decide` says so for a step, from shapes alone. Single ops may be
stock's inside such a part: products (PyTorch's, which vLLM's linear layers call too), SiTU and the latent
norm. The residual's mix, a KDA step, MLA's ends and the routed experts are the package's, or the whole part
is stock's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import glue
from ..layer import DecodeLayer, LayerSpec, StepPlan, _Planned, _Real
from ..steps import Step
from ..table import table
from . import caches, weights
from .settings import Settings

Tensors = Mapping[str, torch.Tensor]
PARTS = ("before", "attention", "after", "feed_forward")
SETTING = {
    "before": "residual",
    "after": "residual",
    "attention": "attention",
    "feed_forward": "feed_forward",
}
PRODUCTS = (
    "input projection", "output projection", "down-projection", "up-projection", "shared expert, gate and up",
    "shared expert, down", "MLP, gate and up", "MLP, down",
)  # fmt: skip
SLOW = ("attention over the cache", "router logits", "weighted sum of experts")
"""Steps for which there is no op and PyTorch is no stand-in on a GPU: float64, or a gather of whole
contexts."""


@dataclass(frozen=True)
class Held:
    """A layer's caches and what the step's metadata says about them."""

    step: Step
    tensors: Tensors
    """KDA: `conv`, `state`, `slots`, and `accepted` in a verify step. MLA: `cache`, `slots`, `pages`,
    `lengths`."""


@dataclass(frozen=True)
class Decision:
    """Who runs a part."""

    reason: str
    """Why stock does; empty if the package does."""
    stock: frozenset[str] = frozenset()
    """Steps inside the package's part that stock runs."""


Substitute = Callable[[Tensors], torch.Tensor]


class Mixed(_Real):
    """Runs the ops, some steps by stock.

    Args:
        stock: the substitutes by step.
        steps: those to use.
    """

    def __init__(self, stock: Mapping[str, Substitute], steps: frozenset[str]) -> None:
        self._stock = {step: stock[step] for step in steps}

    def run(self, step: str, op: str, tensors: Tensors, given: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """One step."""
        if step in self._stock:
            return {"out": self._stock[step](tensors)}
        return super().run(step, op, tensors, given)


class Layer(DecodeLayer):
    """A layer over vLLM's weights and caches.

    Args:
        module: vLLM's decoder layer; it is read, never changed.
        backbone: vLLM's model that the layer belongs to.
        group: the ranks.
        copies: account of copied weights.
    """

    def __init__(self, module: Any, backbone: Any, group: glue.Group, copies: weights.Copies) -> None:
        self.module, self.index = module, int(module.layer_idx)
        self.hidden, self.blocks = int(module.hidden_size), int(backbone.num_attn_res_blocks)
        self.spec, self.group = weights.spec_of(module, backbone.config), group
        self.weights: dict[str, torch.Tensor] = {}
        self.missing: dict[str, str] = {}
        """Why the package cannot run a part, by the part."""
        makers: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
            "residual": lambda: weights.residual(module),
            "attention": lambda: weights.attention(module, copies),
            "feed_forward": lambda: weights.feed_forward(module, group.rank, group.ranks, copies),
        }
        for name, make in makers.items():
            try:
                self.weights |= make()
            except (weights.CannotUse, AttributeError) as e:
                for part in PARTS:
                    if SETTING[part] == name:
                        self.missing[part] = str(e)
        lacking = [op for op in self.op_names(self.spec) if op not in table().ops]
        if lacking:
            self.missing = dict.fromkeys(PARTS, f"the package has no op {', '.join(lacking)}")
        self._scales = (1.0, 1.0)
        if self.spec.attention == "mla":
            own = module.self_attn
            self._scales = (float(own._q_scale_float), float(own._k_scale_float))
        self.repacked_bytes = 0
        self.stock = self._substitutes()

    def run_part(
        self, how: Any, part: str, x: torch.Tensor, prefix: torch.Tensor, blocks: torch.Tensor, held: Held
    ) -> torch.Tensor:
        """Run one part; `x` is what the part before it left (`delta` for `before`). Prefix and blocks are
        updated in place."""
        spec, w = self.spec, self.weights
        rows = spec.saved + 1
        if part == "before":
            return self._residual(
                how, "residual before attention", w, "", prefix, x, blocks, rows, spec.writes
            )
        if part == "attention":
            projected = self._product(how, "input projection", x, w["w_in"])
            core = self._kda_step if spec.attention == "kda" else self._mla_step
            local = core(how, projected, held)
            partial = how.run("output projection", "o_proj", {"x": local, "weight": w["w_o"]}, {})["out"]
            return self._sum(how, "sum of attention", partial)
        if part == "after":
            if spec.writes:  # the attention's output starts a new prefix
                prefix.zero_()
            after = rows + spec.writes
            return self._residual(
                how, "residual after attention", w, "post_", prefix, x, blocks, after, False
            )
        return self._moe(how, w, x) if spec.feed_forward == "moe" else self._dense(how, w, x)

    def decide(self, part: str, settings: Settings, step: Step, held: Held, arch: str | None) -> Decision:
        """Who runs the part in such a step."""
        if self.index in settings.off or SETTING[part] not in settings.parts:
            return Decision("not asked for")
        if part in self.missing:
            return Decision(self.missing[part])
        if settings.reference:
            return Decision("")
        stock, kernels = set(), 0
        for planned in self.planned(part, step, held, arch):
            if planned.kernel is not None:
                kernels += 1
            elif planned.step in self.stock:
                stock.add(planned.step)
            elif planned.op is not None:
                return Decision(f"{planned.step}: {planned.reason}")
            elif planned.step in SLOW:
                return Decision(f"{planned.step}: there is no op for it yet")
        return Decision("", frozenset(stock)) if kernels else Decision("none of its ops has a kernel")

    def alike(self, part: str) -> tuple[Any, ...]:
        """What layers whose part runs the same ops have in common, shapes of weights included."""
        spec = self.spec
        what = {
            "attention": (spec.attention, spec.gate_column),
            "feed_forward": (spec.feed_forward, spec.chosen),
        }.get(part, (spec.saved, spec.writes, self.blocks))
        return part, what, tuple(t.shape for t in self.weights.values()) if SETTING[part] == part else ()

    def _substitutes(self) -> dict[str, Substitute]:
        """Steps that stock may run inside a part of the package."""
        made: dict[str, Substitute] = {
            step: lambda t: torch.nn.functional.linear(t["x"], t["weight"]) for step in PRODUCTS
        }
        mlp, w = self.module.mlp, self.weights
        if self.spec.feed_forward == "moe":
            which, name, mlp = "shared expert", "shared_", getattr(mlp, "shared_experts", None)
            norm = getattr(self.module.mlp, "routed_expert_norm", None)
            if norm is not None:
                made["latent norm"] = lambda t: norm(t["x"])
        else:
            which, name = "MLP", ""
        activation = getattr(mlp, "act_fn", None)
        both, down = w.get(f"{name}gate_up"), w.get(f"{name}down")
        if both is None or down is None or both.shape[0] != 2 * down.shape[1]:
            return made  # the op pads its output, the module does not
        if activation is not None:
            made[f"{which}, SiTU"] = lambda t: activation(t["gate_up"])
        return made

    def planned(self, part: str, step: Step, held: Held, arch: str | None) -> tuple[StepPlan, ...]:
        """What each step of a part would run, found without running anything.

        Args:
            part: which.
            step: its rows.
            held: caches and metadata, tensors of which only the shapes are looked at.
            arch: as a question about another machine; None for this one.
        """
        how = Planned(arch)
        at_meta = Held(step, {n: t.to("meta") for n, t in held.tensors.items()})
        real, self.weights = self.weights, {n: t.to("meta") for n, t in self.weights.items()}
        try:
            x = torch.empty(step.rows, self.hidden, dtype=torch.bfloat16, device="meta")
            blocks = x.new_empty(step.rows, self.blocks, self.hidden)
            self.run_part(how, part, x, x.clone(), blocks, at_meta)
        finally:
            self.weights = real
        return tuple(how.steps)

    def _kda_step(self, how: Any, projected: torch.Tensor, held: Held) -> torch.Tensor:
        w, t = self.weights, held.tensors
        fixed = {n: w[n] for n in ("conv_weight", "dt_bias", "a_log", "fb")} | {"norm": w["head_norm"]}

        def run(
            rows: torch.Tensor, slots: torch.Tensor, conv: torch.Tensor, state: torch.Tensor
        ) -> torch.Tensor:
            given = {"projected": rows, **fixed, "slots": slots, "conv": conv, "state": state}
            out: torch.Tensor = how.run("KDA step", "kda", given, {})["out"]
            return out

        if held.step.verify:
            return caches.kda_verify(
                run, projected, t["slots"], t["accepted"], t["conv"], t["state"], held.step
            )
        return caches.kda_decode(run, projected, t["slots"], t["conv"], t["state"])

    def _mla_step(self, how: Any, projected: torch.Tensor, held: Held) -> torch.Tensor:
        w, t, step = self.weights, held.tensors, held.step
        stage = caches.mla_stage(step.rows, t["cache"])
        tensors = {
            "projected": projected,
            **{n: w[n] for n in ("q_norm", "kv_norm", "qb", "uk", "q_inv", "k_inv")},
            "slots": caches.stage_slots(t["slots"]),
            "cache": stage,
        }
        query = how.run("MLA query", "mla_query", tensors, {})["query"]
        caches.mla_insert(stage, t["slots"], t["cache"])
        how.part("attention over the cache")
        pages, lengths = caches.of_tokens(t["pages"], t["lengths"], step)
        query_scale, key_scale = self._scales
        scale = self.spec.softmax_scale * query_scale * key_scale
        width = w["kv_norm"].shape[0]
        latent = glue.attend(query, t["cache"], pages, lengths, scale, width, key_scale)
        value = {"latent": latent, "kv_b": w["kv_b"], "projected": projected, "lengths": lengths}
        out: torch.Tensor = how.run("MLA value", "mla_value", value, {"G": self.spec.gate_column})["out"]
        return out

    def _experts(self, how: Any, w: Tensors, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of the routed experts. vLLM has the whole down-projection on every rank, so the
        columns that the `moe` op makes itself may be the first on all of them, and `w13` stays as it lies."""
        names = ("w_router", "bias", "w13", "w13_scale", "w2", "w2_scale")
        width = w["w13_scale"].shape[-1] * 32
        latent = torch.zeros(x.shape[0], width, dtype=torch.bfloat16, device=x.device)
        given = {"K": self.spec.chosen}
        block = {"x": x, **{n: w[n] for n in names}, "w_down": w["w_down_first"], "latent": latent}
        whole = how.has_kernel("moe", block, given)
        if not (whole and self.group.ranks == 1):
            own = self._product(how, "down-projection", x, w["w_down"])
            latent.copy_(self._gather(how, "gather of the latent", own))
        out: torch.Tensor
        if whole:
            out = how.run("routed experts", "moe", block, given)["out"]
            return out
        return self._routed(how, w, x, latent)


class Planned(_Planned):
    """Plans for this machine, or for an arch."""

    def __init__(self, arch: str | None) -> None:
        from .. import ops
        from ..device import current_arch

        pretended = ops.pretended_arch
        super().__init__(arch or pretended or current_arch(), here=arch is None and pretended is None)


def held_of(module: Any, spec: LayerSpec, step: Step, metadata: Any, slot_mapping: Tensors) -> Held:
    """The caches of vLLM's layer and its metadata for a step."""
    if spec.attention == "kda":
        conv, state = list(module.self_attn.kv_cache)[:2]
        if step.verify:
            slots = metadata.spec_state_indices_tensor[: step.requests, : step.tokens]
            accepted = metadata.num_accepted_tokens[: step.requests]
            return Held(step, {"conv": conv, "state": state, "slots": slots, "accepted": accepted})
        slots = metadata.non_spec_state_indices_tensor[: step.rows]
        return Held(step, {"conv": conv, "state": state, "slots": slots})
    cache = module.self_attn.kv_cache
    cache = cache if isinstance(cache, torch.Tensor) else cache[0]
    pages, lengths = metadata.decode.block_table, metadata.decode.seq_lens
    pages, lengths = caches.requests_padded(pages, lengths, step.requests)
    slots = slot_mapping[module.self_attn.layer_name][: step.rows]
    return Held(step, {"cache": cache.view(torch.uint8), "slots": slots, "pages": pages, "lengths": lengths})


def empty_held(module: Any, spec: LayerSpec, step: Step, pages: int = 1) -> Held:
    """The layer's caches with a step of nothing but padding."""
    device = module.self_attn.o_proj.weight.device

    def full(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    if spec.attention == "kda":
        conv, state = list(module.self_attn.kv_cache)[:2]
        shape = (step.requests, step.tokens) if step.verify else (step.rows,)
        held = {"conv": conv, "state": state, "slots": full(shape, 0, torch.int32)}
        if step.verify:
            held["accepted"] = full((step.requests,), 1, torch.int32)
        return Held(step, held)
    cache = module.self_attn.kv_cache
    cache = cache if isinstance(cache, torch.Tensor) else cache[0]
    return Held(
        step,
        {
            "cache": cache.view(torch.uint8),
            "slots": full((step.rows,), -1, torch.int64),
            "pages": full((step.requests, pages), 0, torch.int32),
            "lengths": full((step.requests,), 0, torch.int32),
        },
    )
