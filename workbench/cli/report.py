"""`workbench report [RUN]`: the runs of this workspace, or one run in full; with `--claim`, claims judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import DebugOption, Exit, JsonOption, QuietOption, Shell, StrictOption
from workbench.errors import WorkbenchError
from workbench.files import check_destination


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
    claim: Annotated[
        str | None,
        typer.Option(
            "--claim",
            metavar="FILE[:NAME]",
            help="Judge the claims of FILE.toml, or one of them; with --over, a document with a measurement.",
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option("--over", metavar="FILE[:RECORD]", help="Document that --claim is set against."),
    ] = None,
    times: Annotated[
        str | None, typer.Option("--times", metavar="RATIO", help="With --over: how many times as fast.")
    ] = None,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """List the runs, or show one with all its candidates.

    With --to, a self-contained report is written as HTML or Markdown.

    With --claim, say of each claim whether it compares like with like. Exit code 1 if one does not hold as
    stated, unknown premises included; under --strict, 3 if unknown premises alone are the reason.
    """
    from workbench.report import runs
    from workbench.report.documents import json_schema
    from workbench.report.tables import print_run, print_runs

    shell = Shell(json, quiet, debug)
    if schema is not None:
        if run is not None or claim is not None or to is not None:
            raise WorkbenchError("--schema prints a schema and nothing else; leave RUN, --claim and --to out")
        import json as text

        sys.stdout.write(text.dumps(json_schema(schema), indent=1, sort_keys=True) + "\n")
        return
    if claim is not None:
        if run is not None:
            raise WorkbenchError(f"--claim judges claims and shows no run; leave out {run!r}")
        raise typer.Exit(_claims(shell, claim, over, times, to, strict))
    if over is not None or times is not None or strict:
        raise WorkbenchError("--over, --times and --strict belong to --claim FILE; see docs/claims.md")
    workspace = shell.workspace()
    if run is None and to is not None:
        raise WorkbenchError(f"--to needs a run, for instance `workbench report last --to {to}`")
    if run is None:
        listing = runs.list_runs(workspace)
        shell.show(listing, lambda console: print_runs(listing, console))
        return
    if to is not None:
        check_destination(to)
    result = runs.load(workspace, run)
    if to is not None:
        runs.write(workspace, result, to)
        shell.note(f"wrote {to}")
    shell.show(result, lambda console: print_run(result, console, limit=len(result.candidates)))


def _claims(
    shell: Shell, claim: str, over: str | None, times: str | None, to: Path | None, strict: bool
) -> Exit:
    from workbench.files import write_atomic
    from workbench.report.claims import Verdict, find, judge_all, load_claims, pair
    from workbench.report.claims.render import claims_markdown, print_claims

    if over is not None:
        document = judge_all(claim, pair(claim, over, times))
    elif times is not None:
        raise WorkbenchError("--times needs --over, the document that --claim is set against")
    else:
        path, name = find(claim)
        document = judge_all(claim, load_claims(path), name)
    if to is not None:
        if to.suffix.lower() != ".md":
            raise WorkbenchError(f"cannot write claims to {to}; use a name that ends in .md")
        write_atomic(to, claims_markdown(document))
        shell.note(f"wrote {to}")
    shell.show(document, lambda console: print_claims(document, console))
    if document.holds:
        return Exit.GOOD
    failed = {c.verdict for c in document.claims if not c.verdict.holds}
    return Exit.UNDECIDED if strict and failed == {Verdict.UNKNOWN} else Exit.FINDING
