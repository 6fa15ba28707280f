"""A layer's weights as the ops take them, from vLLM's loaded modules: in place wherever they lie right.

What lies otherwise is copied once, small things (norms in float32, taps by tap, absorbed keys) always, the
experts only within the memory that the settings allow. `Copies` keeps the account.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..layer import LayerSpec
from . import layouts

EPS = 1e-5
"""Of every norm in the contracts."""


class CannotUse(ValueError):  # noqa: N818
    """Weights that the ops do not take; the message says why."""


@dataclass
class Copies:
    """Memory for weights that were copied into another layout."""

    limit: int
    """Bytes that copies may take in all."""
    nbytes: int = 0
    made: dict[str, int] = field(default_factory=dict)
    """Bytes by what was copied."""

    def count(self, what: str, nbytes: int) -> None:
        """Account for a copy before it is made; raises CannotUse if it goes beyond the limit."""
        if self.nbytes + nbytes > self.limit:
            raise CannotUse(
                f"{what} would have to be copied, {_gib(nbytes)}; {_gib(self.limit - self.nbytes)} of the"
                f" {_gib(self.limit)} of repack_gib are left"
            )
        self.nbytes += nbytes
        self.made[what] = self.made.get(what, 0) + nbytes

    def contiguous(self, what: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in place if it is contiguous and of the dtype, else a copy."""
        wanted = dtype or tensor.dtype
        if tensor.is_contiguous() and tensor.dtype == wanted:
            return tensor
        self.count(what, tensor.numel() * wanted.itemsize)
        return tensor.to(wanted).contiguous()


def spec_of(layer: Any, config: Any) -> LayerSpec:
    """What a decoder layer of vLLM is."""
    attention = layer.self_attn
    kda = hasattr(attention, "in_proj_qkvgfab")
    gate = 2112 if kda else attention.q_lora_rank + attention.kv_lora_rank + attention.qk_rope_head_dim
    return LayerSpec(
        attention="kda" if kda else "mla",
        feed_forward="moe" if layer.is_moe_layer else "dense",
        saved=int(layer.prev_valid_blocks),
        writes=bool(layer.is_block_write_layer),
        chosen=int(config.num_experts_per_token),
        gate_column=int(gate),
        softmax_scale=192**-0.5 if kda else float(attention.scale),
    )


def residual(layer: Any) -> dict[str, torch.Tensor]:
    """Norms and queries of both residuals."""
    norms = {
        "res_norm": layer.self_attention_res_norm,
        "input_norm": layer.input_layernorm,
        "post_res_norm": layer.mlp_res_norm,
        "post_norm": layer.post_attention_layernorm,
    }
    return {
        **{name: norm_weight(name, module) for name, module in norms.items()},
        "res_query": _row("res_query", layer.self_attention_res_proj.weight),
        "post_res_query": _row("post_res_query", layer.mlp_res_proj.weight),
    }


def final(backbone: Any) -> dict[str, torch.Tensor]:
    """Norms and query of the last residual."""
    return {
        "norm": norm_weight("output_attn_res_norm", backbone.output_attn_res_norm),
        "query": _row("output_attn_res_proj", backbone.output_attn_res_proj.weight),
        "out_norm": norm_weight("norm", backbone.norm),
    }


def attention(layer: Any, copies: Copies) -> dict[str, torch.Tensor]:
    """Projections and the attention's own weights."""
    own = layer.self_attn
    if hasattr(own, "in_proj_qkvgfab"):
        return {**_projections(own.in_proj_qkvgfab, own), **_kda(own, copies)}
    if getattr(own, "fused_qkv_a_g_proj", None) is None:
        raise CannotUse("the input projections of queries, keys and gate are not fused")
    return {**_projections(own.fused_qkv_a_g_proj, own), **_mla(own, copies)}


def feed_forward(layer: Any, rank: int, ranks: int, copies: Copies) -> dict[str, torch.Tensor]:
    """The MoE part, or the dense MLP of a layer without experts."""
    mlp = layer.mlp
    if not layer.is_moe_layer:
        return {
            "gate_up": _plain("gate_up_proj", mlp.gate_up_proj),
            "down": _plain("down_proj", mlp.down_proj),
        }
    if mlp.shared_experts is None or mlp.routed_expert_norm is None:
        raise CannotUse("the MoE has no shared expert or no latent norm")
    return {
        "w_router": _plain("gate", mlp.gate),
        "bias": _of("gate.e_score_correction_bias", mlp.gate.e_score_correction_bias, torch.float32),
        "w_down": _own_rows("routed_expert_down_proj", mlp.routed_expert_down_proj, rank, ranks),
        "latent_norm": norm_weight("routed_expert_norm", mlp.routed_expert_norm),
        "w_up": _own_rows("routed_expert_up_proj", mlp.routed_expert_up_proj, rank, ranks),
        "shared_gate_up": _plain("shared_experts.gate_up_proj", mlp.shared_experts.gate_up_proj),
        "shared_down": _plain("shared_experts.down_proj", mlp.shared_experts.down_proj),
        "w_down_first": _own_rows("routed_expert_down_proj", mlp.routed_expert_down_proj, 0, ranks),
        **_experts(mlp.experts.routed_experts, copies),
    }


