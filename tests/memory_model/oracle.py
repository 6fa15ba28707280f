"""The model once more, written for reading: sets of pairs, every order tried. Straight-line generic programs.

Nothing of `workbench.memory_model` but the program's dataclasses is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

from workbench.memory_model import program as p

Pairs = set[tuple[int, int]]
MASK = (1 << 64) - 1
_OPERATIONS = {
    "add": lambda a, b: (a + b) & MASK,
    "exch": lambda _, b: b,
    "max": max,
}


@dataclass
class Node:
    """An event; the value of a write is worked out later."""

    thread: int
    place: p.Place | None
    step: int
    kind: str  # R, W or F
    where: str = ""
    order: p.Order = p.Order.WEAK
    scope: p.Scope | None = None
    instruction: p.Instruction | None = None
    partner: int | None = None

    @property
    def strong(self) -> bool:
        return self.kind == "F" or self.order is not p.Order.WEAK


def included(scope: p.Scope | None, a: p.Place, b: p.Place) -> bool:
    if scope is None:
        return False
    same = {
        p.Scope.CTA: (a.gpu, a.cluster, a.cta) == (b.gpu, b.cluster, b.cta),
        p.Scope.CLUSTER: (a.gpu, a.cluster) == (b.gpu, b.cluster)
        and (a.cluster is not None or a.cta == b.cta),
        p.Scope.GPU: a.gpu == b.gpu,
        p.Scope.SYS: True,
    }
    return same[scope]


def closure(pairs: Pairs) -> Pairs:
    result = set(pairs)
    while True:
        more = {(a, d) for a, b in result for c, d in result if b == c} - result
        if not more:
            return result
        result |= more


def cyclic(pairs: Pairs) -> bool:
    return any(a == b for a, b in closure(pairs))


def nodes_of(test: p.Litmus) -> list[Node]:
    nodes = [Node(-1, None, 0, "W", location.name) for location in test.locations]
    for number, thread in enumerate(test.threads):
        for step, i in enumerate(thread.code):
            match i:
                case p.Load():
                    nodes.append(Node(number, thread.place, step, "R", i.address.name, i.order, i.scope, i))
                case p.Store():
                    nodes.append(Node(number, thread.place, step, "W", i.address.name, i.order, i.scope, i))
                case p.Atomic():
                    reads = i.order if i.target is not None or i.order is p.Order.RELAXED else p.Order.RELAXED
                    nodes.append(Node(number, thread.place, step, "R", i.address.name, reads, i.scope, i))
                    nodes.append(
                        Node(
                            number,
                            thread.place,
                            step,
                            "W",
                            i.address.name,
                            i.order,
                            i.scope,
                            i,
                            len(nodes) - 1,
                        )
                    )
                case p.Fence():
                    nodes.append(Node(number, thread.place, step, "F", "", i.order, i.scope, i))
                case p.Arithmetic():
                    nodes.append(Node(number, thread.place, step, "A", instruction=i))
                case _:
                    raise ValueError(type(i))
    return nodes


def ends(test: p.Litmus) -> set[tuple[frozenset[tuple[str, int]], ...]]:
    """Final registers of every consistent execution."""
    nodes = nodes_of(test)
    reads = [n for n, e in enumerate(nodes) if e.kind == "R"]
    writes = [n for n, e in enumerate(nodes) if e.kind == "W"]
    found = set()
    options = [
        [w for w in writes if nodes[w].where == nodes[r].where and nodes[w].partner != r] for r in reads
    ]
    for choice in product(*options):
        rf = dict(zip(reads, choice, strict=True))
        valued = values(test, nodes, rf)
        if valued is None:
            continue
        registers, absent = valued
        # A failed compare-and-swap does not write.
        if any(w in absent for w in rf.values()):
            continue
        if any(True for _ in consistent(nodes, rf, absent)):
            found.add(registers)
    return found


def values(
    test: p.Litmus, nodes: list[Node], rf: dict[int, int]
) -> tuple[tuple[frozenset[tuple[str, int]], ...], set[int]] | None:
    """Registers at the end and writes that do not happen; None where values justify themselves."""
    written: dict[int, int | None] = {n: loc.initial[0] for n, loc in enumerate(test.locations)}
    for _ in range(len(nodes) + 1):
        before = dict(written)
        registers: list[dict[str, int | None]] = [
            {name: value for t, name, value in test.registers if t == number}
            for number in range(len(test.threads))
        ]

        def get(
            thread: int, operand: p.Operand, registers: list[dict[str, int | None]] = registers
        ) -> int | None:
            return operand if isinstance(operand, int) else registers[thread].get(operand.name, 0)

        absent: set[int] = set()
        unknown = False
        for n, e in enumerate(nodes):
            i = e.instruction
            if i is None or e.kind == "F":
                continue
            if isinstance(i, p.Load):
                registers[e.thread][i.targets[0].name] = written.get(rf[n])
                unknown = unknown or written.get(rf[n]) is None
            elif isinstance(i, p.Store):
                written[n] = get(e.thread, i.values[0])
            elif isinstance(i, p.Arithmetic):
                sides = [get(e.thread, o) for o in i.operands]
                known = None if None in sides else sum(v for v in sides if v is not None) & MASK
                registers[e.thread][i.target.name] = known
            elif isinstance(i, p.Atomic) and e.kind == "W":
                assert e.partner is not None
                old = written.get(rf[e.partner])
                sides = [get(e.thread, o) for o in i.operands]
                if i.operation == "cas":
                    written[n] = sides[1] if old is not None and old == sides[0] else None
                    if old is not None and old != sides[0]:
                        absent.add(n)
                elif i.operation == "exch":
                    written[n] = sides[0]
                else:
                    both = old is not None and sides[0] is not None
                    written[n] = _OPERATIONS[i.operation](old, sides[0]) if both else None
                if i.target is not None:
                    registers[e.thread][i.target.name] = old
                unknown = unknown or old is None
        if written == before and not unknown:
            rows = tuple(frozenset((k, v) for k, v in row.items() if v is not None) for row in registers)
            return rows, absent
    return None


def consistent(nodes: list[Node], rf: dict[int, int], absent: set[int]) -> Iterator[bool]:
    """One True for every choice of orders that the axioms allow."""
    events = [n for n, e in enumerate(nodes) if e.kind != "A" and n not in absent]
    place = [e.place for e in nodes]

    def po(a: int, b: int) -> bool:
        return nodes[a].thread == nodes[b].thread >= 0 and a < b

    def strong(a: int, b: int) -> bool:
        x, y = nodes[a], nodes[b]
        if a == b or x.thread < 0 or y.thread < 0:
            return False
        if x.kind != "F" and y.kind != "F" and x.where != y.where:
            return False
        if x.thread == y.thread:
            return True
        pa, pb = place[a], place[b]
        assert pa is not None
        assert pb is not None
        return x.strong and y.strong and included(x.scope, pa, pb) and included(y.scope, pb, pa)

    if cyclic({(w, r) for r, w in rf.items()} | dependencies(nodes, absent)):
        return
    pairs = [(a, b) for a in events for b in events]
    program = {(a, b) for a, b in pairs if po(a, b)}
    updates = {nodes[w].partner: w for w in events if nodes[w].kind == "W" and nodes[w].partner is not None}
    observed = {(w, r) for r, w in rf.items() if strong(w, r)}
    while True:
        more = {
            (w, r) for w, z in observed if z in updates for v, r in observed if v == updates[z]
        } - observed
        if not more:
            break
        observed |= more
    releasing = (p.Order.RELEASE, p.Order.ACQ_REL, p.Order.SC)
    acquiring = (p.Order.ACQUIRE, p.Order.ACQ_REL, p.Order.SC)
    release = {
        (a, w)
        for a, w in pairs
        if nodes[w].kind == "W" and nodes[w].strong and nodes[w].thread >= 0 and (a == w or po(a, w))
        if nodes[a].order in releasing
        and (nodes[a].kind == "F" or (nodes[a].kind == "W" and nodes[a].where == nodes[w].where))
    }
    acquire = {
        (r, b)
        for r, b in pairs
        if nodes[r].kind == "R" and nodes[r].strong and (r == b or po(r, b))
        if nodes[b].order in acquiring
        and (nodes[b].kind == "F" or (nodes[b].kind == "R" and nodes[b].where == nodes[r].where))
    }
    sync = {
        (a, b)
        for a, w in release
        for v, r in observed
        if v == w
        for q, b in acquire
        if q == r and strong(a, b)
    }
    fences = [n for n in events if nodes[n].kind == "F" and nodes[n].order is p.Order.SC]
    memory = [n for n in events if nodes[n].kind != "F"]
    places = sorted({nodes[n].where for n in memory})
    by_place = [
        [n for n in memory if nodes[n].kind == "W" and nodes[n].where == x and nodes[n].thread >= 0]
        for x in places
    ]
    initial = {nodes[n].where: n for n in memory if nodes[n].thread < 0}
    tried = set()
    for line in permutations(fences):
        order = frozenset((a, b) for n, a in enumerate(line) for b in line[n + 1 :] if strong(a, b))
        if order in tried:
            continue
        tried.add(order)
        base = closure(program | sync | order)
        if any((b, a) in base for a, b in order):
            continue
        near = {(a, b) for a, b in base if nodes[a].where == nodes[b].where != ""}
        cause = near | {(w, b) for w, r in observed for a, b in near if a == r}
        for lines in product(*(permutations(ws) for ws in by_place)):
            kept = {
                (a, b)
                for line in lines
                for n, a in enumerate(line)
                for b in line[n + 1 :]
                if strong(a, b) or (a, b) in cause
            }
            if any((b, a) in cause for line in lines for n, a in enumerate(line) for b in line[n + 1 :]):
                continue
            co = closure(kept) | {(initial[nodes[w].where], w) for ws in by_place for w in ws}
            fr = {(r, w) for r, v in rf.items() for u, w in co if u == v and updates.get(r) != w}
            communication = {(w, r) for r, w in rf.items()} | fr
            if any((b, a) in cause for a, b in communication):
                continue
            if any(
                (r, x) in fr and strong(r, x) and (x, w) in co and strong(x, w)
                for r, w in updates.items()
                if r is not None
                for x in memory
            ):
                continue
            local = {(a, b) for a, b in program if nodes[a].where == nodes[b].where != ""}
            if cyclic({(a, b) for a, b in communication | co if strong(a, b)} | local):
                continue
            yield True


def dependencies(nodes: list[Node], absent: set[int]) -> Pairs:
    """Read to write, through registers."""
    found: Pairs = set()
    sources: dict[tuple[int, str], set[int]] = {}
    for n, e in enumerate(nodes):
        i = e.instruction

        def need(operands: tuple[p.Operand, ...], e: Node = e) -> set[int]:
            return set().union(
                *(sources.get((e.thread, o.name), set()) for o in operands if isinstance(o, p.Register))
            )

        if isinstance(i, p.Load):
            sources[e.thread, i.targets[0].name] = {n}
        elif isinstance(i, p.Arithmetic):
            sources[e.thread, i.target.name] = need(i.operands)
        elif isinstance(i, p.Store):
            found |= {(r, n) for r in need(i.values)}
        elif isinstance(i, p.Atomic) and e.kind == "W" and e.partner is not None:
            if n not in absent:
                found |= {(r, n) for r in need(i.operands)}
                if i.operation != "exch":
                    found.add((e.partner, n))
            if i.target is not None:
                sources[e.thread, i.target.name] = {e.partner}
    return found
