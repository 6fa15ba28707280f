"""The entry point that vLLM's loader imports: nothing here depends on the package that it loads.

vLLM logs and swallows what goes wrong while a plugin is imported, and then serves without it. So this file
uses the standard library alone, and where `k3_decode.vllm` cannot be loaded it says so in one log line and
the metric `k3_decode_processes{state="broken"}`, and registers a class in its place that is vLLM's own except
that it refuses deployments which ask for `k3_decode`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

KEY = "k3_decode"
ARCHITECTURE = "KimiLinearForCausalLM"
_problem = ""
_before: Any = None


def register() -> None:
    """Register the plugin, or what stands in for one that is broken. Never raises."""
    try:
        importlib.import_module("k3_decode.vllm").register()
    except Exception as e:
        _guard(f"{type(e).__name__}: {e}")


def problem() -> str:
    """Why `k3_decode.vllm` could not be loaded in this process; empty if it could."""
    return _problem


def _guard(why: str) -> None:
    global _problem, _before
    _problem = why
    log = logging.getLogger("vllm.k3_decode")
    log.error("k3_decode: vLLM plugin broken: it cannot be loaded: %s", why)
    try:
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        entry = registry.models[ARCHITECTURE]
        if getattr(entry, "module_name", "") not in (__name__, "k3_decode.vllm"):
            _before = entry
            registry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")
    except Exception as e:  # another vLLM: the log line above has to do
        log.error("k3_decode: nothing stands in for it: %r", e)


@functools.cache
def _show() -> None:
    """Set the metric, once a model is made: not earlier, since the first import of `prometheus_client` fixes
    whether metrics are shared between processes, which is vLLM's to decide."""
    try:
        gauge = importlib.import_module("prometheus_client").Gauge(
            "k3_decode_processes", "Processes by state of the k3_decode plugin", ["state", "version"],
            multiprocess_mode="livesum",
        )  # fmt: skip
        gauge.labels("broken", "unknown").set(1)
    except Exception as e:  # a metric must not take a server down
        logging.getLogger("vllm.k3_decode").debug("no metric: %r", e)


@functools.cache
def _refusing() -> Any:
    """vLLM's class, refusing deployments that have the key."""
    own = _before.load_model_cls() if _before is not None else None
    base: Any = own or importlib.import_module("vllm.models.kimi_k3").KimiLinearForCausalLM

    def made(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        _show()
        extra = getattr(vllm_config, "additional_config", None)
        if isinstance(extra, dict) and extra.get(KEY) not in (None, False):
            raise ValueError(
                "k3_decode does not support this deployment, for 1 reason; change that or take"
                f" {KEY!r} out of additional_config:\n  - the plugin is broken and cannot be loaded:"
                f" {_problem}"
            )
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)

    return type(ARCHITECTURE, (base,), {"__init__": made, "__module__": __name__, "__doc__": base.__doc__})


def __getattr__(name: str) -> Any:
    if name == ARCHITECTURE:  # what vLLM's registry asks for
        return _refusing()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
