"""Asks ptxas whether a PTX text is legal."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def ptxas() -> str | None:
    """Path of ptxas, if it is installed."""
    for root in map(Path, sys.path):
        path = root / "nvidia" / "cu13" / "bin" / "ptxas"
        if path.exists():
            return str(path)
    return None


@cache
def complaint(text: str, arch: str = "sm_103a") -> str:
    """What ptxas has against a module; empty if nothing."""
    tool = ptxas()
    if tool is None:
        return ""
    text = text.replace(".target sm_103a", f".target {arch}")
    done = subprocess.run(
        [tool, f"-arch={arch}", "-o", "/dev/null", "-"], input=text, capture_output=True, text=True
    )
    return done.stdout + done.stderr if done.returncode else ""
