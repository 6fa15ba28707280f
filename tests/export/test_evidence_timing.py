from __future__ import annotations

from typing import Any

import pytest

from tests.export.evidence_bundles import Evidence
from workbench import devices
from workbench.devices import Availability, DeviceInfo, Timing, TimingOptions
from workbench.errors import WorkbenchError
from workbench.export.evidence import timing
from workbench.export.evidence.bundle import MeasuredTime
from workbench.export.evidence.check import load_bundle
from workbench.export.evidence.run import find_gpu
from workbench.export.winner import ExportedKernel
from workbench.ops import load_op
from workbench.ops.model import Op

GB300 = DeviceInfo("cuda", "NVIDIA GB300", "sm_103a", ordinal=3, driver="13.0", sms=152)


class Taken:
    """Stands in for the device: notes how it was asked."""

    def __init__(self, *there: DeviceInfo) -> None:
        self.there = there
        self.asked: list[tuple[TimingOptions, str, int]] = []

    def available(self) -> Availability:
        return Availability(self.there, "" if self.there else "no CUDA driver: no such library")

    def time(self, artifact: Any, op: Op, *, generator: str, seed: int, options: TimingOptions) -> Timing:
        self.asked.append((options, generator, seed))
        flush = 1 << 28 if options.l2 == "flushed" else 0
        samples = tuple(float(n + 1) for n in range(options.samples))
        return Timing(artifact.op, self.there[0], options.method, options.l2, flush, options.warmup,
                      options.chains, samples, 1.5)  # fmt: skip


def installed(monkeypatch: pytest.MonkeyPatch, *there: DeviceInfo) -> Taken:
    taken = Taken(*there)
    monkeypatch.setattr(devices, "available", taken.available)
    monkeypatch.setattr(devices, "time", taken.time)
    return taken


@pytest.fixture
def kernel(evidence: Evidence) -> ExportedKernel:
    return load_bundle(evidence.path)[0][0].exported


def test_samples_carry_device_and_protocol(
    evidence: Evidence, kernel: ExportedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = installed(monkeypatch, GB300)
    found = timing.measurer(evidence.workspace)(kernel)
    assert taken.asked == [(timing.OPTIONS, "ordinary", 0)]
    assert found.artifact_key == kernel.manifest.key and len(found.samples_us) == timing.OPTIONS.samples
    assert (
        found.device["name"] == "NVIDIA GB300"
        and found.device["sms"] == 152
        and "ordinal" not in found.device
    )
    assert (found.method, found.l2, found.warmup) == ("graph", "flushed", timing.OPTIONS.warmup)
    assert MeasuredTime.model_validate_json(found.model_dump_json()) == found


def test_a_repetition_follows_the_protocol_of_the_bundle(
    evidence: Evidence, kernel: ExportedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = installed(monkeypatch, GB300)
    op = load_op(evidence.workspace, "rmsnorm")
    first = timing.measurer(evidence.workspace)(kernel)
    other = first.model_copy(
        update={"method": "events", "l2": "warm", "chains": 4, "warmup": 3, "generator": "large", "seed": 7,
                "samples_us": (1.0, 2.0)}
    )  # fmt: skip
    again = timing.take(kernel, op, other)
    options, generator, seed = taken.asked[-1]
    assert (options.method, options.l2, options.chains, options.warmup, options.samples) == (
        "events", "warm", 4, 3, 2,
    )  # fmt: skip
    assert (generator, seed, again.l2, again.generator) == ("large", 7, "warm", "large")
    huge = other.model_copy(update={"chains": 10**9, "warmup": -5, "samples_us": (1.0,) * 9999})
    timing.take(kernel, op, huge)
    assert (taken.asked[-1][0].chains, taken.asked[-1][0].warmup, taken.asked[-1][0].samples) == (
        100,
        0,
        2000,
    )
    for odd in ({"method": "stopwatch"}, {"l2": "lukewarm"}):
        with pytest.raises(WorkbenchError, match="unknown here"):
            timing.take(kernel, op, other.model_copy(update=odd))


def test_no_device_and_another_arch_are_said(
    evidence: Evidence, kernel: ExportedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    with pytest.raises(WorkbenchError, match="nothing can be measured here: no CUDA driver"):
        timing.measurer(evidence.workspace)
    assert (find_gpu().name, find_gpu().take) == ("no CUDA device here (no CUDA driver)", None)
    taken = installed(monkeypatch, DeviceInfo("cuda", "H200", "sm_90a"))
    with pytest.raises(WorkbenchError, match="built for sm_103a, H200 is sm_90a"):
        timing.measurer(evidence.workspace)(kernel)
    assert not taken.asked


def test_the_gpu_that_is_found_takes_the_bundles_times(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, GB300)
    gpu = find_gpu()
    assert (gpu.name, gpu.arch) == ("NVIDIA GB300", "sm_103a") and gpu.take is not None
    found = gpu.take(load_bundle(evidence.path)[0][0], load_op(evidence.workspace, "rmsnorm"))
    assert len(found.samples_us) == timing.OPTIONS.samples
