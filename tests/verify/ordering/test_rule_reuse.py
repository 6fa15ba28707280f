"""Buffers refilled while other warps read, straight on and round a loop."""

from __future__ import annotations

import pytest
from snippets import ptx

from workbench.isa.ptx import parse
from workbench.verify.ordering.rules.reuse import reused_buffers
from workbench.verify.ordering.static import contract_launch, kernel_forms
from workbench.verify.ordering.view import PtxView

MINE = "{ .reg .b16 h; cvt.u16.u32 h, %r1; shl.b32 %r11, %r1, 1; add.u32 %r12, %r8, %r11;\n"
MINE += "xor.b32 %r13, %r11, 192; add.u32 %r14, %r8, %r13;\n"
READ, FILL, BAR = "ld.shared.b16 h, [%r14];\n", "st.shared.b16 [%r12], h;\n", "bar.sync 0;\n"


def decide(body: str) -> list[str]:
    module = parse(ptx(MINE + body + "}\n"))
    forms = kernel_forms(module, None, None, "k", None)
    view = PtxView.of(module, module.kernels[0], contract_launch(forms, None), forms.layout)
    return [f.message for f in reused_buffers(view)]


def loop(body: str) -> str:
    return "mov.b32 %r15, 0;\nL:\n" + body + "add.u32 %r15, %r15, 1; setp.lt.u32 %p5, %r15, 4; @%p5 bra L;\n"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (FILL + BAR + READ + BAR + FILL, 0),
        (FILL + BAR + READ + FILL, 1),
        (FILL + BAR + READ.replace("%r14", "%r12") + FILL, 0),
        (FILL + BAR + READ + "bar.warp.sync -1;\n" + FILL, 1),
        (FILL + BAR + READ + "fence.acq_rel.gpu;\n" + FILL, 0),
        (loop(FILL + BAR + READ), 1),
        (loop(FILL + BAR + READ + BAR), 0),
        (loop(BAR + FILL + BAR + READ), 0),
    ],
)
def test_a_barrier_before_the_refill(body: str, count: int) -> None:
    assert len(decide(body)) == count


def test_stages_that_change_say_nothing_here() -> None:
    """Two stages and one barrier an iteration: what was read is refilled after the next barrier."""
    body = (
        "and.b32 %r16, %r15, 1; shl.b32 %r16, %r16, 7; add.u32 %r17, %r12, %r16; add.u32 %r18, %r14, %r16;\n"
    )
    body += FILL.replace("%r12", "%r17") + BAR + READ.replace("%r14", "%r18")
    assert decide(loop(body)) == []


def test_a_guard_that_depends_on_data_says_nothing_here() -> None:
    """Which threads store is not known, so that no two threads are certain to meet."""
    body = "ld.global.b32 %r19, [%rd5]; setp.gt.u32 %p6, %r19, 2; @!%p6 bra D;\n" + FILL + "D:\n"
    assert decide(FILL + BAR + READ + body) == []
