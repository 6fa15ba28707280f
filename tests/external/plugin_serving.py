"""Run inside an environment with vLLM and the exported package: each scenario prints one JSON line.

vLLM's own loader, registry, configuration, model classes, forward and forward context are used. What needs a
GPU is stood in for: streams and events, the attention backend's choice, the MXFP4 backend's choice.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ARCHITECTURE = "KimiLinearForCausalLM"
MODEL = {
    "model_type": "kimi_linear", "architectures": [ARCHITECTURE], "vocab_size": 64, "hidden_size": 256,
    "head_dim": 128, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 2,
    "num_key_value_heads": 2, "hidden_act": "situ", "rms_norm_eps": 1e-5, "moe_intermediate_size": 64,
    "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 16, "v_head_dim": 128,
    "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 2, "latent_moe_use_norm": True,
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "routed_expert_hidden_size": 128,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"},
    "linear_attn_config": {
        "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5], "num_heads": 2, "head_dim": 128,
        "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0,
    },
}  # fmt: skip
"""The small model of tests/export/vllm_stock.py."""


def imported(name: str) -> Any:
    return importlib.import_module(name)


def loaded() -> Any:
    """The class that vLLM's registry resolves to after vLLM's own loader ran."""
    imported("vllm.plugins").load_general_plugins()
    registry = imported("vllm.model_executor.models.registry").ModelRegistry
    return registry.models[ARCHITECTURE].load_model_cls()


def stock_class() -> Any:
    return imported("vllm.models.kimi_k3").KimiLinearForCausalLM


class Nothing:
    """An implementation of attention or experts, which this machine has none of."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.made_of = arguments


class Absent(Nothing):
    """A CUDA stream or event on a machine that has none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: None


def configured(extra: dict[str, Any], **parallel: Any) -> Any:
    """vLLM's configuration of the small model."""
    config = imported("vllm.config")
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = config.ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=64, enforce_eager=True,
    )  # fmt: skip
    return config.VllmConfig(
        model_config=model,
        cache_config=config.CacheConfig(block_size=16, cache_dtype="fp8"),
        device_config=config.DeviceConfig(device="cpu"),
        additional_config=extra,
        **parallel,
    )


def built(cls: Any, config: Any) -> Any:
    """vLLM's model of the configuration, on the CPU."""
    torch.cuda.Stream = torch.cuda.Event = Absent  # type: ignore[misc, assignment]
    distributed = imported("vllm.distributed")
    mla = imported("vllm.models.kimi_k3.nvidia.mla")
    mla.get_attn_backend = lambda *a, **k: SimpleNamespace(get_impl_cls=lambda: Nothing)
    mla.get_mla_prefill_backend = lambda *a, **k: Nothing
    quantization = imported("vllm.model_executor.layers.quantization.mxfp4")
    chosen = quantization.Mxfp4MoeBackend.B12X_MXFP4_BF16, Nothing
    quantization.select_deepseek_v4_mxfp4_moe_backend = lambda *a, **k: chosen
    torch.set_default_dtype(torch.bfloat16)
    with imported("vllm.config").set_current_vllm_config(config):
        if not distributed.parallel_state.model_parallel_is_initialized():
            place = f"file://{tempfile.mkdtemp()}/meeting"
            distributed.init_distributed_environment(1, 0, place, 0, "gloo")
            distributed.initialize_model_parallel(1)
        made = cls(vllm_config=config)
    torch.set_default_dtype(torch.float32)
    return made


