"""A dependent grid that does not wait, let go before the last store that it reads (`pdl-early-trigger`)."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.findings import Finding, Severity
from workbench.verify.ordering.binding import Launch
from workbench.verify.ordering.paths import after
from workbench.verify.ordering.program import Kind, Mode
from workbench.verify.ordering.solver import UNREACHED
from workbench.verify.ordering.view import PtxView, SassView, finding

View = PtxView | SassView


def early_triggers(launches: Sequence[Launch], views: Sequence[View | None], n: int) -> list[Finding]:
    """Findings about launch `n`, whose successor reads its output without griddepcontrol.wait.

    Where the successor waits, the place of the trigger is a matter of speed alone.

    Args:
        launches: the chain, in stream order.
        views: one a launch; None where the kernel could not be read.
        n: the launch that triggers.
    """
    mine = views[n]
    following = views[n + 1] if n + 1 < len(views) else None
    if mine is None or following is None or not launches[n + 1].pdl or following.analysis.waits:
        return []
    read = {b for s in following.analysis.sites if s.access.mode is not Mode.STORE for b in s.buffers}
    analysis = mine.analysis
    triggers = [
        e for e in analysis.program.all_events(Kind.TRIGGER) if analysis.solution.lowest(e) != UNREACHED
    ]
    for trigger in triggers:
        later = after(mine.graph, trigger.index)
        for s in analysis.sites:
            late = s.buffers & read
            if s.access.mode is Mode.LOAD or not late or s.event.index not in later:
                continue
            name = ", ".join(sorted(late))
            return [
                finding(
                    "pdl-early-trigger",
                    Severity.ERROR,
                    mine,
                    trigger.index,
                    f"the dependent grid ({launches[n + 1].kernel}) may start here and reads {name} without "
                    f"griddepcontrol.wait, but {name} is stored to later (line "
                    f"{s.place.ptx_line or s.place.sass_offset}): it may read old data",
                    "let the dependent grid execute griddepcontrol.wait before it reads, or trigger after "
                    "the last store",
                    name,
                )
            ]
    return []
