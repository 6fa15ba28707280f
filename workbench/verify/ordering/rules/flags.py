"""Flags in global memory: what a poll lets a thread read, and what a flag store tells (ISA 8.9, 8.10).

`flag-without-acquire`: a poll that is no acquire, then ordinary loads of what the flag guards, with no
acquire in between. `flag-without-release`: stores, then a flag store with no release in between, or with one
that only covers the flag's own thread. `scope-too-narrow`: the acquire or release covers too few threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.dataflow import writes
from workbench.isa.ptx.model import Special
from workbench.ops.model import Role
from workbench.verify.ordering.dependence import flow
from workbench.verify.ordering.memory import Fence, Scope, Touch, fences, stored
from workbench.verify.ordering.paths import Change, Marks, executing
from workbench.verify.ordering.program import Kind
from workbench.verify.ordering.protocol import Protocols, Ticket
from workbench.verify.ordering.view import PtxView, SassView, finding, undecided

View = PtxView | SassView
_AT_A_TIME = 20
"""Flags followed at once: three marks each, of 64."""


def flag_rules(view: View) -> Iterator[Finding]:
    """Both sides of the flag protocols of a kernel."""
    protocols = Protocols.of(view)
    yield from _acquires(view, protocols)
    yield from _releases(view, protocols)


def sass_flag_rules(view: SassView) -> Iterator[Finding]:
    """The same on a cubin alone; with the PTX beside it, that says more."""
    if view.ptx is None:
        yield from flag_rules(view)


def line(view: View, index: int) -> str:
    """Words for where an instruction stands."""
    place = view.place(index)
    if place.ptx_line is not None:
        return f"line {place.ptx_line}"
    return f"offset {place.sass_offset:#x}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "memory"


class _Changes:
    """Changes to marks, added up an instruction."""

    def __init__(self) -> None:
        self.at: dict[int, Change] = {}

    def add(
        self, touch: Touch | Fence, takes: int = 0, gives: int = 0, clears: int = 0, who: Any = None
    ) -> None:
        step = touch.step
        old = self.at.get(step.index)
        if old is not None:
            takes, gives, clears = takes | old.takes, gives | old.gives, clears | old.clears
            who = old.who if who is None else who
        guard = step.guard if who is None else who
        self.at[step.index] = Change(takes, gives, clears, guard, not step.guarded)

    def everywhere(self, view: View, kind: Kind, clears: int) -> None:
        """Let every event of a kind remove marks."""
        for e in view.analysis.program.all_events(kind):
            self.at[e.index] = Change(0, 0, clears, e.guard, not e.guarded)


# -- acquire ---------------------------------------------------------------------------------------


def _acquires(view: View, protocols: Protocols) -> Iterator[Finding]:
    waits: list[tuple[Touch, Ticket | None]] = [(p.touch, None) for p in protocols.flag_polls]
    waits += [(t.touch, t) for t in protocols.tickets]
    for n in range(0, len(waits), _AT_A_TIME):
        yield from _acquires_of(view, protocols, waits[n : n + _AT_A_TIME])


def _acquires_of(
    view: View, protocols: Protocols, waits: Sequence[tuple[Touch, Ticket | None]]
) -> Iterator[Finding]:
    changes = _Changes()
    changes.everywhere(view, Kind.WAIT, (1 << 60) - 1)
    needed = [protocols.needed_scope(t.names) or Scope.CTA for t, _ in waits]
    proxies = 0
    for n, (t, _) in enumerate(waits):
        none, narrow, proxy = (1 << 3 * n + k for k in range(3))
        proxies |= proxy
        gives = proxy
        if not t.acquires:
            gives |= none | narrow
        elif t.scope is not None and t.scope < needed[n]:
            gives |= narrow
        changes.add(t, gives=gives)
    for f in fences(view):
        if f.acquires:
            takes = 0
            for n in range(len(waits)):
                takes |= 1 << 3 * n | (1 << 3 * n + 1 if f.scope >= needed[n] else 0)
            changes.add(f, takes=takes)
    for t in protocols.global_touches:
        if not t.acquires:
            continue
        for n, (w, _) in enumerate(waits):
            if t.names & w.names and w is not t:
                wide = t.scope is None or t.scope >= needed[n]
                changes.add(t, clears=1 << 3 * n | (1 << 3 * n + 1 if wide else 0))
    _proxy_fences(view, changes, proxies)
    marks = Marks(view, changes.at)
    where = [t.index for t, _ in waits]
    reported: dict[int, Finding] = {}
    for t in protocols.global_touches:
        if not t.reads or t.index in protocols.poll_indices or t.index in where or t.acquires:
            continue
        if t.strong and not t.multimem:  # a reduction reads what others wrote, however strong it is
            continue
        carried = marks.carried(t.step)
        for n, (w, ticket) in enumerate(waits):
            bits = carried >> 3 * n & 7
            if not bits or (ticket is not None and view.graph.block_of[t.index] not in ticket.guarded):
                continue
            if t.asynchronous:
                bits &= 7
            else:
                bits &= 3
            guarded = _guarded_by(view, protocols, w, t)
            if not bits or not guarded:
                continue
            found = _acquire_finding(view, protocols, w, t, bits, needed[n])
            if found is not None:
                old = reported.get(w.index)
                reported[w.index] = found if old is None else old.model_copy(update={"count": old.count + 1})
    yield from reported.values()


def _proxy_fences(view: View, changes: _Changes, bits: int) -> None:
    if isinstance(view, SassView):
        for s in view.steps("FENCE"):
            changes.at[s.index] = Change(bits, 0, 0, s.guard, not s.guarded)
        return
    for p in view.steps("fence"):
        m = p.instruction.modifiers
        if m[:1] == ("proxy",) and "async" in m and not any(x.startswith("shared") for x in m):
            changes.at[p.index] = Change(bits, 0, 0, p.guard, not p.guarded)


def _guarded_by(view: View, protocols: Protocols, wait: Touch, load: Touch) -> bool:
    """Whether a load reads what a flag guards."""
    if not load.names or load.read_only:
        return False
    here = [s for s in protocols.setters if s.names & wait.names and s.index != wait.index]
    here += [t.touch for t in protocols.tickets if t.touch is wait]
    if here:
        published = protocols.published(wait.names)
        if load.names & published:
            return True
        return any(view.launch.roles.get(n) is Role.MAILBOX for n in load.names)
    mutable = {n for n in load.names if n in view.launch.mutable or n.startswith("variable ")}
    known = {n for n in mutable if view.launch.roles.get(n) is not None}
    if known:
        return True
    written = {n for t in protocols.global_touches if t.writes for n in t.names}
    return bool(mutable & written)


def _acquire_finding(
    view: View, protocols: Protocols, wait: Touch, load: Touch, bits: int, needed: Scope
) -> Finding | None:
    data, flag = _names(load.names), _names(wait.names)
    there, reader = line(view, load.index), "multimem.ld_reduce" if load.multimem else "an ordinary load"
    how = (
        "an atomic without acquire"
        if not wait.step.instruction.opcode.lower().startswith("ld")
        else ("a load that is no acquire")
    )
    if bits & 1:
        return finding(
            "flag-without-acquire",
            Severity.ERROR,
            view,
            wait.index,
            f"the flag in {flag} is awaited with {how}, and {data} is then read with {reader} "
            f"({there}) with no acquire in between: it may return what was there before the flag was set",
            f"await the flag with ld.acquire{needed_words(needed)}, or put fence.acq_rel"
            f"{needed_words(needed)} between the poll and the loads, in the polling thread",
            data,
        )
    if bits & 2:
        if protocols.needed_scope(wait.names) is None:
            return None
        return finding(
            "scope-too-narrow",
            Severity.ERROR,
            view,
            wait.index,
            f"the flag in {flag} is set by threads outside the scope of the acquire that follows the poll; "
            f"{data}, read at {there}, needs {needed.words}",
            f"use {needed.words} scope for the acquire of this flag",
            flag,
        )
    return None


def needed_words(scope: Scope) -> str:
    """The scope to recommend: .gpu at least."""
    return max(scope, Scope.GPU).words


# -- release ---------------------------------------------------------------------------------------


def _releases(view: View, protocols: Protocols) -> Iterator[Finding]:
    setters = protocols.setters
    for n in range(0, len(setters), _AT_A_TIME):
        yield from _releases_of(view, protocols, setters[n : n + _AT_A_TIME])


def _data_of(view: View, protocols: Protocols, setter: Touch) -> list[Touch]:
    """Stores that a setter publishes: of buffers its waiters read, or of all where those are elsewhere."""
    consumed = protocols.consumed(setter.names)
    found = []
    for t in protocols.global_touches:
        if not t.writes or t.asynchronous or protocols.is_setter(t) or not t.names:
            continue
        if t.multimem or (t.names & protocols.lamport and t.strong):
            continue  # other rules
        if consumed is not None and not t.names & consumed:
            continue
        if consumed is None and t.strong and protocols.is_word(t):
            continue
        if t.names & setter.names and t.strong and protocols.is_word(t):
            continue
        if all(view.launch.roles.get(n) is Role.FLAG for n in t.names):
            continue
        found.append(t)
    return found


def _releases_of(view: View, protocols: Protocols, setters: Sequence[Touch]) -> Iterator[Finding]:
    changes = _Changes()
    needed = [protocols.needed_scope(t.names) or Scope.CTA for t in setters]
    stores: dict[int, list[Touch]] = {}
    for n, s in enumerate(setters):
        stores[n] = _data_of(view, protocols, s)
        for t in stores[n]:
            changes.add(t, gives=3 << 3 * n)
    for f in fences(view):
        if not f.releases:
            continue
        takes = 0
        for n in range(len(setters)):
            takes |= 1 << 3 * n | (2 << 3 * n if f.scope >= needed[n] else 0)
        changes.add(f, takes=takes)
    for t in protocols.global_touches:
        for n, s in enumerate(setters):
            if t.releases and t is not s and t.names & s.names:
                wide = t.scope is not None and t.scope >= needed[n]
                changes.add(t, takes=1 << 3 * n | (2 << 3 * n if wide else 0))
    marks = Marks(view, changes.at)
    for n, s in enumerate(setters):
        if not stores[n]:
            continue
        bits = marks.carried(s.step) >> 3 * n & 7
        if s.releases:
            bits &= ~1 if (s.scope or Scope.CTA) < needed[n] else ~3
        first = _first_before(view, stores[n], s)
        if first is None:
            continue
        found = _release_finding(view, protocols, s, first, bits, needed[n])
        if found is None:
            found = unmet(view, s, stores[n])
        if found is not None:
            yield found


def _first_before(view: View, stores: Sequence[Touch], setter: Touch) -> Touch | None:
    protocols = Protocols.of(view)
    return next((t for t in stores if setter.index in protocols.behind(t.index)), None)


def _release_finding(
    view: View, protocols: Protocols, setter: Touch, store: Touch, bits: int, needed: Scope
) -> Finding | None:
    flag, data = _names(setter.names), _names(store.names)
    there = line(view, store.index)
    if bits & 1:
        return finding(
            "flag-without-release",
            Severity.ERROR,
            view,
            setter.index,
            f"the flag in {flag} is set with no release after the stores to {data} ({there}): whoever sees "
            f"the flag may still read the old {data}",
            f"set the flag with st.release or red.release{needed_words(needed)}, or execute fence.acq_rel"
            f"{needed_words(needed)} in the flag's thread after a barrier behind the stores",
            flag,
        )
    if bits & 2 and protocols.needed_scope(setter.names) is not None:
        return finding(
            "scope-too-narrow",
            Severity.ERROR,
            view,
            setter.index,
            f"the flag in {flag} is read by threads outside the scope of the release before it: they may see "
            f"the flag and still read the old {data} ({there}); the release needs {needed.words}",
            f"use {needed.words} scope for the release of this flag",
            flag,
        )
    return None


def unmet(
    view: View, setter: Touch, stores: Sequence[Touch], rule: str = "flag-without-release"
) -> Finding | None:
    """Stores of other threads that no barrier brings to the flag's thread."""
    protocols = Protocols.of(view)
    flagging = executing(view, setter.step)
    if isinstance(view, SassView):  # bar.warp.sync leaves no trace
        warps = view.analysis.program.threads.linear // np.uint64(32)
        flagging = np.isin(warps, warps[flagging])
    for t in stores:
        others = executing(view, t.step) & ~flagging
        if setter.index not in protocols.behind(t.index) or not others.any() or t.step.guarded:
            continue
        if setter.step.guarded or not flagging.any():
            continue
        if not _met(view, t, setter, others):
            flag, data = _names(setter.names), _names(t.names)
            return finding(
                rule,
                Severity.ERROR,
                view,
                setter.index,
                f"all threads store to {data} ({line(view, t.index)}), but the flag in {flag} only covers "
                "the stores of the thread that sets it: no barrier brings those of the others before it",
                "put bar.sync (or bar.warp.sync, if one warp stores) between the stores and the flag",
                flag,
            )
    return None


