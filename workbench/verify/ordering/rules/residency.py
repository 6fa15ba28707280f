"""Spins on other CTAs that may not be resident (`not-co-resident`).

CTAs of an ordinary launch start when there is room. A CTA that waits for one that has not started holds its
place; when all places are held so, nothing goes on. Only a grid that fits at once may wait so.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.findings import Finding, Severity
from workbench.isa.sass.dataflow import reads, writes
from workbench.verify.ordering.memory import Touch
from workbench.verify.ordering.protocol import Protocols
from workbench.verify.ordering.view import PtxView, SassView, finding

MULTIPROCESSORS = 160
"""A GB300 has at most so many."""
_THREADS, _CTAS, _REGISTERS, _SHARED = 2048, 32, 65536, 228 * 1024
_RESERVED = 1024
"""Shared memory a CTA takes beside its own, bytes."""


def co_residence(view: PtxView) -> Iterator[Finding]:
    """Decide on threads and shared memory; the SASS adds registers."""
    yield from _rule(view, None)


def sass_co_residence(view: SassView) -> Iterator[Finding]:
    """With the registers that the SASS uses."""
    if view.ptx is None or not any(True for _ in _rule(view.ptx, None)):
        yield from _rule(view, _registers(view))


def _registers(view: SassView) -> int:
    names = {n for i in view.graph.instructions for n in (*reads(i), *writes(i))}
    numbers = [int(n[1:]) for n in names if n[:1] == "R" and n[1:].isdigit()]
    return max(numbers, default=0) + 1


def resident(view: PtxView | SassView, registers: int | None) -> int:
    """CTAs that can be resident at once on the whole device, at most."""
    threads = view.launch.block[0] * view.launch.block[1] * view.launch.block[2]
    warps = -(-threads // 32)
    fit = [_CTAS, _THREADS // (32 * warps)]
    shared = view.launch.smem_bytes + _static_shared(view)
    if shared:
        fit.append(_SHARED // (-(-(shared + _RESERVED) // 128) * 128))
    if registers is not None:
        fit.append(_REGISTERS // (-(-registers // 8) * 8 * 32 * warps))
    return MULTIPROCESSORS * max(min(fit), 0)


def _static_shared(view: PtxView | SassView) -> int:
    if isinstance(view, SassView):
        return view.static_smem
    widths = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4}
    return sum(
        (v.elements or 0) * widths.get(v.type, 8)
        for v in (*view.module.variables, *view.kernel.variables)
        if v.space == "shared" and not v.extern
    )


def _rule(view: PtxView | SassView, registers: int | None) -> Iterator[Finding]:
    grid = view.launch.grid
    if grid is None:
        return
    ctas = grid[0] * grid[1] * grid[2]
    protocols = Protocols.of(view)
    if not protocols.flag_polls and not view.launch.cooperative:
        return
    room = resident(view, registers)
    if ctas <= room:
        return
    if view.launch.cooperative:
        yield finding(
            "not-co-resident",
            Severity.ERROR,
            view,
            0,
            f"the grid is launched cooperatively with {ctas} CTAs, of which at most {room} can be resident "
            "at once: the launch fails",
            f"launch at most {room} CTAs and loop over the work, or give each less shared memory, fewer "
            "threads or fewer registers",
        )
        return
    for p in protocols.flag_polls:
        if not p.loop or not _set_here(protocols, p.touch) or not _everybody(view, p.touch):
            continue
        yield finding(
            "not-co-resident",
            Severity.ERROR,
            view,
            p.touch.index,
            f"every CTA may spin here on what others write to {', '.join(sorted(p.touch.names))}, but only "
            f"{room} of the {ctas} CTAs can be resident at once: those may hold the places of the ones "
            "that they wait for, and the kernel hangs",
            f"launch at most {room} CTAs and loop over the work, or launch cooperatively",
            ", ".join(sorted(p.touch.names)),
        )
        return


def _set_here(protocols: Protocols, poll: Touch) -> bool:
    """Whether this grid itself writes what is polled."""
    return any(t.writes and t.names & poll.names and t.index != poll.index for t in protocols.global_touches)


def _everybody(view: PtxView | SassView, poll: Touch) -> bool:
    """Whether a CTA comes to the poll whatever its number: no branch above it hangs on what is not known."""
    graph, program = view.graph, view.analysis.program
    b: int | None = graph.block_of[poll.index]
    while b is not None:
        above = graph.immediate_dominators[b]
        if above is None:
            return True
        following = graph.successors[above]
        known = len(following) < 2 or any((above, s) in program.edges for s in following)
        if not known and not _leads_on(view, above, b):
            return False
        b = above
    return True


def _leads_on(view: PtxView | SassView, above: int, b: int) -> bool:
    """Whether a branch leads to a block all the same, or only looks at the flag once before."""
    graph = view.graph
    if graph.post_dominates(b, above):
        return True
    polls = Protocols.of(view).flag_polls
    return any(graph.block_of[p.touch.index] == above for p in polls)