def filled(model: Any, small: Any) -> Any:
    """vLLM's modules with the small model's weights and, shared with it, its caches."""

    def put(into: Any, value: torch.Tensor) -> None:
        assert into.shape == value.shape and into.dtype == value.dtype, (into.shape, value.shape, into.dtype)
        into.data.copy_(value)

    theirs = model.model
    theirs.embed_tokens.weight.data = small.embed_tokens.clone()
    put(theirs.norm.weight, small.norm.weight)
    put(theirs.output_attn_res_norm.weight, small.output_attn_res_norm.weight)
    put(theirs.output_attn_res_proj.weight, small.output_attn_res_proj.weight)
    names = {
        "self_attn.{}.weight": (
            "o_proj", "in_proj_qkvgfab", "f_b_proj", "conv1d", "o_norm", "fused_qkv_a_g_proj", "q_b_proj",
            "kv_b_proj", "q_a_layernorm", "kv_a_layernorm",
        ),
        "self_attn.{}": ("dt_bias", "A_log"),
        "{}.weight": (
            "input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm",
            "self_attention_res_proj", "mlp_res_proj",
        ),
        "mlp.{}.weight": (
            "gate_up_proj", "down_proj", "gate", "routed_expert_down_proj", "routed_expert_norm",
            "routed_expert_up_proj", "shared_experts.gate_up_proj", "shared_experts.down_proj",
        ),
        "mlp.{}": ("gate.e_score_correction_bias",),
        "mlp.experts.routed_experts.{}": ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"),
    }  # fmt: skip
    taken = set()
    for layer, mine in zip(theirs.layers, small.layers, strict=True):
        for pattern, fields in names.items():
            for field in fields:
                path = pattern.format(field)
                value = reached(mine, path)
                if value is not None:
                    put(reached(layer, path), value)
                    taken.add(reached(layer, path).data_ptr())
        own = layer.self_attn
        if mine.kind == "mla":
            with torch.no_grad():
                own.process_weights_after_loading(torch.bfloat16)
            for name in ("_q_scale", "_k_scale"):
                scale = getattr(mine.self_attn, f"{name}_float")
                setattr(own, f"{name}_float", scale)
                getattr(own, f"{name}_inv").fill_(1 / scale)
        own.kv_cache = mine.self_attn.kv_cache
    left = [n for n, p in theirs.layers.named_parameters() if p.data_ptr() not in taken and ".W_U" not in n]
    assert not [n for n in left if "e_score_correction_bias" not in n], left
    return model


def reached(holder: Any, path: str) -> Any:
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


# Scenarios


def registry() -> dict[str, Any]:
    """What the loader and the registry make of the plugin."""
    cls, stock, static = loaded(), stock_class(), inspect.getattr_static
    status = imported("k3_decode.vllm").status()
    info = imported("vllm.model_executor.models.registry")._ModelInfo.from_model_cls
    made = {"_abc_impl", "_is_protocol", "__parameters__"}  # by typing, for every class
    own = {n for n in vars(cls) if n == "__init__" or not (n.startswith("__") or n in made)}
    same = [n for n in dir(stock) if n not in own and not n.startswith("__")]
    imported("k3_decode.vllm.state").show_noted()
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "base": cls.__mro__[1] is stock,
        "overrides": sorted(own),
        "same": all(static(cls, n) is static(stock, n) for n in same if n not in made),
        "info": info(cls) == info(stock),
        "state": status.state,
        "detail": status.detail,
        "resolves_to": status.resolves_to,
        "metric": metrics(),
    }


def inspected() -> dict[str, Any]:
    """vLLM's inspection of the architecture, in a subprocess of its own that loads the plugins again."""
    loaded()
    registry_module = imported("vllm.model_executor.models.registry")
    entry = registry_module.ModelRegistry.models[ARCHITECTURE]
    info = entry.inspect_model_cls()
    return {"architecture": info.architecture, "hybrid": info.is_hybrid, "pp": info.supports_pp}


class Stand(torch.nn.Module):
    """The backbone's forward without a GPU: the small model's, on the same caches."""

    def __init__(self, small: Any) -> None:
        super().__init__()
        self.small = small

    def forward(self, ids: Any, positions: Any, intermediate: Any, embeds: Any, **more: Any) -> Any:
        return self.small(ids, positions)


def untouched() -> dict[str, Any]:
    """Without the key: the same instance, the same output to the byte, as of vLLM's own class."""
    cls, stock = loaded(), stock_class()
    small = imported("tests.export.vllm_stock")
    ids, positions = torch.arange(5), torch.arange(5)
    made, states, outs, logits = [], [], [], []
    for one in (cls, stock):
        model = built(one, configured({"another": {"key": 1}}))
        backbone = small.Backbone()
        step = small.batch([(small.Request(0, 0), 5)], ids.tolist())
        backbone.context = step.context
        filled(model, backbone)
        states.append([(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()])
        made.append(sorted(vars(model)))
        hidden, weights = model.model.norm, model.model.norm.weight
        model.model = Stand(backbone)
        model.model.norm = hidden
        outs.append(model.forward(ids, positions))
        logits.append(model.needs_norm_in_logits)
        assert weights is hidden.weight and model.specialized_decode is None
        assert model.specialized_decode_config is None
    state = imported("k3_decode.vllm").status().state
    return {
        "attributes": made[0] == made[1],
        "parameters": states[0] == states[1],
        "bytes": torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8)),
        "norm_in_logits": logits,
        "state": state,
    }


