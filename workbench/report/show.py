"""`show`: the tables of the command line, for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from workbench.report import tables
from workbench.report.documents import DoctorDocument, OpDocument, OpsDocument, RecordsDocument, RunsDocument
from workbench.report.findings import Listing
from workbench.verify.report import Report

if TYPE_CHECKING:
    from workbench.artifact import Artifact


def show(value: object, artifact: Artifact | None = None) -> None:
    """Print a result as the command line does.

    Args:
        value: a run, a report, or a document such as `describe` returns.
        artifact: of a report: quotes the lines of code that its findings are about.

    Raises:
        TypeError: for a value that has no table.
    """
    from workbench.agent.run import RunResult

    console = Console(width=120, highlight=False, force_jupyter=False)
    match value:
        case RunResult():
            tables.print_run(value, console)
        case Report():
            listing = Listing.of(artifact) if artifact is not None else None
            tables.print_report(value, console, listing)
        case DoctorDocument():
            tables.print_doctor(value, console)
        case OpDocument():
            tables.print_op(value, console)
        case OpsDocument():
            tables.print_ops(value, console)
        case RecordsDocument():
            tables.print_records(value, console)
        case RunsDocument():
            tables.print_runs(value, console)
        case _:
            raise TypeError(f"no table for {type(value).__name__}")
