"""The class that vLLM's registry has for the architecture: vLLM's own, with the executor if one is wanted."""

from __future__ import annotations

import importlib
from typing import Any

from . import KEY, state
from .registering import base_class, faults, version

_Base: Any = base_class()


def asked(vllm_config: Any) -> bool:
    """True if the deployment's `additional_config` has the key."""
    extra = getattr(vllm_config, "additional_config", None)
    return isinstance(extra, dict) and extra.get(KEY) not in (None, False)


def admitted(vllm_config: Any) -> Any:
    """The deployment as the executor wants it.

    Raises:
        ValueError: with everything that stands against it, one reason a line.
    """
    wrong = faults()
    made = None
    if not wrong:
        settings = importlib.import_module(f"{__package__}.settings")
        requirements = importlib.import_module(f"{__package__}.requirements")
        host = importlib.import_module(f"{__package__}.host")
        executor = importlib.import_module(f"{__package__}.executor")
        chosen, wrong = settings.read(vllm_config.additional_config[KEY])
        try:
            wrong += requirements.unsupported(vllm_config, chosen, host.facts(vllm_config))
        except Exception as e:
            wrong.append(f"vLLM {version()} cannot be asked for its settings: {type(e).__name__}: {e}")
        if not wrong:
            spec = vllm_config.speculative_config
            made = executor.Deployment(
                chosen,
                tokens=1 if spec is None else 1 + int(spec.num_speculative_tokens),
                capture_sizes=tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()),
            )
    if made is None:
        reasons = "\n".join(f"  - {reason}" for reason in wrong)
        state.note("refused", "; ".join(wrong))
        raise ValueError(
            f"k3_decode does not support this deployment, for {len(wrong)}"
            f" reason{'s' if len(wrong) > 1 else ''}; change that or take {KEY!r} out of additional_config:\n"
            f"{reasons}"
        )
    return made


class KimiLinearForCausalLM(_Base):  # type: ignore[misc]
    """Kimi K3's language model, decode by k3_decode where the deployment asks for it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        deployment = admitted(vllm_config) if asked(vllm_config) else None
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        state.show_noted()
        if deployment is not None:
            # Not None: vLLM's model state calls build_specialized_decode, then prepare_kv.
            self.specialized_decode_config = deployment

    def build_specialized_decode(self) -> None:
        """Build the executor over the loaded weights; vLLM's own where this deployment asked for that."""
        if not asked(self.vllm_config):
            super().build_specialized_decode()
            return
        executor = importlib.import_module(f"{__package__}.executor")
        host = importlib.import_module(f"{__package__}.host")
        self.specialized_decode = executor.Executor(self.model, self.specialized_decode_config, host.Vllm())
        self.needs_norm_in_logits = False  # `run` and `normalize` apply it
