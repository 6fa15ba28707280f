"""Which lane `elect.sync` elects: one of its member mask, nobody promises which (ISA 9.7.13.14).

It is the same lane each time for the same mask. A kernel is therefore audited once for each lane that may
make a difference: lane 0, the highest one, and, where the kernel treats both of them apart from the others,
one of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from workbench.findings import Finding
from workbench.isa.values import Lanes
from workbench.verify.ordering.program import Program
from workbench.verify.ordering.view import PtxView, SassView

LOWEST, HIGHEST = 0, 31


def elects(view: PtxView | SassView | None) -> bool:
    """Whether the kernel elects a lane at all."""
    return view is not None and any(i.opcode in ("elect", "ELECT") for i in view.graph.instructions)


def whole_warps(view: PtxView) -> bool:
    """Whether every election of the PTX is known to be among all lanes of the warp."""
    masks = [s.values[1].constant() if len(s.values) > 1 else None for s in view.steps("elect")]
    return all(m is not None and m & 0xFFFFFFFF == 0xFFFFFFFF for m in masks)


def lane_apart(lowest: Sequence[Program], highest: Sequence[Program]) -> int | None:
    """A lane that the kernel treats like neither the lowest nor the highest, if there is one.

    Two lanes are alike if, apart from who is elected, they take the same branches and pass the same guards.

    Args:
        lowest: the kernel's forms where lane 0 is elected.
        highest: the same forms where lane 31 is elected.
    """
    group = list(range(32))
    for programs in (lowest, highest):
        seen: dict[bytes, int] = {}
        for lane, what in enumerate(_taken(programs)):
            first = seen.setdefault(what, lane)
            if group[lane] != group[first]:
                old, new = group[lane], group[first]
                group = [new if g == old else g for g in group]
    rest = [lane for lane in range(32) if group[lane] not in (group[LOWEST], group[HIGHEST])]
    return rest[len(rest) // 2] if rest else None


def _taken(programs: Iterable[Program]) -> list[bytes]:
    """For each lane what its threads do at branches and guards, warp by warp."""
    rows: list[Lanes] = []
    for program in programs:
        masks = [*program.edges.values(), *program.leaving.values()]
        masks += [e.guard for block in program.events for e in block if e.guard is not None]
        n = program.threads.count
        for m in {(m != 0).tobytes(): m for m in masks}.values():
            padded = np.zeros(-(-n // 32) * 32, np.uint64)
            padded[:n] = m != 0
            rows += list(padded.reshape(-1, 32))
    if not rows:
        return [b""] * 32
    table = np.stack(rows)
    return [table[:, lane].tobytes() for lane in range(32)]


def also_found(known: Sequence[Finding], found: Sequence[Finding], lane: int) -> list[Finding]:
    """What an audit with another elected lane found besides what is known, each saying which lane that is."""
    places = {_place(f) for f in known}
    why = f"where elect.sync elects lane {lane}: which lane of its mask it elects is not promised"
    more = [f for f in found if _place(f) not in places]
    return [f.model_copy(update={"message": f"{f.message} ({why})"}) for f in more]


def _place(f: Finding) -> tuple[object, ...]:
    return f.rule, f.severity, f.ptx_line, f.sass_offset, f.buffer
