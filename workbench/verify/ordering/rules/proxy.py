"""Generic writes that the asynchronous proxy reads with no proxy fence between (ISA 8.8, 9.7.13.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Address, Instruction, TensorAddress
from workbench.isa.values import Root, RootKind, Value
from workbench.verify.ordering.analysis import Site
from workbench.verify.ordering.carried import BARE, Carried
from workbench.verify.ordering.first import first_operands, meet
from workbench.verify.ordering.paths import after
from workbench.verify.ordering.program import Mode
from workbench.verify.ordering.rules.regions import (
    SHARED,
    Region,
    addresses,
    is_shared,
    matrix,
    region,
    width,
)
from workbench.verify.ordering.rules.stale import Touch, bare, carry, mark_of, stale, touch
from workbench.verify.ordering.view import PtxView, Step, finding

RULE = "proxy-fence-missing"
FIX = (
    "execute fence.proxy.async.shared::cta in every writing thread after its writes and before the barrier, "
    "or in the issuing thread after the barrier"
)


def proxy_fences(view: PtxView) -> Iterator[Finding]:
    """All cases of the rule on the PTX."""
    yield from _shared(view)
    yield from _global(view)
    yield from _tensormaps(view)


# -- shared memory ---------------------------------------------------------------------------------


def _shared(view: PtxView) -> Iterator[Finding]:
    if not any(True for _ in _reads(view, {})):
        return
    opcodes = ("st", "stmatrix", "atom", "red", "cp", "wgmma", "tcgen05")
    first = first_operands(view, {s.index for s in view.steps(*opcodes) if _vague(s)})
    reads = list(_reads(view, first))
    fences = [s for s in view.steps("fence") if _covers_shared(s.instruction)]
    arenas = _arenas(view) if _filled_by_copies(view) else frozenset()
    for h in stale(view, list(_writes(view, first)), reads, [mark_of(f, fence=True) for f in fences], arenas):
        i = view.graph.instructions[h.write.index]
        yield finding(
            RULE,
            Severity.ERROR,
            view,
            h.read.index,
            f"{h.read.what} may read stale shared memory: {h.write.what} in line {i.line} wrote those bytes "
            "through the generic proxy, and no fence.proxy.async stands between the write and this read in "
            "the asynchronous proxy",
            FIX,
        ).model_copy(update={"count": h.count})


def _vague(s: Step) -> bool:
    """Whether an operand that may be an address is not known."""
    return any(v.known is None and v.roots for v in s.values)


def _filled_in(s: Step, first: dict[int, tuple[Value, ...]]) -> Step:
    """A step with the values of its first execution where those of every execution are not known."""
    known = first.get(s.index)
    if known is None:
        return s
    values = tuple(
        v if v.known is not None else Value(f.known, v.roots) for v, f in zip(s.values, known, strict=True)
    )
    return replace(s, values=values)


def _reads(view: PtxView, first: dict[int, tuple[Value, ...]]) -> Iterator[Touch]:
    """Reads of shared memory in the asynchronous proxy."""
    for s in (_filled_in(s, first) for s in view.steps("cp", "wgmma", "tcgen05")):
        i = s.instruction
        m = i.modifiers
        if i.opcode == "cp":
            found = _copied_from(view, s)
            if found is not None:
                yield touch(s, (found,), "a tensor copy" if "tensor" in m else "a bulk copy")
        elif i.opcode == "wgmma" and m[:1] == ("mma_async",):
            yield from _matrices(s, [matrix(view, s, v) for v in s.values[1:3]], "wgmma")
        elif i.opcode == "tcgen05" and m[:1] == ("mma",):
            pairs = list(zip(i.operands, s.values, strict=True))[1:3]
            regions = [matrix(view, s, v) for o, v in pairs if not isinstance(o, Address)]
            yield from _matrices(s, regions, "tcgen05.mma")
        elif i.opcode == "tcgen05" and m[:1] == ("cp",):
            yield from _matrices(s, [matrix(view, s, s.values[1])], "tcgen05.cp")


def _matrices(step: Step, regions: list[Region | None], what: str) -> Iterator[Touch]:
    known = tuple(r for r in regions if r is not None)
    if known:
        yield touch(step, known, what)


def _spaces(i: Instruction) -> list[str]:
    """Target and source space of a bulk or tensor copy; nothing for other instructions."""
    m = i.modifiers
    bulk = m[:2] == ("async", "bulk") or m[:3] == ("reduce", "async", "bulk")
    found = [x for x in m if x in SHARED or x == "global"]
    return found if bulk and "prefetch" not in m and len(found) >= 2 else []


def _copied_from(view: PtxView, s: Step) -> Region | None:
    """The shared source of a bulk or tensor copy; None for other copies."""
    i = s.instruction
    spaces = _spaces(i)
    if not spaces or spaces[1] == "global":
        return None
    found = addresses(s)
    if len(found) < 2:
        return None
    size = 16
    if "tensor" not in i.modifiers:
        at = i.operands.index(found[1][0]) + 1
        size = s.values[at].constant() or 16 if at < len(s.values) else 16
    return region(view, s, found[1][1], size)


def _filled_by_copies(view: PtxView) -> bool:
    """Whether bulk or tensor copies write shared memory here, so that not all writes are generic."""
    return any(_spaces(s.instruction)[:1] not in ([], ["global"]) for s in view.steps("cp"))


def _writes(view: PtxView, first: dict[int, tuple[Value, ...]]) -> Iterator[Touch]:
    """Writes of shared memory in the generic proxy."""
    names = {"st": "a store", "cp": "cp.async", "atom": "an atomic", "red": "an atomic"}
    for s in (_filled_in(s, first) for s in view.steps("st", "stmatrix", "atom", "red", "cp")):
        i = s.instruction
        m = i.modifiers
        if i.opcode == "cp" and (m[:1] != ("async",) or "bulk" in m or "mbarrier" in m or not i.operands):
            continue
        found = addresses(s)
        if not found or not is_shared(view, found[0][1], i):
            continue
        size = width(i)
        if i.opcode == "cp":
            size = s.values[2].constant() or 4 if len(s.values) > 2 else 4
        here = region(view, s, found[0][1], size)
        if here is None or not here.who.any():
            continue
        remote = m[:1] == ("async",) and i.opcode in ("st", "red")
        what = "st.async" if remote else names.get(i.opcode, i.opcode)
        yield touch(s, (here,), what, found[-1][1].constant() if remote else None, remote)


def _covers_shared(i: Instruction) -> bool:
    m = i.modifiers
    if m[:2] == ("proxy", "async"):
        return "global" not in m
    return m[:2] == ("proxy", "async::generic") and "release" in m


def _arenas(view: PtxView) -> frozenset[str]:
    """Shared variables that hold more than one thing: of open length, or with mbarriers inside."""
    names = {v.name for v in (*view.module.variables, *view.kernel.variables) if v.elements is None}
    for s in view.steps("mbarrier"):
        for _, v in addresses(s):
            names |= {r.name for r in v.roots if r.kind is RootKind.SYMBOL}
    return frozenset(names)


# -- global memory ---------------------------------------------------------------------------------


def _global(view: PtxView) -> Iterator[Finding]:
    """Ordinary stores to a buffer that this grid then copies from with a bulk or tensor copy.

    Only what is certain to be meant: the copy cannot come before the store, and either both use one pointer
    or a barrier or flag stands between them, so that the copy is there to read what was stored.
    """
    sites = [s for s in view.analysis.sites if s.buffers]
    reads = [s for s in sites if s.access.mode is Mode.LOAD and _is_bulk(view, s)]
    reads = [s for s in reads if view.step(s.event.index) is not None]
    stored = [s for s in sites if s.access.mode is Mode.STORE and not s.access.strong]
    stored = [s for s in stored if not _is_bulk(view, s)]
    stored = [s for s in stored if any(s.buffers & r.buffers for r in reads)]
    if not reads or not stored:
        return
    fences = [s for s in view.steps("fence") if _covers_global(s.instruction)]
    writes = [w for w in (view.step(s.event.index) for s in stored) if w is not None]
    first: dict[int, tuple[Value, ...]] | None = None
    touches = [touch(w, (), "a store") for w in writes]
    carried = carry(view, [[t] for t in touches], [mark_of(f, fence=True) for f in fences])
    unordered = carry(view, [[t] for t in touches], [])
    done: set[tuple[int, frozenset[str]]] = set()
    for r in reads:
        step = view.step(r.event.index)
        if step is None:
            continue
        for n, (site, write) in enumerate(zip(stored, writes, strict=True)):
            buffers = site.buffers & r.buffers
            if not buffers or (step.index, buffers) in done or not bare(carried, n, step):
                continue
            if write.index in after(view.graph, step.index):
                continue
            if first is None:
                first = first_operands(view, {w.index for w in writes} | {x.event.index for x in reads})
            if not (_same_bytes(view, first, write, step) or _handed_over(view, unordered, n, write, step)):
                continue
            done.add((step.index, buffers))
            name = ", ".join(sorted(buffers))
            yield finding(
                RULE,
                Severity.ERROR,
                view,
                step.index,
                f"the bulk copy may read stale {name}: the store in line {write.instruction.line} wrote it "
                "through the generic proxy, and no fence.proxy.async for global memory stands between the "
                "store and this copy in the asynchronous proxy",
                "execute fence.proxy.async.global (or fence.proxy.async) in the thread that issues the copy, "
                "after the barrier or flag that orders it after the store",
                name,
            )


def _is_bulk(view: PtxView, s: Site) -> bool:
    i = view.graph.instructions[s.event.index]
    return i.opcode == "cp" and "bulk" in i.modifiers


def _covers_global(i: Instruction) -> bool:
    m = i.modifiers
    return m[:2] == ("proxy", "async") and (len(m) == 2 or "global" in m)


def _same_bytes(view: PtxView, first: dict[int, tuple[Value, ...]], write: Step, read: Step) -> bool:
    """True if CTA 0 copies bytes that it has stored itself."""
    a = Step(write.index, write.instruction, None, False, first.get(write.index, ()))
    b = Step(read.index, read.instruction, None, False, first.get(read.index, ()))
    if not a.values or not b.values or "tensor" in read.instruction.modifiers:
        return False
    target, source = addresses(a)[0][1].known, addresses(b)[1][1].known
    size = b.values[2].constant()
    if target is None or source is None or size is None:
        return False
    who = view.executing(write), view.executing(read)
    return meet(target, who[0], width(write.instruction), source, who[1], size)


def _handed_over(view: PtxView, carried: Carried, n: int, write: Step, read: Step) -> bool:
    """True if a thread that did not itself store comes to the copy after the store."""
    state = carried.before(read.index)[n]
    stores = view.executing(write) != 0
    who = (view.executing(read) != 0) & ((state & BARE) != 0)
    return bool((who & ~stores).any())


# -- tensor maps in memory -------------------------------------------------------------------------


def _tensormaps(view: PtxView) -> Iterator[Finding]:
    """Tensor maps changed by the kernel that a copy uses with no release or acquire of that proxy between."""
    edits = [s for s in view.steps("tensormap") if addresses(s)]
    if not edits:
        return
    uses = [(s, _map_roots(s)) for s in view.steps("cp") if "tensor" in s.instruction.modifiers]
    kind = ("proxy", "tensormap::generic")
    fences = [s for s in view.steps("fence") if s.instruction.modifiers[:2] == kind]
    acquires = [f for f in fences if "acquire" in f.instruction.modifiers]
    replaced = [s for s in edits if s.instruction.modifiers[:1] == ("replace",)]
    copied = [s for s in edits if s.instruction.modifiers[:1] == ("cp_fenceproxy",)]
    releases = [f for f in fences if "release" in f.instruction.modifiers]
    for writes, needed, own, what, fix in (
        (
            [*replaced, *copied],
            acquires,
            True,
            "fence.proxy.tensormap::generic.acquire in the thread that issues the copy",
            "execute fence.proxy.tensormap::generic.acquire.gpu [map], 128 in the issuing thread, before it",
        ),
        (
            replaced,
            releases,
            False,
            "fence.proxy.tensormap::generic.release by the thread that changed it",
            "execute fence.proxy.tensormap::generic.release.gpu after tensormap.replace, before the barrier",
        ),
    ):
        if not writes:
            continue
        touches = [[touch(w, (), "tensormap.replace")] for w in writes]
        carried = carry(view, touches, [mark_of(f, fence=True) for f in needed], own)
        for use, roots in uses:
            for n, w in enumerate(writes):
                if not (roots & addresses(w)[0][1].roots) or not bare(carried, n, use):
                    continue
                yield finding(
                    RULE,
                    Severity.ERROR,
                    view,
                    use.index,
                    "the tensor copy may use an old tensor map: it was changed in line "
                    f"{w.instruction.line} and no {what} stands between",
                    fix,
                )
                break


def _map_roots(s: Step) -> frozenset[Root]:
    found = next((v for o, v in addresses(s) if isinstance(o, TensorAddress) and v.roots), None)
    if found is None:
        return frozenset()
    return frozenset(r for r in found.roots if r.kind is not RootKind.LOADED)
