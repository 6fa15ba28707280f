"""Groups of asynchronous copies: waits that are too loose, missing barriers, bulk groups."""

from __future__ import annotations

import pytest
from snippets import ptx

from workbench.isa.ptx import parse
from workbench.verify.ordering.rules.copies import copy_groups
from workbench.verify.ordering.static import contract_launch, kernel_forms
from workbench.verify.ordering.view import PtxView

MINE = "and.b32 %r11, %r1, 31; shl.b32 %r11, %r11, 2; add.u32 %r12, %r8, %r11;\n"
COPY = "cp.async.ca.shared.global [%r12], [%rd5], 4;\n"
NEXT = "cp.async.ca.shared.global [%r12+128], [%rd6], 4;\n"
COMMIT, BAR = "cp.async.commit_group;\n", "bar.sync 0;\n"
READ, OTHER = "ld.shared.b32 %r13, [%r12];\n", "ld.shared.b32 %r13, [%r8+64];\n"


def decide(body: str) -> list[str]:
    module = parse(ptx(MINE + body))
    forms = kernel_forms(module, None, None, "k", None)
    view = PtxView.of(module, module.kernels[0], contract_launch(forms, None), forms.layout)
    return [f.message for f in copy_groups(view)]


def wait(n: int) -> str:
    return f"cp.async.wait_group {n};\n"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (COPY + COMMIT + wait(0) + READ.replace("%r12]", "%r12+512]"), ""),
        (COPY + COMMIT + READ, "nothing waits"),
        (COPY + COMMIT + wait(1) + BAR + READ, "lets it be pending"),
        (COPY + wait(0) + BAR + READ, "lets it be pending"),
        (COPY + "cp.async.wait_all;\n" + BAR + READ, ""),
        (COPY + COMMIT + NEXT + COMMIT + wait(1) + BAR + READ, ""),
        (COPY + COMMIT + NEXT + COMMIT + wait(1) + BAR + READ.replace("%r12]", "%r12+128]"), "pending"),
        (COPY + COMMIT + COMMIT + wait(1) + BAR + READ, ""),
        (COPY + COMMIT + wait(0) + OTHER, "another thread"),
        (COPY + COMMIT + BAR + wait(0) + OTHER, "another thread"),
        (COPY + COMMIT + wait(0) + BAR + OTHER, ""),
    ],
)
def test_groups_are_counted(body: str, part: str) -> None:
    found = decide(body)
    assert len(found) == bool(part), found
    assert all(part in message for message in found)


def test_an_unknown_number_of_pending_groups_says_nothing() -> None:
    some = "setp.lt.u32 %p5, %r9, 3; @%p5 bra S;\n" + COMMIT + "S:\n"
    assert decide(COPY + COMMIT + some + wait(1) + BAR + READ) == []


def test_an_mbarrier_may_tell_instead() -> None:
    told = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r8+248];\n"
    poll = "{ .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r8+248], 0; @!q bra W; }\n"
    assert decide(COPY + told + poll + READ) == []


TO_GLOBAL = "cp.async.bulk.global.shared::cta.bulk_group [%rd5], [%r8], 64;\n"
BULK = TO_GLOBAL + "cp.async.bulk.commit_group;\n"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (BULK, "nothing waits"),
        (BULK + "cp.async.bulk.wait_group 0;\n", ""),
        (BULK + "cp.async.bulk.wait_group.read 0;\n", ""),
        (BULK + "cp.async.bulk.wait_group.read 1;\n", "lets its group be pending"),
        (BULK + BULK + "cp.async.bulk.wait_group.read 1;\n", "lets its group be pending"),
        (f"$L: {BULK} cp.async.bulk.wait_group.read 1; @%p1 bra $L; cp.async.bulk.wait_group.read 0;\n", ""),
        (f"$L: {BULK} cp.async.bulk.wait_group.read 1; @%p1 bra $L;\n", "lets its group be pending"),
        (f"@%p1 bra $S; {BULK} $S: @%p1 bra $E; cp.async.bulk.wait_group.read 0; $E: mov.u32 %r13, 0;\n", ""),
    ],
)
def test_a_bulk_store_is_over_before_its_thread_ends(body: str, part: str) -> None:
    found = decide(body)
    assert len(found) == bool(part) and all(part in m for m in found), found
