"""Multicast memory (`multimem-order`; ISA 9.7.9.14, 8.6).

A multimem address may only be touched by multimem instructions. A relaxed publication orders nothing but its
own words: what a flag guards needs a release. Multicast and ordinary view of the same bytes are aliases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from workbench.findings import Finding, Severity
from workbench.isa.ptx.dataflow import writes
from workbench.isa.values import Root, RootKind
from workbench.verify.ordering.memory import Scope, Space, Touch, fences, touches
from workbench.verify.ordering.paths import Change, Marks, change
from workbench.verify.ordering.protocol import Protocols
from workbench.verify.ordering.rules.flags import line, unmet
from workbench.verify.ordering.view import PtxView, SassView, finding

_EMPTY = frozenset((0, 0x8000, 0x80008000, 1 << 31, 1 << 63)) | frozenset(
    (1 << bits) - 1 for bits in (8, 16, 32, 64)
)
"""Constants that empty a word rather than announce one: zero, negative zero, all ones."""


def multimem_rules(view: PtxView) -> Iterator[Finding]:
    """All three kinds."""
    multicast = [t for t in touches(view) if t.multimem]
    if not multicast:
        return
    yield from _ordinary(view, multicast)
    yield from _unguarded(view, multicast)
    yield from _aliases(view, multicast)


def sass_multimem_rules(view: SassView) -> Iterator[Finding]:
    """On a cubin alone: multimem loads have an opcode of their own, multimem stores look like any other."""
    if view.ptx is None:
        yield from _ordinary(view, [t for t in touches(view) if t.multimem])


def _pointers(t: Touch) -> frozenset[Root]:
    """The parameters an address comes from; SASS reads a pointer in two halves, which count as one."""
    return frozenset(
        replace(r, offset=r.offset & ~7)
        for r in t.address.roots
        if r.kind is RootKind.PARAM and r.offset is not None
    )


def _ordinary(view: PtxView | SassView, multicast: list[Touch]) -> Iterator[Finding]:
    """Ordinary accesses through the very pointer that multimem instructions use."""
    certain = {next(iter(_pointers(t))) for t in multicast if len(_pointers(t)) == 1}
    for t in touches(view):
        mine = _pointers(t)
        if t.multimem or t.space is not Space.GLOBAL or (isinstance(view, SassView) and not t.reads):
            continue
        if len(mine) != 1 or not mine <= certain:
            continue
        other = next(m for m in multicast if _pointers(m) == mine)
        yield finding(
            "multimem-order",
            Severity.ERROR,
            view,
            t.index,
            f"an ordinary {t.step.instruction.opcode} uses the pointer that multimem instructions use "
            f"({line(view, other.index)}): accessing a multicast address in another way is undefined",
            "use the ordinary (unicast) address of the buffer for ordinary accesses",
            ", ".join(sorted(t.names)) or None,
        )
        return


def _unguarded(view: PtxView, multicast: list[Touch]) -> Iterator[Finding]:
    """Multicast data, then a flag with no release of system scope in between."""
    protocols = Protocols.of(view)
    flags = [t for t in protocols.global_touches if t.writes and _is_flag(view, protocols, t)]
    data = [t for t in multicast if t.writes and t not in flags and not t.releases]
    if not flags or not data:
        return
    changes = {t.index: change(view, t.step, gives=1) for t in data}
    for f in fences(view):
        if f.releases and f.scope is Scope.SYS:
            changes[f.step.index] = change(view, f.step, takes=1)
    marks = Marks(view, changes)
    for t in flags:
        wide = t.releases and t.scope is Scope.SYS
        if wide or not marks.carried(t.step):
            left_out = unmet(view, t, data, "multimem-order")
            if left_out is not None:
                yield left_out
                return
            continue
        yield finding(
            "multimem-order",
            Severity.ERROR,
            view,
            t.index,
            f"the flag is set after multicast stores (line {view.place(data[0].index).ptx_line}) "
            "with no release of system scope in between: another GPU may see the flag and read old data",
            "set the flag with .release.sys, or execute fence.acq_rel.sys between the data and the flag",
            ", ".join(sorted(t.names)) or None,
        )
        return


def _is_flag(view: PtxView, protocols: Protocols, t: Touch) -> bool:
    """A word of the protocol: one counted up, or a constant, other than words that are data themselves."""
    if t.width > 1 or t.asynchronous or t.names & protocols.lamport:
        return False
    if protocols.is_setter(t):
        return True
    i = t.step.instruction
    if not t.multimem and t.strong and t.scope is Scope.SYS and i.opcode == "st":
        return protocols.is_word(t) and _announces(view, t)
    if not t.multimem or t.scope is not Scope.SYS or t.nbytes > 8:
        return False
    counts = i.opcode == "multimem" and "red" in i.modifiers and i.modifiers[-1] in ("u32", "s32", "u64")
    constant = t.step.values[-1].constant() is not None
    polled = bool(t.names & protocols.polled)
    return (counts or constant) and (polled or counts)


def _announces(view: PtxView, t: Touch) -> bool:
    """Whether a store to system scope, wherever it leads, writes a sequence number: a constant other than
    what empties a word (zero, a sentinel), or a parameter as it came."""
    number = t.step.values[-1].constant()
    if number is not None:
        return number not in _EMPTY
    name = getattr(t.step.instruction.operands[-1], "name", None)
    makers = [i for i in view.graph.instructions if name in {r.name for r in writes(i)}]
    return len(makers) == 1 and makers[0].opcode == "ld" and "param" in makers[0].modifiers


def _aliases(view: PtxView, multicast: list[Touch]) -> Iterator[Finding]:
    """The same buffer through two pointers, multicast and ordinary, with no alias fence in between."""
    changes: dict[int, Change] = {}
    for t in multicast:
        if t.writes:
            changes[t.index] = change(view, t.step, gives=1)
    for s in view.steps("fence"):
        if s.instruction.modifiers[:2] == ("proxy", "alias"):
            changes[s.index] = change(view, s, takes=1)
    marks = Marks(view, changes)
    names = {n for t in multicast for n in t.names}
    for t in touches(view):
        if t.multimem or not t.reads or not t.names & names or not t.names <= names:
            continue
        if t.index in Protocols.of(view).poll_indices or not marks.carried(t.step):
            continue
        if any(_pointers(m) == _pointers(t) for m in multicast):
            continue
        yield finding(
            "multimem-order",
            Severity.WARNING,
            view,
            t.index,
            f"{', '.join(sorted(t.names))} is read through its ordinary address after multimem stores to its "
            "multicast address: the two are aliases, and no fence.proxy.alias orders them",
            "put fence.proxy.alias between the two",
            ", ".join(sorted(t.names)),
        )
        return
