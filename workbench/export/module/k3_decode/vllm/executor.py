"""The executor that vLLM's model calls: which steps it takes, and one loop over the layers for those.

vLLM's side of the contract: made once the weights are loaded; `prepare_kv` after each binding of caches (the
profiling one, then the real one); `plan` before each forward, then `run` with what it returned, or the stock
forward and `normalize`; `embed_input_ids` in place of the embedding. `plan` looks at the host's numbers only,
alike on every rank; the ranks compare their choices in `prepare_kv`.

A captured step is planned and run once, its graph replayed: `run` keeps no count and reads no value from the
device, and the kernels' own counters live in device memory. Whatever a kernel needs is made by `prepare_kv`,
which runs each part that a kernel will run on a step of padding, outside any capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import counters
from .._identity import MANIFEST_SHA256, VERSION
from ..layer import _Real
from ..steps import MAX_ROWS, Counts, Step, prepared, recognise, signature
from ..table import table
from . import parts, state, weights
from .host import Context, Host
from .parts import PARTS, Decision, Held, Layer, Mixed, Planned
from .settings import Settings

ALWAYS = (*range(1, 9), 16, 32, MAX_ROWS)
"""Rows that are prepared whatever sizes are captured."""
FINAL = (-1, "final")
"""The last residual among the parts of a step."""


@dataclass(frozen=True)
class Deployment:
    """What the executor must know of the deployment."""

    settings: Settings
    tokens: int = 1
    """Rows of a request in a verify step, 1 + drafts; 1 without speculation."""
    capture_sizes: tuple[int, ...] = ()
    max_requests: int | None = None


@dataclass(frozen=True)
class Choice:
    """What the package runs in steps of one size."""

    own: Mapping[tuple[int, str], frozenset[str]]
    """Layer and part, with the steps inside that stock runs."""
    stock: Mapping[str, int]
    """How many parts stock runs, by reason."""
    refused: str
    """Why such steps are left to the stock forward as a whole; empty if they are taken."""


@dataclass(frozen=True)
class Plan:
    """A step that the executor takes."""

    step: Step
    positions: torch.Tensor
    metadata: tuple[Any, ...]
    """Of each layer."""
    slot_mapping: Mapping[str, torch.Tensor]


class RanksDiffer(RuntimeError):  # noqa: N818
    """Ranks of a group would run different things, and wait for each other for ever."""


class Executor:
    """Runs decode and verify steps over vLLM's language model, which is read and never changed.

    Args:
        backbone: vLLM's `KimiLinearModel`, weights loaded.
        deployment: settings, speculation, captured sizes.
        host: the serving engine.

    Raises:
        ValueError: for a number of draft tokens that is not supported.
    """

    def __init__(self, backbone: Any, deployment: Deployment, host: Host) -> None:
        self.backbone, self.deployment, self.host = backbone, deployment, host
        self.copies = weights.Copies(deployment.settings.repack_bytes)
        modules = list(backbone.layers)[backbone.start_layer : backbone.end_layer]
        self.layers = tuple(Layer(m, backbone, host.group, self.copies) for m in modules)
        self.final: dict[str, torch.Tensor] = {}
        self.final_missing = ""
        try:
            self.final = weights.final(backbone)
        except (weights.CannotUse, AttributeError) as e:
            self.final_missing = str(e)
        sizes = (*ALWAYS, *deployment.capture_sizes)
        self.steps = prepared(sizes, deployment.tokens, max_requests=deployment.max_requests)
        self.choices: dict[Step, Choice] = {}
        self._decided: dict[Any, Decision] = {}
        self._tried: set[Any] = set()

    @property
    def repacked_bytes(self) -> int:
        """Memory of weights that were copied into another layout, bytes on this rank."""
        return self.copies.nbytes

    # The contract

    def prepare_kv(self) -> None:
        """Choose what runs in steps of each size, and make what kernels need, for the caches that are bound.

        Raises:
            RanksDiffer: if ranks choose differently.
        """
        self._decided.clear()
        self.choices = {step: self._choose(step) for step in self.steps}
        self._agree()
        if not self.deployment.settings.reference:
            for step in self.steps:
                self._try_out(step)
            self._agree()
        taken = [s for s, c in self.choices.items() if not c.refused]
        if taken:
            told = ", ".join(str(s) for s in taken)
            state.note("active", f"takes steps of {told}", self)
        else:
            first = self.steps[0]
            state.note("idle", f"takes no step; {first}: {self.choices[first].refused}", self)

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings by vLLM's own module: there is no op for them."""
        embedded: torch.Tensor = self.backbone.embed_input_ids(ids)
        return embedded

    def plan(self, positions: torch.Tensor, intermediate_tensors: Any) -> Plan | None:
        """The step that is about to run, or None to run the stock forward.

        Args:
            positions: `[rows]`; only the number of rows is looked at.
            intermediate_tensors: of a pipeline stage; None on the first.
        """
        found, reason = self._recognise(int(positions.shape[0]), positions, intermediate_tensors)
        state.planned(reason or "taken")
        return found

    def run(self, plan: Plan, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> Any:
        """The planned step: normalised hidden states `[rows, H]`, with the auxiliary streams where the
        backbone has such layers."""
        x = inputs_embeds
        if x is None:
            assert input_ids is not None
            x = self.embed_input_ids(input_ids)
        own = self.choices[plan.step].own
        prefix = x.clone()
        blocks = x.new_empty(x.shape[0], self.backbone.num_attn_res_blocks, x.shape[1])
        wanted = tuple(self.backbone.aux_hidden_state_layers)
        aux: list[torch.Tensor] = []
        delta: torch.Tensor | None = None
        for layer, metadata in zip(self.layers, plan.metadata, strict=True):
            if layer.index in wanted:
                aux.append(prefix.clone() if delta is None else prefix + delta)
            index, module = layer.index, layer.module
            held = Held(plan.step, {})
            if (index, "attention") in own:
                held = parts.held_of(module, layer.spec, plan.step, metadata, plan.slot_mapping)
            if (index, "before") in own:
                before = torch.zeros_like(x) if delta is None else delta
                y = self._part(layer, "before", own, before, prefix, blocks, held)
            else:
                y, prefix, blocks = module._pre_attn_norm(delta, blocks, prefix)
            if (index, "attention") in own:
                y = self._part(layer, "attention", own, y, prefix, blocks, held)
            else:
                y = module.self_attn(hidden_states=y, positions=plan.positions)
            if (index, "after") in own:
                y = self._part(layer, "after", own, y, prefix, blocks, held)
            else:
                y, prefix, blocks = module._post_attn_norm(y, blocks, prefix)
            if (index, "feed_forward") in own:
                delta = self._part(layer, "feed_forward", own, y, prefix, blocks, held)
            else:
                delta = module.mlp(y)
        assert delta is not None
        if self.layers[-1].index + 1 in wanted:
            aux.append(prefix + delta)
        if FINAL in own:
            out = self._final(_Real(), prefix, delta, blocks)
        else:
            out = self.normalize(self.host.stock_residual(self.backbone, prefix, delta, blocks))
        return (out, aux) if aux else out

    def normalize(self, output: Any) -> Any:
        """What the stock forward left, with the final norm that `run` applies; auxiliary streams stay as they
        are. At most 255 rows at a time: vLLM's norm sums larger batches in another order, and the few rows
        that are sampled from would differ from those of a stock deployment."""
        hidden, aux = output if isinstance(output, tuple) else (output, None)
        normed = [self.backbone.norm(rows, None) for rows in hidden.split(255)]
        hidden = normed[0] if len(normed) == 1 else torch.cat(normed)
        return hidden if aux is None else (hidden, aux)

    # What it would do

    def explain(self) -> str:
        """Which parts the package runs for which rows, and the commonest reasons why not more."""
        lines = [f"{len(self.layers)} layers, rank {self.host.group.rank} of {self.host.group.ranks}"]
        alike: dict[tuple[int, str], list[str]] = {}
        for step, choice in self.choices.items():
            by_part = Counter(part for _, part in choice.own)
            what = ", ".join(f"{part} in {n} layers" for part, n in sorted(by_part.items()))
            inside = sorted(set().union(*choice.own.values()))
            what += f"; by stock inside: {', '.join(inside)}" if inside else ""
            what = f"stock, {choice.refused}" if choice.refused else what
            alike.setdefault((step.tokens, what), []).append(str(step.requests))
        for (tokens, what), requests in alike.items():
            each = "one token" if tokens == 1 else f"{tokens} tokens"
            lines.append(f"{', '.join(requests)} requests of {each}: {what}")
        missing = Counter(r for layer in self.layers for r in layer.missing.values())
        lines += [f"cannot use, {n} parts: {reason}" for reason, n in missing.most_common(8)]
        copied = weights.described(self.copies.made)
        return "\n".join([*lines, copied] if copied else lines)

    def signature(self) -> int:
        """A number that ranks which do the same have alike."""
        said = [
            (s.requests, s.tokens, c.refused == "", sorted((k, sorted(v)) for k, v in c.own.items()))
            for s, c in self.choices.items()
        ]
        return signature(None, VERSION, MANIFEST_SHA256, repr(said))

    # Inside

    def _part(
        self,
        layer: Layer,
        part: str,
        own: Mapping[tuple[int, str], frozenset[str]],
        x: torch.Tensor,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        held: Held,
    ) -> torch.Tensor:
        """One of the package's parts of a layer."""
        stock = own[layer.index, part]
        how = Mixed(layer.stock, stock) if stock else _Real()
        return layer.run_part(how, part, x, prefix, blocks, held)

    def _recognise(
        self, rows: int, positions: torch.Tensor, intermediate_tensors: Any
    ) -> tuple[Plan | None, str]:
        if intermediate_tensors is not None:
            return None, "inputs of a pipeline stage"
        context = self.host.context()
        if context is None:
            return None, "no attention metadata"
        if context.piecewise:
            return None, "a piecewise graph, keyed by its rows alone"
        if self.deployment.settings.reference and self.host.capturing():
            return None, "the reference cannot be captured"
        metadata = tuple(context.metadata.get(_name(layer.module)) for layer in self.layers)
        if any(m is None for m in metadata):
            return None, "a layer has no attention metadata"
        found = recognise(rows, self.deployment.tokens, (_counts(m) for m in metadata), self.steps)
        if found.step is None:
            return None, found.reason
        choice = self.choices.get(found.step)
        if choice is None:
            return None, "the caches are not bound yet"
        if choice.refused:
            return None, choice.refused
        short = self._short(found.step, metadata, context)
        if short:
            return None, short
        return Plan(found.step, positions, metadata, context.slot_mapping), ""

    def _short(self, step: Step, metadata: tuple[Any, ...], context: Context) -> str:
        """Why a layer's metadata do not cover the step's rows; empty if they do."""
        for layer, m in zip(self.layers, metadata, strict=True):
            if layer.spec.attention == "kda":
                slots = m.spec_state_indices_tensor if step.verify else m.non_spec_state_indices_tensor
                if slots is None or slots.shape[0] < (step.requests if step.verify else step.rows):
                    return "fewer state slots than rows"
            else:
                mapped = context.slot_mapping.get(_name(layer.module))
                if m.decode is None or mapped is None or mapped.shape[0] < step.rows:
                    return "fewer cache slots than rows"
        return ""

    def _choose(self, step: Step) -> Choice:
        settings = self.deployment.settings
        own: dict[tuple[int, str], frozenset[str]] = {}
        stock, inside = Counter[str](), 0
        for layer in self.layers:
            held = parts.empty_held(layer.module, layer.spec, step)
            for part in PARTS:
                decided = self._decide(layer, part, step, held)
                if decided.reason:
                    stock[decided.reason] += 1
                else:
                    own[layer.index, part] = decided.stock
                    inside += len(decided.stock)
        reason = self._decide_final(step)
        if reason:
            stock[reason] += 1
        else:
            own[FINAL] = frozenset()
        refused = ""
        if not own:
            refused = stock.most_common(1)[0][0]
        elif settings.mode == "layer" and stock:
            refused = f"{sum(stock.values())} parts would be stock's: {stock.most_common(1)[0][0]}"
        elif settings.mode == "layer" and inside:
            refused = f"{inside} steps inside parts would be stock's"
        return Choice(own, dict(stock), refused)

    def _decide(self, layer: Layer, part: str, step: Step, held: Held) -> Decision:
        settings = self.deployment.settings
        shapes = tuple(t.shape for t in held.tensors.values()) if part == "attention" else ()
        off = layer.index in settings.off
        key = (*layer.alike(part), step, off, layer.missing.get(part), shapes)
        if key not in self._decided:
            self._decided[key] = layer.decide(part, settings, step, held, None)
        return self._decided[key]

    def _decide_final(self, step: Step) -> str:
        settings = self.deployment.settings
        if "residual" not in settings.parts:
            return "not asked for"
        if self.final_missing or "attn_res" not in table().ops:
            return self.final_missing or "the package has no op attn_res"
        if settings.reference:
            return ""
        how = Planned(None)
        row = torch.empty(step.rows, self.final["norm"].shape[0], dtype=torch.bfloat16, device="meta")
        blocks = row.new_empty(step.rows, self.backbone.num_attn_res_blocks, row.shape[1])
        self._final(how, row, row.clone(), blocks, {n: t.to("meta") for n, t in self.final.items()})
        lacking = [s for s in how.steps if s.kernel is None]
        return f"{lacking[0].step}: {lacking[0].reason}" if lacking else ""

    def _final(
        self,
        how: Any,
        prefix: torch.Tensor,
        delta: torch.Tensor,
        blocks: torch.Tensor,
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        tensors = {"prefix": prefix, "delta": delta, "blocks": blocks, **(held or self.final)}
        rows = blocks.shape[1] + 1
        out: torch.Tensor = how.run("last residual", "attn_res", tensors, {"V": rows, "A": rows - 1})["out"]
        return out

    def _try_out(self, step: Step) -> None:
        """Run the package's parts on a step of padding; what does not run by kernels is left to stock."""
        choice = self.choices[step]
        if choice.refused:
            return
        fell, own, stock = "", dict(choice.own), Counter(choice.stock)
        for layer in self.layers:
            held = parts.empty_held(layer.module, layer.spec, step)
            for part in PARTS:
                if (layer.index, part) in own:
                    reason = self._fallback_of(layer, part, own, held)
                    if reason:
                        del own[layer.index, part]
                        stock[reason] += 1
                        fell = reason
        if FINAL in own:
            row = torch.zeros(step.rows, self.final["norm"].shape[0], dtype=torch.bfloat16)
            row = row.to(self.final["norm"].device)
            blocks = row.new_zeros(step.rows, self.backbone.num_attn_res_blocks, row.shape[1])
            self._final(_Real(), row, row.clone(), blocks)
        left = bool(own) and not (fell and self.deployment.settings.mode == "layer")
        self.choices[step] = Choice(own, dict(stock), "" if left else fell)

    def _fallback_of(
        self, layer: Layer, part: str, own: Mapping[tuple[int, str], frozenset[str]], held: Held
    ) -> str:
        """Why a part of padding fell back to the reference; empty if kernels ran it. Once for parts alike."""
        aligned = tuple(t.data_ptr() % 256 for t in layer.weights.values())
        key = (*layer.alike(part), held.step, aligned)
        if key in self._tried:
            return ""
        self._tried.add(key)
        device = layer.module.self_attn.o_proj.weight.device
        x = torch.zeros(held.step.rows, layer.hidden, dtype=torch.bfloat16, device=device)
        blocks = x.new_zeros(held.step.rows, layer.blocks, layer.hidden)
        before = counters.counts().fallbacks
        self._part(layer, part, own, x, x.clone(), blocks, held)
        after = counters.counts().fallbacks
        for (op, reason), n in after.items():
            if n > before.get((op, reason), 0):
                self._tried.discard(key)
                return f"{op} fell back: {reason}"
        return ""

    def _agree(self) -> None:
        """Compare the choices with the other ranks'."""
        group = self.host.group
        if group.ranks == 1:
            return
        device = self.layers[0].module.self_attn.o_proj.weight.device
        mine = torch.tensor([[self.signature()]], dtype=torch.int64, device=device)
        everyone = group.gather(mine).flatten().tolist()
        if len(set(everyone)) > 1:
            odd = [r for r, s in enumerate(everyone) if s != everyone[0]]
            raise RanksDiffer(
                f"k3_decode: ranks {odd} would run other parts than rank 0; every rank needs the same"
                " package, layout of weights and settings. This rank:\n" + self.explain()
            )


def _name(module: Any) -> str:
    attention = module.self_attn
    return str(getattr(attention, "layer_name", None) or attention.prefix)


def _counts(metadata: Any) -> Counts:
    """What one layer's metadata count."""
    if hasattr(metadata, "num_spec_decodes"):
        staged = metadata.spec_state_indices_tensor
        return Counts(
            prefills=int(metadata.num_prefills),
            decodes=int(metadata.num_decodes),
            decode_tokens=int(metadata.num_decode_tokens),
            verifies=int(metadata.num_spec_decodes),
            verify_tokens=int(metadata.num_spec_decode_tokens),
            staged=None if staged is None else int(staged.shape[0]),
        )
    return Counts(
        prefills=int(metadata.num_prefills),
        decodes=int(metadata.num_decodes),
        decode_tokens=int(metadata.num_decode_tokens),
    )
