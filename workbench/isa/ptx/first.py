"""What registers hold the first time round every loop."""

from __future__ import annotations

from workbench.isa.ptx.dataflow import writes
from workbench.isa.ptx.values import PtxValues
from workbench.isa.values import Value


class FirstValues(PtxValues):
    """One pass over the graph without its back edges; leaving a loop, what the loop changes is unknown."""

    def _solve(self) -> None:
        graph = self._graph
        names = [tuple(r.name for r in writes(i)) for i in graph.instructions]
        self._shared = frozenset(name for w in names for name in w)
        loops = [
            (
                body,
                frozenset(
                    name
                    for b in body
                    for w in names[graph.blocks[b].start : graph.blocks[b].end]
                    for name in w
                ),
            )
            for body in graph.loops.values()
        ]
        back = {(b, s) for b, s in graph.back_edges}
        for b in graph.reverse_postorder:
            for _ in self.walk(b):
                pass
            leaving = self._here
            for s in graph.successors[b]:
                if (b, s) in back:
                    continue
                lost = {n for body, names in loops if b in body and s not in body for n in names}
                self._here = {n: Value(None, v.roots) if n in lost else v for n, v in leaving.items()}
                self._merge(s)
