"""Marks that threads carry: through fences, barriers, roles and loops."""

from __future__ import annotations

import pytest
from snippets import ptx

from workbench.isa.ptx import parse
from workbench.verify.ordering.binding import Launch, Layout
from workbench.verify.ordering.paths import Change, Marks, after, change, executing, loops_around, passes
from workbench.verify.ordering.view import PtxView


def view_of(body: str) -> PtxView:
    module = parse(ptx(body))
    kernel = module.kernels[0]
    layout = Layout(tuple((p.offset, p.size) for p in kernel.params))
    return PtxView.of(module, kernel, Launch("k", (128, 1, 1), {}, {}, None, frozenset()), layout)


def carried(body: str) -> int:
    """Threads that come to the last shared load with the mark of a shared store and no fence after it."""
    view = view_of(body)
    changes: dict[int, Change] = {}
    for step in view.steps("st", "fence"):
        if step.instruction.opcode == "st" and "shared" in step.instruction.modifiers:
            changes[step.index] = change(view, step, gives=1)
        elif step.instruction.opcode == "fence":
            changes[step.index] = change(view, step, takes=1)
    load = [s for s in view.steps("ld") if "shared" in s.instruction.modifiers][-1]
    marks = Marks(view, changes)
    who = executing(view, load)
    assert bool(marks.carried(load)) == bool(marks.before(load.index)[who].any())
    return int((marks.before(load.index)[who] != 0).sum())


ST, LD, FENCE, BAR = (
    "st.shared.b32 [%r8], %r1;",
    "ld.shared.b32 %r10, [%r8];",
    "fence.proxy.async;",
    "bar.sync 0;",
)


@pytest.mark.parametrize(
    ("body", "threads"),
    [
        (ST + LD, 128),
        (ST + FENCE + LD, 0),
        ("@%p1 " + ST + LD, 1),
        ("@%p1 " + ST + BAR + LD, 128),
        (ST + BAR + "@%p1 " + LD, 1),
        (ST + FENCE + BAR + LD, 0),
        (ST + "@%p1 " + FENCE + BAR + LD, 128),
        (ST + BAR + FENCE + LD, 0),
        (ST + BAR + "@%p1 " + FENCE + "@%p1 " + LD, 0),
        ("@%p3 " + ST + "bar.warp.sync -1;" + LD, 128),
        ("@%p1 " + ST + "bar.warp.sync -1;" + LD, 32),
        ("@%p1 " + ST + "bar.warp.sync 3;" + LD, 2),
        ("setp.lt.u32 %p5, %r9, 7; " + ST + "@%p5 " + FENCE + LD, 128),
        ("setp.lt.u32 %p5, %r9, 7; @%p5 " + ST + LD, 128),
        ("L:\n" + LD + ST + "add.u32 %r9, %r9, -1; setp.ne.u32 %p5, %r9, 0; @%p5 bra L;", 128),
        ("@%p2 bra A; bar.sync 1, 64; " + LD + " bra E;\nA:\n" + ST + "bar.arrive 1, 64;\nE:\n", 96),
        ("@%p2 bra A; bar.sync 1, 64; " + LD + " bra E;\nA:\n" + ST + "bar.arrive 2, 64;\nE:\n", 0),
        (BAR + LD.replace("r10", "r11") + ST + BAR + "bar.sync 1;" + BAR + LD, 128),
        (LD + ST + BAR, 0),
        (
            "@%p2 bra A;\nW:\nmbarrier.try_wait.parity.shared.b64 %p6, [%r8+128], 0; @!%p6 bra W; "
            + LD
            + " bra E;\nA:\n"
            + ST
            + "mbarrier.arrive.shared.b64 _, [%r8+128];\nE:\n",
            96,
        ),
        (ST + "barrier.cluster.arrive; barrier.cluster.wait;" + LD, 128),
    ],
)
def test_marks(body: str, threads: int) -> None:
    assert carried(body) == threads


def test_a_barrier_earlier_in_the_program_does_not_hand_back() -> None:
    view = view_of(BAR + LD + ST + BAR)
    changes = {s.index: change(view, s, gives=2) for s in view.steps("st")}
    (load,) = [s for s in view.steps("ld") if "shared" in s.instruction.modifiers]
    assert Marks(view, changes).carried(load) == 0
    assert (Marks(view, changes).at_end() == 2).all()
    assert (Marks(view, {}, start=4).at_end() == 4).all()


def test_paths_and_loops() -> None:
    view = view_of(
        "L:\nld.volatile.global.u32 %r10, [%rd5]; setp.eq.u32 %p5, %r10, 0; @%p5 bra L; "
        "@%p1 bra S; fence.acq_rel.gpu;\nS:\n" + LD
    )
    (poll,) = [s for s in view.steps("ld") if "volatile" in s.instruction.modifiers]
    (load,) = [s for s in view.steps("ld") if "shared" in s.instruction.modifiers]
    (fence,) = view.steps("fence")
    assert {poll.index, load.index, fence.index} <= after(view.graph, poll.index)
    assert not passes(view.graph, poll.index, load.index, lambda at: at == fence.index)
    assert passes(view.graph, poll.index, load.index, lambda at: at in (poll.index + 1, fence.index))
    assert len(loops_around(view.graph, poll.index)) == 1
    assert loops_around(view.graph, load.index) == []
