"""Phases of mbarriers, as far as the code alone decides them (ISA 9.7.13.15).

Bytes expected against bytes copied, arrivals against the count, the parity of the first wait and of waits in
loops, re-initialisation, and use by threads that nothing orders after the initialisation. A barrier on which
something is done that is not understood is left to the dynamic rules.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Instruction
from workbench.verify.ordering.paths import MEETINGS, after, loops_around
from workbench.verify.ordering.program import Kind
from workbench.verify.ordering.rules.mbarrier_ops import Op, Use, uses
from workbench.verify.ordering.rules.regions import addresses, is_shared, overlaps, region, width
from workbench.verify.ordering.sure import SurePasses
from workbench.verify.ordering.view import PtxView, finding

RULE = "mbarrier-phase"
_SPIN = frozenset(("mbarrier", "bra", "setp", "selp", "nanosleep", "mov", "and", "or", "not", "add"))


def mbarrier_phases(view: PtxView) -> Iterator[Finding]:
    """All cases of the rule on the PTX."""
    found = uses(view)
    if not found:
        return
    by_key: dict[tuple[str, int], list[Use]] = {}
    for u in found:
        if u.key is not None:
            by_key.setdefault(u.key, []).append(u)
    loose = [u for u in found if u.key is None]
    order = _Order(view)
    for key, mine in by_key.items():
        others = [u for u in loose if u.symbol in (None, key[0])]
        yield from _bytes(view, mine, others, order)
        yield from _arrivals(view, mine, others, order)
        yield from _first_parity(view, mine, order)
        yield from _loop_parity(view, mine)
        yield from _initialised(view, mine, order)


def _error(view: PtxView, u: Use, message: str, fix: str) -> Finding:
    return finding(RULE, Severity.ERROR, view, u.index, message, fix)


class _Order:
    """Which blocks every run of a thread passes, on the graph without back edges."""

    def __init__(self, view: PtxView) -> None:
        graph = view.graph
        self.passes = SurePasses(view)
        self.view = view
        self.looped = frozenset(
            b for header, body in graph.loops.items() if not _spins(view, body) for b in body
        )

    def in_loop(self, u: Use) -> bool:
        """Whether it stands in a loop that is more than a spin."""
        return self.view.graph.block_of[u.index] in self.looped

    def sure(self, u: Use) -> bool:
        """Whether every thread that may execute it does so once, in the first pass."""
        return self.passes.all_of(u.step)

    def together(self, a: Use, b: Use) -> bool:
        """Whether both stand in one block, so that one is executed as often as the other."""
        return self.view.graph.block_of[a.index] == self.view.graph.block_of[b.index]


def _spins(view: PtxView, body: frozenset[int]) -> bool:
    blocks = [view.graph.blocks[b] for b in body]
    code = [i for b in blocks for i in view.graph.instructions[b.start : b.end]]
    return all(i.opcode in _SPIN and i.modifiers[:1] not in (("arrive",), ("init",)) for i in code)


def _bytes(view: PtxView, mine: list[Use], others: list[Use], order: _Order) -> Iterator[Finding]:
    """expect_tx against the bytes of the copies that signal the barrier, in one pass through the code."""
    expects = [u for u in mine if u.op in (Op.ARRIVE, Op.EXPECT) and u.nbytes != 0]
    copies = [u for u in mine if u.op is Op.COPY]
    unclear = [
        u for u in others if u.op in (Op.COPY, Op.EXPECT, Op.OTHER) or (u.op is Op.ARRIVE and u.nbytes != 0)
    ]
    if not expects or not copies or unclear or any(u.op is Op.OTHER for u in mine):
        return
    parts = [*expects, *copies]
    if any(u.nbytes is None or u.remote for u in parts):
        return
    anchor = expects[0]
    if not all(order.sure(u) for u in parts) and not all(order.together(anchor, u) for u in parts):
        return
    expected = sum((u.nbytes or 0) * u.threads for u in expects)
    copied = sum((u.nbytes or 0) * u.threads for u in copies)
    if expected == copied:
        return
    lines = ", ".join(str(u.line) for u in copies[:4])
    late = (
        "its phase never completes and the waiting threads hang"
        if expected > copied
        else "its phase can complete, and the waiting threads go on, before all bytes have arrived"
    )
    yield _error(
        view,
        anchor,
        f"expect_tx announces {expected} bytes, but the copies that signal this mbarrier (line {lines}) "
        f"bring {copied}: {late}",
        "let expect_tx announce exactly the bytes of all copies of the phase",
    )


def _arrivals(view: PtxView, mine: list[Use], others: list[Use], order: _Order) -> Iterator[Finding]:
    """The count of init against the threads that arrive, where all is done once."""
    inits = [u for u in mine if u.op is Op.INIT]
    arrivals = [u for u in mine if u.op is Op.ARRIVE]
    waits = [u for u in mine if u.op is Op.WAIT]
    unclear = [u for u in others if u.op in (Op.ARRIVE, Op.OTHER, Op.INIT)]
    if len(inits) != 1 or not arrivals or not waits or unclear or any(u.op is Op.OTHER for u in mine):
        return
    wanted = inits[0].count
    if wanted is None or wanted < 1 or not all(order.sure(u) and not u.remote for u in (*arrivals, *inits)):
        return
    if any(u.count is None for u in arrivals) or any(order.in_loop(u) for u in (*arrivals, *waits, *inits)):
        return
    made = sum((u.count or 0) * u.threads for u in arrivals)
    if made < wanted:
        message = (
            f"the mbarrier is initialised for {wanted} arrivals a phase, but only {made} are made (line "
            f"{arrivals[0].line}): the phase never completes, and the threads waiting in line "
            f"{waits[0].line} hang"
        )
    elif made % wanted or (len(arrivals) == 1 and made > wanted):
        message = (
            f"the mbarrier is initialised for {wanted} arrivals a phase, but {made} are made (line "
            f"{arrivals[0].line}): its phase completes before all of them have arrived, and the wait in line "
            f"{waits[0].line} does not order what the late ones did"
        )
    else:
        return
    yield _error(
        view,
        inits[0],
        message,
        f"initialise it with the number of arrivals ({made}), or let so many threads arrive",
    )


def _first_parity(view: PtxView, mine: list[Use], order: _Order) -> Iterator[Finding]:
    """A wait for parity 1 of a new barrier passes at once: wrong where it guards the first copy's bytes."""
    copies = [u for u in mine if u.op is Op.COPY and u.target is not None and not u.remote]
    waits = [u for u in mine if u.op is Op.WAIT]
    if not copies or not waits or any(w.parity is None for w in waits):
        return
    for r in view.steps("ld", "ldmatrix"):
        found = addresses(r)
        if not found or not is_shared(view, found[0][1], r.instruction):
            continue
        here = region(view, r, found[0][1], width(r.instruction))
        copy = next(
            (c for c in copies if here is not None and c.target is not None and overlaps(c.target, here)),
            None,
        )
        if copy is None:
            continue
        before = [w for w in waits if r.index in after(view.graph, w.index)]
        if before and all(w.parity == 1 for w in before):
            yield _error(
                view,
                before[0],
                f"the wait for parity 1 of a newly initialised mbarrier passes at once, so that line "
                f"{r.instruction.line} reads shared memory before the copy in line {copy.line} has written "
                "it",
                "wait for parity 0 first: the phase in which the first copy completes",
            )
            return


