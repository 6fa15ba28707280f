"""Launches kernels from cubins through the CUDA driver, clusters and programmatic dependent launch included.

`cuda.bindings.driver` is used because the launch configuration of `cuda.core` has no attribute for
programmatic stream serialization. It is imported when the first cubin is loaded, so that this module imports
anywhere. It needs the standard library alone and no other module of the package.

A launch copies its parameters while the call runs. Their memory is made once, and only the addresses in it
change, so that a call allocates nothing on the device and may be captured in a graph.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_PORTABLE_CLUSTER = 8
"""Largest number of CTAs of a cluster that every device takes without being asked."""
_PLAIN_SMEM = 48 * 1024
"""Largest dynamic shared memory, bytes, that a kernel takes without being asked."""


class LaunchError(RuntimeError):
    """The driver refused something; the message holds the call and the driver's name of the error."""


@dataclass(frozen=True)
class Pointer:
    """Eight bytes of a parameter that hold the address of a buffer plus `addend`."""

    offset: int
    buffer: str
    addend: int = 0


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its bytes, pointers zero, and the pointers to fill in."""

    data: bytes
    pointers: tuple[Pointer, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem_bytes: int = 0
    """Dynamic shared memory, bytes a CTA."""
    pdl: bool = False
    """May start before its predecessor in the stream has ended."""
    cooperative: bool = False
    parameters: tuple[Parameter, ...] = ()


class _Packed:
    """The parameters of one launch in memory that the driver reads."""

    def __init__(self, launch: Launch) -> None:
        self.blocks = [ctypes.create_string_buffer(p.data, max(len(p.data), 1)) for p in launch.parameters]
        self.slots: list[tuple[ctypes.c_uint64, str, int]] = []
        for block, parameter in zip(self.blocks, launch.parameters, strict=True):
            for pointer in parameter.pointers:
                slot = ctypes.c_uint64.from_buffer(block, pointer.offset)
                self.slots.append((slot, pointer.buffer, pointer.addend))
        addresses = [ctypes.addressof(block) for block in self.blocks]
        self.array = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)

    def fill(self, addresses: Mapping[str, int]) -> None:
        """Write the addresses of the buffers."""
        for slot, buffer, addend in self.slots:
            slot.value = addresses[buffer] + addend

    @property
    def address(self) -> int:
        """Address of the array of parameter addresses, 0 if there are none."""
        return ctypes.addressof(self.array) if self.blocks else 0


class Program:
    """A cubin in the current context with its launches, ready to run in a stream from any thread.

    Args:
        cubin: the module.
        launches: in stream order.
        driver: stands in for `cuda.bindings.driver`; tests give one.

    Raises:
        ImportError: if `cuda.bindings` is not installed.
        LaunchError: if no context is current, or the driver refuses the module, an entry or an attribute.
    """

    def __init__(self, cubin: bytes, launches: Sequence[Launch], driver: Any = None) -> None:
        self.launches = tuple(launches)
        self._cuda = driver if driver is not None else importlib.import_module("cuda.bindings.driver")
        self._cubin = cubin  # the driver may read it again
        self._lock = threading.Lock()
        self._context = self._call("cuCtxGetCurrent")
        if int(self._context) == 0:
            raise LaunchError("no CUDA context is current in this thread; use the device first")
        self._module = self._call("cuModuleLoadData", cubin)
        self._functions = [self._function(launch) for launch in self.launches]
        self._packed = [_Packed(launch) for launch in self.launches]
        self._attributes = [self._attributes_of(launch, launch.pdl) for launch in self.launches]
        self._serial = [self._attributes_of(launch, False) for launch in self.launches]

    def run(self, addresses: Mapping[str, int], stream: int, after_wait: bool = False) -> None:
        """Launch all kernels in `stream` (a `CUstream` as an integer).

        Args:
            addresses: device address of every buffer by name.
            stream: where to launch.
            after_wait: start the first kernel only when everything before it in the stream has ended, even
                where it was built for programmatic dependent launch.

        Raises:
            LaunchError: if the driver refuses a launch.
            KeyError: if a buffer has no address.
        """
        with self._lock, self._in_context():
            for i, launch in enumerate(self.launches):
                packed = self._packed[i]
                packed.fill(addresses)
                attributes = self._serial[i] if after_wait and i == 0 else self._attributes[i]
                self._launch(launch, self._functions[i], packed, attributes, stream)

    def unload(self) -> None:
        """Give the module back to the driver; the program cannot run afterwards."""
        self._call("cuModuleUnload", self._module)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        """The program's context current in this thread: a new thread has none, or that of another device."""
        current = self._call("cuCtxGetCurrent")
        if int(current) == int(self._context):
            yield
            return
        self._call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            if int(current) != 0:
                self._call("cuCtxSetCurrent", current)

    def _launch(
        self, launch: Launch, function: Any, packed: _Packed, attributes: list[Any], stream: int
    ) -> None:
        config = self._cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.smem_bytes
        config.hStream = self._cuda.CUstream(stream)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._call("cuLaunchKernelEx", config, function, packed.address, 0)

    def _function(self, launch: Launch) -> Any:
        function = self._call("cuModuleGetFunction", self._module, launch.kernel.encode())
        names = self._cuda.CUfunction_attribute
        if launch.smem_bytes > _PLAIN_SMEM:
            which = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, which, launch.smem_bytes)
        x, y, z = launch.cluster
        if x * y * z > _PORTABLE_CLUSTER:
            which = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._call("cuFuncSetAttribute", function, which, 1)
        return function

    def _attributes_of(self, launch: Launch, pdl: bool) -> list[Any]:
        ids = self._cuda.CUlaunchAttributeID
        made = []
        if launch.cluster != (1, 1, 1):
            cluster = self._attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            extent = cluster.value.clusterDim
            extent.x, extent.y, extent.z = launch.cluster
            made.append(cluster)
        if pdl:
            early = self._attribute(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            early.value.programmaticStreamSerializationAllowed = 1
            made.append(early)
        if launch.cooperative:
            cooperative = self._attribute(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            cooperative.value.cooperative = 1
            made.append(cooperative)
        return made

    def _attribute(self, which: Any) -> Any:
        attribute = self._cuda.CUlaunchAttribute()
        attribute.id = which
        return attribute

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; its result without the error code, a single value unpacked."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if int(error) != 0:
            raise LaunchError(f"{name} failed: {getattr(error, 'name', error)}")
        return values[0] if len(values) == 1 else tuple(values)
