"""Measurements out of the workbench's own documents: manifests, tuning records, runs, timings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.cost import Prediction
    from workbench.records.model import Record

_LARGEST = 256 << 20
"""Bytes of a document."""
Fields = dict[str, Any]


def measured_in(path: Path, record: str | None = None) -> Fields:
    """The measurement that a document holds: the fields of a claim file's entry that follow from it.

    Args:
        path: an exported kernel's `manifest.json` (or its folder), the JSON of `propose`, `tune` or a run,
            the JSON of a timing, or a file of records as `db export` writes it.
        record: beginning of the id of one record, where there are several.

    Raises:
        WorkbenchError: if there is no such measurement, or it was not verified.
    """
    if path.is_dir():
        path = path / "manifest.json"
    try:
        if path.stat().st_size > _LARGEST:
            raise WorkbenchError(f"{path} has more than {_LARGEST} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise WorkbenchError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise WorkbenchError(f"{path} is no text: {e.reason}") from e
    documents = list(_documents(path, text))
    if not documents:
        raise WorkbenchError(f"{path} is empty")
    if "key" in documents[0] and isinstance(documents[0]["key"], dict):
        return _of_record(path, documents, record)
    if record is not None:
        raise WorkbenchError(f"{path} holds no tuning records, so `record` chooses nothing")
    if len(documents) > 1:
        raise WorkbenchError(f"{path} holds {len(documents)} documents that are no tuning records")
    (document,) = documents
    try:
        if "candidates" in document and "winner" in document:
            return _of_run(path, document)
        if "prediction" in document and "files" in document:
            return _of_manifest(path, document)
        if document.get("kind") == "measured" and "samples_us" in document:
            return _of_timing(path, document)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise WorkbenchError(f"{path} is not what this workbench writes: {where}: {first['msg']}") from e
    raise WorkbenchError(
        f"{path} is no document with a measurement: manifest.json, the JSON of propose or tune, a timing, or"
        " records of `workbench db export`"
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


def _of_record(path: Path, documents: list[Fields], wanted: str | None) -> Fields:
    from workbench.records.model import Record

    try:
        records = [Record.model_validate(d) for d in documents]
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise WorkbenchError(f"{path} has a record of another schema: {where}: {first['msg']}") from e
    found = [r for r in records if wanted is None or r.id.startswith(wanted)]
    if len(found) != 1:
        ids = ", ".join(r.id[:12] for r in records[:8])
        what = "no record" if not found else f"{len(found)} records"
        raise WorkbenchError(f"{path} has {what} for `record = {wanted!r}`; it has {ids}")
    return _record(path, found[0])


def _record(path: Path, record: Record) -> Fields:
    if not record.is_usable:
        why = record.failure or f"verdict {record.verdict}"
        raise WorkbenchError(
            f"{path}: record {record.id[:12]} was not verified ({why}); its time is no claim"
        )
    key = record.key
    return {
        "implementation": f"{key.template} {(record.artifact_key or key.hash)[:12]}",
        "quantity": "time of one run",
        "unit": "us",
        "value": _printed(record.value_us),
        "kind": key.objective.value,
        "reported_by": "self",
        "source": f"record {record.id[:12]}",
        "scope": "kernel",
        "premises": {
            "hardware": key.device,
            "op": key.op,
            "workload": key.workload,
            "axes": _axes(key.axes),
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
        "value": _printed(prediction.us),
        "kind": "predicted",
        "reported_by": "self",
        "source": source,
        "scope": "kernel",
        "premises": {
            "hardware": rests.machine,
            "op": rests.op,
            "workload": rests.workload,
            "axes": _axes(rests.axes),
            "arch": rests.arch,
            "protocol": f"premises {rests.hash[:12]}",
        },
    }


def _of_timing(path: Path, document: Fields) -> Fields:
    device, samples = document.get("device"), document["samples_us"]
    numbers = isinstance(samples, list) and all(
        isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < float("inf") for s in samples
    )
    if not numbers or not samples or not isinstance(device, dict) or not device.get("name"):
        raise WorkbenchError(f"{path}: a timing has a device with a name, and positive samples_us")
    said = {name: document.get(name) for name in ("method", "l2", "flush_bytes", "chains")}
    premises = {
        "hardware": device["name"],
        "arch": device.get("arch"),
        "driver": device.get("driver"),
        "protocol": " ".join(f"{name}={value}" for name, value in said.items()),
    }
    return {
        "implementation": str(document.get("kernel", path.name)),
        "quantity": "median time of one run",
        "unit": "us",
        "value": _printed(statistics.median(samples)),
        "kind": "measured",
        "reported_by": "self",
        "source": f"{len(samples)} samples",
        "scope": "kernel",
        "premises": {name: value for name, value in premises.items() if value},
    }


def _axes(axes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={n}" for name, n in sorted(axes.items()))


def _printed(us: float | None) -> str:
    """Microseconds with four digits: neither a prediction nor a median is worth more."""
    return f"{us or 0.0:#.4g}"
