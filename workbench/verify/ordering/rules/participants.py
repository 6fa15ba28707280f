"""Which threads take part in an instruction: may, must, and what those that do not take part do instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.verify.ordering.paths import reaching
from workbench.verify.ordering.program import Event, Program

Who = NDArray[np.bool_]
"""One flag a thread of the CTA."""


class Participants:
    """Questions about the threads of one form of a kernel; branches whose takers are known count."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reach: dict[int, Who] = reaching(program)
        self.warps = (program.threads.linear // np.uint64(32)).astype(np.intp)
        self._downstream: dict[int, frozenset[int]] = {}
        self._upstream: dict[int, frozenset[int]] = {}

    def nobody(self) -> Who:
        """No thread."""
        return np.zeros(self.program.threads.count, np.bool_)

    def may(self, block: int, event: Event) -> Who:
        """Threads that may execute an event: they reach it and its guard, where known, lets them."""
        reach = self.reach.get(block)
        if reach is None:
            return self.nobody()
        return reach if event.guard is None else reach & (event.guard != 0)

    def surely(self, block: int, event: Event) -> Who:
        """Threads that execute an event on every path to their end."""
        if event.guarded:
            return self.nobody()
        return self.may(block, event) & ~self.ending_without(frozenset((block,)))

    def ending_without(self, avoided: Collection[int]) -> Who:
        """Threads that may end without having come through any of these blocks."""
        program = self.program
        found = self.nobody()
        if 0 in avoided:
            return found
        state = {0: np.ones(program.threads.count, np.bool_)}
        todo = [0]
        while todo:
            b = todo.pop()
            if program.leaves[b]:
                mask = program.leaving.get(b)
                found |= state[b] if mask is None else state[b] & (mask != 0)
            for s in program.successors[b]:
                if s in avoided:
                    continue
                mask = program.edges.get((b, s))
                coming = state[b] if mask is None else state[b] & (mask != 0)
                old = state.get(s)
                new = coming if old is None else old | coming
                if old is None or not np.array_equal(old, new):
                    state[s] = new
                    todo.append(s)
        return found

    def split_warps(self, who: Who, live: Who) -> Who:
        """Threads of `live` that are left out of a warp of which others are in `who`."""
        n = int(self.warps[-1]) + 1
        some = np.zeros(n, np.bool_)
        some[self.warps[who]] = True
        return live & ~who & some[self.warps]

    def warp_count(self, who: Who) -> int:
        """Number of warps with a thread in `who`."""
        return int(np.unique(self.warps[who]).size)

    def downstream(self, block: int) -> frozenset[int]:
        """Blocks that come after a block on some path; the block itself if a loop comes back."""
        if block not in self._downstream:
            self._downstream[block] = _closure(self.program.successors[block], self.program.successors)
        return self._downstream[block]

    def upstream(self, block: int) -> frozenset[int]:
        """The block and those from which a path leads to it."""
        if block not in self._upstream:
            before: list[list[int]] = [[] for _ in self.program.successors]
            for b, following in enumerate(self.program.successors):
                for s in following:
                    before[s].append(b)
            self._upstream[block] = _closure((block,), before)
        return self._upstream[block]

    def reached_by(self, who: Who) -> frozenset[int]:
        """Blocks that some of these threads may reach."""
        return frozenset(b for b, reach in self.reach.items() if (reach & who).any())


def _closure(start: Iterable[int], successors: Any) -> frozenset[int]:
    found: set[int] = set()
    todo = list(start)
    while todo:
        b = todo.pop()
        if b not in found:
            found.add(b)
            todo += successors[b]
    return frozenset(found)


def threads_text(who: Who) -> str:
    """Threads in words: `thread 0`, `threads 32 to 63`, `threads 1, 3, 5, ...`."""
    at = np.flatnonzero(who)
    if at.size == 0:
        return "no thread"
    if at.size == 1:
        return f"thread {at[0]}"
    if at[-1] - at[0] == at.size - 1:
        return f"threads {at[0]} to {at[-1]}"
    more = ", ..." if at.size > 3 else ""
    return f"threads {', '.join(str(n) for n in at[:3])}{more}"


def blocks_of(program: Program) -> Callable[[int], int]:
    """The block of an event's instruction index."""
    place = {e.index: b for b, events in enumerate(program.events) for e in events}
    return lambda index: place[index]