def refused() -> dict[str, Any]:
    """A deployment with many things that are not supported."""
    cls = loaded()
    config = configured({"k3_decode": {"mod": "layer"}, "decode_backend": "latency_specialized"})
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.enable_expert_parallel = True
    config.cache_config.mamba_ssm_cache_dtype = "bfloat16"
    config.cache_config.cache_dtype = "auto"
    try:
        cls(vllm_config=config)
    except ValueError as e:
        status = imported("k3_decode.vllm").status()
        return {"error": str(e), "state": status.state, "ok": status.ok, "metric": metrics()}
    return {"error": ""}


def served() -> dict[str, Any]:
    """With the key: vLLM's forward, its context and modules; decode and verify steps by the executor."""
    cls = loaded()
    small = imported("tests.export.vllm_stock")
    results: dict[str, Any] = {"steps": []}
    for tokens in (1, 4):
        config = configured({"k3_decode": {"reference": True}})
        stocks, shared = (small.Backbone(spec=tokens - 1) for _ in range(2))
        model = filled(built(cls, config), shared)
        assert type(model.specialized_decode_config).__name__ == "Deployment"
        settings = model.specialized_decode_config.settings
        executor = imported("k3_decode.vllm.executor")
        model.specialized_decode_config = executor.Deployment(settings, tokens=tokens, capture_sizes=(3,))
        with imported("vllm.config").set_current_vllm_config(config):
            model.build_specialized_decode()
        model.specialized_decode.prepare_kv()
        requests = [[small.Request(n, tokens - 1) for n in range(3)] for _ in range(2)]
        work = [({0: 3, 1: 2}, 0, 0), ({1: tokens, 0: tokens}, 0, 2), ({0: tokens, 1: tokens}, 4 * tokens, 1)]
        for i, (new, pad, accepted) in enumerate(work):
            outs = []
            for which, own in enumerate(requests):
                pairs, rows = [(own[r], n) for r, n in new.items()], sum(new.values())
                step = small.batch(pairs, [(5 * i + 3 * j) % 64 for j in range(rows)], tokens, pad)
                if which and i:
                    outs.append(forward(model, config, step))
                else:  # prefill: stock on both sides, whose kernels need a GPU
                    backbone = shared if which else stocks
                    backbone.context = step.context
                    out = backbone(step.ids, step.positions)
                    outs.append(model.specialized_decode.normalize(out) if which else stocks.norm(out))
                for r, n in pairs:
                    kept = min(accepted, tokens) if n == tokens > 1 else n
                    r.context += kept
                    r.accepted = kept if n == tokens > 1 else 1
            live = sum(new.values())
            want, got = (o[:live].double() for o in outs)
            off = (want - got).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
            results["steps"].append({"tokens": tokens, "rows": step.ids.shape[0], "off": off.max().item()})
    status = imported("k3_decode.vllm").status_of(model)
    state = imported("vllm.v1.worker.gpu.model_states").resolve_model_state_cls(config, model)
    return {
        **results,
        "status": {k: status[k] for k in ("state", "plans", "repacked_bytes", "executor", "ok")},
        "norm_in_logits": model.needs_norm_in_logits,
        "model_state": state.__name__,
        "metric": metrics(),
    }


def forward(model: Any, config: Any, step: Any) -> torch.Tensor:
    """vLLM's own forward under its own forward context."""
    context = imported("vllm.forward_context")
    with context.set_forward_context(
        step.context.metadata, config, num_tokens=step.ids.shape[0], slot_mapping=step.context.slot_mapping
    ):
        out: torch.Tensor = model.forward(step.ids, step.positions)
    return out


def asked() -> dict[str, Any]:
    """What a deployment with the key says, and whether one without it starts as vLLM's own."""
    cls, error = loaded(), ""
    try:
        built(cls, configured({"k3_decode": {"reference": True}}))
    except ValueError as e:
        error = str(e)
    model = built(cls, configured({}))
    stock = isinstance(model, stock_class()) and model.specialized_decode_config is None
    return {"error": error, "stock": stock, "metric": metrics()}


def metrics() -> dict[str, float]:
    """The metric's samples by state."""
    client = imported("prometheus_client")
    return {
        sample.labels["state"]: sample.value
        for family in client.REGISTRY.collect()
        if family.name == "k3_decode_processes"
        for sample in family.samples
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