def _experts(routed: Any, copies: Copies) -> dict[str, torch.Tensor]:
    try:
        found = layouts.experts_of(routed)
    except ValueError as e:
        raise CannotUse(str(e)) from e
    if found.layout not in (layouts.ROW_MAJOR, layouts.SHUFFLED):
        raise CannotUse(f"the layout of the routed experts is {found.layout}")
    if found.layout != layouts.ROW_MAJOR:
        copies.count(f"routed experts in the layout {found.layout}", found.nbytes)
    try:
        return layouts.row_major(found)
    except ValueError as e:
        raise CannotUse(str(e)) from e


def _kda(own: Any, copies: Copies) -> dict[str, torch.Tensor]:
    lower = getattr(own, "gate_lower_bound", None)
    if lower != -5.0 or own.head_dim != 128 or own.conv_size != 4:
        raise CannotUse(f"KDA with bound {lower}, heads of {own.head_dim}, {own.conv_size} taps")
    if own.conv1d.bias is not None or float(own.o_norm.eps) != EPS:
        raise CannotUse(f"a convolution with bias, or a head norm with epsilon {own.o_norm.eps}")
    taps = own.conv1d.weight.detach().reshape(3, -1, 4).transpose(1, 2)  # q, k, v; tap; channel
    if not torch.equal(taps.to(torch.bfloat16).to(taps.dtype), taps):
        raise CannotUse("the convolution's taps are no bfloat16 numbers")
    return {
        "conv_weight": copies.contiguous("convolution taps", taps, torch.bfloat16),
        "dt_bias": _of("dt_bias", own.dt_bias, torch.float32),
        "a_log": _of("A_log", own.A_log, torch.float32),
        "fb": _plain("f_b_proj", own.f_b_proj),
        "head_norm": copies.contiguous("head norms", own.o_norm.weight.detach(), torch.float32),
    }


def _mla(own: Any, copies: Copies) -> dict[str, torch.Tensor]:
    heads, keys, latent = own.W_UK_T.shape
    both = _plain("kv_b_proj", own.kv_b_proj)
    if both.shape != (heads * (keys + own.v_head_dim), latent) or keys != own.v_head_dim:
        raise CannotUse(f"kv_b_proj is {list(both.shape)}, the absorbed keys {list(own.W_UK_T.shape)}")
    return {
        "q_norm": norm_weight("q_a_layernorm", own.q_a_layernorm),
        "kv_norm": norm_weight("kv_a_layernorm", own.kv_a_layernorm),
        "qb": _plain("q_b_proj", own.q_b_proj),
        "uk": copies.contiguous("absorbed keys", _of("W_UK_T", own.W_UK_T, torch.bfloat16, lies=False)),
        "kv_b": both.view(heads, 2 * keys, latent),
        "q_inv": _of("_q_scale_inv", own._q_scale_inv, torch.float32).reshape(1),
        "k_inv": _of("_k_scale_inv", own._k_scale_inv, torch.float32).reshape(1),
    }


def _projections(into: Any, own: Any) -> dict[str, torch.Tensor]:
    return {"w_in": _plain("input projection", into), "w_o": _plain("o_proj", own.o_proj)}


def norm_weight(name: str, module: Any) -> torch.Tensor:
    """Scale of an RMSNorm with the contracts' epsilon.

    Raises:
        CannotUse: for another epsilon or dtype.
    """
    eps = float(module.variance_epsilon)
    if eps != EPS:
        raise CannotUse(f"{name} has epsilon {eps}, the ops have {EPS}")
    return _of(name, module.weight, torch.bfloat16)


def _plain(name: str, linear: Any) -> torch.Tensor:
    if getattr(linear, "bias", None) is not None:
        raise CannotUse(f"{name} has a bias")
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise CannotUse(f"{name} has no plain weight")
    return _of(name, weight, torch.bfloat16)


def _own_rows(name: str, linear: Any, rank: int, ranks: int) -> torch.Tensor:
    weight = _plain(name, linear)
    if weight.shape[0] % ranks:
        raise CannotUse(f"{name} has {weight.shape[0]} rows, which {ranks} ranks cannot share")
    rows = weight.shape[0] // ranks
    return weight[rank * rows : (rank + 1) * rows]


def _row(name: str, weight: torch.Tensor) -> torch.Tensor:
    return _of(name, weight, torch.bfloat16).reshape(-1)


def _of(name: str, tensor: torch.Tensor, dtype: torch.dtype, lies: bool = True) -> torch.Tensor:
    found = tensor.detach()
    if found.dtype != dtype:
        raise CannotUse(f"{name} is {found.dtype}, not {dtype}")
    if lies and not found.is_contiguous():
        raise CannotUse(f"{name} is not contiguous")
    return found


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.1f} MiB"


def described(made: Mapping[str, int]) -> str:
    """The copies as text, one a line."""
    return "\n".join(f"copied: {what}, {_gib(nbytes)}" for what, nbytes in sorted(made.items()))
