"""All that a deployment must be for the plugin to serve it, checked at once, before any weight is loaded.

`unsupported` looks at vLLM's configuration and at facts of the machine; it returns every reason, so that one
message can list them. What cannot be read (another vLLM) is a reason too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..steps import drafts_problem
from .settings import Settings

MOE = {
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "num_experts_per_token": 16,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
}
"""What the ops' contracts have for constants, by the name in the model's configuration."""
PARALLEL = (8, 16)
"""Tensor parallelism that ops are verified at."""


@dataclass(frozen=True)
class Facts:
    """What vLLM's configuration does not say."""

    device: str
    """Platform: `cuda`, `cpu`, `rocm`."""
    arch: str | None
    """Arch of the device that kernels need."""
    arches: tuple[str, ...]
    """Arches of the package's kernels."""
    launcher: str
    """Empty if kernels can be launched, else what is missing."""
    kda_dtypes: tuple[str, str]
    """Of the convolution's and of the recurrent state, torch names."""
    conv_dim_first: bool
    """True if a convolution state's channels come before its taps."""
    decode_graphs: str
    """How decode steps are captured: `FULL`, `PIECEWISE`, `NONE`."""
    torch_compile: bool
    """True if the model's forward is traced as a whole."""
    v2_runner: bool
    """True if the runner builds model states, which build the executor."""
    aux_attn_res: bool
    """True if the auxiliary stream is the mixed one (`VLLM_KIMI_K3_AUX_ATTN_RES_STREAM`)."""


_Check = Callable[[Any, Settings, Facts], str]
"""Why not; empty if all is well."""


def unsupported(config: Any, settings: Settings, facts: Facts) -> list[str]:
    """Every reason why the deployment is refused; empty if there is none."""
    found = []
    for check in _CHECKS:
        try:
            reason = check(config, settings, facts)
        except Exception as e:
            what = check.__name__.strip("_").replace("_", " ")
            reason = f"{what}: cannot be read from this vLLM's configuration ({type(e).__name__}: {e})"
        if reason:
            found.append(reason)
    return found


def _if(wrong: bool, reason: str) -> str:
    return reason if wrong else ""


def _other_executor(config: Any, settings: Settings, facts: Facts) -> str:
    backend = config.additional_config.get("decode_backend", "auto")
    return _if(backend != "auto", f"decode_backend {backend!r}, another executor for the same steps")


def _device(config: Any, settings: Settings, facts: Facts) -> str:
    if settings.reference:
        return ""
    if facts.device != "cuda" or facts.arch is None:
        return f"the platform {facts.device}: kernels need a CUDA device"
    known = ", ".join(facts.arches) or "nothing"
    return _if(
        facts.arch not in facts.arches, f"the device {facts.arch}: the package has kernels for {known}"
    )


def _launcher(config: Any, settings: Settings, facts: Facts) -> str:
    return "" if settings.reference else facts.launcher


def _model(config: Any, settings: Settings, facts: Facts) -> str:
    text = config.model_config.hf_text_config
    odd = [
        f"{name} {getattr(text, name, None)!r} (wanted {value!r})"
        for name, value in MOE.items()
        if getattr(text, name, None) != value and not (settings.reference and name == "num_experts_per_token")
    ]
    for name in ("attn_res_block_size", "q_lora_rank", "mla_use_output_gate", "routed_expert_hidden_size"):
        if not getattr(text, name, None):
            odd.append(f"without {name}")
    return _if(bool(odd), f"a model other than Kimi K3: {', '.join(odd)}")


