"""The proposing runs of a workspace: listed, read back and written out as a report."""

from __future__ import annotations

from pathlib import Path

from workbench.agent.run import RunResult, RunStore, Status, load_result
from workbench.errors import ContentError, WorkbenchError
from workbench.files import write_atomic
from workbench.report.documents import RunsDocument, RunSummary
from workbench.workspace import Workspace

NEWEST = "last"


def list_runs(workspace: Workspace) -> RunsDocument:
    """All runs, the newest first; a run whose settings cannot be read is left out."""
    summaries = []
    for run_id in _ids(workspace):
        try:
            summaries.append(_summary(workspace, run_id))
        except ContentError:
            continue
    return RunsDocument(runs=tuple(summaries))


def load(workspace: Workspace, run_id: str) -> RunResult:
    """Read a finished run; `last` names the newest.

    Raises:
        UnknownNameError: if there is no such run.
        WorkbenchError: if there is no run at all, or it did not finish.
        ContentError: if its files are damaged.
    """
    if run_id == NEWEST:
        ids = _ids(workspace)
        if not ids:
            raise WorkbenchError("no runs yet; start one with `workbench propose --op OP`")
        run_id = ids[0]
    return load_result(workspace.runs, run_id)


def write(workspace: Workspace, result: RunResult, to: Path) -> None:
    """Write a run's report as one self-contained `.html` or `.md` file.

    Raises:
        WorkbenchError: for another suffix, or if the file cannot be written.
    """
    match to.suffix.lower():
        case ".html" | ".htm":
            from workbench.report.html import run_html

            write_atomic(to, run_html(workspace, result))
        case ".md":
            from workbench.report.markdown import run_markdown

            write_atomic(to, run_markdown(result))
        case suffix:
            raise WorkbenchError(
                f"cannot write a report as {suffix or 'a file without a suffix'}; use .html or .md"
            )


def _ids(workspace: Workspace) -> list[str]:
    if not workspace.runs.is_dir():
        return []
    found = [p for p in workspace.runs.iterdir() if (p / "run.json").is_file()]
    return [
        p.name for p in sorted(found, key=lambda p: ((p / "run.json").stat().st_mtime, p.name), reverse=True)
    ]


def _summary(workspace: Workspace, run_id: str) -> RunSummary:
    store, chosen = RunStore.open(workspace.runs, run_id)
    try:
        result = load_result(workspace.runs, run_id)
    except WorkbenchError:
        result = None
    candidates = result.candidates if result is not None else tuple(store.candidates().values())
    best = result.best() if result is not None else None
    return RunSummary(
        run_id=run_id,
        op=chosen.op,
        workload=chosen.workload,
        arch=chosen.arch,
        finished=result is not None,
        candidates=len(candidates),
        verified=sum(c.status is Status.VERIFIED for c in candidates),
        winner=best.proposal.template if best is not None else None,
        knobs=best.proposal.knobs if best is not None else None,
        predicted_us=best.predicted_us if best is not None else None,
    )
