"""Raw samples of an exported kernel on a CUDA device, for a bundle and for its repetition."""

from __future__ import annotations

from dataclasses import replace

from workbench import devices
from workbench.devices import DeviceInfo, TimingOptions
from workbench.errors import WorkbenchError
from workbench.export.evidence.bundle import MeasuredTime
from workbench.export.evidence.make import Measure
from workbench.export.winner import KEY_LENGTH, ExportedKernel
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.workspace import Workspace

OPTIONS = TimingOptions(method="graph", l2="flushed", warmup=20, samples=200)
"""Protocol of a bundle's samples."""
GENERATOR, SEED = "ordinary", 0
_MOST_SAMPLES = 2000


def measurer(workspace: Workspace) -> Measure:
    """What takes samples on the first CUDA device.

    Raises:
        WorkbenchError: if this machine has none. Its calls raise WorkbenchError for a kernel of another arch.
    """
    there = devices.available()
    if not there:
        raise WorkbenchError(f"nothing can be measured here: {there.reason}; leave --measure out")
    device = there.devices[0]

    def measure(kernel: ExportedKernel) -> MeasuredTime:
        m = kernel.manifest
        if m.arch != device.arch:
            raise WorkbenchError(
                f"{m.key[:KEY_LENGTH]} is built for {m.arch}, {device.name} is {device.arch}; name kernels "
                "that it can run, or leave --measure out"
            )
        return take(kernel, load_op(workspace, m.op))

    return measure


def take(kernel: ExportedKernel, op: Op, like: MeasuredTime | None = None) -> MeasuredTime:
    """Take samples on the first CUDA device; raises WorkbenchError if it does not run the kernel.

    Args:
        kernel: whose cubin is launched.
        op: its contract, whose generator makes the inputs.
        like: samples whose protocol is to be followed; by default `OPTIONS`.
    """
    options, generator, seed = OPTIONS, GENERATOR, SEED
    if like is not None:
        if like.method not in ("events", "graph") or like.l2 not in ("flushed", "warm"):
            raise WorkbenchError(f"the bundle's times were taken by {like.method}/{like.l2}, unknown here")
        options = replace(
            OPTIONS,
            method="graph" if like.method == "graph" else "events",
            l2="flushed" if like.l2 == "flushed" else "warm",
            warmup=min(max(like.warmup, 0), _MOST_SAMPLES),
            samples=min(len(like.samples_us), _MOST_SAMPLES),
            chains=min(max(like.chains, 1), 100),
        )
        generator, seed = like.generator, like.seed
    timing = devices.time(kernel.artifact, op, generator=generator, seed=seed, options=options)
    return MeasuredTime(
        artifact_key=kernel.manifest.key,
        device=_described(timing.device),
        method=timing.method,
        l2=timing.l2,
        flush_bytes=timing.flush_bytes,
        warmup=timing.warmup,
        chains=timing.chains,
        generator=generator,
        seed=seed,
        samples_us=timing.samples_us,
        host_us=timing.host_us,
    )


def first_device() -> tuple[DeviceInfo | None, str]:
    """The first CUDA device, or None and why there is none."""
    there = devices.available()
    return (there.devices[0], "") if there else (None, there.reason)


def _described(device: DeviceInfo) -> dict[str, str | int]:
    """What the device says of itself, its number on this machine aside."""
    return {name: value for name, value in device.asdict().items() if name != "ordinal"}
