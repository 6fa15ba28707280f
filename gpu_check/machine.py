"""What the numbers rest on beside the device: packages, clocks."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

_PACKAGES = ("numpy", "torch", "ml_dtypes", "rich", "cuda-bindings", "cuda-core")
_ASKED = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version")


def facts() -> dict[str, Any]:
    """Python, packages, and what nvidia-smi says before anything has run."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "absent"
    return {"python": platform.python_version(), "packages": packages, "nvidia_smi": nvidia_smi()}


def nvidia_smi() -> dict[str, str]:
    """Clocks, power and temperature now; empty without the program."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    first = asked.stdout.strip().splitlines()[:1]
    return dict(zip(_ASKED, first[0].split(", "), strict=False)) if first else {}
