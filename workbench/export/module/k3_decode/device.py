"""What the machine offers: the device's arch, whether torch and the launcher are there."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys

from .counters import log
from .dispatch import Requirement

SWITCH = "K3_DECODE_DISABLE"
"""Environment variable that turns kernels off: `all`, `OP`, `OP@ROWS`, `OP@FROM-TO`, commas between."""
_ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def arch_of(capability: tuple[int, int]) -> str:
    """Name of the arch that a compute capability needs; `sm_XY` where no kernel is built for it."""
    return _ARCHES.get(capability, f"sm_{capability[0]}{capability[1]}")


def current_arch() -> str | None:
    """Arch of the current CUDA device; None without torch or without a device."""
    try:
        import torch

        return arch_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    except (ImportError, OSError, RuntimeError):
        return None


@functools.cache
def torch_there() -> Requirement:
    """Whether torch can be imported."""
    try:
        import torch
    except (ImportError, OSError) as e:
        return Requirement("torch", False, f"cannot be imported: {e}")
    return Requirement("torch", True, torch.__version__)


def enabled(op: str, batch: int) -> Requirement:
    """Whether the op's kernels are wanted at a batch: what `K3_DECODE_DISABLE` names runs by reference."""
    said = os.environ.get(SWITCH, "")
    for which, least, most in _switched_off(said):
        if which in (op, "all") and least <= batch <= most:
            rows = (
                "" if most == _ALL_ROWS else f" at {least} to {most} rows" if most > least else f" at {least}"
            )
            return Requirement("switch", False, f"{SWITCH} turns the kernels of {op} off{rows}")
    return Requirement("switch", True, f"{SWITCH} turns nothing off here")


def switched_off() -> tuple[str, ...]:
    """What `K3_DECODE_DISABLE` names, without rows."""
    return tuple(which for which, _, _ in _switched_off(os.environ.get(SWITCH, "")))


_ALL_ROWS = sys.maxsize


@functools.cache
def _switched_off(said: str) -> tuple[tuple[str, int, int], ...]:
    """Op or `all`, least and most rows of each entry; an entry that cannot be read is logged, once."""
    found = []
    for entry in filter(None, (part.strip() for part in said.split(","))):
        read = re.fullmatch(r"(\w+)(?:@(\d+)(?:-(\d+))?)?", entry)
        least = int(read[2] or 0) if read else 0
        most = int(read[3] or read[2] or _ALL_ROWS) if read else -1
        if read is None or most < least:
            log.warning("%s: %r is none of all, OP, OP@ROWS, OP@FROM-TO; it turns nothing off", SWITCH, entry)
        else:
            found.append((read[1], least, most))
    return tuple(found)


@functools.cache
def launcher() -> Requirement:
    """Whether `cuda.bindings` can be imported."""
    try:
        found = importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:
        found = False
    detail = "cuda.bindings" if found else "cuda-bindings is not installed"
    return Requirement("launcher", found, detail)
