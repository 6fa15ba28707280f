"""Module variables that carry data from one launch to the next (`persistent-device-state`).

A `.global` variable outlives every launch. A kernel that reads what an earlier launch left there depends on
more than its parameters: its output may change from call to call, and two launches at once share it.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.findings import Finding, Severity
from workbench.isa.values import RootKind
from workbench.verify.ordering.memory import Space, Touch, touches
from workbench.verify.ordering.paths import Change, Marks, change
from workbench.verify.ordering.view import PtxView, finding


def persistent_state(view: PtxView) -> Iterator[Finding]:
    """One finding a variable that some path reads before this launch has written it, and that is written."""
    written = _written(view)
    for name in sorted(written):
        mine = [t for t in touches(view) if t.space is Space.GLOBAL and name in _variables(view, t)]
        stores = [t for t in mine if t.writes and not t.reads]
        changes: dict[int, Change] = {t.index: change(view, t.step, clears=1) for t in stores}
        marks = Marks(view, changes, start=1)
        read = next((t for t in mine if t.reads and t.results and marks.carried(t.step)), None)
        if read is None:
            read = next((t for t in mine if t.reads and t.writes), None)
        if read is None:
            continue
        write = written[name]
        yield finding(
            "persistent-device-state",
            Severity.ERROR,
            view,
            read.index,
            f"the module's variable {name} is read here and written at {write}: what one launch leaves in it "
            "the next one finds, so that the result depends on earlier launches and on those beside it",
            "pass a buffer as a parameter (a state or flag with a contract) in place of the variable",
            f"variable {name}",
        )


def _variables(view: PtxView, t: Touch) -> frozenset[str]:
    names = {r.name for r in t.address.roots if r.kind is RootKind.SYMBOL}
    return frozenset(n for n in names if view.values.spaces.get(n) == "global")


def _written(view: PtxView) -> dict[str, str]:
    """Variables that this kernel writes, with where."""
    found: dict[str, str] = {}
    for t in touches(view):
        if t.writes and t.space is Space.GLOBAL:
            for name in _variables(view, t):
                found.setdefault(name, f"line {view.place(t.index).ptx_line}")
    return found
