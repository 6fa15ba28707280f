"""Which arrivals a phase of an mbarrier needs: all of them, where no more can come than it expects.

A thread arrives at most once a phase (that it does is the rule mbarrier-phase's business), so that a barrier
whose arriving threads are no more than its count completes no phase without each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from workbench.verify.ordering.program import Event

Name = tuple[bool, int]
"""Whether the address is an array's base only, and the address."""


@dataclass(frozen=True)
class Mbarriers:
    """Mbarriers of a kernel as its instructions name them."""

    names: Mapping[int, Name] = field(default_factory=dict)
    """By instruction; arrivals and waits that are not there may be at any barrier."""
    arrivals: Mapping[int, int] = field(default_factory=dict)
    """What a thread counts for, by instruction; 1 if not there, -1 if not known."""
    expected: Mapping[Name, int] = field(default_factory=dict)
    """Counts of the initialisations; -1 where two do not agree or one is not known."""

    def may_meet(self, arrival: Event, wait: Event) -> bool:
        """Whether an arrival may be at the barrier that a wait is for."""
        a, b = self.names.get(arrival.index), self.names.get(wait.index)
        if a is None or b is None:
            return arrival.key is None or wait.key is None or arrival.key == wait.key
        if (a[0] and b[0]) or (not a[0] and not b[0]):
            return a[1] == b[1]
        array, single = (a[1], b[1]) if a[0] else (b[1], a[1])
        return array <= single < self._end(array)

    def _end(self, array: int) -> int:
        """Where the next array begins."""
        every = {*self.names.values(), *self.expected}
        return min((at for is_array, at in every if is_array and at > array), default=1 << 62)

    def count(self, wait: Event) -> int | None:
        """Arrivals that a phase of the barrier takes; None if that cannot be told."""
        name = self.names.get(wait.index)
        if name is None:
            return None
        if name in self.expected:
            found = {self.expected[name]}
        elif name[0]:
            found = {n for (is_array, at), n in self.expected.items() if not is_array and at == name[1]}
        else:
            bases = [at for is_array, at in self.expected if is_array and at <= name[1]]
            found = {self.expected[True, max(bases)]} if bases else set()
        return found.pop() if len(found) == 1 and -1 not in found else None

    def all_needed(self, wait: Event, arrivals: Sequence[tuple[Event, NDArray[np.bool_]]]) -> bool:
        """Whether no phase completes without every thread that arrives.

        Args:
            arrivals: those that may be at the barrier, with who executes them.
        """
        expected = self.count(wait)
        if expected is None or any(a.index not in self.names for a, _ in arrivals):
            return False
        most: NDArray[np.int64] | None = None
        for a, who in arrivals:
            each = self.arrivals.get(a.index, 1)
            if each < 0:
                return False
            mine = np.where(who, each, 0).astype(np.int64)
            most = mine if most is None else np.maximum(most, mine)
        return most is not None and int(most.sum()) <= expected