def _loop_parity(view: PtxView, mine: list[Use]) -> Iterator[Finding]:
    """A wait for one constant parity in a loop that arms the barrier again and again."""
    graph = view.graph
    turning = [u for u in mine if u.op in (Op.ARRIVE, Op.COPY) and _real_loops(view, u.index)]
    if not turning or any(u.op is Op.INIT and _real_loops(view, u.index) for u in mine):
        return
    for w in (u for u in mine if u.op is Op.WAIT):
        step = view.step(w.index)
        loops = _real_loops(view, w.index)
        if step is None or not loops or len(step.values) < 3 or "parity" not in step.instruction.modifiers:
            continue
        if not _every_time(view, w.index, loops[0]):
            continue  # a wait that some iterations go round may be for one phase only
        parity, place = step.values[2].constant(), addresses(step)[0][1].constant()
        if parity is None or place is None:
            continue
        armed = [u for u in turning if _always_at(view, u, place)]
        inside = [u for u in mine if u.op is Op.WAIT and graph.block_of[u.index] in loops[0] and u is not w]
        if not armed or any(u.parity != w.parity for u in inside):
            continue
        yield _error(
            view,
            w,
            f"this wait is for parity {parity & 1} in every iteration, while the mbarrier is used again in "
            f"each (line {armed[0].line}): every other time it passes at once or never",
            "flip the parity with every phase (phase ^= 1)",
        )
        return


