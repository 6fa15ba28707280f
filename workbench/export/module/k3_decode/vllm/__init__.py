"""The vLLM 0.33 plugin: Kimi K3 decode by the package's kernels, off unless asked for.

    vllm serve ... --additional-config '{"k3_decode": {}}'

vLLM's loader finds `register` (entry point group `vllm.general_plugins`) in every process. It registers a
subclass of the language model that is registered already, under the same name. Without the key that subclass
does what its base does and nothing else. With the key it refuses at once, in one `ValueError`, all that it
does not support, and after the weights are loaded it builds `executor.Executor`.

vLLM logs and swallows what goes wrong while a plugin is imported. So its loader imports `k3_decode_plugin`,
which needs nothing of this package; a deployment that asks for a plugin that is broken does not start; and
`status()`, `python -m k3_decode.vllm`, one log line and a metric say what is the case.
"""

from __future__ import annotations

import importlib
from typing import Any

KEY = "k3_decode"
"""Of vLLM's `additional_config`; its value is described in `settings`."""
ARCHITECTURE = "KimiLinearForCausalLM"
"""Kimi K3's multimodal model makes its language model through the registry under this name too."""
VLLM = "0.33."
"""Versions of vLLM that the plugin knows begin so."""

__all__ = ["ARCHITECTURE", "KEY", "register", "status", "status_of"]


def register() -> None:
    """The entry point. May be called any number of times; never raises: see `status`."""
    importlib.import_module(f"{__name__}.registering").register()


def status() -> Any:
    """What the plugin is doing in this process, as `state.Status`; `str` of it is text for people."""
    return importlib.import_module(f"{__name__}.registering").status()


def status_of(model: Any) -> dict[str, Any]:
    """The status in the process of a model, plain data: `LLM.apply_model(k3_decode.vllm.status_of)` asks
    every worker."""
    told: dict[str, Any] = status().as_dict()
    return told


def __getattr__(name: str) -> Any:
    if name == ARCHITECTURE:  # what vLLM's registry asks for
        return importlib.import_module(f"{__name__}.model").KimiLinearForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
