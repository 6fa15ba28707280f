"""`workbench init DIR`: lay out a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import DebugOption, JsonOption, QuietOption, Shell
from workbench.errors import WorkbenchError


def command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder to lay the workspace out in.")],
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Lay out a new workspace in DIR; nothing is overwritten."""
    from workbench.export.layout import lay_out

    shell = Shell(json, quiet, debug)
    if not folder:
        raise WorkbenchError("the folder's name is empty; `workbench init .` uses the current folder")
    document = lay_out(Path(folder))
    shell.show(
        document,
        lambda console: console.print(
            f"{len(document.files)} files in {document.folder}; next: cd there and run `workbench ops`",
            soft_wrap=True,
        ),
    )