def _linear_attention(config: Any, settings: Settings, facts: Facts) -> str:
    kda = config.model_config.hf_text_config.linear_attn_config
    wanted: dict[str, Any] = {
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    odd = [f"{n} {kda.get(n)!r} (wanted {v!r})" for n, v in wanted.items() if kda.get(n) != v]
    return _if(bool(odd), f"KDA other than Kimi K3's: {', '.join(odd)}")


def _model_dtype(config: Any, settings: Settings, facts: Facts) -> str:
    dtype = str(config.model_config.dtype)
    return _if(not dtype.endswith("bfloat16"), f"the model dtype {dtype}: bfloat16 is wanted")


def _tensor_parallel(config: Any, settings: Settings, facts: Facts) -> str:
    size = config.parallel_config.tensor_parallel_size
    return _if(
        size not in PARALLEL and not settings.reference,
        f"tensor parallelism {size}: ops are verified at {' and '.join(map(str, PARALLEL))}",
    )


def _pipeline_parallel(config: Any, settings: Settings, facts: Facts) -> str:
    size = config.parallel_config.pipeline_parallel_size
    return _if(size != 1, f"pipeline parallelism {size}")


def _expert_parallel(config: Any, settings: Settings, facts: Facts) -> str:
    return _if(bool(config.parallel_config.enable_expert_parallel), "expert parallelism")


def _micro_batches(config: Any, settings: Settings, facts: Facts) -> str:
    return _if(bool(config.parallel_config.use_ubatching), "dual batch overlap (micro-batches)")


def _context_parallel(config: Any, settings: Settings, facts: Facts) -> str:
    size = config.parallel_config.decode_context_parallel_size
    return _if(size != 1, f"decode context parallelism {size}")


def _sleep(config: Any, settings: Settings, facts: Facts) -> str:
    return _if(bool(config.model_config.enable_sleep_mode), "sleep mode, which moves weights")


def _lora(config: Any, settings: Settings, facts: Facts) -> str:
    return _if(config.lora_config is not None, "LoRA")


def _runner(config: Any, settings: Settings, facts: Facts) -> str:
    return _if(not facts.v2_runner, "the V1 model runner, which never builds the executor")


def _compile(config: Any, settings: Settings, facts: Facts) -> str:
    return _if(facts.torch_compile, "compilation mode STOCK_TORCH_COMPILE, which would trace the executor")


def _graphs(config: Any, settings: Settings, facts: Facts) -> str:
    if settings.reference:
        return _if(
            facts.decode_graphs != "NONE",
            f"reference with cudagraph_mode {facts.decode_graphs}: the reference cannot be captured; use"
            " --enforce-eager",
        )
    return _if(
        facts.decode_graphs == "PIECEWISE",
        "cudagraph_mode PIECEWISE: its graphs do not tell decode steps apart; use FULL_AND_PIECEWISE, FULL"
        " or NONE",
    )


def _cache(config: Any, settings: Settings, facts: Facts) -> str:
    dtype = config.cache_config.cache_dtype
    wrong = "attention" in settings.parts and dtype not in ("fp8", "fp8_e4m3")
    return _if(
        wrong, f"KV cache dtype {dtype!r}: the MLA ops take fp8 (e4m3); or leave out the part attention"
    )


def _kda_cache(config: Any, settings: Settings, facts: Facts) -> str:
    wrong = "attention" in settings.parts and facts.kda_dtypes != ("bfloat16", "float32")
    return _if(wrong, f"KDA caches of {' and '.join(facts.kda_dtypes)}: bfloat16 and float32 are wanted")


def _conv_layout(config: Any, settings: Settings, facts: Facts) -> str:
    wrong = "attention" in settings.parts and facts.conv_dim_first
    return _if(wrong, "VLLM_SSM_CONV_STATE_LAYOUT=DS: taps must come before channels")


def _replayed_state(config: Any, settings: Settings, facts: Facts) -> str:
    cache = config.cache_config
    return _if(bool(cache.use_replayssm or cache.use_kda_recoverssm), "ReplaySSM or RecoverSSM")


def _speculation(config: Any, settings: Settings, facts: Facts) -> str:
    spec = config.speculative_config
    if spec is None:
        return ""
    found = []
    if spec.method != "dspark":
        found.append(f"speculation by {spec.method!r}: only dspark takes normalised hidden states")
    if spec.enable_adaptive_verification:
        found.append("adaptive verification: steps would not be uniform")
    problem = drafts_problem(spec.num_speculative_tokens)
    if problem:
        found.append(problem)
    if facts.aux_attn_res:
        found.append("the AttnRes auxiliary stream (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM)")
    return "; ".join(found)


_CHECKS: Collection[_Check] = (
    _other_executor, _device, _launcher, _model, _linear_attention, _model_dtype, _tensor_parallel,
    _pipeline_parallel, _expert_parallel, _micro_batches, _context_parallel, _sleep, _lora, _runner, _compile,
    _graphs, _cache, _kda_cache, _conv_layout, _replayed_state, _speculation,
)  # fmt: skip
