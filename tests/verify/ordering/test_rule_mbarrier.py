"""Phases of mbarriers that the code alone decides, and what is left to the dynamic rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import audit, contract, only, ptx

from workbench.isa.ptx import parse
from workbench.verify.ordering.rules.mbarrier import mbarrier_phases, remote_pairs
from workbench.verify.ordering.static import contract_launch, kernel_forms
from workbench.verify.ordering.view import PtxView

RULE = "mbarrier-phase"
INIT = "@%p1 mbarrier.init.shared.b64 [%r8+128], {0};\nbar.sync 0;\n"
WAIT = "{ .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r8+128], 0; @!q bra W; }\n"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8+128], {0};\n"
COPY = (
    "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd1], 64, [%r8+128];\n"
)
READ = "ld.shared.b32 %r11, [%r8];\n"


def said(text: str) -> list[tuple[int | None, str]]:
    """What the rule says of a kernel for any launch."""
    module = parse(text)
    forms = kernel_forms(module, None, None, "k", None)
    view = PtxView.of(module, module.kernels[0], contract_launch(forms, None), forms.layout)
    return [(f.ptx_line, f.message) for f in (*mbarrier_phases(view), *remote_pairs(view))]


def decide(body: str) -> list[str]:
    return [message for _, message in said(ptx(body))]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (INIT.format(1) + EXPECT.format(64) + COPY + WAIT + READ, ""),
        (INIT.format(1) + EXPECT.format(128) + COPY + WAIT + READ, "hang"),
        (INIT.format(1) + EXPECT.format(32) + COPY + WAIT + READ, "before all bytes have arrived"),
        (INIT.format(1) + EXPECT.format(128) + COPY + COPY.replace("[%r8]", "[%r8+64]") + WAIT + READ, ""),
        (INIT.format(1) + EXPECT.format(64) + COPY + WAIT.replace(", 0;", ", 1;") + READ, "passes at once"),
        (INIT.format(128) + "mbarrier.arrive.shared.b64 _, [%r8+128];\n" + WAIT, ""),
        (INIT.format(129) + "mbarrier.arrive.shared.b64 _, [%r8+128];\n" + WAIT, "hang"),
        (INIT.format(32) + "mbarrier.arrive.shared.b64 _, [%r8+128];\n" + WAIT, "before all of them"),
        (INIT.format(4) + "@%p3 mbarrier.arrive.shared.b64 _, [%r8+128];\n" + WAIT, ""),
        (INIT.format(1) + INIT.format(1) + EXPECT.format(64) + COPY + WAIT, "initialised again"),
        (
            "@%p1 mbarrier.init.shared.b64 [%r8+128], 128;\nmbarrier.arrive.shared.b64 _, [%r8+128];\n",
            "not yet",
        ),
    ],
)
def test_what_the_code_decides(body: str, part: str) -> None:
    found = decide(body)
    assert len(found) == bool(part), found
    assert all(part in message for message in found)


def test_an_empty_barrier_may_be_waited_for_with_parity_1() -> None:
    """The producer's first wait passes at once, which is meant: the stage is free."""
    free = WAIT.replace(", 0;", ", 1;").replace("W", "V").replace("[%r8+128]", "[%r8+136]")
    body = (
        "@%p1 mbarrier.init.shared.b64 [%r8+136], 128;\n"
        + INIT.format(1)
        + free
        + EXPECT.format(64)
        + COPY
        + WAIT
    )
    assert decide(body + READ + "mbarrier.arrive.shared.b64 _, [%r8+136];\n") == []


def test_who_arrives_is_not_known() -> None:
    """A predicate that depends on data leaves the count open."""
    body = (
        INIT.format(128) + "ld.global.b32 %r11, [%rd5]; setp.gt.u32 %p5, %r11, 3;\n"
        "@%p5 mbarrier.arrive.shared.b64 _, [%r8+128];\n" + WAIT
    )
    assert decide(body) == []


def test_a_loop_whose_parity_never_flips() -> None:
    loop = (
        INIT.format(1) + "mov.b32 %r12, 0; mov.b32 %r13, 0;\nL:\n" + EXPECT.format(64) + COPY
        + WAIT.replace(", 0;", ", {0};").replace("{ .reg", "{{ .reg").replace("bra W; }", "bra W; }}")
        + READ + "bar.sync 0; xor.b32 %r13, %r13, 1; add.u32 %r12, %r12, 1;\n"
        + "setp.lt.u32 %p5, %r12, 4; @%p5 bra L;\n"
    )  # fmt: skip
    assert ["every iteration" in m for m in decide(loop.format("0"))] == [True]
    assert decide(loop.format("%r13")) == []


def test_the_finding_stands_at_the_line(tmp_path: Path) -> None:
    body = INIT.format(1) + EXPECT.format(32) + COPY + WAIT + READ
    target = audit(tmp_path, ptx(body), contract(pdl=False))
    lines = ptx(body).splitlines()
    finding = only(target, RULE)
    assert "expect_tx" in lines[(finding.ptx_line or 0) - 1]
