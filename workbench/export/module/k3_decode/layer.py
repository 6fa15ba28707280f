"""One decode layer of Kimi K3 built from the ops: kernels where the table has them, the reference elsewhere.

    y       = attn_res(prefix, delta, blocks)                      saves a block on every twelfth layer
    local   = kda(y W_in) or mla_value(attend(mla_query(y W_in)))
    x       = attn_res(prefix, sum over ranks of o_proj(local), blocks)
    delta'  = up(rmsnorm(sum over ranks of moe(x))) + sum over ranks of shared(x), or the dense MLP of layer 0

`DecodeLayer.plan` says for a batch and an arch which step would run which kernel. A step whose op has no
kernel runs by reference; parts for which there is no op yet are in `glue`. More kernels change neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from . import glue, ops
from .contracts import Shape, infer, storage_shape
from .device import current_arch, enabled
from .dispatch import Decision, Request, decide
from .explaining import with_machine
from .table import table

Tensors = Mapping[str, torch.Tensor]

_ATTENTION = {
    "kda": ("conv_weight", "dt_bias", "a_log", "fb", "head_norm"),
    "mla": ("q_norm", "kv_norm", "qb", "uk", "kv_b", "q_inv", "k_inv"),
}
_FEED_FORWARD = {
    "moe": (
        "w_router", "bias", "w_down", "w13", "w13_scale", "w2", "w2_scale", "latent_norm", "w_up",
        "shared_gate_up", "shared_down",
    ),
    "dense": ("gate_up", "down"),
}  # fmt: skip
_COMMON = (
    "res_norm",
    "res_query",
    "input_norm",
    "post_res_norm",
    "post_res_query",
    "post_norm",
    "w_in",
    "w_o",
)
_CACHES = {"kda": ("slots", "conv", "state"), "mla": ("slots", "cache", "pages", "lengths")}


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is."""

    attention: Literal["kda", "mla"]
    feed_forward: Literal["moe", "dense"]
    saved: int
    """Blocks saved before this layer."""
    writes: bool
    """Saves its own block before attention."""
    chosen: int = 16
    """Experts a token."""
    gate_column: int = 2112
    """First column of the gate in an MLA layer's projection."""
    softmax_scale: float = 192**-0.5

    @staticmethod
    def of_k3(index: int) -> LayerSpec:
        """Layer `index`, 0 to 92, of Kimi K3.

        Raises:
            ValueError: if there is no such layer.
        """
        if not 0 <= index < 93:
            raise ValueError(f"Kimi K3 has layers 0 to 92, not {index}")
        attention: Literal["kda", "mla"] = "mla" if index % 4 == 3 or index == 92 else "kda"
        return LayerSpec(attention, "moe" if index else "dense", -(-index // 12), index % 12 == 0)


@dataclass(frozen=True)
class StepPlan:
    """What one step of a layer runs."""

    step: str
    op: str | None
    """None where there is no op yet."""
    kernel: str | None
    """Key of the kernel; None where the reference runs."""
    reason: str
    """Why the reference runs; empty if a kernel does."""

    def __str__(self) -> str:
        what = f"kernel {self.kernel[:12]}" if self.kernel else f"PyTorch ({self.reason})"
        return f"{self.step}: {self.op or 'no op'}, {what}"


@dataclass
class _Real:
    """Runs the ops."""

    def run(self, step: str, op: str, tensors: Tensors, given: Mapping[str, int]) -> dict[str, torch.Tensor]:
        return ops.run(op, tensors, **given)

    def has_kernel(self, op: str, tensors: Tensors, given: Mapping[str, int]) -> bool:
        decision = _decide(op, tensors, given)
        return decision.kernel is not None and enabled(op, decision.batch).met

    def part(self, step: str) -> None:
        """A part without an op; nothing to note."""


@dataclass
class _Planned:
    """Notes what would run, on tensors without data."""

    arch: str | None
    here: bool
    """True if the question is about this machine."""
    steps: list[StepPlan] = field(default_factory=list)

    def run(self, step: str, op: str, tensors: Tensors, given: Mapping[str, int]) -> dict[str, torch.Tensor]:
        decision = self._decide(op, tensors, given)
        key = decision.kernel.key if decision.kernel else None
        self.steps.append(StepPlan(step, op, key, decision.reason))
        known = table().ops[op]
        axes = infer(known, {n: tuple(t.shape) for n, t in tensors.items()}, given)
        return {
            b.name: tensors.get(
                b.name,
                torch.empty(storage_shape(b, axes), dtype=getattr(torch, b.torch_dtype), device="meta"),
            )
            for b in known.buffers
            if b.mutated
        }

    def has_kernel(self, op: str, tensors: Tensors, given: Mapping[str, int]) -> bool:
        return self._decide(op, tensors, given).kernel is not None

    def part(self, step: str) -> None:
        self.steps.append(StepPlan(step, None, None, "there is no op for it yet"))

    def _decide(self, op: str, tensors: Tensors, given: Mapping[str, int]) -> Decision:
        decision = _decide(op, tensors, given, self.arch)
        return with_machine(decision) if self.here else decision


class DecodeLayer:
    """A layer with its weights, as one rank holds them.

    Args:
        spec: what the layer is.
        weights: by name, storage tensors as the ops take them: `res_norm`, `res_query`, `input_norm`,
            `post_res_norm`, `post_res_query`, `post_norm` of the residuals, `w_in`, `w_o`; those of the
            attention and of the feed-forward part, see the module.
        group: the ranks that share the layer. Where this is not the first, `w13` is repacked once, so that
            this rank's latent columns come first; `repacked_bytes` is what the copy costs.

    Raises:
        ValueError: naming the weights that are missing, or an op that the package lacks.
    """

    def __init__(self, spec: LayerSpec, weights: Tensors, group: glue.Group | None = None) -> None:
        self.spec, self.group = spec, group or glue.Alone()
        wanted = (*_COMMON, *_ATTENTION[spec.attention], *_FEED_FORWARD[spec.feed_forward])
        missing = [name for name in wanted if name not in weights]
        if missing:
            raise ValueError(f"the layer lacks the weights {', '.join(missing)}")
        lacking = [op for op in self.op_names(spec) if op not in table().ops]
        if lacking:
            raise ValueError(f"the package was exported without the ops {', '.join(lacking)}")
        self.weights = dict(weights)
        self._scales = (1.0, 1.0)
        if spec.attention == "mla":
            self._scales = (1 / float(weights["q_inv"]), 1 / float(weights["k_inv"]))
        self.repacked_bytes = 0
        if spec.feed_forward == "moe" and self.group.rank:
            self._own_columns_first()

    @staticmethod
    def op_names(spec: LayerSpec) -> tuple[str, ...]:
        """Ops that a layer may use."""
        attention = ("kda",) if spec.attention == "kda" else ("mla_query", "mla_value")
        moe = ("moe", "moe_topk", "moe_experts", "rmsnorm") if spec.feed_forward == "moe" else ()
        return ("attn_res", "skinny_gemm", "o_proj", "situ", *attention, *moe)

    def __call__(
        self, prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor, caches: Tensors
    ) -> torch.Tensor:
        """Run the layer on a batch; prefix, blocks and caches are updated in place.

        Args:
            prefix: `[B, H]` bf16, the running sum.
            delta: `[B, H]` bf16, what the layer before adds; zeros at layer 0, whose prefix is the embedding.
            blocks: `[B, M, H]` bf16, saved blocks.
            caches: `slots`, `conv` and `state` of KDA, or `slots`, `cache`, `pages` and `lengths` of MLA.

        Returns:
            The delta for the next layer, `[B, H]` bf16.

        Raises:
            ValueError: if a cache is missing or a shape does not fit.
        """
        missing = [name for name in _CACHES[self.spec.attention] if name not in caches]
        if missing:
            raise ValueError(f"the layer lacks the caches {', '.join(missing)}")
        return self._run(_Real(), self.weights, prefix, delta, blocks, caches)

    def plan(
        self, batch: int, caches: Mapping[str, Shape], blocks: int = 8, arch: str | None = None
    ) -> tuple[StepPlan, ...]:
        """What each step would run, found without running anything.

        Args:
            batch: tokens.
            caches: shapes of `conv` and `state`, or of `cache` and `pages`.
            blocks: saved blocks that the tensor has room for.
            arch: as a question about another machine; by default the current device and what is installed.
        """
        hidden = self.weights["w_o"].shape[0]
        weights = {n: t.to("meta") for n, t in self.weights.items()}
        types = {"conv": torch.bfloat16, "state": torch.float32, "cache": torch.uint8, "pages": torch.int32}
        held = {n: torch.empty(shape, dtype=types[n], device="meta") for n, shape in caches.items()}
        held["slots"] = torch.empty(
            batch, dtype=torch.int32 if self.spec.attention == "kda" else torch.int64, device="meta"
        )
        held["lengths"] = torch.empty(batch, dtype=torch.int32, device="meta")
        row = torch.empty(batch, hidden, dtype=torch.bfloat16, device="meta")
        saved = torch.empty(batch, blocks, hidden, dtype=torch.bfloat16, device="meta")
        how = _Planned(arch or current_arch(), here=arch is None)
        self._run(how, weights, row, row.clone(), saved, held)
        return tuple(how.steps)

    def _run(
        self,
        how: Any,
        w: Tensors,
        prefix: torch.Tensor,
        delta: torch.Tensor,
        blocks: torch.Tensor,
        caches: Tensors,
    ) -> torch.Tensor:
        spec = self.spec
        rows = spec.saved + 1
        y = self._residual(how, "residual before attention", w, "", prefix, delta, blocks, rows, spec.writes)
        projected = self._product(how, "input projection", y, w["w_in"])
        attention = self._kda if spec.attention == "kda" else self._mla
        local = attention(how, w, projected, caches)
        partial = how.run("output projection", "o_proj", {"x": local, "weight": w["w_o"]}, {})["out"]
        attended = self._sum(how, "sum of attention", partial)
        if spec.writes:  # the attention's output starts a new prefix
            prefix.zero_()
        after = rows + spec.writes
        x = self._residual(
            how, "residual after attention", w, "post_", prefix, attended, blocks, after, False
        )
        return self._moe(how, w, x) if spec.feed_forward == "moe" else self._dense(how, w, x)

    def _residual(
        self, how: Any, step: str, w: Tensors, which: str, prefix: torch.Tensor, delta: torch.Tensor,
        blocks: torch.Tensor, rows: int, writes: bool,
    ) -> torch.Tensor:  # fmt: skip
        tensors = {
            "prefix": prefix,
            "delta": delta,
            "blocks": blocks,
            "norm": w[f"{which}res_norm"],
            "query": w[f"{which}res_query"],
            "out_norm": w["post_norm" if which else "input_norm"],
        }
        made = how.run(step, "attn_res", tensors, {"V": rows, "A": rows if writes else rows - 1})
        out: torch.Tensor = made["out"]
        return out

    def _kda(self, how: Any, w: Tensors, projected: torch.Tensor, caches: Tensors) -> torch.Tensor:
        tensors = {
            "projected": projected,
            **{n: w[n] for n in ("conv_weight", "dt_bias", "a_log", "fb")},
            "norm": w["head_norm"],
            **{n: caches[n] for n in _CACHES["kda"]},
        }
        out: torch.Tensor = how.run("KDA step", "kda", tensors, {})["out"]
        return out

    def _mla(self, how: Any, w: Tensors, projected: torch.Tensor, caches: Tensors) -> torch.Tensor:
        tensors = {
            "projected": projected,
            **{n: w[n] for n in ("q_norm", "kv_norm", "qb", "uk", "q_inv", "k_inv")},
            **{n: caches[n] for n in ("slots", "cache")},
        }
        query = how.run("MLA query", "mla_query", tensors, {})["query"]
        how.part("attention over the cache")
        width = w["kv_norm"].shape[0]
        query_scale, key_scale = self._scales
        scale = self.spec.softmax_scale * query_scale * key_scale
        latent = glue.attend(
            query, caches["cache"], caches["pages"], caches["lengths"], scale, width, key_scale
        )
        value = {"latent": latent, "kv_b": w["kv_b"], "projected": projected, "lengths": caches["lengths"]}
        out: torch.Tensor = how.run("MLA value", "mla_value", value, {"G": self.spec.gate_column})["out"]
        return out

    def _moe(self, how: Any, w: Tensors, x: torch.Tensor) -> torch.Tensor:
        latent = self._sum(how, "sum of the latent", self._experts(how, w, x))
        normed = how.run("latent norm", "rmsnorm", {"x": latent, "weight": w["latent_norm"]}, {})["out"]
        up = self._gather(
            how, "gather of the up-projection", self._product(how, "up-projection", normed, w["w_up"])
        )
        shared = self._mlp(how, "shared expert", x, w["shared_gate_up"], w["shared_down"])
        how.part("sum of routed and shared experts")
        return glue.add(up, self._sum(how, "sum of the shared expert", shared))

    def _experts(self, how: Any, w: Tensors, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of the routed experts: the whole block by one op where it has a kernel."""
        names = ("w_router", "bias", "w_down", "w13", "w13_scale", "w2", "w2_scale")
        width = w["w13_scale"].shape[-1] * 32
        latent = torch.zeros(x.shape[0], width, dtype=torch.bfloat16, device=x.device)
        block = {"x": x, **{n: w[n] for n in names}, "latent": latent}
        given = {"K": self.spec.chosen}
        whole = how.has_kernel("moe", block, given)
        if not (whole and self.group.ranks == 1):
            own = self._product(how, "down-projection", x, w["w_down"])
            gathered = self._gather(how, "gather of the latent", own)
            latent.copy_(gathered.roll(-self.group.rank * own.shape[1], 1))
        out: torch.Tensor
        if whole:
            out = how.run("routed experts", "moe", block, given)["out"]
            return out
        return self._routed(how, w, x, latent)

    def _routed(self, how: Any, w: Tensors, x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Routing, experts and their weighted sum one by one, from the whole latent."""
        how.part("router logits")
        logits = glue.router(x, w["w_router"])
        given = {"logits": logits, "bias": w["bias"]}
        routed = how.run("routing", "moe_topk", given, {"K": self.spec.chosen})
        names = ("w13", "w13_scale", "w2", "w2_scale")
        experts = {"latent": latent, "ids": routed["ids"], **{n: w[n] for n in names}}
        rows = how.run("routed experts", "moe_experts", experts, {})["expanded"]
        how.part("weighted sum of experts")
        return glue.combine(routed["weights"], rows)

    def _dense(self, how: Any, w: Tensors, x: torch.Tensor) -> torch.Tensor:
        return self._sum(how, "sum of the MLP", self._mlp(how, "MLP", x, w["gate_up"], w["down"]))

    def _mlp(
        self, how: Any, step: str, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        both = self._product(how, f"{step}, gate and up", x, gate_up)
        hidden = how.run(f"{step}, SiTU", "situ", {"gate_up": both}, {"P": down.shape[1]})["out"]
        return self._product(how, f"{step}, down", hidden, down)

    def _product(self, how: Any, step: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A projection, by whichever of the two ops has a kernel for it."""
        tensors = {"x": x, "weight": weight}
        split = "splitk_gemm" in table().ops and how.has_kernel("splitk_gemm", tensors, {})
        narrow = how.has_kernel("skinny_gemm", tensors, {})
        op = "splitk_gemm" if split and not (narrow and x.shape[0] <= 2) else "skinny_gemm"
        out: torch.Tensor = how.run(step, op, tensors, {})["out"]
        return out

    def _sum(self, how: Any, step: str, partial: torch.Tensor) -> torch.Tensor:
        if self.group.ranks > 1:
            how.part(step)
            if partial.device.type != "meta":
                return self.group.sum(partial)
        return partial

    def _gather(self, how: Any, step: str, columns: torch.Tensor) -> torch.Tensor:
        if self.group.ranks == 1:
            return columns
        how.part(step)
        if columns.device.type == "meta":
            return torch.cat([columns] * self.group.ranks, -1)
        return self.group.gather(columns)

    def _own_columns_first(self) -> None:
        """Turn the latent columns of `w13` so that this rank's come first, as the `moe` op wants them."""
        columns = self.weights["w_down"].shape[0] * self.group.rank
        if columns % 32:
            raise ValueError(f"{columns} latent columns before this rank's are no multiple of a scale's 32")
        for name, elements in (("w13", 2), ("w13_scale", 32)):
            turned = self.weights[name].roll(-columns // elements, -1)
            self.repacked_bytes += turned.numel() * turned.element_size()
            self.weights[name] = turned


def _decide(op: str, tensors: Tensors, given: Mapping[str, int], arch: str | None = None) -> Decision:
    """The decision for tensors of these shapes; outputs may be missing."""
    known = table().ops[op]
    axes = infer(known, {n: tuple(t.shape) for n, t in tensors.items()}, given)
    device = next(iter(tensors.values())).device
    where = arch or (ops.arch_for(device) if device.type != "meta" else None)
    others = {axis: n for axis, n in axes.items() if axis != "B"}
    return decide(table(), Request(op, where, axes.get("B", 1), others))
