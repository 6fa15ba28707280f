"""Measured times of a kernel's launches on a CUDA device: protocol, raw samples, premises.

A sample is the time between two CUDA events around the launches, all of them. The first launch starts when
everything before it has ended, also where it was built for programmatic dependent launch; the later ones
start as they were built. With `l2="flushed"` a buffer larger than the L2 cache is written before each sample,
so that operands come from memory; with `l2="warm"` they stay where the run before left them. Under `graph`
launches and events are nodes of one captured graph, and the host plays no part in a sample.

What is measured is never mixed with what is predicted: a `Timing` is `measured` and carries its premises.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from workbench.devices.cuda import CudaDevice
from workbench.devices.launch import Program
from workbench.devices.model import Bytes, DeviceError, DeviceInfo, Kernel, place

_EXTERNAL = 1
"""CU_EVENT_RECORD_EXTERNAL: inside a capture, an event that can be read from outside."""
_BATCH = 16
"""Samples that are enqueued before the host waits."""
_SMALLEST_FLUSH = 256 << 20
"""Bytes; writing them takes the GPU longer than it takes the host to enqueue a few launches."""


@dataclass(frozen=True)
class TimingOptions:
    """How to measure."""

    method: Literal["events", "graph"] = "events"
    l2: Literal["flushed", "warm"] = "flushed"
    warmup: int = 10
    """Samples taken first and thrown away."""
    warmup_s: float = 0.1
    """Warm up for at least so many seconds: an idle device's clocks take a while to rise."""
    samples: int = 100
    chains: int = 1
    """Times that the launches run between the two events; the sample is divided by it."""
    time_limit: float = 60.0
    """Seconds after which no further sample is begun; fewer samples are then returned."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.chains < 1 or self.warmup < 0 or self.warmup_s < 0:
            raise DeviceError("a timing needs at least one sample and one chain, and no negative warm-up")
        if self.l2 == "flushed" and self.chains != 1:
            raise DeviceError("with a flushed L2 cache only one chain fits between two events")


@dataclass(frozen=True)
class Timing:
    """What was measured, with its premises."""

    kernel: str
    device: DeviceInfo
    method: str
    l2: str
    flush_bytes: int
    warmup: int
    chains: int
    samples_us: tuple[float, ...]
    """Raw, in the order taken."""
    host_us: float
    """Median time that the host took to enqueue one sample. Under `events`, samples of kernels of several
    launches may hold gaps where this is more than what the device works on one sample, flush included."""
    kind: Literal["measured"] = "measured"

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        """Shortest sample."""
        return min(self.samples_us)

    def quantile_us(self, share: float) -> float:
        """The sample below which `share` of all lie."""
        ordered = sorted(self.samples_us)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def premises(self) -> dict[str, Any]:
        """What the numbers rest on; timings are comparable where these are equal."""
        return {
            "device": self.device.name,
            "arch": self.device.arch,
            "driver": self.device.driver,
            "method": self.method,
            "l2": self.l2,
            "flush_bytes": self.flush_bytes,
            "chains": self.chains,
        }

    def asdict(self) -> dict[str, Any]:
        """For JSON, raw samples included."""
        return asdict(self)


def time_kernel(
    device: CudaDevice,
    kernel: Kernel,
    given: Mapping[str, Bytes],
    options: TimingOptions | None = None,
) -> Timing:
    """Measure a kernel on a device.

    Args:
        device: of the kernel's arch.
        kernel: what to launch.
        given: contents of its inputs. States are not restored between samples: a kernel that updates one goes
            on from where the sample before left it.
        options: the protocol.

    Raises:
        DeviceError: if the device does not take the kernel, or a launch fails.
    """
    options = options or TimingOptions()
    with device.scope():
        addresses = place(device, kernel, given)
        loaded = device.load(kernel)
        timing = time_loaded(device, kernel.name, loaded, addresses, options)
        loaded.unload()
    return timing


def time_loaded(
    device: CudaDevice,
    name: str,
    program: Program,
    addresses: Mapping[str, int],
    options: TimingOptions,
) -> Timing:
    """Measure launches whose buffers are in place; see `time_kernel`."""
    flush_bytes = max(4 * device.info.l2_bytes, _SMALLEST_FLUSH) if options.l2 == "flushed" else 0
    with device.scope():
        flush = device.allocate(flush_bytes, "flush") if flush_bytes else 0
        device.run(program, addresses)
        device.synchronize()  # a kernel that faults does so here
        take = _Sampler(device, program, addresses, options, flush, flush_bytes)
        try:
            samples, host = take.all()
        finally:
            take.close()
    return Timing(
        kernel=name,
        device=device.info,
        method=options.method,
        l2=options.l2,
        flush_bytes=flush_bytes,
        warmup=options.warmup,
        chains=options.chains,
        samples_us=tuple(samples),
        host_us=statistics.median(host),
    )


class _Sampler:
    """Events, and the graph if there is one, of one measurement."""

    def __init__(
        self,
        device: CudaDevice,
        program: Program,
        addresses: Mapping[str, int],
        options: TimingOptions,
        flush: int,
        flush_bytes: int,
    ) -> None:
        self.device, self.cuda, self.options = device, device.cuda, options
        self.program, self.addresses = program, addresses
        self.flush, self.flush_bytes = flush, flush_bytes
        self.graph: Any = None
        pairs = 1 if options.method == "graph" else _BATCH
        self.events = [(self.cuda("cuEventCreate", 0), self.cuda("cuEventCreate", 0)) for _ in range(pairs)]
        if options.method == "graph":
            self.graph = self._captured()

    def all(self) -> tuple[list[float], list[float]]:
        """Samples and the host's time for each, both in microseconds."""
        began = time.monotonic()
        thrown = 0
        while thrown < self.options.warmup or time.monotonic() - began < self.options.warmup_s:
            thrown += len(self._take(self.options.warmup - thrown or len(self.events))[0])
            if time.monotonic() - began > self.options.time_limit:
                break
        samples: list[float] = []
        host: list[float] = []
        while not samples or (
            len(samples) < self.options.samples and time.monotonic() - began < self.options.time_limit
        ):
            more, enqueued = self._take(self.options.samples - len(samples))
            samples += more
            host += enqueued
        return samples, host

    def _take(self, most: int) -> tuple[list[float], list[float]]:
        """At most `most` samples, as many as there are events, and the host's times."""
        pairs = self.events[: max(most, 1)]
        host = []
        for pair in pairs:
            started = time.perf_counter()
            if self.graph is not None:
                self.cuda("cuGraphLaunch", self.graph, self.device.stream)
            else:
                self._enqueue(pair, 0)
            host.append((time.perf_counter() - started) * 1e6)
        self.device.synchronize()
        samples = [
            float(self.cuda("cuEventElapsedTime", start, end)) * 1e3 / self.options.chains
            for start, end in pairs
        ]
        return samples, host

    def close(self) -> None:
        """Give events and graph back."""
        if self.graph is not None:
            self.cuda.quietly("cuGraphExecDestroy", self.graph)
        for pair in self.events:
            for event in pair:
                self.cuda.quietly("cuEventDestroy", event)

    def _enqueue(self, pair: tuple[Any, Any], flags: int) -> None:
        start, end = pair
        if self.flush_bytes:
            self.device.fill(self.flush, self.flush_bytes, 0)
        self.cuda("cuEventRecordWithFlags", start, self.device.stream, flags)
        for _ in range(self.options.chains):
            self.device.run(self.program, self.addresses)
        self.cuda("cuEventRecordWithFlags", end, self.device.stream, flags)

    def _captured(self) -> Any:
        mode = self.cuda.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.cuda("cuStreamBeginCapture", self.device.stream, mode)
        try:
            self._enqueue(self.events[0], _EXTERNAL)
        except DeviceError:
            self.cuda.quietly("cuStreamEndCapture", self.device.stream)
            raise
        graph = self.cuda("cuStreamEndCapture", self.device.stream)
        try:
            return self.cuda("cuGraphInstantiate", graph, 0)
        finally:
            self.cuda.quietly("cuGraphDestroy", graph)
