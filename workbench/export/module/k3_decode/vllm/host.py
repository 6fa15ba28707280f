"""vLLM as the executor sees it: facts for the requirements, a step's context, the ranks, the stock parts.

`Host` is what the executor needs; `Vllm` is vLLM 0.33, imported when it is made. Tests have a host of their
own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import glue
from ..device import current_arch, launcher
from ..table import table
from .requirements import Facts


@dataclass(frozen=True)
class Context:
    """What vLLM says about the step that is about to run."""

    metadata: Mapping[str, Any]
    """Attention metadata by the layer's name."""
    slot_mapping: Mapping[str, torch.Tensor]
    """Cache row of each token, int64, by the layer's name."""
    piecewise: bool
    """True in a graph that is keyed by its rows alone."""


class Host(Protocol):
    """The serving engine."""

    group: glue.Group

    def context(self) -> Context | None:
        """The step's context; None outside a forward pass, and for steps that have no metadata."""

    def capturing(self) -> bool:
        """True while a graph is captured."""

    def stock_residual(
        self, backbone: Any, prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """The last residual as the stock forward has it, before the final norm."""


class Vllm:
    """vLLM 0.33."""

    def __init__(self) -> None:
        self._context = importlib.import_module("vllm.forward_context")
        self._piecewise = importlib.import_module("vllm.config").CUDAGraphMode.PIECEWISE
        group = importlib.import_module("vllm.distributed").get_tp_group()
        alone = group.world_size == 1
        self.group: glue.Group = glue.Alone() if alone else glue.Distributed(group.device_group)

    def context(self) -> Context | None:
        """The forward context's; None for the dictionaries of micro-batches."""
        if not self._context.is_forward_context_available():
            return None
        found = self._context.get_forward_context()
        metadata, slots = found.attn_metadata, found.slot_mapping
        if not isinstance(metadata, dict) or not isinstance(slots, dict):
            return None
        return Context(metadata, slots, found.cudagraph_runtime_mode == self._piecewise)

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def stock_residual(
        self, backbone: Any, prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """By vLLM's own kernel."""
        mixed = importlib.import_module("vllm.models.kimi_k3.nvidia.ops").attn_res
        out: torch.Tensor = mixed(
            prefix,
            delta,
            blocks,
            backbone.output_attn_res_norm.weight,
            backbone.output_attn_res_proj.weight.squeeze(0),
            None,
            num_blocks=backbone.num_attn_res_blocks,
            block_write_idx=-1,
            eps=backbone.output_attn_res_norm.variance_epsilon,
            output_norm_eps=0.0,
        )
        return out


def facts(config: Any) -> Facts:
    """What the requirements must know besides vLLM's configuration."""
    platform = importlib.import_module("vllm.platforms").current_platform
    modes = importlib.import_module("vllm.config")
    envs = importlib.import_module("vllm.envs")
    mamba = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    cache, graphs = config.cache_config, config.compilation_config.cudagraph_mode
    states = mamba.MambaStateDtypeCalculator.kda_state_dtype(
        config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    ready = launcher()
    return Facts(
        device=str(platform.device_type) or "unspecified",
        arch=current_arch() if platform.is_cuda() else None,
        arches=tuple(sorted({k.arch for k in table().kernels})),
        launcher="" if ready.met else ready.detail,
        kda_dtypes=(_name(states[0]), _name(states[1])),
        conv_dim_first=bool(mamba.is_conv_state_dim_first()),
        decode_graphs="NONE" if graphs is None else str(graphs.decode_mode().name),
        torch_compile=config.compilation_config.mode == modes.CompilationMode.STOCK_TORCH_COMPILE,
        v2_runner=bool(config.use_v2_model_runner),
        aux_attn_res=bool(envs.VLLM_KIMI_K3_AUX_ATTN_RES_STREAM),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
