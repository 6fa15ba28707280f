"""Control-flow graphs of either instruction set: blocks, dominators, post-dominators and loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

Inst = TypeVar("Inst")


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: the instructions `start` to `end` (exclusive) of the kernel."""

    index: int
    start: int
    end: int
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ControlFlowGraph(Generic[Inst]):
    """Basic blocks in program order and the edges between them; block 0 is the entry.

    `leaves[b]` is true if the kernel may end in block `b` (a return, also a predicated one, or a trap).
    """

    instructions: tuple[Inst, ...]
    blocks: tuple[Block, ...]
    successors: tuple[tuple[int, ...], ...]
    leaves: tuple[bool, ...]

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Predecessors of each block."""
        found: list[list[int]] = [[] for _ in self.blocks]
        for b, following in enumerate(self.successors):
            for s in following:
                found[s].append(b)
        return tuple(map(tuple, found))

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """Block of each instruction."""
        return tuple(b.index for b in self.blocks for _ in range(b.start, b.end))

    @cached_property
    def reverse_postorder(self) -> tuple[int, ...]:
        """Reachable blocks, each after its predecessors except along back edges."""
        return tuple(_reverse_postorder(0, self.successors)) if self.blocks else ()

    @cached_property
    def immediate_dominators(self) -> tuple[int | None, ...]:
        """Immediate dominator of each block; None for the entry and for unreachable blocks."""
        if not self.blocks:
            return ()
        return tuple(_dominator_tree(0, self.successors, self.predecessors))

    @cached_property
    def immediate_post_dominators(self) -> tuple[int | None, ...]:
        """Immediate post-dominator of each block; None where only the end of the kernel is one.

        Blocks from which the kernel never ends have None as well.
        """
        n = len(self.blocks)
        backwards: list[tuple[int, ...]] = [*self.predecessors, tuple(b for b in range(n) if self.leaves[b])]
        forwards = [(*s, n) if self.leaves[b] else s for b, s in enumerate(self.successors)]
        tree = _dominator_tree(n, backwards, [*forwards, ()])
        return tuple(None if d is None or d == n else d for d in tree[:n])

    @cached_property
    def back_edges(self) -> frozenset[tuple[int, int]]:
        """Edges whose target dominates their source: one loop each."""
        return frozenset(
            (b, s) for b in self.reverse_postorder for s in self.successors[b] if self.dominates(s, b)
        )

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """Natural loops: header to the blocks of the loop, the header included."""
        found: dict[int, set[int]] = {}
        for source, header in self.back_edges:
            body = found.setdefault(header, {header})
            todo = [source]
            while todo:
                b = todo.pop()
                if b not in body:
                    body.add(b)
                    todo.extend(self.predecessors[b])
        return {header: frozenset(body) for header, body in found.items()}

    def dominates(self, a: int, b: int) -> bool:
        """True if every path from the entry to block `b` passes block `a` (a block dominates itself)."""
        return _above(a, b, self.immediate_dominators)

    def post_dominates(self, a: int, b: int) -> bool:
        """True if every path from block `b` to the end passes block `a`."""
        return _above(a, b, self.immediate_post_dominators)


def _above(a: int, b: int, tree: Sequence[int | None]) -> bool:
    at: int | None = b
    while at is not None:
        if at == a:
            return True
        at = tree[at]
    return False


def _reverse_postorder(root: int, successors: Sequence[Sequence[int]]) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(successors[root]))]
    while stack:
        node, rest = stack[-1]
        for s in rest:
            if s not in seen:
                seen.add(s)
                stack.append((s, iter(successors[s])))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    return order


def _dominator_tree(
    root: int, successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]
) -> list[int | None]:
    """Cooper, Harvey and Kennedy's iteration; None for the root and what it does not reach."""
    order = _reverse_postorder(root, successors)
    rank = {node: n for n, node in enumerate(order)}
    tree: dict[int, int] = {root: root}
    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            best: int | None = None
            for p in predecessors[node]:
                if p not in tree:
                    continue
                if best is None:
                    best = p
                    continue
                while best != p:
                    while rank[p] > rank[best]:
                        p = tree[p]
                    while rank[best] > rank[p]:
                        best = tree[best]
            if best is not None and tree.get(node) != best:
                tree[node] = best
                changed = True
    return [tree.get(n) if n != root else None for n in range(len(successors))]