def _met(view: View, store: Touch, setter: Touch, others: Any) -> bool:
    """Whether the marks of other threads reach the flag's thread."""
    changes = {store.index: Change(gives=1, who=others.astype(np.uint64))}
    return Marks(view, changes).carried(setter.step) != 0


# -- relaxed operations of too small a scope ---------------------------------------------------------


def scope_rules(view: PtxView) -> Iterator[Finding]:
    """Polls, flag stores and counters whose own scope leaves out the other side."""
    protocols = Protocols.of(view)
    mine = {p.touch.index: p.touch for p in protocols.flag_polls}
    mine |= {s.index: s for s in protocols.setters} | {t.touch.index: t.touch for t in protocols.tickets}
    for t in sorted(mine.values(), key=lambda x: x.index):
        needed = protocols.needed_scope(t.names)
        if (
            needed is None
            or t.scope is None
            or t.scope >= needed
            or "volatile" in t.step.instruction.modifiers
        ):
            continue
        if _own_slot(view, t):
            yield undecided(
                view,
                t.index,
                f"whether the flag in {_names(t.names)} is used by one CTA alone cannot be told: its address "
                "depends on the CTA",
                f"use {needed.words} scope",
                _names(t.names),
            )
            continue
        yield finding(
            "scope-too-narrow",
            Severity.ERROR,
            view,
            t.index,
            f"the flag in {_names(t.names)} is accessed with {t.scope.words} scope, but threads outside that "
            f"scope use it too: nothing orders or makes atomic what they do with it; it needs {needed.words}",
            f"use {needed.words} scope",
            _names(t.names),
        )


def _own_slot(view: PtxView, t: Touch) -> bool:
    """Whether every access to the flag's buffer is at an address that depends on the CTA."""
    mine = [o for o in Protocols.of(view).global_touches if o.names & t.names]
    seeds = {
        at: tuple(r.name for r in writes(i))
        for at, i in enumerate(view.graph.instructions)
        if any(isinstance(o, Special) and o.name.startswith("%ctaid") for o in i.operands)
    }
    held = flow(view, seeds, predicates=False)
    return all(held.reads.get(o.index, frozenset()) - set(stored(o)) for o in mine)
