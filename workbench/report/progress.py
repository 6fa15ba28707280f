"""Shows a proposing run while it goes: bars on a terminal, one line a round or turn in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from workbench.agent.events import (
    CandidateFinished,
    Event,
    FinalistFinished,
    FinalistStarted,
    ModelAnswered,
    RoundStarted,
    RunStarted,
    WinnerExported,
)
from workbench.agent.run import Candidate, Status
from workbench.report.conversations import answered
from workbench.report.tables import microseconds, settings, shorten


class RunProgress:
    """Follows a run's events; use it as a context manager and pass it as `on_event`.

    `run_id` is the run's name as soon as it has one, so that an interrupted run can be named.
    """

    def __init__(self, console: Console, *, enabled: bool = True) -> None:
        self.run_id: str | None = None
        self._console = console
        self._enabled = enabled
        self._live = enabled and console.is_terminal
        self._started = time.monotonic()
        self._best: float | None = None
        self._counts: dict[Status, int] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=not self._live,
        )
        self._all: TaskID | None = None

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case RunStarted(settings=s, known=known):
                self.run_id = s.run_id
                self._say(f"run {s.run_id}: {s.op} {s.workload} for {s.arch}, seed {s.seed}")
                if known:
                    self._say(f"{known} candidates are known from before the interruption")
                total = s.rounds * s.batch if s.model is None else None
                self._all = self._bar.add_task("candidates", total=total, best="")
            case RoundStarted(round=number, proposals=proposals):
                self._say(f"round {number + 1}: {len(proposals)} candidates")
            case ModelAnswered(chain=chain, turn=turn, reply=reply, spend=spend):
                self._say(answered(chain, turn, reply, spend))
            case CandidateFinished(candidate=c):
                self._finished(c)
            case FinalistStarted(candidate=c):
                self._say(f"finalist #{c.proposal.index} goes through every check")
            case FinalistFinished(candidate=c):
                self._say(
                    f"finalist #{c.proposal.index}: {c.status.value}" + (f": {c.reason}" if c.reason else "")
                )
            case WinnerExported():
                self._say("winner exported")
            case _:
                pass

    def _finished(self, c: Candidate) -> None:
        self._counts[c.status] = self._counts.get(c.status, 0) + 1
        us = c.predicted_us
        if us is not None and (self._best is None or us < self._best):
            self._best = us
        outcome = (
            f"predicted {microseconds(us)}"
            if us is not None
            else f"{c.status.value}: {shorten(c.reason, 100)}"
        )
        self._say(f"  #{c.proposal.index} {c.proposal.template} {settings(c.proposal.knobs)}: {outcome}")
        if self._all is not None:
            best = f"best {microseconds(self._best)} (predicted)" if self._best is not None else ""
            self._bar.update(self._all, advance=1, best=best)

    def _say(self, text: str) -> None:
        if self._enabled:
            stamp = f"[{time.monotonic() - self._started:6.1f} s] "
            self._console.print(Text.assemble((stamp, "dim"), text), soft_wrap=True)
