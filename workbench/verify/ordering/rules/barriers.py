"""Barriers of a CTA: lanes that diverge at them, counts that cannot match, and one barrier in two roles.

PTX ISA 9.7.13.1: a barrier waits for all threads of the executing warp that have not exited, a count is a
multiple of 32, and the `.aligned` forms (`bar.*` among them) must be executed by whole warps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.findings import Finding, Severity
from workbench.verify.ordering.paths import after
from workbench.verify.ordering.program import Event, Kind, Program
from workbench.verify.ordering.rules.elected import Predicates, elected_blocks, refined
from workbench.verify.ordering.rules.participants import Participants, Who, threads_text
from workbench.verify.ordering.solver import arrivals_before
from workbench.verify.ordering.view import PtxView, SassView, finding

DIVERGENCE, REUSE = "barrier-divergence", "barrier-reuse"
_CTA = frozenset((Kind.BARRIER, Kind.BARRIER_ARRIVE))
_CLUSTER = frozenset((Kind.CLUSTER_ARRIVE, Kind.CLUSTER_WAIT))
_EMPTY = frozenset(("bra", "ret", "exit", "BRA", "EXIT", "NOP", "BSSY", "BSYNC", "BREAK", "WARPSYNC"))
_BLOCKING = frozenset((Kind.BARRIER, Kind.MBARRIER_WAIT, Kind.CLUSTER_WAIT))
_WHOLE = (
    "let every lane of the warp come to the barrier (move it out of the divergent branch), or put "
    "bar.warp.sync there if only this warp is to be synchronised"
)


def barriers_ptx(view: PtxView) -> Iterator[Finding]:
    """Rules `barrier-divergence` and `barrier-reuse` on the PTX."""
    yield from _Barriers(view, refined(view)).findings()
    yield from _elected(view)


def barriers_sass(view: SassView) -> Iterator[Finding]:
    """The same on the SASS, where there is no PTX to say what was meant."""
    if view.ptx is None:
        yield from _Barriers(view, view.analysis.program).findings()


@dataclass(frozen=True, eq=False)
class _Site:
    event: Event
    block: int
    may: Who
    surely: Who
    aligned: bool

    @property
    def index(self) -> int:
        return self.event.index

    @property
    def arrives(self) -> bool:
        return self.event.kind is Kind.BARRIER_ARRIVE


def _aligned(i: Any) -> bool:
    """`bar.*` and `.aligned`; the SASS has no other form."""
    return i.opcode in ("bar", "BAR") or "aligned" in i.modifiers or i.opcode.isupper()


class _Barriers:
    def __init__(self, view: PtxView | SassView, program: Program) -> None:
        self.view, self.program = view, program
        self.people = Participants(program)
        graph: Any = view.graph
        self.graph = graph
        self.sites: list[_Site] = []
        for b, events in enumerate(program.events):
            for e in events:
                if e.kind not in _CTA | _CLUSTER:
                    continue
                who = self.people.may(b, e)
                if who.any():
                    aligned = _aligned(graph.instructions[e.index])
                    self.sites.append(_Site(e, b, who, self.people.surely(b, e), aligned))
        self.idle = frozenset(
            b.index
            for b in graph.blocks
            if all(graph.instructions[at].opcode in _EMPTY for at in range(b.start, b.end))
        )

    def findings(self) -> Iterator[Finding]:
        split: set[int] = set()
        for site in self.sites:
            f = self._divergence(site)
            if f is not None:
                split.add(site.index)
                yield f
        for site in self.sites:
            if site.index not in split and site.event.kind in _CTA:
                yield from self._count(site)
        yield from self._warp_barriers()
        yield from self._shared_by_roles()
        yield from self._arrived_twice()

    def _say(self, rule: str, site: _Site, message: str, fix: str) -> Finding:
        return finding(rule, Severity.ERROR, self.view, site.index, message, fix)

    def _name(self, site: _Site) -> str:
        return _instruction(self.graph.instructions[site.index])

    def _where(self, index: int) -> str:
        place = self.view.place(index)
        return f"line {place.ptx_line}" if place.ptx_line is not None else f"/*{place.sass_offset or 0:04x}*/"

    def _named(self, key: int | None) -> list[_Site]:
        """Sites at this CTA barrier, or at one that cannot be told."""
        return [s for s in self.sites if s.event.kind in _CTA and s.event.key in (None, key)]

    # -- lanes -----------------------------------------------------------------------------------

    def _live(self, index: int, left_out: Who, *, rejoin: bool) -> Who:
        """Those of the left-out threads that go on with something else (rejoin: with the same code later)."""
        block = self.graph.block_of[index]
        region = self.people.downstream(block)
        if not rejoin:
            upstream = self.people.upstream(block)
            region = region | frozenset(b for b in self.people.reach if b not in upstream)
        found = self.people.nobody()
        rest = range(index + 1, self.graph.blocks[block].end)
        if any(self.graph.instructions[at].opcode not in _EMPTY for at in rest):
            found |= self.people.reach[block] & left_out
        for b in region - self.idle:
            reach = self.people.reach.get(b)
            if reach is not None:
                found |= reach & left_out
        return found

    def _divergence(self, site: _Site) -> Finding | None:
        if site.event.kind in _CLUSTER and not site.aligned:
            return None
        everyone = np.ones(self.program.threads.count, np.bool_)
        left_out = self.people.split_warps(site.may, everyone)
        if not site.aligned:  # lanes may come to another barrier of that number instead
            for other in self._named(site.event.key):
                left_out &= ~other.may
        live = self._live(site.index, left_out, rejoin=False)
        if not live.any():
            return None
        warp = int(self.people.warps[live][0])
        here = site.may & (self.people.warps == warp)
        gone = live & (self.people.warps == warp)
        return self._say(
            DIVERGENCE,
            site,
            f"only {threads_text(here)} of warp {warp} can execute {self._name(site)}, {threads_text(gone)} "
            "of "
            "the same warp go another way: the warp waits at the barrier for lanes that never come, or the "
            "barrier counts lanes that are not there",
            _WHOLE,
        )

    def _warp_barriers(self) -> Iterator[Finding]:
        """bar.warp.sync whose mask names lanes that never come to one with that mask."""
        found: list[tuple[Event, int, Who]] = []
        for b, events in enumerate(self.program.events):
            for e in events:
                if e.kind is Kind.WARP_BARRIER and isinstance(self.view, PtxView):
                    who = self.people.may(b, e)
                    if who.any():
                        found.append((e, b, who))
        lane = (self.program.threads.linear % np.uint64(32)).astype(np.int64)
        for e, _, who in found:
            if e.key is None or e.guarded:
                continue
            members = (np.int64(e.key) >> lane) & 1 != 0
            some = np.zeros(int(self.people.warps[-1]) + 1, np.bool_)
            some[self.people.warps[who]] = True
            missing = members & some[self.people.warps] & ~who
            for other, _, theirs in found:
                if other.key in (None, e.key):
                    missing &= ~theirs
            missing = self._live(e.index, missing, rejoin=False)
            if missing.any():
                warp = int(self.people.warps[missing][0])
                gone = missing & (self.people.warps == warp)
                yield finding(
                    DIVERGENCE,
                    Severity.ERROR,
                    self.view,
                    e.index,
                    f"bar.warp.sync with mask {e.key:#x} waits for {threads_text(gone)} of warp {warp}, "
                    "which "
                    "never come to a bar.warp.sync of that mask",
                    "name in the mask only the lanes that execute it, or move it to where all of them come",
                )

    # -- counts ----------------------------------------------------------------------------------

    def _count(self, site: _Site) -> Iterator[Finding]:
        e = site.event
        if e.key is None or e.count == -1:
            return
        size = self.program.threads.count
        whole = -(-size // 32) * 32
        if e.count is None:
            yield from self._skipped(site)
            return
        if e.count % 32 or e.count > whole:
            why = (
                "is not a multiple of the warp size"
                if e.count % 32
                else f"is more than the {size} threads of the CTA"
            )
            yield self._say(
                DIVERGENCE,
                site,
                f"{self._name(site)} counts {e.count} threads, which {why}: the barrier never completes as "
                "meant",
                "count the threads of the warps that take part, a multiple of 32",
            )
            return
        same = [s for s in self._named(e.key) if s.event.count in (e.count, -1)]
        coming = self.people.nobody()
        for s in same:
            coming |= s.may
        again = any(
            s.arrives
            and ((s.may & o.may).any() if o is not s else s.block in self.people.downstream(s.block))
            for s in same
            for o in same
        )
        warps = self.people.warp_count(coming)
        if 32 * warps < e.count and not again:
            others = [s for s in self._named(e.key) if s not in same]
            more = f"; {self._where(others[0].index)} counts {others[0].event.count}" if others else ""
            yield self._say(
                DIVERGENCE,
                site,
                f"{self._name(site)} waits for {e.count} threads, but only {32 * warps} "
                f"({threads_text(coming)}) can come to barrier {e.key} with that count{more}: they wait for "
                "ever",
                f"count {32 * warps} threads, or let the other warps come to the barrier",
            )
        here = self.people.warp_count(site.surely)
        if 32 * here > e.count:
            yield self._say(
                DIVERGENCE,
                site,
                f"{self._name(site)} counts {e.count} threads, but {32 * here} ({threads_text(site.surely)}) "
                "come to it: it lets the first of them pass without the others",
                f"count {32 * here} threads, or give each group of warps a barrier of its own",
            )

    def _skipped(self, site: _Site) -> Iterator[Finding]:
        coming = self.people.nobody()
        for s in self._named(site.event.key):
            coming |= s.may
        if isinstance(self.view, SassView) and not site.surely.any():
            return  # the assembler itself puts barriers on paths that are never taken
        skips = ~coming
        live = self._live(site.index, skips, rejoin=True)
        if not live.any() or site.index != min(s.index for s in self._named(site.event.key)):
            return
        yield self._say(
            DIVERGENCE,
            site,
            f"{self._name(site)} has no count, so it waits for all {self.program.threads.count} threads of "
            "the "
            f"CTA, but {threads_text(live)} skip it and run on: the others hang, or pair with a later "
            "barrier",
            f"give the barrier a number of its own and the count of the warps that take part "
            f"({32 * self.people.warp_count(coming)})",
        )

    # -- one barrier in two roles ----------------------------------------------------------------

    def _shared_by_roles(self) -> Iterator[Finding]:
        phases = arrivals_before(self.program)
        whole = [s for s in self.sites if s.event.kind is Kind.BARRIER and s.surely.all()]
        for n, a in enumerate(self.sites):
            if a.event.kind is not Kind.BARRIER or not a.event.count or a.event.count < 0:
                continue
            for b in self.sites[n + 1 :]:
                e = b.event
                if e.kind is not Kind.BARRIER or (e.key, e.count) != (a.event.key, a.event.count):
                    continue
                if e.key is None or e.count is None or (a.may & b.may).any():
                    continue
                enough = min(32 * self.people.warp_count(s.surely) for s in (a, b)) >= e.count
                if not enough or self._apart(a, b, whole, phases):
                    continue
                yield self._say(
                    REUSE,
                    b,
                    f"barrier {e.key} with count {e.count} is used by {threads_text(a.may)} at "
                    f"{self._where(a.index)} and by {threads_text(b.may)} here with no common barrier "
                    "between: "
                    "warps of one role can complete the other's barrier",
                    "give each role a barrier number of its own",
                )
                return

    def _apart(self, a: _Site, b: _Site, whole: list[_Site], phases: dict[int, Any]) -> bool:
        """Whether a barrier of the whole CTA, or a wait on something else, may stand between the two."""
        for w in whole:
            x, y = w.index in after(self.graph, a.index), w.index in after(self.graph, b.index)
            if x != y:
                return True
        for s, other in ((a, b), (b, a)):
            split = self.people.reached_by(s.may) - self.people.reached_by(other.may)
            waits = [
                e
                for blk in split
                for e in self.program.events[blk]
                if e.kind in (Kind.MBARRIER_WAIT, Kind.ACQUIRE)
                or (e.kind is Kind.BARRIER and e.key != s.event.key)
            ]
            if any(s.index in after(self.graph, e.index) for e in waits):
                return True
        return False

    def _arrived_twice(self) -> Iterator[Finding]:
        """A warp that arrives and comes to the same barrier again before anything tells it of the reset."""
        for a in self.sites:
            if not a.arrives or a.event.key is None or a.event.guarded:
                continue
            stops = {
                e.index
                for events in self.program.events
                for e in events
                if e.kind in _BLOCKING and (e.kind is not Kind.BARRIER or e.key != a.event.key)
            }
            follow = after(self.graph, a.index, lambda at, stops=stops: at in stops)  # type: ignore[misc]
            for b in self.sites:
                if b.event.kind not in _CTA or b.event.key != a.event.key or b.index not in follow:
                    continue
                both = a.may & b.may
                if not both.any() or b.event.guarded:
                    continue
                yield self._say(
                    REUSE,
                    b,
                    f"{threads_text(both)} arrive at barrier {a.event.key} at {self._where(a.index)} and "
                    "come "
                    "to it again here before anything says that it was reset: their two arrivals can "
                    "complete "
                    "it without the other role",
                    "use one barrier number for each direction (full and empty), as a producer and a "
                    "consumer "
                    "need two",
                )
                return


def _instruction(i: Any) -> str:
    return (
        str(i.text).rstrip("; ").split("@", 1)[-1].split(" ", 1)[-1]
        if i.predicate
        else str(i.text).rstrip("; ")
    )


def _elected(view: PtxView) -> Iterator[Finding]:
    """Barriers that only one elected lane of a warp executes."""
    if view.threads.count == 1:
        return
    program = view.analysis.program
    blocks = elected_blocks(view)
    predicates = Predicates(view)
    for b, events in enumerate(program.events):
        for e in events:
            if e.kind not in _CTA | _CLUSTER or not _aligned(view.graph.instructions[e.index]):
                continue
            lone = b in blocks
            if e.condition is not None and predicates.holds(*e.condition).one_true:
                lone = True
            if lone:
                yield finding(
                    DIVERGENCE,
                    Severity.ERROR,
                    view,
                    e.index,
                    f"only the one lane of a warp that elect.sync chose executes "
                    f"{_instruction(view.graph.instructions[e.index])}: the barrier needs whole warps, so "
                    "the "
                    "others never come or the count is wrong",
                    _WHOLE,
                )
