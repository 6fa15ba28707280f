"""Stands in for `cuda.bindings.driver`: its own structures, its calls carried out by the simulator."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as real
import numpy as np

from workbench.devices import DeviceError, Kernel
from workbench.devices.simulated import SimulatedDevice
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator import Adversary, KernelLaunch, SimulationOptions, simulate_module

LAUNCH_US, BYTES_A_US = 3.0, 3e6
"""What a launch takes, and how many bytes a memset writes in a microsecond, on the driver's own clock."""
LARGEST_FILL = 64 << 20
"""Bytes; a larger memset, which is there to flush the cache, takes its time and writes nothing."""


@dataclass
class Launched:
    """One launch as the driver was given it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    attributes: dict[str, Any]


@dataclass
class SimulatedDriver:
    """A device of arch `sm_90a` whose kernels are simulated. Modules are known by the hash of their cubin."""

    failing: str = ""
    """Name of a call that returns an error."""
    capability: tuple[int, int] = (9, 0)
    devices: int = 1
    overlap: bool = False
    """Grids launched with programmatic stream serialization run ahead of the one before until they wait."""
    launched: list[Launched] = field(default_factory=list)
    now_us: float = 0.0
    live: dict[str, set[int]] = field(default_factory=dict)
    """Handles by kind that were made and not given back."""

    def __post_init__(self) -> None:
        self.simulator = SimulatedDevice(capacity=1 << 33)
        self.known: dict[str, str] = {}
        self.modules: dict[int, Module] = {}
        self.functions: dict[int, tuple[Module, str]] = {}
        self.events: dict[int, float | None] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.memory: dict[int, str] = {}
        self.capture: list[Callable[[], None]] | None = None
        self.waiting: tuple[Module, list[KernelLaunch]] | None = None
        self.broken: str = ""
        self.current = 0
        self._handles = itertools.count(0x1000)

    def knows(self, *kernels: Kernel) -> SimulatedDriver:
        """Let it load these kernels' cubins."""
        for k in kernels:
            self.known[hashlib.sha256(k.cubin).hexdigest()] = k.ptx
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AssertionError(f"{name} is not simulated")
        return getattr(real, name)

    def _result(self, name: str, *values: Any) -> Any:
        if name == self.failing:
            return (real.CUresult.CUDA_ERROR_OPERATING_SYSTEM, *(None for _ in values))
        return (real.CUresult.CUDA_SUCCESS, *values)

    def _new(self, kind: str) -> int:
        handle = next(self._handles)
        self.live.setdefault(kind, set()).add(handle)
        return handle

    def _gone(self, kind: str, handle: int) -> None:
        self.live[kind].remove(int(handle))

    # The device

    def cuInit(self, flags: int) -> Any:  # noqa: N802
        return self._result("cuInit")

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return self._result("cuDriverGetVersion", 13000)

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return self._result("cuDeviceGetCount", self.devices)

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return self._result("cuDeviceGet", ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> Any:  # noqa: N802
        return self._result("cuDeviceGetName", b"Simulated GPU".ljust(length, b"\0"))

    def cuDeviceTotalMem(self, device: int) -> Any:  # noqa: N802
        return self._result("cuDeviceTotalMem", self.simulator.memory.capacity)

    def cuDeviceGetAttribute(self, which: Any, device: int) -> Any:  # noqa: N802
        known = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": 132,
            "L2_CACHE_SIZE": 1 << 20,
            "CLOCK_RATE": 1_980_000,
        }
        return self._result("cuDeviceGetAttribute", known[which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")])

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        return self._result("cuDevicePrimaryCtxRetain", self._new("context"))

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:  # noqa: N802
        self.live["context"].pop()
        return self._result("cuDevicePrimaryCtxRelease")

    def cuCtxSetCurrent(self, context: int) -> Any:  # noqa: N802
        self.current = int(context)
        return self._result("cuCtxSetCurrent")

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return self._result("cuCtxGetCurrent", self.current)

    # Memory

    def cuMemAlloc(self, nbytes: int) -> Any:  # noqa: N802
        try:
            address = self.simulator.allocate(nbytes)
        except DeviceError:
            return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        self.live.setdefault("memory", set()).add(address)
        return self._result("cuMemAlloc", address)

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        # Memory is given back when no newer one is left, as the simulator frees from the top.
        self._gone("memory", address)
        if not self.live["memory"]:
            self.simulator.memory.release(0)
        return self._result("cuMemFree")

    def cuMemcpyHtoD(self, address: int, source: int, nbytes: int) -> Any:  # noqa: N802
        data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(source), np.uint8)
        self.simulator.write(int(address), data)
        return self._result("cuMemcpyHtoD")

    def cuMemcpyDtoH(self, target: int, address: int, nbytes: int) -> Any:  # noqa: N802
        np.frombuffer((ctypes.c_uint8 * nbytes).from_address(target), np.uint8)[:] = self.simulator.read(
            int(address), nbytes
        )
        return self._result("cuMemcpyDtoH")

    def cuMemsetD8Async(self, address: int, byte: int, nbytes: int, stream: int) -> Any:  # noqa: N802
        def work() -> None:
            self._run_waiting()
            if nbytes <= LARGEST_FILL:
                self.simulator.fill(int(address), nbytes, byte)
            self.now_us += nbytes / BYTES_A_US

        return self._enqueue("cuMemsetD8Async", work)

    # Streams, events, graphs

    def _enqueue(self, name: str, work: Callable[[], None]) -> Any:
        if name != self.failing:
            if self.capture is not None:
                self.capture.append(work)
            else:
                work()
        return self._result(name)

    def cuStreamCreate(self, flags: int) -> Any:  # noqa: N802
        return self._result("cuStreamCreate", self._new("stream"))

    def cuStreamDestroy(self, stream: int) -> Any:  # noqa: N802
        self._gone("stream", stream)
        return self._result("cuStreamDestroy")

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        if self.capture is not None:
            return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        self._run_waiting()
        if self.broken:
            return (real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        return self._result("cuStreamSynchronize")

    def cuEventCreate(self, flags: int) -> Any:  # noqa: N802
        handle = self._new("event")
        self.events[handle] = None
        return self._result("cuEventCreate", handle)

    def cuEventDestroy(self, event: int) -> Any:  # noqa: N802
        self._gone("event", event)
        return self._result("cuEventDestroy")

    def cuEventRecordWithFlags(self, event: int, stream: int, flags: int) -> Any:  # noqa: N802
        assert (flags == 1) == (self.capture is not None), "an event in a capture must be external"

        def work() -> None:
            self.events[event] = self.now_us

        return self._enqueue("cuEventRecordWithFlags", work)

    def cuEventElapsedTime(self, start: int, end: int) -> Any:  # noqa: N802
        a, b = self.events[start], self.events[end]
        if a is None or b is None:
            return (real.CUresult.CUDA_ERROR_INVALID_HANDLE, 0.0)
        return self._result("cuEventElapsedTime", (b - a) / 1e3)

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> Any:  # noqa: N802
        self.capture = []
        return self._result("cuStreamBeginCapture")

    def cuStreamEndCapture(self, stream: int) -> Any:  # noqa: N802
        handle = self._new("graph")
        self.graphs[handle], self.capture = self.capture or [], None
        return self._result("cuStreamEndCapture", handle)

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:  # noqa: N802
        handle = self._new("executable")
        self.graphs[handle] = self.graphs[graph]
        return self._result("cuGraphInstantiate", handle)

    def cuGraphDestroy(self, graph: int) -> Any:  # noqa: N802
        self._gone("graph", graph)
        return self._result("cuGraphDestroy")

    def cuGraphExecDestroy(self, graph: int) -> Any:  # noqa: N802
        self._gone("executable", graph)
        return self._result("cuGraphExecDestroy")

    def cuGraphLaunch(self, graph: int, stream: int) -> Any:  # noqa: N802
        for work in self.graphs[graph]:
            work()
        return self._result("cuGraphLaunch")

    # Modules and launches

    def cuModuleLoadData(self, cubin: bytes) -> Any:  # noqa: N802
        ptx = self.known.get(hashlib.sha256(cubin).hexdigest())
        if ptx is None:
            return (real.CUresult.CUDA_ERROR_INVALID_IMAGE, None)
        handle = self._new("module")
        self.modules[handle] = parse(ptx)
        return self._result("cuModuleLoadData", handle)

    def cuModuleUnload(self, module: int) -> Any:  # noqa: N802
        self._gone("module", module)
        return self._result("cuModuleUnload")

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:  # noqa: N802
        text = name.decode()
        if text not in {k.name for k in self.modules[module].kernels}:
            return (real.CUresult.CUDA_ERROR_NOT_FOUND, None)
        handle = next(self._handles)
        self.functions[handle] = (self.modules[module], text)
        return self._result("cuModuleGetFunction", handle)

    def cuFuncSetAttribute(self, function: int, which: Any, value: int) -> Any:  # noqa: N802
        return self._result("cuFuncSetAttribute")

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> Any:  # noqa: N802
        module, name = self.functions[function]
        entry = module.kernel(name)
        array = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        block = bytearray()
        for i, param in enumerate(entry.params):
            block.extend(bytes(param.offset - len(block)))
            block.extend(ctypes.string_at(array[i], param.size))  # type: ignore[arg-type]
        attributes = {a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): a.value for a in config.attrs}
        extent = attributes["CLUSTER_DIMENSION"].clusterDim if "CLUSTER_DIMENSION" in attributes else None
        launched = Launched(
            name,
            (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ),
            config.sharedMemBytes,
            attributes,
        )
        launch = KernelLaunch(
            name,
            launched.grid,
            launched.block,
            bytes(block),
            (extent.x, extent.y, extent.z) if extent is not None else (1, 1, 1),
            config.sharedMemBytes,
            "PROGRAMMATIC_STREAM_SERIALIZATION" in attributes,
        )

        def work() -> None:
            self.launched.append(launched)
            self.now_us += LAUNCH_US
            if not (launch.pdl and self.overlap and self.waiting and self.waiting[0] is module):
                self._run_waiting()
                self.waiting = (module, [])
            self.waiting[1].append(launch)  # type: ignore[index]
            if not self.overlap:
                self._run_waiting()

        return self._enqueue("cuLaunchKernelEx", work)

    def _run_waiting(self) -> None:
        """Run the launches that wait to see whether a dependent one follows."""
        if self.waiting is None:
            return
        (module, launches), self.waiting = self.waiting, None
        options = self.simulator.options
        if len(launches) > 1:
            # As hardware does: no access is looked at.
            adversary = Adversary(overlap=True)
            options = SimulationOptions(check_races=False, check_memory=False, adversary=adversary)
        outcome = simulate_module(module, launches, self.simulator.memory, options)
        errors = [f.message for f in outcome.findings if f.severity.value == "error"]
        if errors or not outcome.completed:
            self.broken = errors[0] if errors else "it did not end"