def _every_time(view: PtxView, index: int, body: frozenset[int]) -> bool:
    """Whether each iteration of a loop passes an instruction."""
    graph = view.graph
    block = graph.block_of[index]
    ends = [b for b, header in graph.back_edges if b in body and header in body]
    return all(graph.dominates(block, b) for b in ends)


def _always_at(view: PtxView, u: Use, place: int) -> bool:
    step = view.step(u.index)
    if step is None:
        return False
    return any(v.constant() == place for _, v in addresses(step))


def _real_loops(view: PtxView, index: int) -> list[frozenset[int]]:
    return [body for body in loops_around(view.graph, index) if not _spins(view, body)]


def _initialised(view: PtxView, mine: list[Use], order: _Order) -> Iterator[Finding]:
    """Initialised twice without inval, or used by threads that nothing orders after the initialisation."""
    graph = view.graph
    inits = [u for u in mine if u.op is Op.INIT]
    invals = {u.index for u in mine if u.op is Op.INVAL}
    for u in inits:
        reached = after(graph, u.index, lambda at: at in invals)
        again = next((x for x in inits if x.index in reached and (x is not u or _fixed(view, x))), None)
        if again is not None and view.executing(u.step).any():
            yield _error(
                view,
                again,
                f"the mbarrier initialised in line {u.line} is initialised again without mbarrier.inval "
                "between, which is undefined while it is a valid mbarrier",
                "execute mbarrier.inval first, or initialise it once and go on counting phases",
            )
            return
    if len(inits) != 1:
        return
    init = inits[0]
    meetings = {e.index for e in view.analysis.program.all_events(*MEETINGS, Kind.ACQUIRE)}
    meetings -= {u.index for u in mine}
    bare = after(graph, init.index, lambda at: at in meetings)
    started = view.executing(init.step) != 0
    for u in mine:
        if u.op is Op.INIT or u.index not in bare or u.remote or order.in_loop(init):
            continue
        if any(u.index in after(graph, m) for m in meetings if m in after(graph, init.index)):
            continue
        if ((view.executing(u.step) != 0) & ~started).any():
            yield _error(
                view,
                u,
                f"threads that did not initialise the mbarrier (line {init.line}) use it with no barrier "
                "between: they may find it not yet initialised",
                "put a barrier (bar.sync; barrier.cluster for other CTAs) between mbarrier.init and its use",
            )
            return


def _fixed(view: PtxView, u: Use) -> bool:
    """Whether an initialisation in a loop is of the same barrier each time."""
    step = view.step(u.index)
    return step is not None and addresses(step)[0][1].constant() is not None


def remote_pairs(view: PtxView) -> Iterator[Finding]:
    """st.async whose data and mbarrier are in different CTAs (ISA 9.7.9.12: they must be in the same one)."""
    ranks: dict[str, tuple[object, int | None]] = {}
    for s in view.steps("mapa"):
        i: Instruction = s.instruction
        name = getattr(i.operands[0], "name", None)
        if name is not None and len(i.operands) == 3:
            ranks[name] = (i.operands[2], s.values[2].constant())
    for s in view.steps("st", "red"):
        if s.instruction.modifiers[:1] != ("async",):
            continue
        places = [getattr(getattr(o, "base", None), "name", None) for o, _ in addresses(s)]
        if len(places) < 2 or places[0] is None or places[-1] is None:
            continue
        data, barrier = ranks.get(places[0]), ranks.get(places[-1])
        if data is None or barrier is None or data[0] == barrier[0]:
            continue
        if data[1] is not None and barrier[1] is not None and data[1] != barrier[1]:
            yield finding(
                RULE,
                Severity.ERROR,
                view,
                s.index,
                f"st.async writes data in CTA {data[1]} of the cluster but signals an mbarrier in CTA "
                f"{barrier[1]}; both must be in the same CTA, so the owner of the data is never told",
                "map the data and the mbarrier to the same CTA rank",
            )
