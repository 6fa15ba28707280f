"""A CUDA device driven through `cuda.bindings`, with the launcher that the exported package has.

Neither the workbench's compiler nor torch is needed: cubins and bytes go in, bytes come out. Memory and
modules belong to the device's primary context, so that torch may use the same device in the same process.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.devices.launch import LaunchError, Program
from workbench.devices.model import Bytes, DeviceError, DeviceInfo, Kernel, Loaded

_ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


@dataclass(frozen=True)
class Availability:
    """The CUDA devices that kernels can be launched on; false where there is none."""

    devices: tuple[DeviceInfo, ...]
    reason: str = ""
    """Why there is none."""

    def __bool__(self) -> bool:
        return bool(self.devices)


def arch_of(capability: tuple[int, int]) -> str:
    """Arch of a compute capability, for instance `sm_90a`; `sm_XY` where no kernel is built for it."""
    return _ARCHES.get(capability, f"sm_{capability[0]}{capability[1]}")


def available(driver: Any = None) -> Availability:
    """The CUDA devices of this machine, or why there is none. Never raises, and holds nothing afterwards.

    Args:
        driver: stands in for `cuda.bindings.driver`; tests give one.
    """
    try:
        cuda = _Driver(driver)
        cuda("cuInit", 0)
        count = int(cuda("cuDeviceGetCount"))
        found = tuple(_info(cuda, n) for n in range(count))
    except ImportError:
        return Availability((), "cuda-bindings is not installed")
    except DeviceError as e:
        absent = isinstance(e.__cause__, RuntimeError)  # the bindings found no library, or not the call
        return Availability((), "there is no CUDA driver that can be loaded" if absent else str(e))
    return Availability(found, "" if found else "the driver shows no device")


class CudaDevice:
    """One CUDA device; see `Device`. All work goes through one stream.

    Args:
        ordinal: number of the device.
        driver: stands in for `cuda.bindings.driver`; tests give one.

    Raises:
        DeviceError: if there is no such device; the message says why.
    """

    def __init__(self, ordinal: int = 0, driver: Any = None) -> None:
        there = available(driver)
        if ordinal >= len(there.devices):
            raise DeviceError(there.reason or f"there is no CUDA device {ordinal}")
        self._info = there.devices[ordinal]
        self.cuda = _Driver(driver)
        self._device = self.cuda("cuDeviceGet", ordinal)
        self._context = self.cuda("cuDevicePrimaryCtxRetain", self._device)
        self.cuda("cuCtxSetCurrent", self._context)
        self.stream = self.cuda("cuStreamCreate", 0)
        self._memory: list[int] = []

    @property
    def info(self) -> DeviceInfo:
        """What the driver says of it."""
        return self._info

    def allocate(self, nbytes: int, name: str = "", writable: bool = True) -> int:
        """See `Device.allocate`; the driver aligns to 256 bytes at least."""
        try:
            address = int(self.cuda("cuMemAlloc", max(nbytes, 1)))
        except DeviceError as e:
            raise DeviceError(f"no memory for {nbytes} bytes of {name or 'a buffer'}: {e}") from e
        self._memory.append(address)
        return address

    def write(self, address: int, data: Bytes) -> None:
        """See `Device.write`."""
        if data.nbytes:
            contiguous = np.ascontiguousarray(data)
            self.synchronize()
            self.cuda("cuMemcpyHtoD", address, contiguous.ctypes.data, contiguous.nbytes)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """See `Device.fill`."""
        if nbytes:
            self.cuda("cuMemsetD8Async", address, byte, nbytes, self.stream)

    def read(self, address: int, nbytes: int) -> Bytes:
        """See `Device.read`."""
        self.synchronize()
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self.cuda("cuMemcpyDtoH", data.ctypes.data, address, nbytes)
        return data

    def load(self, kernel: Kernel) -> Program:
        """See `Device.load`; a cubin of another arch is refused."""
        if kernel.arch != self._info.arch:
            raise DeviceError(
                f"{kernel.name} is built for {kernel.arch}, {self._info.name} is {self._info.arch}"
            )
        try:
            return Program(kernel.cubin, kernel.launches, self.cuda.api)
        except LaunchError as e:
            raise DeviceError(f"{kernel.name}: {e}") from e

    def run(self, loaded: Loaded, addresses: Mapping[str, int], after_wait: bool = True) -> None:
        """See `Device.run`."""
        assert isinstance(loaded, Program)
        try:
            loaded.run(addresses, int(self.stream), after_wait)
        except LaunchError as e:
            raise DeviceError(str(e)) from e

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.cuda("cuStreamSynchronize", self.stream)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """See `Device.scope`."""
        mark = len(self._memory)
        try:
            yield
        except BaseException:
            self._free(mark, quietly=True)
            raise
        self.synchronize()
        self._free(mark)

    def close(self) -> None:
        """See `Device.close`."""
        self._free(0, quietly=True)
        for name, value in (("cuStreamDestroy", self.stream), ("cuDevicePrimaryCtxRelease", self._device)):
            self.cuda.quietly(name, value)

    def _free(self, mark: int, quietly: bool = False) -> None:
        call = self.cuda.quietly if quietly else self.cuda
        while len(self._memory) > mark:
            call("cuMemFree", self._memory.pop())


class _Driver:
    """`cuda.bindings.driver`, its error codes turned into errors."""

    def __init__(self, api: Any = None) -> None:
        self.api = api if api is not None else importlib.import_module("cuda.bindings.driver")

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call the driver; the result without the error code, a single value unpacked."""
        try:
            error, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as e:  # the driver is absent, or older than the call
            raise DeviceError(f"{name} cannot be called: {str(e).splitlines()[0]}") from e
        if int(error) != 0:
            raise DeviceError(f"{name} failed: {getattr(error, 'name', error)}")
        return values[0] if len(values) == 1 else tuple(values)

    def quietly(self, name: str, *arguments: Any) -> None:
        """Call the driver while something else has failed already: its errors say nothing new."""
        getattr(self.api, name)(*arguments)


def _info(cuda: _Driver, ordinal: int) -> DeviceInfo:
    device = cuda("cuDeviceGet", ordinal)
    names = cuda.api.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(cuda("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    version = int(cuda("cuDriverGetVersion"))
    name = cuda("cuDeviceGetName", 256, device)
    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    return DeviceInfo(
        kind="cuda",
        name=name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name),
        arch=arch_of(capability),
        ordinal=ordinal,
        driver=f"{version // 1000}.{version % 1000 // 10}",
        sms=attribute("MULTIPROCESSOR_COUNT"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(cuda("cuDeviceTotalMem", device)),
        clock_khz=attribute("CLOCK_RATE"),
    )
