"""The value of the key `k3_decode` in vLLM's `additional_config`.

{}                                  whatever parts of a step have kernels; stock runs the rest
{"mode": "layer"}                   only steps of which every part has a kernel, all layers
{"parts": ["feed_forward"]}         only these parts: residual, attention, feed_forward
{"off": [0, 3]}                     not in these layers
{"repack_gib": 4.0}                 memory for copies of weights that lie in another layout; 1.0 by default
{"reference": true}                 parts without kernels by PyTorch in float64: right, slow, never captured
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

PARTS = ("residual", "attention", "feed_forward")
MODES = ("parts", "layer")


@dataclass(frozen=True)
class Settings:
    """What is asked for."""

    mode: Literal["parts", "layer"] = "parts"
    """`parts`: a step is taken if any part of it has a kernel. `layer`: only if all have."""
    parts: tuple[str, ...] = PARTS
    off: tuple[int, ...] = ()
    """Layers that stock runs."""
    repack_gib: float = 1.0
    reference: bool = False

    @property
    def repack_bytes(self) -> int:
        """Memory for copies of weights, bytes a rank."""
        return int(self.repack_gib * 2**30)


def read(value: Any) -> tuple[Settings, list[str]]:
    """The settings, and what is wrong with the value; the settings are the defaults where something is."""
    if value is True:
        return Settings(), []
    if not isinstance(value, Mapping):
        return Settings(), [f"k3_decode is {value!r}; give an object, {{}} for the defaults"]
    known = [f.name for f in fields(Settings)]
    wrong = []
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            wrong.append(f"there is no setting {name!r}" + (f"; nearest: {near[0]}" if near else ""))
    made: dict[str, Any] = {}
    for name, take in _TAKE.items():
        if name in value:
            try:
                made[name] = take(value[name])
            except (TypeError, ValueError) as e:
                wrong.append(f"{name} is {value[name]!r}: {e}")
    return (Settings(), wrong) if wrong else (Settings(**made), [])


def _mode(value: Any) -> str:
    if value not in MODES:
        raise ValueError(f"choose {' or '.join(MODES)}")
    return str(value)


def _parts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or any(v not in PARTS for v in value):
        raise ValueError(f"give a list of {', '.join(PARTS)}")
    return tuple(p for p in PARTS if p in value)


def _layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_whole(v) and v >= 0 for v in value):
        raise ValueError("give a list of layer numbers, 0 for the first")
    return tuple(sorted(set(value)))


def _memory(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError("give GiB, 0 or more")
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TAKE = {"mode": _mode, "parts": _parts, "off": _layers, "repack_gib": _memory, "reference": _switch}
