"""Progress of a run on standard error, and what Ctrl-C says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from workbench.cli.shell import Interrupted, Shell, console

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
            how = f"workbench propose --resume {progress.run_id}"
            raise Interrupted(f"interrupted; continue with `{how}`") from None
