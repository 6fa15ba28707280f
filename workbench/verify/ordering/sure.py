"""Which threads are sure to come to a block, each loop entered at most once, whatever the data."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.isa.values import Lanes
from workbench.verify.ordering.view import PtxView, Step


class SurePasses:
    """Blocks that lie on every way of a thread through the graph without its back edges."""

    def __init__(self, view: PtxView) -> None:
        self._view = view
        back = view.graph.back_edges
        self._order = view.graph.reverse_postorder
        self._next = {b: [s for s in view.graph.successors[b] if (b, s) not in back] for b in self._order}
        self._edges = view.analysis.program.edges
        self._passed: dict[int, frozenset[int]] = {}

    @cached_property
    def _classes(self) -> NDArray[np.intp]:
        """For each thread the first one that can take the same edges."""
        n = self._view.threads.count
        rows = list({(m != 0).tobytes(): m != 0 for m in self._edges.values()}.values())
        if not rows:
            return np.zeros(n, np.intp)
        _, first, inverse = np.unique(np.stack(rows), axis=1, return_index=True, return_inverse=True)
        return np.asarray(first[inverse.reshape(-1)], np.intp)

    def _blocks(self, thread: int) -> frozenset[int]:
        if thread in self._passed:
            return self._passed[thread]
        ways = {
            b: [s for s in n if (b, s) not in self._edges or self._edges[b, s][thread] != 0]
            for b, n in self._next.items()
        }
        down: dict[int, int] = dict.fromkeys(self._order, 0)
        down[0] = 1
        for b in self._order:
            for s in ways[b]:
                down[s] += down[b]
        up: dict[int, int] = {}
        for b in reversed(self._order):
            ends = 0
            if self._view.graph.leaves[b]:
                leaving = self._view.analysis.program.leaving.get(b)
                ends = int(leaving is None or leaving[thread] != 0)
            up[b] = sum(up[s] for s in ways[b]) + ends  # a block that only goes round again leads nowhere
        total = up.get(0, 0)
        self._passed[thread] = frozenset(b for b in self._order if total and down[b] * up[b] == total)
        return self._passed[thread]

    def threads(self, step: Step) -> Lanes:
        """Threads (0 or 1) that are sure to execute a step."""
        who = self._view.executing(step)
        if step.guarded:
            return np.zeros_like(who)
        block = self._view.graph.block_of[step.index]
        classes = self._classes
        good = [int(c) for c in np.unique(classes[who != 0]) if block in self._blocks(int(c))]
        return np.asarray(who * np.isin(classes, good).astype(np.uint64))

    def all_of(self, step: Step) -> bool:
        """Whether every thread that may execute a step is sure to, and there is one."""
        who = self._view.executing(step)
        return bool((who != 0).any()) and bool(np.array_equal(self.threads(step), who))
