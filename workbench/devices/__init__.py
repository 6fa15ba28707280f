"""Devices that run kernels: a CUDA device through `cuda.bindings`, the simulator behind the same interface.

    if there := devices.available():      # never raises; there.reason says why there is none
        timing = devices.time(artifact, op, options=devices.TimingOptions(samples=200))
        timing.median_us, timing.samples_us, timing.premises

`execute` runs a kernel and returns the bytes of its outputs. `available`, `CudaDevice` and `time_kernel` need
numpy and cuda-bindings alone; `time` and `inputs` need torch; `SimulatedDevice` needs all of the workbench.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.devices.cuda import Availability, CudaDevice, available
from workbench.devices.measure import inputs, kernel_of, time
from workbench.devices.model import Device, DeviceError, DeviceInfo, Kernel, Slot, execute
from workbench.devices.timing import Timing, TimingOptions, time_kernel

if TYPE_CHECKING:
    from workbench.devices.simulated import SimulatedDevice

__all__ = [
    "Availability",
    "CudaDevice",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "Kernel",
    "SimulatedDevice",
    "Slot",
    "Timing",
    "TimingOptions",
    "available",
    "execute",
    "inputs",
    "kernel_of",
    "time",
    "time_kernel",
]


def __getattr__(name: str) -> Any:
    if name == "SimulatedDevice":
        return importlib.import_module("workbench.devices.simulated").SimulatedDevice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
