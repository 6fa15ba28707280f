"""What the machine offers: the device's arch, whether torch and the launcher are there."""

from __future__ import annotations

import functools
import importlib.util
import os

from .dispatch import Requirement

SWITCH = "K3_DECODE_DISABLE"
"""Environment variable that turns kernels off."""
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


def enabled(op: str) -> Requirement:
    """Whether kernels of the op are wanted: `K3_DECODE_DISABLE` names ops to run by reference, or `all`."""
    off = {name.strip() for name in os.environ.get(SWITCH, "").split(",")}
    if op in off or "all" in off:
        return Requirement("switch", False, f"{SWITCH} turns the kernels of {op} off")
    return Requirement("switch", True, f"{SWITCH} turns nothing off here")


@functools.cache
def launcher() -> Requirement:
    """Whether `cuda.bindings` can be imported."""
    try:
        found = importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:
        found = False
    detail = "cuda.bindings" if found else "cuda-bindings is not installed"
    return Requirement("launcher", found, detail)
