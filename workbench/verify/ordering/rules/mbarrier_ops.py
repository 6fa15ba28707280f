"""Operations on mbarriers as the rules read them: which barrier, how many arrivals, how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from workbench.isa.ptx.model import Instruction, Operand, Reg
from workbench.isa.values import Value
from workbench.verify.ordering.first import first_operands
from workbench.verify.ordering.rules.regions import Region, addresses, region, symbol_of, width
from workbench.verify.ordering.view import PtxView, Step


class Op(StrEnum):
    """What is done to an mbarrier."""

    INIT = "init"
    INVAL = "inval"
    ARRIVE = "arrive"
    EXPECT = "expect"
    """expect_tx without an arrival."""
    COPY = "copy"
    """A copy whose bytes are counted."""
    WAIT = "wait"
    OTHER = "other"
    """Something whose effect on the counts is not told here."""


@dataclass(frozen=True, eq=False)
class Use:
    """One instruction's use of one mbarrier, with values of the first CTA and iteration."""

    step: Step
    op: Op
    key: tuple[str, int] | None
    """Shared variable and byte offset of the barrier; None if not known or not one for all threads."""
    symbol: str | None
    threads: int
    """Threads that may execute it."""
    count: int | None = None
    """Arrivals a thread; for INIT the expected count; None if not known."""
    nbytes: int | None = 0
    """Bytes expected or copied, a thread; None if not known."""
    parity: int | None = None
    remote: bool = False
    """The barrier may be another CTA's."""
    target: Region | None = None
    """Where a copy writes."""

    @property
    def index(self) -> int:
        """Instruction index."""
        return self.step.index

    @property
    def line(self) -> int:
        """PTX line."""
        return self.step.instruction.line


def uses(view: PtxView) -> list[Use]:
    """All uses of mbarriers, in program order."""
    found = [s for s in view.steps("mbarrier", "cp", "st", "red", "tcgen05") if _touches(s.instruction)]
    first = first_operands(view, {s.index for s in found})
    mapped = _mapped(view)
    result: list[Use] = []
    for s in found:
        values = first.get(s.index)
        if values is not None:
            pairs = zip(s.values, values, strict=True)
            known = tuple(v if v.known is not None else Value(f.known, v.roots) for v, f in pairs)
            s = replace(s, values=known)
        result += _use(view, s, mapped)
    return sorted(result, key=lambda u: u.index)


def _touches(i: Instruction) -> bool:
    m = i.modifiers
    if i.opcode == "mbarrier":
        return True
    if i.opcode == "cp":
        return any(x.startswith("mbarrier") for x in m)
    if i.opcode in ("st", "red"):
        return m[:1] == ("async",)
    return m[:1] == ("commit",)


def _mapped(view: PtxView) -> frozenset[str]:
    """Registers that hold an address in another CTA's shared memory, or one derived from such."""
    found: set[str] = set()
    grew = True
    while grew:
        grew = False
        for i in view.graph.instructions:
            first = i.operands[0] if i.operands else None
            if not isinstance(first, Reg) or first.name in found:
                continue
            names = {o.name for o in i.operands[1:] if isinstance(o, Reg)}
            if i.opcode == "mapa" or (
                i.opcode in ("mov", "add", "sub", "cvt", "or", "and") and names & found
            ):
                found.add(first.name)
                grew = True
    return frozenset(found)


def through_mapa(view: PtxView, operand: object, mapped: frozenset[str]) -> bool:
    """Whether an address is made by mapa."""
    base = getattr(operand, "base", None)
    return isinstance(base, Reg) and base.name in mapped


def _use(view: PtxView, s: Step, mapped: frozenset[str]) -> Iterator[Use]:
    i, m = s.instruction, s.instruction.modifiers
    places = addresses(s)
    if not places:
        return
    at = 0
    if i.opcode == "cp" and "bulk" in m:
        at = 2 if len(places) > 2 else len(places) - 1
    elif i.opcode in ("st", "red"):
        at = len(places) - 1
    operand, value = places[at]
    remote = through_mapa(view, operand, mapped) or any("multicast" in x for x in m) or "cta_group::2" in m
    symbol = symbol_of(view, value)
    here = region(view, s, value, 8)
    key = None
    if here is not None and here.offsets is not None and (here.who != 0).any():
        places_of = np.unique(here.offsets[here.who != 0])
        key = (here.symbol, int(places_of[0])) if places_of.size == 1 else None
    base = Use(s, Op.OTHER, key, symbol, int((view.executing(s) != 0).sum()), remote=remote)
    if s.guarded:
        base = replace(base, remote=True)  # who executes it is not known
    yield _filled(view, base, places)


def _filled(view: PtxView, u: Use, places: list[tuple[Operand, Value]]) -> Use:
    s, m, opcode = u.step, u.step.instruction.modifiers, u.step.instruction.opcode
    if opcode == "tcgen05":
        return replace(u, op=Op.ARRIVE, count=1)
    if opcode == "st":
        return replace(u, op=Op.COPY, nbytes=width(s.instruction))
    if opcode == "red":
        return u
    if opcode == "cp":
        if "bulk" not in m:
            return replace(u, op=Op.ARRIVE, count=1) if "noinc" in m else u
        size = None
        if "tensor" in m:
            size = view.map_bytes(s, places[1][1]) if places[1:] else None
        else:
            at = s.instruction.operands.index(places[1][0]) + 1
            size = s.values[at].constant() if at < len(s.values) else None
        return replace(u, op=Op.COPY, nbytes=size, target=region(view, s, places[0][1], size or 16))
    what = m[0]
    last = s.values[-1].constant() if len(s.values) > 1 else None
    if what == "init":
        return replace(u, op=Op.INIT, count=last)
    if what == "inval":
        return replace(u, op=Op.INVAL)
    if what in ("try_wait", "test_wait"):
        n = 2
        parity = s.values[n].constant() if "parity" in m and len(s.values) > n else None
        return replace(u, op=Op.WAIT, parity=None if parity is None else parity & 1)
    if what == "expect_tx":
        return replace(u, op=Op.EXPECT, nbytes=last)
    if what == "arrive" and "expect_tx" in m:
        return replace(u, op=Op.ARRIVE, count=1, nbytes=last)
    if what == "arrive":
        brackets = next(n for n, o in enumerate(s.instruction.operands) if o is places[0][0])
        more = s.values[brackets + 1 :]
        return replace(u, op=Op.ARRIVE, count=more[0].constant() if more else 1)
    return u
