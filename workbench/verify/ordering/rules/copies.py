"""Asynchronous copies used before they are complete: cp.async groups and bulk groups (ISA 9.7.9.25).

Groups are counted along the first pass through the code, loops entered once: what is read there before its
group is waited for is wrong in every run that comes that far. Leaving a loop, nothing is said any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Instruction
from workbench.isa.values import Value
from workbench.verify.ordering.first import first_operands
from workbench.verify.ordering.paths import MEETINGS, after
from workbench.verify.ordering.program import Kind
from workbench.verify.ordering.rules.regions import (
    SHARED,
    Region,
    addresses,
    is_shared,
    matrix,
    overlaps,
    region,
    width,
)
from workbench.verify.ordering.view import PtxView, Step, finding

RULE = "cp-async-group"
_AGES = 24
"""Committed groups that are told apart; older ones count as complete or not known."""
_OPEN, _FRESH, _MET, _NOT = 1 << _AGES, 2 << _AGES, 4 << _AGES, 8 << _AGES
_PENDING = (1 << _AGES) - 1 | _OPEN
_ANY = _PENDING | _FRESH | _MET


def copy_groups(view: PtxView) -> Iterator[Finding]:
    """All cases of the rule on the PTX."""
    copies = [s for s in view.steps("cp") if _is_copy(s.instruction)]
    if copies:
        yield from _plain(view, copies)
    stores = [s for s in view.steps("cp") if "bulk_group" in s.instruction.modifiers]
    if stores:
        yield from _bulk(view, stores)


def _is_copy(i: Instruction) -> bool:
    m = i.modifiers
    return m[:1] == ("async",) and "bulk" not in m and "mbarrier" not in m and bool(SHARED & set(m))


def _is_wait(i: Instruction, bulk: bool) -> bool:
    m = i.modifiers
    return i.opcode == "cp" and ("bulk" in m) == bulk and bool({"wait_group", "wait_all"} & set(m))


class _Groups:
    """What each copy may be at each point: in a group of some age, complete, or not issued yet."""

    def __init__(self, view: PtxView, copies: list[Step], bulk: bool) -> None:
        self.view, self.bulk = view, bulk
        self.copies = {s.index: n for n, s in enumerate(copies)}
        self.meetings = {e.index for e in view.analysis.program.all_events(*MEETINGS)}
        graph = view.graph
        back = graph.back_edges
        self.entry: dict[int, list[int]] = {0: [_NOT] * len(copies)}
        for b in graph.reverse_postorder:
            if b not in self.entry:
                continue
            state = list(self.entry[b])
            for at in range(graph.blocks[b].start, graph.blocks[b].end):
                self.step(at, state)
            for s in graph.successors[b]:
                if (b, s) in back:
                    continue
                left = any(b in body and s not in body for body in graph.loops.values())
                coming = [_NOT if x == _NOT else _ANY | _NOT for x in state] if left else state
                old = self.entry.get(s)
                self.entry[s] = (
                    list(coming) if old is None else [x | y for x, y in zip(old, coming, strict=True)]
                )

    def step(self, at: int, state: list[int]) -> None:
        """Change the states by one instruction."""
        i = self.view.graph.instructions[at]
        if at in self.meetings:
            state[:] = [(x & ~_FRESH) | (_MET if x & _FRESH else 0) for x in state]
        if i.opcode != "cp":
            return
        m = i.modifiers
        if at in self.copies:
            state[self.copies[at]] = _OPEN  # of the threads that execute it, if it has a guard
        elif ("bulk" in m) == self.bulk and "commit_group" in m:
            state[:] = [_committed(x) | (x if i.predicate is not None else 0) for x in state]
        elif _is_wait(i, self.bulk):
            allowed = self._allowed(at, i)
            state[:] = [_waited(x, allowed) | (x if i.predicate is not None else 0) for x in state]
        elif "mbarrier" in m and "arrive" in m and not self.bulk:  # an mbarrier tells when they are complete
            state[:] = [x if x == _NOT else x | _MET for x in state]

    def _allowed(self, at: int, i: Instruction) -> int | None:
        """Groups that may still be pending after a wait; None for none, not even open ones."""
        if "wait_all" in i.modifiers:
            return None
        step = self.view.step(at)
        number = step.values[0].constant() if step is not None and step.values else None
        return _AGES if number is None else number

    def at_end(self, b: int) -> list[int]:
        """States at the end of a block."""
        last = self.view.graph.blocks[b].end - 1
        state = self.before(last)
        self.step(last, state)
        return state

    def before(self, at: int) -> list[int]:
        """States before an instruction; all not issued where the first pass does not come."""
        b = self.view.graph.block_of[at]
        if b not in self.entry:
            return [_NOT] * len(self.copies)
        state = list(self.entry[b])
        for n in range(self.view.graph.blocks[b].start, at):
            self.step(n, state)
        return state


def _committed(x: int) -> int:
    ages = (x & ((1 << _AGES) - 1)) << 1
    if ages >> _AGES:  # too old to tell apart
        ages = ages & ((1 << _AGES) - 1) | _ANY
    return ages | (1 if x & _OPEN else 0) | (x & (_FRESH | _MET | _NOT))


def _waited(x: int, allowed: int | None) -> int:
    pending = x & ((1 << _AGES) - 1)
    kept = 0 if allowed is None else pending & ((1 << allowed) - 1)
    done = bool(pending & ~kept) or (allowed is None and bool(x & _OPEN))
    open_ = 0 if allowed is None else x & _OPEN
    return kept | open_ | (x & (_FRESH | _MET | _NOT)) | (_FRESH if done else 0)


# -- cp.async --------------------------------------------------------------------------------------


def _plain(view: PtxView, copies: list[Step]) -> Iterator[Finding]:
    groups = _Groups(view, copies, bulk=False)
    reads = [
        (s, groups.before(s.index)) for s in view.steps("ld", "ldmatrix", "wgmma", "tcgen05") if _reads(s)
    ]
    suspects = [(s, n, x[n]) for s, x in reads for n in range(len(copies)) if _suspect(x[n])]
    if not suspects:
        return
    wanted = {s.index for s, _, _ in suspects} | {copies[n].index for _, n, _ in suspects}
    first = first_operands(view, wanted)
    targets = {n: _target(view, _at_first(copies[n], first)) for n in {n for _, n, _ in suspects}}
    found: dict[tuple[str, str | int], tuple[Step, Step, int]] = {}
    for s, n, x in suspects:
        target = targets[n]
        sources = _sources(view, _at_first(s, first))
        if target is None or not any(overlaps(target, r) for r in sources):
            continue
        pending = bool(x & _PENDING)
        if not pending and not any(_others(target, r) for r in sources):
            continue
        key = ("pending" if pending else "met", view.graph.block_of[s.index])
        old = found.get(key)
        found[key] = (s, copies[n], 1) if old is None else (old[0], old[1], old[2] + 1)
    for (what, _), (s, copy, count) in found.items():
        yield _report(view, what, s, copy, groups).model_copy(update={"count": count})


def _report(view: PtxView, what: str, read: Step, copy: Step, groups: _Groups) -> Finding:
    i, line = read.instruction, copy.instruction.line
    if what == "pending":
        waits = [s for s in view.steps("cp") if _is_wait(s.instruction, False) and s.index < read.index]
        said = (
            f"the wait in line {waits[-1].instruction.line} lets it be pending" if waits else "nothing waits"
        )
        message = (
            f"{i.name} reads shared memory that the cp.async in line {line} may not have written yet: {said}"
        )
        fix = (
            "lower the number of cp.async.wait_group so that the group of that copy is complete, or commit "
            "the copy before the wait; then a barrier"
        )
    else:
        message = (
            f"{i.name} reads bytes that another thread's cp.async in line {line} writes; each thread waits "
            "for its own copies only, and no barrier stands between the wait and this read"
        )
        fix = (
            "put bar.sync (__syncthreads) between cp.async.wait_group and the reads of other threads' copies"
        )
    return finding(RULE, Severity.ERROR, view, read.index, message, fix)


def _suspect(x: int) -> bool:
    """Surely issued and surely not complete, or complete with no barrier since."""
    if x & _NOT:
        return False
    return bool(x & _PENDING and not x & (_FRESH | _MET)) or x == _FRESH


def _reads(s: Step) -> bool:
    i = s.instruction
    if i.opcode == "ld":
        return not {"param", "global", "const", "local"} & set(i.modifiers)
    return i.opcode == "ldmatrix" or i.modifiers[:1] in (("mma_async",), ("mma",))


def _at_first(s: Step, first: dict[int, tuple[Value, ...]]) -> Step:
    values = first.get(s.index)
    if values is None:
        return s
    pairs = zip(s.values, values, strict=True)
    return replace(s, values=tuple(v if v.known is not None else Value(f.known, v.roots) for v, f in pairs))


def _target(view: PtxView, s: Step) -> Region | None:
    found = addresses(s)
    size = s.values[2].constant() if len(s.values) > 2 else None
    return region(view, s, found[0][1], size or 4) if found else None


def _sources(view: PtxView, s: Step) -> list[Region]:
    i = s.instruction
    if i.opcode in ("wgmma", "tcgen05"):
        matrices = [matrix(view, s, v) for v in s.values[1:3]]
        return [r for r in matrices if r is not None]
    found = addresses(s)
    if not found or not is_shared(view, found[0][1], i):
        return []
    here = region(view, s, found[0][1], width(i))
    return [here] if here is not None else []


def _others(copy: Region, read: Region) -> bool:
    """Whether some thread reads bytes that another thread copies."""
    if copy.offsets is None or read.offsets is None:
        return False
    c, r = copy.offsets[:, None], read.offsets[None, :]
    meet = (c < r + np.uint64(read.size)) & (r < c + np.uint64(copy.size))
    meet &= (copy.who != 0)[:, None] & (read.who != 0)[None, :]
    np.fill_diagonal(meet, False)
    return bool(meet.any())


# -- bulk copies -----------------------------------------------------------------------------------


def _bulk(view: PtxView, stores: list[Step]) -> Iterator[Finding]:
    """Bulk stores: their group committed before the wait, their result published after a full wait."""
    groups = _Groups(view, stores, bulk=True)
    loose = list(_uncommitted(view, stores, groups))
    yield from loose
    yield from _published(view, stores, groups)
    if not loose:
        yield from _abandoned(view, stores, groups)


def _uncommitted(view: PtxView, stores: list[Step], groups: _Groups) -> Iterator[Finding]:
    for s in view.steps("cp"):
        if not _is_wait(s.instruction, True) or s.values[0].constant() != 0:
            continue
        open_ = [c for c, x in zip(stores, groups.before(s.index), strict=True) if x == _OPEN]
        if open_:
            yield finding(
                RULE,
                Severity.ERROR,
                view,
                s.index,
                f"{s.instruction.name} does not wait for the bulk copy in line {open_[0].instruction.line}: "
                "no cp.async.bulk.commit_group stands between, so the copy is in no group yet",
                "execute cp.async.bulk.commit_group after the copy and before the wait",
            ).model_copy(update={"count": len(open_)})


def _published(view: PtxView, stores: list[Step], groups: _Groups) -> Iterator[Finding]:
    """A release after wait_group.read only: the source has been read, the target need not be written."""
    events = [e for e in view.analysis.program.all_events(Kind.RELEASE) if e.access is not None]
    for e in events:
        b = view.graph.block_of[e.index]
        waits = [
            view.graph.instructions[at]
            for at in range(view.graph.blocks[b].start, e.index)
            if _is_wait(view.graph.instructions[at], True)
        ]
        if not waits or any("read" not in w.modifiers for w in waits):
            continue
        done = [c for c, x in zip(stores, groups.before(e.index), strict=True) if x & (_FRESH | _MET) == x]
        done = [c for c in done if view.graph.block_of[c.index] == b]
        if done:
            yield finding(
                RULE,
                Severity.ERROR,
                view,
                e.index,
                f"this release may be seen before the bulk copy in line {done[0].instruction.line} has "
                "written global memory: cp.async.bulk.wait_group.read in line "
                f"{waits[-1].line} waits only until its source has been read",
                "wait with cp.async.bulk.wait_group (without .read) before the release",
            ).model_copy(update={"count": len(done)})


def _abandoned(view: PtxView, stores: list[Step], groups: _Groups) -> Iterator[Finding]:
    """Threads that end with a store of theirs pending: its source is gone with the CTA's shared memory."""
    graph = view.graph
    ends = [b for b, leaves in enumerate(graph.leaves) if leaves and not _traps(view, b)]
    states = [groups.at_end(b) for b in ends]
    waits = [s for s in view.steps("cp") if _is_wait(s.instruction, True)]
    left: list[tuple[Step, Step | None]] = []
    for n, s in enumerate(stores):
        if not SHARED & set(s.instruction.modifiers):
            continue
        behind = after(graph, s.index)
        mine = [w for w in waits if w.index in behind]
        at_ends = [x for x in (state[n] for state in states) if x != _NOT]
        surely = bool(at_ends) and not any(x & (_FRESH | _MET) for x in at_ends)
        if not mine or surely or _last_of_loop(view, s, mine):
            left.append((s, mine[0] if mine else None))
    for s, wait in left[:1]:
        said = (
            f"{wait.instruction.name} in line {wait.instruction.line} lets its group be pending"
            if wait is not None
            else "nothing waits for its group"
        )
        yield finding(
            RULE,
            Severity.ERROR,
            view,
            s.index,
            f"the thread may end while this bulk copy still reads shared memory: {said}, and once the CTA "
            "has ended its shared memory may hold another CTA's data",
            "commit the copy and execute cp.async.bulk.wait_group.read 0 in its thread before the end",
        ).model_copy(update={"count": len(left)})


def _traps(view: PtxView, b: int) -> bool:
    return view.graph.instructions[view.graph.blocks[b].end - 1].opcode == "trap"


def _last_of_loop(view: PtxView, store: Step, waits: list[Step]) -> bool:
    """Whether the store's last group stays pending: nothing commits another, no wait is for all groups."""
    graph = view.graph
    b = graph.block_of[store.index]
    if any((w.values[0].constant() or 0) < 1 for w in waits):
        return False
    commits = [
        at
        for at, i in enumerate(graph.instructions)
        if i.opcode == "cp" and "bulk" in i.modifiers and "commit_group" in i.modifiers
    ]
    return len(commits) == 1 and graph.block_of[commits[0]] == b and commits[0] > store.index
