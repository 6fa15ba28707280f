"""`workbench doctor`: what this machine can do."""

from __future__ import annotations

import typer

from workbench.cli.shell import DebugOption, Exit, JsonOption, QuietOption, Shell


def command(json: JsonOption = False, quiet: QuietOption = False, debug: DebugOption = False) -> None:
    """Say what this machine can do and what it lacks."""
    from workbench.report.doctor import examine
    from workbench.report.tables import print_doctor

    shell = Shell(json, quiet, debug)
    document = examine()
    shell.show(document, lambda console: print_doctor(document, console))
    raise typer.Exit(Exit.GOOD if document.usable else Exit.FINDING)
