"""Shared memory refilled before its readers are done, where the code alone decides it.

A read and a later write of the same bytes by threads of different warps, with no barrier on any path between;
and bulk stores whose source is written again before any wait for them. Loops are followed back to their start
only for addresses that are the same in every iteration: what changes from stage to stage is left to the
dynamic rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.flow import ControlFlowGraph
from workbench.isa.ptx.model import Instruction
from workbench.isa.values import Value
from workbench.verify.ordering.first import first_operands
from workbench.verify.ordering.paths import after
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
from workbench.verify.ordering.sure import SurePasses
from workbench.verify.ordering.view import PtxView, Step, finding

RULE = "buffer-reuse"
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))
_RECEIVES = (Kind.BARRIER, Kind.MBARRIER_WAIT, Kind.CLUSTER_WAIT, Kind.ACQUIRE, Kind.RELEASE)
"""Where a thread can learn that threads of other warps have read; fences are among the releases."""
_MOST = 1 << 22
"""Most pairs of threads compared."""


@dataclass(frozen=True, eq=False)
class _Touch:
    step: Step
    first: Region
    """In the first iteration of its loops."""
    always: Region | None
    """In every iteration, if that is one place."""


def reused_buffers(view: PtxView) -> Iterator[Finding]:
    """All cases of the rule on the PTX."""
    writes = [s for s in view.steps("st", "stmatrix", "cp") if _writes(view, s)]
    reads = [s for s in view.steps("ld", "ldmatrix", "wgmma") if _reads(view, s)]
    stores = [s for s in view.steps("cp") if _from_shared(s.instruction)]
    if not writes or not (reads or stores):
        return
    steps = [*writes, *reads, *stores]
    first = first_operands(view, {s.index for s in steps})
    sure = SurePasses(view)
    targets = [t for s in writes if (t := _touch(view, s, first, 0, sure)) is not None]
    sources = [t for s in reads if (t := _touch(view, s, first, 0, sure)) is not None]
    copied = [t for s in stores if (t := _touch(view, s, first, 1, sure)) is not None]
    back = view.graph.back_edges
    forward = replace(
        view.graph,
        successors=tuple(
            tuple(s for s in n if (b, s) not in back) for b, n in enumerate(view.graph.successors)
        ),
    )
    yield from _unordered(view, forward, sources, targets)
    yield from _overwritten(view, forward, copied, targets)


def _writes(view: PtxView, s: Step) -> bool:
    i, m = s.instruction, s.instruction.modifiers
    if i.opcode == "cp":
        spaces = [x for x in m if x in SHARED or x == "global"]
        return m[:1] == ("async",) and spaces[:1] not in ([], ["global"]) and "mbarrier" not in m
    if _STRONG & set(m) or "async" in m:
        return False
    found = addresses(s)
    return bool(found) and is_shared(view, found[0][1], i)


def _reads(view: PtxView, s: Step) -> bool:
    i, m = s.instruction, s.instruction.modifiers
    if i.opcode == "wgmma":
        return m[:1] == ("mma_async",)
    found = addresses(s)
    return not _STRONG & set(m) and bool(found) and is_shared(view, found[0][1], i)


def _from_shared(i: Instruction) -> bool:
    m = i.modifiers
    spaces = [x for x in m if x in SHARED or x == "global"]
    return "bulk_group" in m and len(spaces) >= 2 and spaces[0] == "global" and spaces[1] != "global"


def _touch(
    view: PtxView, s: Step, first: dict[int, tuple[Value, ...]], at: int, sure: SurePasses
) -> _Touch | None:
    values = first.get(s.index)
    if values is None:
        return None
    pairs = zip(s.values, values, strict=True)
    known = replace(s, values=tuple(v if v.known is not None else Value(f.known, v.roots) for v, f in pairs))
    here, always = _region(view, known, at), _region(view, s, at)
    if here is None or here.offsets is None:
        return None
    who = sure.threads(s)
    if not (who != 0).any():
        return None
    fixed = always is not None and always.offsets is not None
    return _Touch(
        s, replace(here, who=who), replace(always, who=who) if always is not None and fixed else None
    )


def _region(view: PtxView, s: Step, at: int) -> Region | None:
    i = s.instruction
    if i.opcode == "wgmma":
        found = [matrix(view, s, v) for v in s.values[1:3]]
        return next((r for r in reversed(found) if r is not None), None)
    places = addresses(s)
    if at >= len(places):
        return None
    size = width(i)
    if i.opcode == "cp":
        size = 16
        if "tensor" not in i.modifiers:
            n = i.operands.index(places[1][0]) + 1
            size = s.values[n].constant() or 4 if n < len(s.values) else 4
    return region(view, s, places[at][1], size)


def _unordered(
    view: PtxView, forward: ControlFlowGraph[Instruction], reads: list[_Touch], writes: list[_Touch]
) -> Iterator[Finding]:
    events = view.analysis.program.all_events(*_RECEIVES)
    meetings = {e.index for e in events}
    meetings |= {s.index for s in view.steps("wgmma") if s.instruction.modifiers[:1] == ("wait_group",)}
    by = {n: who.astype(np.uint64) for n, who in view.block_threads.items()}
    found: dict[tuple[int, int], tuple[_Touch, _Touch, int]] = {}
    for r in reads:
        ahead = after(forward, r.step.index, lambda at: at in meetings)
        around = after(view.graph, r.step.index, lambda at: at in meetings)
        for w in writes:
            at = w.step.index
            if at in ahead and at != r.step.index:
                graph, a, b = forward, r.first, w.first
            elif at in around and r.always is not None and w.always is not None:
                graph, a, b = view.graph, r.always, w.always
            else:
                continue
            # Only a writer that comes by the read itself is sure to meet nobody on this path.
            b = replace(b, who=b.who & by[view.graph.block_of[r.step.index]])
            if overlaps(a, b) and _across_warps(a, b) and not _met(graph, r.step.index, at, meetings):
                key = (view.graph.block_of[r.step.index], view.graph.block_of[at])
                old = found.get(key)
                found[key] = (r, w, 1) if old is None else (old[0], old[1], old[2] + 1)
    for r, w, count in found.values():
        what = "the copy" if w.step.instruction.opcode == "cp" else "the store"
        yield finding(
            RULE,
            Severity.ERROR,
            view,
            w.step.index,
            f"{what} writes shared memory that other warps may still be reading in line "
            f"{r.step.instruction.line}: no barrier stands between their read and this write",
            "put a barrier (bar.sync, or an mbarrier that the readers arrive at) between the last read and "
            "the refill",
        ).model_copy(update={"count": count})


def _met(graph: ControlFlowGraph[Instruction], start: int, goal: int, meetings: set[int]) -> bool:
    """Whether some path from `start` meets other threads before it first comes to `goal`."""
    between = after(graph, start, lambda at: at == goal)
    return any(m in between and goal in after(graph, m) for m in meetings)


def _across_warps(a: Region, b: Region) -> bool:
    """Whether threads of different warps touch the same bytes, one of each region."""
    if a.offsets is None or b.offsets is None:
        return False
    x, y = np.flatnonzero(a.who), np.flatnonzero(b.who)
    if x.size * y.size > _MOST:
        return False
    p, q = a.offsets[x][:, None], b.offsets[y][None, :]
    meet = (p < q + np.uint64(b.size)) & (q < p + np.uint64(a.size))
    return bool((meet & (x[:, None] // 32 != y[None, :] // 32)).any())


def _overwritten(
    view: PtxView, forward: ControlFlowGraph[Instruction], copied: list[_Touch], writes: list[_Touch]
) -> Iterator[Finding]:
    """The source of a bulk store written again with no wait for the store on any path."""
    waits = {s.index for s in view.steps("cp") if {"bulk", "wait_group"} <= set(s.instruction.modifiers)} | {
        e.index for e in view.analysis.program.all_events(Kind.ACQUIRE)
    }
    for c in copied:
        ahead = after(forward, c.step.index, lambda at: at in waits)
        around = after(view.graph, c.step.index, lambda at: at in waits)
        for w in writes:
            at = w.step.index
            if at in ahead:
                graph, a, b = forward, c.first, w.first
            elif at in around and c.always is not None and w.always is not None:
                graph, a, b = view.graph, c.always, w.always
            else:
                continue
            if not overlaps(a, b) or _met(graph, c.step.index, at, waits):
                continue
            yield finding(
                RULE,
                Severity.ERROR,
                view,
                at,
                f"this write may change shared memory that the bulk copy in line {c.step.instruction.line} "
                "is still reading: nothing waits for that copy before the write",
                "execute cp.async.bulk.commit_group and cp.async.bulk.wait_group.read 0 in the issuing "
                "thread, then a barrier, before the buffer is written again",
            )
            break
