"""The axioms of the PTX memory model (PTX ISA 8.7 to 8.10) on one candidate with every read given its write.

Coherence is partial: initial writes first, what causality orders, and morally strong pairs either way. More
of it would only forbid more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.memory_model.candidate import Candidate
from workbench.memory_model.events import ALIAS_FENCE, Event, Kind
from workbench.memory_model.program import Proxy
from workbench.memory_model.relations import Rows, acyclic, bits, close
from workbench.memory_model.runs import CANDIDATE, Budget


@dataclass(frozen=True)
class Consistent:
    """An execution that all axioms allow."""

    reads_from: Mapping[int, int]
    base: tuple[int, ...]
    cause: tuple[int, ...]
    coherence: tuple[int, ...]


def thin_air(c: Candidate, reads_from: Mapping[int, int]) -> bool:
    """True if reads-from and dependency have a cycle (axiom No-Thin-Air, 8.10.4)."""
    if not any(c.needs):
        return False
    rows = [0] * c.size
    for read, write in reads_from.items():
        rows[write] |= 1 << read
    for write, reads in enumerate(c.needs):
        for read in bits(reads):
            rows[read] |= 1 << write
    return not acyclic(rows)


def consistent(
    c: Candidate, reads_from: Mapping[int, int], last: Mapping[int, int], budget: Budget
) -> Iterator[Consistent]:
    """Executions with these reads-from edges that all axioms allow.

    Args:
        c: the candidate.
        reads_from: by read, the write it reads.
        last: by cell, a write that all others of the cell precede in coherence.
        budget: what the search may cost.

    Returns:
        one execution for each order of fence.sc operations and of morally strong writes.
    """
    budget.spend(CANDIDATE)
    if thin_air(c, reads_from):
        return
    observed = _observation(c, reads_from)
    rows = list(c.base)
    changed = False
    for write, heads in c.releases.items():
        for read in bits(observed[write]):
            tails = c.acquires.get(read, 0)
            for head in bits(heads):
                edges = tails & c.strong[head] & ~(1 << head)
                if edges & ~rows[head]:
                    rows[head] |= edges
                    changed = True
    if changed:
        close(rows)
    for base in _fence_orders(c, rows):
        budget.spend(CANDIDATE)
        full = c.with_inlets(base)
        preserved = _preserved(c, full)
        cause = _causality(c, preserved, observed)
        yield from _coherences(c, reads_from, last, full, cause, budget)


def _observation(c: Candidate, reads_from: Mapping[int, int]) -> Rows:
    """By write: the reads that observe it, directly or through read-modify-writes (8.9.2)."""
    observed = [0] * c.size
    for read, write in reads_from.items():
        if c.strong[write] >> read & 1:
            observed[write] |= 1 << read
    if c.updates:
        changed = True
        while changed:
            changed = False
            for write in range(c.size):
                mask = observed[write]
                for read in bits(mask):
                    if read in c.updates:
                        mask |= observed[c.updates[read]]
                if mask != observed[write]:
                    observed[write], changed = mask, True
    return observed


def _fence_orders(c: Candidate, base: Rows) -> Iterator[Rows]:
    """Base causality with each order of the morally strong fence.sc pairs that fits it (8.9.3)."""
    pairs = _strong_pairs(c, c.sequential)
    stack = [(base, 0)]
    while stack:
        rows, at = stack.pop()
        if any(rows[i] >> j & 1 and rows[j] >> i & 1 for i, j in pairs):
            continue
        at = _next_unordered(rows, pairs, at)
        if at == len(pairs):
            yield rows
            continue
        i, j = pairs[at]
        stack.append((_ordered(rows, i, j), at + 1))
        stack.append((_ordered(rows, j, i), at + 1))


def _strong_pairs(c: Candidate, members: list[int]) -> list[tuple[int, int]]:
    """Morally strong pairs among these events."""
    return [(i, j) for n, i in enumerate(members) for j in members[n + 1 :] if c.strong[i] >> j & 1]


def _next_unordered(rows: Rows, pairs: list[tuple[int, int]], at: int) -> int:
    """Number of the first pair from `at` on that a closed relation orders neither way."""
    while at < len(pairs) and (rows[pairs[at][0]] >> pairs[at][1] | rows[pairs[at][1]] >> pairs[at][0]) & 1:
        at += 1
    return at


def _ordered(rows: Rows, i: int, j: int) -> Rows:
    """A closed relation with i before j, closed again."""
    added = rows[j] | 1 << j
    return [row | added if k == i or row >> i & 1 else row for k, row in enumerate(rows)]


def _preserved(c: Candidate, base: Rows) -> Rows:
    """Proxy-preserved base causality between accesses of one cell (8.9.5)."""
    events = c.events
    rows = [0] * c.size
    if not c.mixed:
        for mask in c.accesses.values():
            for i in bits(mask):
                rows[i] = base[i] & mask
        return rows
    whole = sum(1 << f for f in c.proxy_fences if c.ends_grid(events[f]))
    aliases = [f for f in c.proxy_fences if events[f].via == ALIAS_FENCE or whole >> f & 1]
    for i, x in enumerate(events):
        if x.cell < 0 or c.thread[i] < 0:
            continue
        others = list(bits(c.accesses[x.cell] & base[i]))
        if not others:
            continue
        starts = 1 << i
        if x.via != Proxy.GENERIC:
            fences = (f for f in c.proxy_fences if base[i] >> f & 1)
            starts = sum(1 << f for f in fences if c.fence_of(f, i, entering=False))
        reach = 0
        for s in bits(starts):
            # The end of a grid takes an access out of its proxy and the next one into another.
            reach |= base[s] | 1 << s & whole
        aliased = 0
        for f in aliases:
            if reach >> f & 1:
                aliased |= base[f] | 1 << f & whole
        for j in others:
            y = events[j]
            if x.view == y.view:
                same = x.via == y.via and (x.via == Proxy.GENERIC or c.same_cta(i, j))
                if same or _has_returned(x, y):
                    rows[i] |= 1 << j
                    continue
                ways = reach | aliased
            else:
                ways = aliased
            if y.via == Proxy.GENERIC:
                if ways >> j & 1:
                    rows[i] |= 1 << j
                continue
            for f in c.proxy_fences:
                if not (ways >> f & 1 and base[f] >> j & 1 and c.fence_of(f, j, entering=True)):
                    continue
                if y.via != Proxy.TENSORMAP or _edited(c, base, i, f):
                    rows[i] |= 1 << j
                    break
    return rows


def _has_returned(x: Event, y: Event) -> bool:
    """True for a generic read and a later write by the async proxy: no fence is needed (rule X10).

    The read has its value before the write is issued.
    """
    reads = x.kind is Kind.READ and x.via == Proxy.GENERIC
    return reads and y.kind is Kind.WRITE and y.via == Proxy.ASYNC


def _edited(c: Candidate, base: Rows, write: int, acquire: int) -> bool:
    """True if a tensormap release fence stands between a generic write and the acquire fence."""
    between = (f for f in c.proxy_fences if base[write] >> f & 1 and base[f] >> acquire & 1)
    return any(c.events[f].via == Proxy.TENSORMAP and c.events[f].releases for f in between)


def _causality(c: Candidate, preserved: Rows, observed: Rows) -> Rows:
    """Causality: preserved base causality, or observation followed by it (8.9.5)."""
    rows = list(preserved)
    for write, reads in enumerate(observed):
        for read in bits(reads):
            rows[write] |= preserved[read]
    return rows


def _coherences(
    c: Candidate,
    reads_from: Mapping[int, int],
    last: Mapping[int, int],
    base: Rows,
    cause: Rows,
    budget: Budget,
) -> Iterator[Consistent]:
    co = [0] * c.size
    pairs: list[tuple[int, int]] = []
    for cell, writes in c.writes.items():
        first = c.initial[cell]
        mask = sum(1 << w for w in writes)
        for w in writes:
            co[w] |= cause[w] & mask
            if w != first:
                co[first] |= 1 << w
            if cell in last and w != last[cell]:
                co[w] |= 1 << last[cell]
        pairs.extend(_strong_pairs(c, writes))
    close(co)
    # Causality (8.10.6) for reads-from, which does not depend on coherence.
    if any(cause[read] >> write & 1 for read, write in reads_from.items()):
        return
    stack = [(co, 0)]
    while stack:
        budget.spend(CANDIDATE // 4)
        rows, at = stack.pop()
        if any(row >> i & 1 for i, row in enumerate(rows)):
            continue
        if not _respects(c, reads_from, cause, rows):
            continue
        at = _next_unordered(rows, pairs, at)
        if at == len(pairs):
            if _per_location(c, reads_from, rows):
                yield Consistent(dict(reads_from), tuple(base), tuple(cause), tuple(rows))
            continue
        i, j = pairs[at]
        stack.append((_ordered(rows, i, j), at + 1))
        stack.append((_ordered(rows, j, i), at + 1))


def _respects(c: Candidate, reads_from: Mapping[int, int], cause: Rows, co: Rows) -> bool:
    """Axioms Causality (8.10.6) and Atomicity (8.10.3) with as much coherence as there is so far."""
    for read, write in reads_from.items():
        later = co[write]
        own = c.updates.get(read)
        for other in bits(later):
            if other == own:
                continue
            if cause[other] >> read & 1:
                return False
            if own is not None and c.strong[read] & c.strong[own] & 1 << other and co[other] >> own & 1:
                return False
    return True


def _per_location(c: Candidate, reads_from: Mapping[int, int], co: Rows) -> bool:
    """Axiom SC-per-Location (8.10.5): morally strong communication does not contradict program order."""
    rows = [0] * c.size
    for mask in c.accesses.values():
        for i in bits(mask):
            if c.thread[i] >= 0:
                rows[i] |= (c.po[i] | (co[i] if c.events[i].kind is Kind.WRITE else 0)) & mask & c.strong[i]
    for read, write in reads_from.items():
        if c.strong[write] >> read & 1:
            rows[write] |= 1 << read
        rows[read] |= co[write] & c.strong[read] & ~(1 << c.updates.get(read, c.size))
    return acyclic(rows)
