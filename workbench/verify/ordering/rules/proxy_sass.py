"""Missing proxy fences on the SASS alone: FENCE.VIEW.ASYNC between STS and asynchronous reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from workbench.findings import Finding, Severity
from workbench.isa.sass.dataflow import span
from workbench.isa.sass.model import SassAddress, SassInstruction, SassReg
from workbench.isa.values import Lanes, Value
from workbench.verify.ordering.rules.proxy import FIX, RULE
from workbench.verify.ordering.rules.regions import Region
from workbench.verify.ordering.rules.stale import Touch, mark_of, stale, touch
from workbench.verify.ordering.view import SassStep, SassView, finding

_BRACKETS = re.compile(r"(\w*)\[([^\]]*)\]")
_STORES = ("STS", "STSM", "ATOMS", "LDGSTS")
_NAMES = {"STS": "a shared store", "LDGSTS": "cp.async", "ATOMS": "a shared atomic", "STSM": "stmatrix"}
_FILLS = ("UTMALDG", "STAS", "UBLKCP")
_COPIES = ("UBLKCP", "UBLKRED", "UTMASTG", "UTMAREDG")
_MATRICES = ("HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCMXQMMA", "UTCCP")
_ALL = "shared memory"
_WINDOW = np.uint64(0xFFFFFF)
"""Shared addresses have the CTA's rank in its cluster above bit 24."""


def proxy_fences_sass(view: SassView) -> Iterator[Finding]:
    """Shared memory written by STS and the like, then read by bulk copies or tensor cores, with no fence."""
    reads = list(_reads(view))
    if not reads:
        return
    writes = list(_writes(view))
    fences = [s for s in view.steps("FENCE") if s.instruction.modifiers[:3] == ("VIEW", "ASYNC", "S")]
    filled = any(s.instruction.opcode != "UBLKCP" or _loads(s.instruction) for s in view.steps(*_FILLS))
    arenas = frozenset((_ALL,)) if filled else frozenset()
    for h in stale(view, writes, reads, [mark_of(f, fence=True) for f in fences], arenas):
        at = view.graph.instructions[h.write.index].offset
        yield finding(
            RULE,
            Severity.ERROR,
            view,
            h.read.index,
            f"{h.read.what} may read stale shared memory: {h.write.what} at 0x{at:x} wrote those bytes "
            "through the generic proxy, and no FENCE.VIEW.ASYNC.S stands between it and this read in the "
            "asynchronous proxy",
            FIX,
        ).model_copy(update={"count": h.count})


def _loads(i: SassInstruction) -> bool:
    return [m for m in i.modifiers if m in ("S", "G")][:1] == ["S"]


def _writes(view: SassView) -> Iterator[Touch]:
    for s in view.steps(*_STORES):
        at = next((n for n, o in enumerate(s.instruction.operands) if isinstance(o, SassAddress)), None)
        if at is None:
            continue
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        size = next((sizes[m] for m in reversed(s.instruction.modifiers) if m in sizes), 4)
        if s.instruction.opcode == "STSM":
            size = 16
        yield touch(s, (_region(view, s, s.values[at], size),), _NAMES[s.instruction.opcode])


def _region(view: SassView, s: SassStep, value: Value, size: int) -> Region:
    offsets = None if value.known is None else value.known & _WINDOW
    return Region(_ALL, offsets, size, _who(view, s))


def _who(view: SassView, s: SassStep) -> Lanes:
    n = view.analysis.program.threads.count
    return np.ones(n, np.uint64) if s.guard is None else s.guard


def _reads(view: SassView) -> Iterator[Touch]:
    for s in view.steps(*_COPIES):
        i = s.instruction
        found = [(o, v) for o, v in zip(i.operands, s.values, strict=True) if isinstance(o, SassAddress)]
        if i.opcode == "UBLKCP" and _loads(i):
            continue
        tensor = i.opcode.startswith("UTMA")
        at = 0 if tensor else 1
        if at >= len(found):
            continue
        size = 16
        if not tensor:
            pairs = zip(i.operands, s.values, strict=True)
            blocks = next((v.constant() for o, v in pairs if isinstance(o, SassReg)), None)
            size = 16 * (blocks & 0xFFFF) if blocks else 16
        what = "a tensor copy (UTMA)" if tensor else "a bulk copy (UBLKCP)"
        yield touch(s, (_region(view, s, found[at][1], size),), what)
    yield from _matrix_reads(view)


def _matrix_reads(view: SassView) -> Iterator[Touch]:
    """Matrices in shared memory, by their descriptors: address / 16 in bits 0 to 13 of the low word."""
    wanted = [n for n, i in enumerate(view.graph.instructions) if i.opcode in _MATRICES]
    if not wanted:
        return
    for b in sorted({view.graph.block_of[n] for n in wanted}):
        for at, state in view.values.walk(b):
            i = view.graph.instructions[at]
            if i.opcode not in _MATRICES:
                continue
            guard = None if i.predicate is None else view.values.predicate(i.predicate, i.negated, state)
            s = SassStep(at, i, guard, i.predicate is not None and guard is None, ())
            regions = []
            for kind, name in _BRACKETS.findall(i.text):
                if kind != "gdesc":
                    continue
                words = span(name.split("+")[0], 3)
                pairs = (0, 2) if i.opcode.endswith("GMMA") else (0,)
                for n in pairs:
                    value = state.get(words[n]) if n < len(words) else None
                    known = None if value is None else value.known
                    offsets = None if known is None else (known & np.uint64(0x3FFF)) << np.uint64(4)
                    regions.append(Region(_ALL, offsets, 16, _who(view, s)))
            if regions:
                what = "wgmma" if i.opcode.endswith("GMMA") else i.opcode
                yield touch(s, tuple(regions), what)
