"""What the plugin refuses, all of it in one message, and its settings; vLLM's configuration is a stand-in."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import import_module as module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def requirements(package: ModuleType) -> ModuleType:
    return module("k3_decode.vllm.requirements")


@pytest.fixture
def settings(package: ModuleType) -> ModuleType:
    return module("k3_decode.vllm.settings")


def deployment() -> Any:
    """A configuration that is supported, as vLLM has it."""
    text = SimpleNamespace(
        hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0, num_experts=896,
        num_experts_per_token=16, num_expert_group=1, topk_group=1, moe_router_activation_func="sigmoid",
        moe_renormalize=True, routed_scaling_factor=1.0, rms_norm_eps=1e-5, attn_res_block_size=12,
        q_lora_rank=1536, mla_use_output_gate=True, routed_expert_hidden_size=3584,
        linear_attn_config={
            "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0,
        },
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={"k3_decode": {}},
        model_config=SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16, enable_sleep_mode=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8, pipeline_parallel_size=1, enable_expert_parallel=False,
            use_ubatching=False, decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8", use_replayssm=False, use_kda_recoverssm=False),
        lora_config=None,
        speculative_config=None,
    )  # fmt: skip


def facts(requirements: ModuleType) -> Any:
    return requirements.Facts(
        device="cuda", arch="sm_103a", arches=("sm_103a",), launcher="", kda_dtypes=("bfloat16", "float32"),
        conv_dim_first=False, decode_graphs="FULL", torch_compile=False, v2_runner=True, aux_attn_res=False,
    )  # fmt: skip


def speculation(method: str = "dspark", drafts: int = 5, adaptive: bool = False) -> Any:
    return SimpleNamespace(
        method=method, num_speculative_tokens=drafts, enable_adaptive_verification=adaptive
    )


CONFIG: list[tuple[str, Any, str]] = [
    ("additional_config.decode_backend", "latency_specialized", "another executor for the same steps"),
    ("model_config.hf_text_config.hidden_act", "silu", "hidden_act 'silu'"),
    ("model_config.hf_text_config.rms_norm_eps", 1e-6, "rms_norm_eps 1e-06 (wanted 1e-05)"),
    ("model_config.hf_text_config.q_lora_rank", None, "without q_lora_rank"),
    ("model_config.hf_text_config.linear_attn_config.gate_lower_bound", None, "gate_lower_bound None"),
    ("model_config.dtype", torch.float16, "the model dtype torch.float16"),
    ("model_config.enable_sleep_mode", True, "sleep mode"),
    ("parallel_config.tensor_parallel_size", 4, "tensor parallelism 4: ops are verified at 8 and 16"),
    ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism 2"),
    ("parallel_config.enable_expert_parallel", True, "expert parallelism"),
    ("parallel_config.use_ubatching", True, "dual batch overlap"),
    ("parallel_config.decode_context_parallel_size", 8, "decode context parallelism 8"),
    ("cache_config.cache_dtype", "auto", "KV cache dtype 'auto'"),
    ("cache_config.use_replayssm", True, "ReplaySSM"),
    ("cache_config.use_kda_recoverssm", True, "RecoverSSM"),
    ("lora_config", object(), "LoRA"),
    ("speculative_config", speculation("mtp"), "speculation by 'mtp'"),
    ("speculative_config", speculation(drafts=8), "8 draft tokens are not supported"),
    ("speculative_config", speculation(drafts=2), "2 draft tokens are not supported"),
    ("speculative_config", speculation(adaptive=True), "adaptive verification"),
]
FACTS: list[tuple[dict[str, Any], str]] = [
    ({"device": "rocm", "arch": None}, "the platform rocm"),
    ({"arch": "sm_100a"}, "the device sm_100a: the package has kernels for sm_103a"),
    ({"launcher": "cuda-bindings is not installed"}, "cuda-bindings is not installed"),
    ({"kda_dtypes": ("bfloat16", "bfloat16")}, "KDA caches of bfloat16 and bfloat16"),
    ({"conv_dim_first": True}, "VLLM_SSM_CONV_STATE_LAYOUT=DS"),
    ({"decode_graphs": "PIECEWISE"}, "cudagraph_mode PIECEWISE"),
    ({"torch_compile": True}, "STOCK_TORCH_COMPILE"),
    ({"v2_runner": False}, "the V1 model runner"),
]


def put(config: Any, path: str, value: Any) -> Any:
    *way, last = path.split(".")
    holder = config
    for name in way:
        holder = holder[name] if isinstance(holder, dict) else getattr(holder, name)
    if isinstance(holder, dict):
        holder[last] = value
    else:
        setattr(holder, last, value)
    return config


def test_a_supported_deployment(requirements: ModuleType, settings: ModuleType) -> None:
    chosen = settings.Settings()
    assert requirements.unsupported(deployment(), chosen, facts(requirements)) == []
    for drafts in range(3, 8):
        config = put(deployment(), "speculative_config", speculation(drafts=drafts))
        assert requirements.unsupported(config, chosen, facts(requirements)) == []
    for graphs in ("FULL", "NONE"):
        assert (
            requirements.unsupported(deployment(), chosen, replace(facts(requirements), decode_graphs=graphs))
            == []
        )


@pytest.mark.parametrize(("path", "value", "reason"), CONFIG)
def test_each_setting_that_is_not_supported(
    requirements: ModuleType, settings: ModuleType, path: str, value: Any, reason: str
) -> None:
    found = requirements.unsupported(put(deployment(), path, value), settings.Settings(), facts(requirements))
    assert len(found) == 1 and reason in found[0]


@pytest.mark.parametrize(("change", "reason"), FACTS)
def test_each_machine_that_is_not_supported(
    requirements: ModuleType, settings: ModuleType, change: dict[str, Any], reason: str
) -> None:
    found = requirements.unsupported(
        deployment(), settings.Settings(), replace(facts(requirements), **change)
    )
    assert len(found) == 1 and reason in found[0]


def test_all_reasons_come_together(requirements: ModuleType, settings: ModuleType) -> None:
    config, machine = deployment(), facts(requirements)
    last = {path: (value, reason) for path, value, reason in CONFIG}
    for path, (value, _) in last.items():
        put(config, path, copy.deepcopy(value))
    for change, _ in FACTS[1:]:
        machine = replace(machine, **change)
    found = requirements.unsupported(config, settings.Settings(), machine)
    told = "\n".join(found)
    assert all(reason in told for _, reason in [*last.values(), *FACTS[1:]])
    assert len(found) == len(requirements._CHECKS), "every check fails, and each is heard"


def test_what_cannot_be_read_is_a_reason(requirements: ModuleType, settings: ModuleType) -> None:
    config = deployment()
    del config.parallel_config.use_ubatching, config.cache_config.use_replayssm
    found = requirements.unsupported(config, settings.Settings(), facts(requirements))
    assert len(found) == 2 and all("cannot be read from this vLLM's configuration" in r for r in found)


def test_without_the_attention_its_caches_may_be_anything(
    requirements: ModuleType, settings: ModuleType
) -> None:
    chosen, _ = settings.read({"parts": ["feed_forward"]})
    config = put(deployment(), "cache_config.cache_dtype", "auto")
    machine = replace(facts(requirements), kda_dtypes=("float32", "float32"), conv_dim_first=True)
    assert requirements.unsupported(config, chosen, machine) == []


def test_the_reference_runs_anywhere_and_in_no_graph(requirements: ModuleType, settings: ModuleType) -> None:
    chosen, _ = settings.read({"reference": True})
    machine = replace(facts(requirements), device="cpu", arch=None, launcher="none", decode_graphs="NONE")
    config = put(deployment(), "parallel_config.tensor_parallel_size", 1)
    assert requirements.unsupported(config, chosen, machine) == []
    found = requirements.unsupported(config, chosen, replace(machine, decode_graphs="FULL"))
    assert len(found) == 1 and "--enforce-eager" in found[0]


def test_settings(settings: ModuleType) -> None:
    for value in ({}, True):
        assert settings.read(value) == (settings.Settings(), [])
    chosen, wrong = settings.read(
        {"mode": "layer", "parts": ["feed_forward", "residual"], "off": [3, 0, 3], "repack_gib": 2}
    )
    assert not wrong and chosen.parts == ("residual", "feed_forward") and chosen.off == (0, 3)
    assert chosen.mode == "layer" and chosen.repack_bytes == 2 * 2**30 and not chosen.reference


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("yes", "k3_decode is 'yes'; give an object"),
        ({"mod": "layer"}, "there is no setting 'mod'; nearest: mode"),
        ({"mode": "all"}, "mode is 'all': choose parts or layer"),
        ({"parts": []}, "parts is []: give a list of residual, attention, feed_forward"),
        ({"parts": "attention"}, "parts is 'attention': give a list"),
        ({"off": [True]}, "off is [True]: give a list of layer numbers"),
        ({"off": [-1]}, "off is [-1]"),
        ({"repack_gib": -1}, "repack_gib is -1: give GiB"),
        ({"repack_gib": float("nan")}, "repack_gib is nan"),
        ({"reference": 1}, "reference is 1: give true or false"),
    ],
)
def test_settings_that_are_wrong(settings: ModuleType, value: Any, reason: str) -> None:
    chosen, wrong = settings.read(value)
    assert chosen == settings.Settings() and len(wrong) == 1 and reason in wrong[0]


def test_all_that_is_wrong_with_settings_is_said(settings: ModuleType) -> None:
    assert len(settings.read({"mode": 1, "parts": 2, "off": 3, "x": 4})[1]) == 4
