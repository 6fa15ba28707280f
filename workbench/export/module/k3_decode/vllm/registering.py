"""Registers the model with vLLM, and finds out what vLLM makes of it. Imports vLLM only when called."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Any

from . import ARCHITECTURE, VLLM, state
from .state import Status

GROUP = "vllm.general_plugins"
ENTRY = "k3_decode"
"""Name of the entry point, which `VLLM_PLUGINS` takes."""
_REGISTRY = "vllm.model_executor.models.registry"
_CLASS = f"{__package__}:{ARCHITECTURE}"
_before: Any = None
"""What the registry had for the architecture before this plugin."""


def register() -> None:
    """Put the subclass into vLLM's registry; what is wrong is noted, not raised.

    A package that is damaged registers too: a deployment that asks for it is then refused, one that does not
    runs as before.
    """
    global _before
    try:
        registry = importlib.import_module(_REGISTRY).ModelRegistry
        if ARCHITECTURE not in registry.models:
            raise LookupError(f"vLLM {version()} has no architecture {ARCHITECTURE}")
        if not _ours(registry.models[ARCHITECTURE]):
            _before = registry.models[ARCHITECTURE]
            registry.register_model(ARCHITECTURE, _CLASS)
    except Exception as e:
        state.note("broken", f"nothing is registered: {type(e).__name__}: {e}")
        return
    wrong = faults()
    if wrong:
        state.note("broken", f"registered, and refuses deployments that ask for it: {'; '.join(wrong)}")
    elif state.noted() is None:
        state.note("registered", f"off unless additional_config has the key; {_held()}")


def faults() -> list[str]:
    """What is wrong with this installation, whatever the deployment."""
    found = []
    if not version().startswith(VLLM):
        found.append(f"vLLM {version()} is not a version that the plugin knows ({VLLM}*)")
    try:
        from ..table import table

        table()
    except Exception as e:
        found.append(f"the package is damaged: {e}")
        return found
    try:
        importlib.import_module("torch")
        importlib.import_module(f"{__package__.rpartition('.')[0]}.ops")
        for module in ("requirements", "host", "executor"):
            importlib.import_module(f"{__package__}.{module}")
    except Exception as e:
        found.append(f"a part cannot be imported: {type(e).__name__}: {e}")
    return found


def base_class() -> Any:
    """The class to derive from: the one registered before, vLLM's own where that is not known."""
    if _before is not None:
        return _before.load_model_cls()
    return importlib.import_module("vllm.models.kimi_k3").KimiLinearForCausalLM


def version() -> str:
    """Version of the installed vLLM."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def status() -> Status:
    """The plugin in this process."""
    explained, repacked, plans = state.executor_facts()

    def told(which: state.State, detail: str, resolved: str = "") -> Status:
        return Status(
            which, detail, resolves_to=resolved, executor=explained, repacked_bytes=repacked, plans=plans
        )

    noted = state.noted()
    entries = [e for e in importlib.metadata.entry_points(group=GROUP) if e.name == ENTRY]
    if not entries and noted is None:
        return told("not installed", f"no entry point {ENTRY} in the group {GROUP}: install the package")
    allowed = os.environ.get("VLLM_PLUGINS")
    if noted is None and allowed is not None and ENTRY not in allowed.split(","):
        return told("filtered", f"VLLM_PLUGINS is {allowed!r}; add {ENTRY}")
    if noted is None:
        return told("not loaded", "vLLM did not load its plugins in this process")
    if noted[0] == "broken" or _REGISTRY not in sys.modules:
        return told(*noted)
    entry = sys.modules[_REGISTRY].ModelRegistry.models.get(ARCHITECTURE)
    resolved = f"{getattr(entry, 'module_name', '')}:{getattr(entry, 'class_name', '')}"
    if not _ours(entry):
        return told("overridden", f"{ARCHITECTURE} was registered again by something else", str(entry))
    return told(*noted, resolved)


def _ours(entry: Any) -> bool:
    return f"{getattr(entry, 'module_name', '')}:{getattr(entry, 'class_name', '')}" == _CLASS


def _held() -> str:
    from ..table import table

    held = table()
    arches = ", ".join(sorted({k.arch for k in held.kernels})) or "no arch"
    return f"{len(held.kernels)} kernels for {arches}"
