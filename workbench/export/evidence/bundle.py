"""What an evidence bundle says: its manifest `bundle.json`, and the kernels with their evidence.

`bundle.json` repeats nothing that is not computed from the other members: `entry_of` makes a kernel's entry
when a bundle is written and again when one is read, and the two must be the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.artifact import Toolchain
from workbench.cost import Prediction
from workbench.errors import ContentError
from workbench.export.provenance import LARGEST_SEED, Provenance
from workbench.export.waivers import Waiver
from workbench.export.winner import ExportedKernel, exported_from
from workbench.records.model import SCHEMA, Objective, Record
from workbench.verify.report import Verdict

MANIFEST = "bundle.json"
README = "README.md"
KERNELS, MACHINES, VERIFIERS = "kernels", "machines", "verifiers"
RECORDS, TIMING = "records.jsonl", "timing.json"
EXPORTED = (
    "manifest.json",
    "kernel.py",
    "kernel.ptx",
    "kernel.cubin",
    "kernel.sass",
    "report.json",
    "REPORT.md",
)
"""Files of an exported kernel, as they lie in `generated_kernels/`."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class MeasuredTime(_Data):
    """Raw samples of one kernel on one CUDA device, with the protocol that they were taken under."""

    kind: Literal["measured"] = "measured"
    artifact_key: str
    device: dict[str, str | int]
    """What the device says of itself."""
    method: str
    l2: str
    """`flushed` or `warm`."""
    flush_bytes: int
    warmup: int
    """Samples taken first and thrown away."""
    chains: int
    """Runs of all launches between two events."""
    generator: str
    """Of the inputs."""
    seed: int = Field(ge=0, lt=LARGEST_SEED)
    """Of the inputs."""
    samples_us: tuple[float, ...] = Field(min_length=1, max_length=100_000)
    """Microseconds of one run of all launches, in the order taken."""
    host_us: float
    """Median time that the host took to enqueue one sample, microseconds."""

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        ordered = sorted(self.samples_us)
        n = len(ordered)
        return (ordered[n // 2] + ordered[(n - 1) // 2]) / 2


class Figure(_Data):
    """One number of microseconds, what it is of, and everything that it rests on."""

    kind: Literal["predicted", "measured"]
    us: float
    """One run of all launches; of a measured time the median."""
    samples: int
    """Raw samples behind it; 0 for a prediction."""
    premises: dict[str, Any]
    """By name. Two figures are compared only where these are equal."""


class KernelEntry(_Data):
    """One kernel of the bundle."""

    folder: str
    """Of its files."""
    key: str
    """Key of the artifact."""
    op: str
    workload: str
    axes: dict[str, int]
    arch: str
    template: str
    knobs: dict[str, int | str | bool]
    source_sha256: str
    ptx_sha256: str
    cubin_sha256: str
    sass_sha256: str | None
    """None where the exporting machine had no disassembler."""
    toolchain: Toolchain
    provenance: Provenance | None
    """What the report rests on; None where the export did not record it."""
    verdict: Verdict
    checks: int
    waived: tuple[str, ...]
    """Checks that could not decide and that a person accepted."""
    waivers: tuple[Waiver, ...]
    """Of single findings, with person and reason."""
    figures: tuple[Figure, ...]
    records: int
    """Tuning records of this artifact in the bundle."""


class OpEntry(_Data):
    """An op's contract as the workspace had it when the bundle was made. Its file travels to be read: it is
    never executed from a bundle."""

    file: str
    op_hash: str
    tolerance_hash: str
    verifier_hash: str
    """Hash of the file and of the functions that verifiers are made of."""
    generators: tuple[str, ...]


class BundleManifest(_Data):
    """`bundle.json`."""

    format: Literal[1] = 1
    workbench: str
    """Version that made the bundle."""
    workbench_hash: str
    """Hash of the parts of its source that compile, check and predict."""
    kernels: tuple[KernelEntry, ...] = Field(min_length=1)
    ops: dict[str, OpEntry]
    machines: dict[str, str]
    """Machine descriptions that predictions rest on: hash of the figures by name."""
    notes: tuple[str, ...] = ()
    """What the bundle could not hold, and why."""


@dataclass(frozen=True)
class BundledKernel:
    """A kernel read from a bundle."""

    entry: KernelEntry
    exported: ExportedKernel
    records: tuple[Record, ...]
    timing: MeasuredTime | None


def entry_of(
    folder: str, exported: ExportedKernel, records: Sequence[Record], timing: MeasuredTime | None
) -> KernelEntry:
    """The entry of a kernel with this evidence."""
    m, files = exported.manifest, exported.manifest.files
    sass = files.get("kernel.sass")
    return KernelEntry(
        folder=folder,
        key=m.key,
        op=m.op,
        workload=m.workload,
        axes=m.axes,
        arch=m.arch,
        template=m.template,
        knobs=m.knobs,
        source_sha256=m.source_hash,
        ptx_sha256=files["kernel.ptx"].sha256,
        cubin_sha256=files["kernel.cubin"].sha256,
        sass_sha256=sass.sha256 if sass is not None else None,
        toolchain=m.toolchain,
        provenance=m.provenance,
        verdict=exported.report.verdict,
        checks=len(m.checks),
        waived=tuple(c.name for c in m.checks if c.waived),
        waivers=tuple(w for c in m.checks for w in c.waivers),
        figures=figures_of(exported, records, timing),
        records=len(records),
    )


def figures_of(
    exported: ExportedKernel, records: Sequence[Record], timing: MeasuredTime | None
) -> tuple[Figure, ...]:
    """Every time that is stated for a kernel: the prediction, the samples beside it, the measured records."""
    figures = []
    if exported.manifest.prediction is not None:
        figures.append(predicted_figure(exported.manifest.prediction))
    if timing is not None:
        figures.append(measured_figure(exported, timing))
    for r in records:
        if r.key.objective is Objective.MEASURED and r.value_us is not None:
            premises = {"from": "tuning record", "seed": r.seed, **r.key.model_dump(mode="json")}
            figures.append(
                Figure(kind="measured", us=r.value_us, samples=len(r.samples_us), premises=premises)
            )
    return tuple(figures)


def predicted_figure(prediction: Prediction) -> Figure:
    """A predicted time as a figure."""
    p = prediction.premises
    rest = _situation(p.axes, p.workload)
    return Figure(
        kind="predicted", us=prediction.us, samples=0, premises={**rest, **p.model_dump(mode="json")}
    )


def measured_figure(exported: ExportedKernel, timing: MeasuredTime) -> Figure:
    """The median of measured samples as a figure."""
    m = exported.manifest
    premises = {
        **_situation(m.axes, m.workload),
        "op": m.op,
        "workload": m.workload,
        "axes": m.axes,
        "arch": m.arch,
        "artifact_key": m.key,
        **timing_premises(timing),
    }
    return Figure(kind="measured", us=timing.median_us, samples=len(timing.samples_us), premises=premises)


def timing_premises(timing: MeasuredTime) -> dict[str, Any]:
    """What two measured times of one kernel must share to be compared."""
    return {
        "device": timing.device.get("name", ""),
        "driver": timing.device.get("driver", ""),
        "method": timing.method,
        "l2": timing.l2,
        "flush_bytes": timing.flush_bytes,
        "chains": timing.chains,
        "generator": timing.generator,
        "input seed": timing.seed,
    }


def _situation(axes: Mapping[str, int], workload: str) -> dict[str, Any]:
    m = re.search(r"(?:^|_)(tp\d+)(?:_|$)", workload)
    return {
        "of": "one run of all launches of this op, alone on the device",
        "batch": axes.get("B"),
        "parallelism": f"shapes of one rank of {m[1].upper()}" if m else "not stated",
        "speculation": "none",
        "baseline": "none: a time, not a ratio",
    }


def read_kernel(entry: KernelEntry, members: Mapping[str, bytes]) -> BundledKernel:
    """A kernel of the bundle with its evidence.

    Raises:
        ContentError: naming the member that is missing or wrong.
    """
    inside = {n.removeprefix(f"{entry.folder}/"): d for n, d in members.items() if _is_in(n, entry.folder)}
    for name in inside:
        if name not in (*EXPORTED, RECORDS, TIMING):
            raise ContentError(
                f"{entry.folder}/{name}", "is no file of an exported kernel or of its evidence"
            )
    exported = exported_from(inside, Path(entry.folder))
    odd = exported.manifest.files.keys() - inside.keys() | exported.manifest.files.keys() - set(EXPORTED)
    if odd:
        raise ContentError(f"{entry.folder}/manifest.json", f"lists {min(odd)}, which is no file of a kernel")
    unlisted = inside.keys() & set(EXPORTED) - exported.manifest.files.keys() - {"manifest.json"}
    if unlisted:
        raise ContentError(f"{entry.folder}/{min(unlisted)}", "is not listed in the kernel's manifest")
    timing = None
    if TIMING in inside:
        timing = read_timing(inside[TIMING], f"{entry.folder}/{TIMING}")
    records = read_records(inside.get(RECORDS, b""), f"{entry.folder}/{RECORDS}")
    return BundledKernel(entry, exported, records, timing)


def read_manifest(members: Mapping[str, bytes]) -> BundleManifest:
    """The bundle's own manifest; raises ContentError."""
    if MANIFEST not in members:
        raise ContentError(MANIFEST, "is missing")
    try:
        manifest = BundleManifest.model_validate_json(members[MANIFEST])
    except ValidationError as e:
        raise ContentError(MANIFEST, _first(e)) from e
    folders = [k.folder for k in manifest.kernels]
    if len(set(folders)) != len(folders):
        raise ContentError(MANIFEST, "lists a kernel's folder twice")
    return manifest


def read_timing(data: bytes, place: str) -> MeasuredTime:
    """Measured samples; raises ContentError for anything but finite positive ones."""
    try:
        timing = MeasuredTime.model_validate_json(data)
    except ValidationError as e:
        raise ContentError(place, _first(e)) from e
    if not all(0 < s < 1e9 for s in (*timing.samples_us, timing.host_us)):
        raise ContentError(place, "holds a sample that is no positive finite time")
    return timing


def records_text(records: Sequence[Record]) -> bytes:
    """Records as `workbench db export` writes them."""
    lines = [json.dumps({"schema": SCHEMA, **r.model_dump(mode="json")}, sort_keys=True) for r in records]
    return "".join(f"{line}\n" for line in lines).encode()


def read_records(data: bytes, place: str) -> tuple[Record, ...]:
    """Records from JSON lines; raises ContentError with the line that is wrong."""
    records = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
                raise ContentError(place, f"is no record of schema {SCHEMA}", number)
            records.append(Record.model_validate(fields))
        except ValidationError as e:
            raise ContentError(place, _first(e), number) from e
        except (ValueError, RecursionError) as e:
            raise ContentError(place, "is no JSON", number) from e
    return tuple(records)


def kernel_folder(op: str, workload: str, arch: str, short: str) -> str:
    """Where a kernel's files lie in a bundle; the same as below `generated_kernels/`."""
    return f"{KERNELS}/{op}/{workload}-{arch}/{short}"


def sha256(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _is_in(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}/")


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"is damaged at {place or 'its start'}: {first['msg']}"
