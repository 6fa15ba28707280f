"""Measured times as the workbench writes them: of `workbench.devices`, of evidence, of the check on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Samples = Annotated[
    tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1, max_length=1_000_000)
]
Text = Annotated[str, Field(min_length=1)]


class _Read(BaseModel):
    """What is read of a document; it may hold more."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="ignore", strict=True)


class _Device(_Read):
    name: Text
    arch: str = ""
    driver: str | int = ""


class _Protocol(_Read):
    method: str
    l2: str
    flush_bytes: int | None = None
    chains: int

    def text(self) -> str:
        flushed = "" if self.flush_bytes is None else f" flush_bytes={self.flush_bytes}"
        return f"method={self.method} l2={self.l2}{flushed} chains={self.chains}"


class Timing(_Protocol):
    """Samples of one kernel."""

    kernel: str = ""
    artifact_key: str = ""
    device: _Device
    generator: str = ""
    seed: int | None = None
    samples_us: Annotated[Samples, Field(strict=False)]

    def fields(self, implementation: str) -> dict[str, Any]:
        """The fields of a claim file's entry."""
        device = self.device
        inputs = f"{self.generator}, seed {self.seed}" if self.generator else ""
        return _fields(implementation, self.samples_us, device, self.text(), inputs=inputs)


class _Premises(_Protocol):
    device: Text
    arch: str = ""
    driver: str | int = ""


class _CheckMeasured(_Read):
    samples_us: Annotated[Samples | None, Field(strict=False)] = None
    """None where the method failed."""
    premises: _Premises | None = None


class _CheckRecord(_Read):
    record: str = ""
    kernel: str = ""
    op: str = ""
    workload: str = ""
    measured: dict[str, _CheckMeasured] = {}


class _CheckSection(_Read):
    records: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()


class CheckReport(_Read):
    """The report of the check on a GPU."""

    sections: Annotated[tuple[_CheckSection, ...], Field(strict=False)]

    def measurements(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each measured time by kernel and method."""
        for section in self.sections:
            for raw in section.records:
                if raw.get("record") != "timing":
                    continue
                record = _CheckRecord.model_validate(raw)
                for method, found in record.measured.items():
                    if found.samples_us is not None and found.premises is not None:
                        rests = found.premises
                        device = _Device(name=rests.device, arch=rests.arch, driver=rests.driver)
                        more = {"op": record.op, "workload": record.workload}
                        yield (
                            f"{record.kernel}/{method}",
                            _fields(record.kernel, found.samples_us, device, rests.text(), **more),
                        )


def _fields(
    implementation: str, samples: tuple[float, ...], device: _Device, protocol: str, **premises: str
) -> dict[str, Any]:
    stated = {
        "hardware": device.name,
        "arch": device.arch,
        "driver": str(device.driver),
        "protocol": protocol,
        **premises,
    }
    return {
        "implementation": implementation,
        "quantity": "median time of one run",
        "unit": "us",
        "value": printed(statistics.median(samples)),
        "kind": "measured",
        "reported_by": "self",
        "source": f"{len(samples)} samples",
        "scope": "kernel",
        "premises": {name: value for name, value in stated.items() if value},
    }


def axes_text(axes: Mapping[str, int]) -> str:
    """Axes as a premise, in one order."""
    return " ".join(f"{name}={n}" for name, n in sorted(axes.items()))


def printed(us: float | None) -> str:
    """Microseconds with four digits: neither a prediction nor a median is worth more."""
    return f"{us or 0.0:#.4g}"
