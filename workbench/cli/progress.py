"""Progress of a run on standard error, and what Ctrl-C says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from workbench.cli.shell import Exit, Shell, complain, console

if TYPE_CHECKING:
    from workbench.agent.events import OnEvent


@contextmanager
def followed(shell: Shell) -> Iterator[OnEvent]:
    """Yield an event handler that draws a run's progress; an interruption ends with how to go on."""
    from workbench.report.progress import RunProgress

    with RunProgress(console(stderr=True), enabled=not shell.quiet) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            if progress.run_id is None:
                raise
            complain(f"interrupted; continue with `workbench propose --resume {progress.run_id}`")
            raise typer.Exit(Exit.INTERRUPTED) from None
