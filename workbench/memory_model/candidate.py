"""A candidate execution before reads are given their writes: events, program order, moral strength."""

from __future__ import annotations

from workbench.memory_model.events import EVERY_PROXY, Event, Kind, Run
from workbench.memory_model.matching import Meeting, includes
from workbench.memory_model.program import Litmus, Place, Proxy
from workbench.memory_model.relations import Rows, bits, close
from workbench.memory_model.runs import Memory


class Candidate:
    """Events of one choice of runs that met in one way; the initial writes stand first.

    `thread[i]` is -1 for an initial write. `base` is base causality without release patterns and fence order:
    closed, but without the edges into detached events, which `inlets` holds (see `with_inlets`).
    """

    def __init__(self, test: Litmus, memory: Memory, runs: tuple[Run, ...], meeting: Meeting) -> None:
        self.test, self.runs, self.meeting = test, runs, meeting
        cells = sorted({e.cell for r in runs for e in r.events if e.cell >= 0})
        self.events: list[Event] = [
            Event(Kind.WRITE, 0, 0, cell, cell, memory.initial[cell]) for cell in cells
        ]
        self.initial = {cell: number for number, cell in enumerate(cells)}
        self.thread = [-1] * len(cells)
        self.offsets = []
        for number, run in enumerate(runs):
            self.offsets.append(len(self.events))
            self.events.extend(run.events[: meeting.stops[number]])
            self.thread.extend([number] * meeting.stops[number])
        self.size = len(self.events)
        self.places = [t.place for t in test.threads]
        self._order()
        self._kinds()
        self._strength()

    # -- orders ---------------------------------------------------------------------------------------

    def _order(self) -> None:
        size = self.size
        rows = [0] * size
        self.po: Rows = [0] * size
        """Program order; a detached event follows what precedes its instruction."""
        self.inlets: Rows = [0] * size
        """By detached event: events of its thread that precede its instruction."""
        self.needs: Rows = [0] * size
        """By write: the reads it depends on."""
        for i, event in enumerate(self.events):
            if self.thread[i] < 0:
                continue
            shift = self.offsets[self.thread[i]]
            before = event.before << shift
            for j in bits(before):
                self.po[j] |= 1 << i
                if not event.detached:
                    rows[j] |= 1 << i
            if event.detached:
                self.inlets[i] = before
            for j in bits(event.after << shift):
                rows[j] |= 1 << i
            self.needs[i] = event.needs << shift
        for (one, a), (other, b) in self.meeting.edges:
            if a < self.meeting.stops[one] and b < self.meeting.stops[other]:
                rows[self.offsets[one] + a] |= 1 << (self.offsets[other] + b)
        self.detached = any(self.inlets)
        self.base = close(rows)

    def with_inlets(self, base: Rows) -> Rows:
        """`base` with what precedes each detached event.

        What precedes a copy's instruction precedes the copy's accesses, but not what their completion
        releases: a completion orders the copy's own accesses alone.
        """
        if not self.detached:
            return base
        rows = list(base)
        for i, inlet in enumerate(self.inlets):
            if inlet:
                bit = 1 << i
                for j in range(self.size):
                    if base[j] & inlet or inlet >> j & 1:
                        rows[j] |= bit
        return rows

    # -- what events are ------------------------------------------------------------------------------

    def _kinds(self) -> None:
        events = self.events
        self.reads = [i for i, e in enumerate(events) if e.kind is Kind.READ]
        self.writes: dict[int, list[int]] = {}
        self.accesses: dict[int, int] = {}
        """By cell: its accesses."""
        for i, e in enumerate(events):
            if e.kind is Kind.WRITE:
                self.writes.setdefault(e.cell, []).append(i)
            if e.cell >= 0:
                self.accesses[e.cell] = self.accesses.get(e.cell, 0) | 1 << i
        self.updates = {self._own(i, e.atomic): i for i, e in enumerate(events) if e.atomic >= 0}
        """By read of a read-modify-write: its write."""
        self.sequential = [i for i, e in enumerate(events) if e.sequential]
        fences = [i for i, e in enumerate(events) if e.kind is Kind.PROXY_FENCE or self.ends_grid(e)]
        self.mixed = any(e.cell >= 0 and (e.via or e.view != self._home(e)) for e in events)
        """True if there are aliases or proxies other than the generic one."""
        self.proxy_fences = fences if self.mixed else []

    def _home(self, event: Event) -> int:
        first = next(bits(self.accesses[event.cell]))
        rest = self.accesses[event.cell] & ~(1 << self.initial[event.cell])
        first = next(bits(rest), first)
        return self.events[first].view

    def ends_grid(self, event: Event) -> bool:
        """True for the end of a thread whose grid another follows."""
        return event.sync is not None and event.sync.what == "grid.end"

    def _own(self, i: int, number: int) -> int:
        return self.offsets[self.thread[i]] + number

    def place(self, i: int) -> Place:
        """Where the thread of an event runs."""
        return self.places[self.thread[i]]

    def same_cta(self, i: int, j: int) -> bool:
        """True if two events are of threads of one CTA."""
        if self.thread[i] < 0 or self.thread[j] < 0:
            return False
        a, b = self.place(i), self.place(j)
        return (a.grid, a.gpu, a.cluster, a.cta) == (b.grid, b.gpu, b.cluster, b.cta)

    def fence_of(self, fence: int, access: int, *, entering: bool) -> bool:
        """True if a proxy fence takes an access out of (or `entering`: into) its proxy."""
        via, proxy = self._via(fence), self.events[access].via
        if via == EVERY_PROXY:
            return proxy != Proxy.TENSORMAP
        if via != proxy:
            return False
        if proxy == Proxy.TENSORMAP:
            # One way: an acquire fence in the thread that reads by the tensormap proxy.
            return entering and self.events[fence].acquires and self.thread[fence] == self.thread[access]
        return self.same_cta(fence, access)

    def _via(self, fence: int) -> int:
        return EVERY_PROXY if self.ends_grid(self.events[fence]) else self.events[fence].via

    # -- moral strength -------------------------------------------------------------------------------

    def _strength(self) -> None:
        events, size = self.events, self.size
        related = [0] * size
        for i in range(size):
            related[i] |= self.po[i]
            for j in bits(self.po[i]):
                related[j] |= 1 << i
        self.strong: Rows = [0] * size
        """Morally strong pairs (PTX ISA 8.7)."""
        memory = [e.cell >= 0 for e in events]
        for i in range(size):
            a = events[i]
            if self.thread[i] < 0 or not (memory[i] or a.scope is not None):
                continue
            for j in range(i + 1, size):
                b = events[j]
                if not (memory[j] or b.scope is not None):
                    continue
                if memory[i] and memory[j]:
                    if a.cell != b.cell or a.view != b.view or a.via != b.via:
                        continue
                elif (memory[i] and a.via) or (memory[j] and b.via):
                    continue
                if not related[i] >> j & 1:
                    if not (a.strong and b.strong):
                        continue
                    one, other = self.place(i), self.place(j)
                    if not (includes(a.scope, one, other) and includes(b.scope, other, one)):
                        continue
                self.strong[i] |= 1 << j
                self.strong[j] |= 1 << i
        self._patterns()

    def _patterns(self) -> None:
        """Release patterns by strong write, acquire patterns by strong read: their first or last events."""
        events, po = self.events, self.po
        self.releases: dict[int, int] = {}
        self.acquires: dict[int, int] = {}
        for i, e in enumerate(events):
            if not e.strong or e.cell < 0 or self.thread[i] < 0:
                continue
            mask = 0
            for j, f in enumerate(events):
                if self.thread[j] != self.thread[i]:
                    continue
                fence = f.cell < 0 and f.sync is None
                if not fence and (f.kind is not e.kind or f.view != e.view):
                    continue
                before, after = i == j or po[j] >> i & 1, i == j or po[i] >> j & 1
                if (f.releases and before) if e.kind is Kind.WRITE else (f.acquires and after):
                    mask |= 1 << j
            if mask:
                (self.releases if e.kind is Kind.WRITE else self.acquires)[i] = mask
