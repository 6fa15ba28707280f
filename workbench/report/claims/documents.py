"""Measurements out of the workbench's own documents: manifests, tuning records, runs, timings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError
from workbench.report.claims.serving import ServeResult
from workbench.report.claims.timings import CheckReport, Timing, axes_text, printed

if TYPE_CHECKING:
    from workbench.cost import Prediction
    from workbench.export.manifest import Manifest
    from workbench.records.model import Record

_LARGEST = 256 << 20
"""Bytes of a document."""
Fields = dict[str, Any]


def measured_in(path: Path, record: str | None = None) -> Fields:
    """The measurement that a document holds: the fields of a claim file's entry that follow from it.

    Args:
        path: an exported kernel's `manifest.json` (or its folder) or the `timing.json` beside it, an evidence
            bundle, the JSON of `propose`, `tune` or a run, that of a timing or of the check on a GPU, a file
            of records as `db export` writes it, or results of `vllm bench serve`.
        record: which of several measurements: a record's id, `KEY/predicted` or `KEY/measured` of a bundle,
            `KERNEL/METHOD` of a check, a metric; so much of it as tells it from the others.

    Raises:
        WorkbenchError: if there is no such measurement, or it was not verified.
    """
    if record is not None and not record:
        raise WorkbenchError(f"{path}: `record` is empty, which every record begins with; leave it out")
    if path.is_dir():
        path = path / "manifest.json"
    try:
        found = list(_measurements(path, _read(path)))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise WorkbenchError(f"{path} is not what this workbench writes: {where}: {first['msg']}") from e
    labels = [label for label, _ in found]
    fitting = [
        fields
        for label, fields in found
        if record is None or label.startswith(record) or record.startswith(label)
    ]
    exact = [fields for label, fields in found if label == record]
    if len(exact or fitting) != 1:
        what = "no measurement" if not fitting else f"{len(fitting)} measurements"
        told = ", ".join(repr(label) for label in labels[:8]) or "none"
        raise WorkbenchError(f"{path} has {what} for `record = {record!r}`; it has {told}")
    return _verified(path, (exact or fitting)[0])


def _verified(path: Path, fields: Fields) -> Fields:
    why = fields.pop("unusable", "")
    if why:
        raise WorkbenchError(f"{path}: {fields['source']}: {why}; it can be no claim")
    return fields


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST:
            raise WorkbenchError(f"{path} has more than {_LARGEST} bytes")
        return path.read_bytes()
    except OSError as e:
        raise WorkbenchError(f"{path} cannot be read: {e.strerror}") from e


def _measurements(path: Path, data: bytes) -> Iterator[tuple[str, Fields]]:
    """Each measurement with what chooses it."""
    if data[257:262] == b"ustar":
        yield from _of_bundle(path)
        return
    try:
        documents = list(_documents(path, data.decode()))
    except UnicodeDecodeError as e:
        raise WorkbenchError(f"{path} is no text: {e.reason}") from e
    if not documents:
        raise WorkbenchError(f"{path} is empty")
    first = documents[0]
    if isinstance(first.get("key"), dict):
        yield from _of_records(documents)
    elif ServeResult.fits(first):
        yield from _of_benchmarks(documents)
    elif len(documents) > 1:
        raise WorkbenchError(f"{path} holds {len(documents)} documents that are no tuning records")
    elif "candidates" in first and "winner" in first:
        yield "winner", _of_run(path, first)
    elif "prediction" in first and "files" in first:
        yield "prediction", _of_manifest(path, first)
    elif first.get("kind") == "measured" and "samples_us" in first:
        yield "timing", _of_timing(path, first)
    elif "sections" in first and "machine" in first:
        yield from CheckReport.model_validate(first).measurements()
    else:
        raise WorkbenchError(
            f"{path} is no document with a measurement: manifest.json, the JSON of propose or tune, a timing,"
            " a bundle of evidence, the report of the check on a GPU, records of `workbench db export`, or"
            " results of `vllm bench serve`"
        )


def _documents(path: Path, text: str) -> Iterator[Fields]:
    """One JSON object, or one a line."""
    try:
        pieces = [json.loads(text)]
    except json.JSONDecodeError:
        pieces = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    pieces.append(json.loads(line))
                except json.JSONDecodeError as e:
                    raise WorkbenchError(f"{path}:{number} is no JSON: {e.msg}") from e
    except RecursionError as e:
        raise WorkbenchError(f"{path} is nested too deeply") from e
    for piece in pieces:
        if not isinstance(piece, dict):
            raise WorkbenchError(f"{path} is no JSON object")
        yield piece


def _of_benchmarks(documents: list[Fields]) -> Iterator[tuple[str, Fields]]:
    """Metrics of one benchmark by name; of several in one file by the file's line and name."""
    for line, document in enumerate(documents, 1):
        for name, fields in ServeResult.model_validate(document).measurements():
            yield name if len(documents) == 1 else f"{line}/{name}", fields


