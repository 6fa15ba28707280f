"""`workbench db`: the tuning records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import DebugOption, Exit, JsonOption, QuietOption, Shell

app = typer.Typer(
    help="The tuning records: list, export, import.", no_args_is_help=True, rich_markup_mode=None
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, a record a line.")]


@app.command(name="list")
def list_records(
    op: Annotated[str | None, typer.Option("--op", metavar="OP", help="Only this op's.")] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", metavar="W", help="Only this workload's.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run's.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most so many, the newest.")] = 50,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """List records, the latest of each key."""
    from workbench.report import records
    from workbench.report.tables import print_records

    shell = Shell(json, quiet, debug)
    document = records.list_records(shell.workspace(), op=op, workload=workload, run=run, limit=limit)
    shell.show(document, lambda console: print_records(document, console))


@app.command(name="export")
def export_records(
    file: FileArgument, json: JsonOption = False, quiet: QuietOption = False, debug: DebugOption = False
) -> None:
    """Write all records to FILE."""
    from workbench.report import records

    shell = Shell(json, quiet, debug)
    document = records.export_records(shell.workspace(), file)
    shell.show(
        document, lambda console: console.print(f"{document.records} records in {file}", soft_wrap=True)
    )


@app.command(name="import")
def import_records(
    file: FileArgument, json: JsonOption = False, quiet: QuietOption = False, debug: DebugOption = False
) -> None:
    """Add the records of FILE; exit code 1 if some of its lines could not be used."""
    from workbench.report import records
    from workbench.report.tables import print_import

    shell = Shell(json, quiet, debug)
    document = records.import_records(shell.workspace(), file)
    shell.show(document, lambda console: print_import(document, console))
    raise typer.Exit(Exit.FINDING if document.skipped else Exit.GOOD)
