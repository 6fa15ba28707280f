"""The tuning records of a workspace, as documents."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import UnknownNameError
from workbench.records import Record, RecordStore
from workbench.report.documents import (
    ExportedRecordsDocument,
    ImportedRecordsDocument,
    RecordsDocument,
    RecordSummary,
    SkippedLine,
)
from workbench.workspace import Workspace


def store(workspace: Workspace) -> RecordStore:
    """The workspace's record store; raises WorkbenchError if the file is damaged or of a newer schema."""
    return RecordStore(workspace.tuning_db / "records.sqlite")


def list_records(
    workspace: Workspace,
    *,
    op: str | None = None,
    workload: str | None = None,
    run: str | None = None,
    limit: int = 50,
) -> RecordsDocument:
    """The newest `limit` records that match, newest first.

    Raises:
        UnknownNameError: if `op` is neither an op of the workspace nor one that a record is of.
    """
    records = store(workspace)
    found = records.query(op=op, workload=workload, run=run)
    if op is not None and not found:
        known = {*workspace.op_names()} | {r.key.op for r in records.query()}
        if op not in known:
            raise UnknownNameError("op", op, known)
    return RecordsDocument(
        path=str(records.path.relative_to(workspace.root)),
        total=len(found),
        unusable=records.unusable(),
        records=tuple(_summary(r) for r in reversed(found[-limit:])),
    )


def export_records(workspace: Workspace, path: Path) -> ExportedRecordsDocument:
    """Write all records as JSON lines."""
    return ExportedRecordsDocument(file=str(path), records=store(workspace).export_jsonl(path))


def import_records(workspace: Workspace, path: Path) -> ImportedRecordsDocument:
    """Add records from JSON lines; what cannot be used is named."""
    result = store(workspace).import_jsonl(path)
    return ImportedRecordsDocument(
        added=result.added,
        known=result.known,
        skipped=tuple(SkippedLine(line=b.line, reason=b.reason) for b in result.bad),
    )


def _summary(record: Record) -> RecordSummary:
    key = record.key
    return RecordSummary(
        id=record.id,
        op=key.op,
        workload=key.workload,
        template=key.template,
        knobs=key.knobs,
        arch=key.arch,
        device=key.device,
        objective=key.objective.value,
        value_us=record.value_us,
        verdict=record.verdict,
        failure=record.failure,
        message=record.message,
        run=record.run,
        finished=record.finished.isoformat(timespec="seconds"),
    )
