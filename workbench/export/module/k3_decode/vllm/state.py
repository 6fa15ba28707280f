"""What the plugin knows about itself in one process: its state, one log line for each change, a metric."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .._identity import VERSION

State = Literal[
    "not installed", "filtered", "not loaded", "broken", "overridden", "registered", "refused", "idle",
    "active",
]  # fmt: skip
"""`filtered`: `VLLM_PLUGINS` leaves the plugin out. `overridden`: another plugin registered the architecture
later. `idle`: asked for, but no step can be taken. The others say what they mean."""
METRIC = "k3_decode_processes"
log = logging.getLogger("vllm.k3_decode")
"""Below vLLM's logger, whose handler and level it has."""


@dataclass(frozen=True)
class Status:
    """The plugin in this process."""

    state: State
    detail: str
    version: str = VERSION
    resolves_to: str = ""
    """Class that vLLM's registry has for the architecture, `module:name`."""
    executor: str = ""
    """What runs which part of a step, and why not more; see `executor.Executor.explain`."""
    repacked_bytes: int = 0
    """Memory of weights that were copied into another layout."""
    plans: Mapping[str, int] = field(default_factory=dict)
    """Planned steps by what came of them: `taken`, or why the stock forward runs. A captured step is planned
    once, however often its graph is replayed."""

    @property
    def ok(self) -> bool:
        """False if the plugin cannot do what it would be asked for."""
        return self.state in ("registered", "active", "idle")

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "plans": dict(self.plans), "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"k3_decode {self.version}: {self.state}: {self.detail}"]
        if self.resolves_to:
            lines.append(f"  architecture resolves to {self.resolves_to}")
        if self.repacked_bytes:
            lines.append(f"  {self.repacked_bytes / 2**20:.1f} MiB of weights repacked")
        lines += [f"  {line}" for line in self.executor.splitlines()]
        lines += [f"  {n} steps planned: {what}" for what, n in sorted(self.plans.items())]
        return "\n".join(lines)


_lock = threading.Lock()
_noted: tuple[State, str] | None = None
_executor: Any = None
_plans: Counter[str] = Counter()
_gauge: Any = None
_shown: State | None = None


def note(state: State, detail: str, executor: Any = None) -> None:
    """Change the state: one log line where it is new, an error's where something is wrong."""
    global _noted, _executor
    with _lock:
        before, _noted = _noted, (state, detail)
        _executor = executor
    if before != (state, detail):
        write = log.error if state in ("broken", "refused") else log.warning if state == "idle" else log.info
        write("k3_decode %s: vLLM plugin %s: %s", VERSION, state, detail)
    show(state, wait=state in ("broken", "registered"))


def noted() -> tuple[State, str] | None:
    """State and detail as noted last; None if nothing was."""
    return _noted


def planned(outcome: str) -> None:
    """Count a planned step."""
    with _lock:
        _plans[outcome] += 1
        first = _plans[outcome] == 1
    if first:
        log.info("k3_decode: first step of its kind: %s", outcome)


def executor_facts() -> tuple[str, int, dict[str, int]]:
    """Explanation, repacked bytes and plans."""
    with _lock:
        plans = dict(_plans)
        executor = _executor
    if executor is None:
        return "", 0, plans
    return executor.explain(), executor.repacked_bytes, plans


def reset() -> None:
    """Forget everything; for tests."""
    global _noted, _executor
    with _lock:
        _noted = _executor = None
        _plans.clear()


def show_noted() -> None:
    """Set the metric to the state as noted last."""
    if _noted is not None:
        show(_noted[0])


def show(state: State, wait: bool = False) -> None:
    """Set the metric `k3_decode_processes{state, version}`: how many processes are in which state.

    Args:
        state: of this process.
        wait: leave it if nobody imported `prometheus_client` yet: its first import fixes whether metrics are
            shared between processes, which is vLLM's to decide.
    """
    global _gauge, _shown
    if wait and "prometheus_client" not in sys.modules:
        return
    try:
        client = importlib.import_module("prometheus_client")
        with _lock:
            if _gauge is None:
                _gauge = client.Gauge(
                    METRIC, "Processes by state of the k3_decode plugin", ["state", "version"],
                    multiprocess_mode="livesum",
                )  # fmt: skip
            if _shown is not None and _shown != state:
                _gauge.labels(_shown, VERSION).set(0)
            _gauge.labels(state, VERSION).set(1)
            _shown = state
    except Exception as e:  # a metric must not take a server down
        log.debug("no metric: %s", e)
