"""`workbench report [RUN]`: the runs of this workspace, or one run in full."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import DebugOption, JsonOption, QuietOption, Shell
from workbench.errors import WorkbenchError


def command(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run to show; `last` is the newest.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write the report here: FILE.html or FILE.md.")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option("--schema", metavar="NAME", help="Print the JSON Schema of a document and leave."),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """List the runs, or show one with all its candidates.

    With --to, a self-contained report is written as HTML or Markdown.
    """
    from workbench.report import runs
    from workbench.report.documents import json_schema
    from workbench.report.tables import print_run, print_runs

    shell = Shell(json, quiet, debug)
    if schema is not None:
        import json as text

        sys.stdout.write(text.dumps(json_schema(schema), indent=1, sort_keys=True) + "\n")
        return
    workspace = shell.workspace()
    if run is None and to is not None:
        raise WorkbenchError(f"--to needs a run, for instance `workbench report last --to {to}`")
    if run is None:
        listing = runs.list_runs(workspace)
        shell.show(listing, lambda console: print_runs(listing, console))
        return
    result = runs.load(workspace, run)
    if to is not None:
        runs.write(workspace, result, to)
        shell.note(f"wrote {to}")
    shell.show(result, lambda console: print_run(result, console, limit=len(result.candidates)))