def _of_records(documents: list[Fields]) -> Iterator[tuple[str, Fields]]:
    from workbench.records.model import Record

    for document in documents:
        record = Record.model_validate(document)
        yield record.id[:16], _record(record)


def _record(record: Record) -> Fields:
    key = record.key
    return {
        "implementation": f"{key.template} {(record.artifact_key or key.hash)[:12]}",
        "quantity": "time of one run",
        "unit": "us",
        "value": printed(record.value_us),
        "kind": key.objective.value,
        "reported_by": "self",
        "source": f"record {record.id[:12]}",
        "unusable": "" if record.is_usable else f"not verified, {record.failure or record.verdict}",
        "scope": "kernel",
        "premises": {
            "hardware": key.device,
            "op": key.op,
            "workload": key.workload,
            "axes": axes_text(key.axes),
            "arch": key.arch,
            "protocol": f"premises {key.premises[:12]}",
        },
    }


def _of_run(path: Path, document: Fields) -> Fields:
    from workbench.agent.run import RunResult

    result = RunResult.model_validate(document)
    best = result.best()
    if best is None:
        raise WorkbenchError(f"{path}: the run has no winner")
    if best.prediction is None:
        raise WorkbenchError(f"{path}: the run's winner has no predicted time")
    what = f"{best.proposal.template} {(best.artifact_key or best.source_hash)[:12]}"
    return _predicted(best.prediction, what, f"run {result.run_id}")


def _of_manifest(path: Path, document: Fields) -> Fields:
    from workbench.export.manifest import Manifest

    manifest = Manifest.model_validate(document)
    if manifest.prediction is None:
        raise WorkbenchError(f"{path}: the kernel was exported without a predicted time")
    what = f"{manifest.template} {manifest.key[:12]}"
    return _predicted(manifest.prediction, what, f"kernel {manifest.key[:12]}")


def _predicted(prediction: Prediction, implementation: str, source: str) -> Fields:
    rests = prediction.premises
    return {
        "implementation": implementation,
        "quantity": "time of one run",
        "unit": "us",
        "value": printed(prediction.us),
        "kind": "predicted",
        "reported_by": "self",
        "source": source,
        "scope": "kernel",
        "premises": {
            "hardware": rests.machine,
            "op": rests.op,
            "workload": rests.workload,
            "axes": axes_text(rests.axes),
            "arch": rests.arch,
            "protocol": f"premises {rests.hash[:12]}",
        },
    }


def _of_timing(path: Path, document: Fields) -> Fields:
    """Of `workbench.devices`, or of the evidence beside an exported kernel, whose manifest says the op."""
    from workbench.export.manifest import Manifest

    timing = Timing.model_validate(document)
    fields = timing.fields(timing.kernel or timing.artifact_key or path.name)
    beside = path.parent / "manifest.json"
    if timing.artifact_key and beside.is_file():
        manifest = Manifest.model_validate_json(_read(beside))
        if manifest.key == timing.artifact_key:
            fields["implementation"] = f"{manifest.template} {manifest.key[:12]}"
            fields["premises"] |= _of_kernel(manifest)
    return fields


def _of_bundle(path: Path) -> Iterator[tuple[str, Fields]]:
    from workbench.export.evidence.check import load_bundle

    kernels, _ = load_bundle(path)
    for kernel in kernels:
        manifest, short = kernel.exported.manifest, kernel.entry.key[:12]
        what = f"{manifest.template} {short}"
        if manifest.prediction is not None:
            yield f"{short}/predicted", _predicted(manifest.prediction, what, f"kernel {short}")
        if kernel.timing is not None:
            fields = Timing.model_validate(kernel.timing.model_dump()).fields(what)
            fields["premises"] |= _of_kernel(manifest)
            yield f"{short}/measured", fields


def _of_kernel(manifest: Manifest) -> Fields:
    return {
        "op": manifest.op,
        "workload": manifest.workload,
        "axes": axes_text(manifest.axes),
        "arch": manifest.arch,
    }
