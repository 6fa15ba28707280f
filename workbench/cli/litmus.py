"""`workbench litmus FILE...`: decide litmus tests of the PTX memory model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shell import DebugOption, Exit, JsonOption, QuietOption, Shell, StrictOption

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.memory_model import LitmusDocument


def command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="FILE.litmus, or folders of such files.")
    ],
    expected: Annotated[
        Path | None,
        typer.Option(
            "--expected", metavar="E.csv", help="Expected verdicts: rows `path,0|1`, relative to E.csv."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Candidate executions before a test is given up.")
    ] = 100_000,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Decide litmus tests of the PTX memory model.

    A verdict is 1 where the condition holds under its quantifier, else 0. Exit code 1 if one is not the
    expected verdict; under --strict, 3 if a test was not decided.
    """
    from workbench.memory_model import check_files

    shell = Shell(json, quiet, debug)
    document = check_files(files, expected, limit=limit, note=shell.note)
    shell.show(document, lambda console: _print(document, console))
    if document.disagreements:
        raise typer.Exit(Exit.FINDING)
    raise typer.Exit(Exit.UNDECIDED if strict and document.undecided else Exit.GOOD)


def _print(document: LitmusDocument, console: Console) -> None:
    """Print each test, and how many there were."""
    words = {None: "-", 0: "0", 1: "1"}
    width = max(len(t.path) for t in document.tests)
    for test in document.tests:
        verdict = "undecided" if test.verdict is None else words[test.verdict]
        remark = ""
        if test.expected is not None and test.verdict is not None and test.verdict != test.expected:
            remark = f"  expected {test.expected}"
        console.print(f"{test.path:<{width}}  {verdict}{remark}", markup=False, soft_wrap=True)
    with_expected = sum(t.expected is not None for t in document.tests)
    line = f"{document.decided} of {len(document.tests)} decided"
    if with_expected:
        line += f", {document.agree} of {with_expected} agree"
    console.print(line, markup=False)
