"""Rule tmem-lifetime on small kernels: what one instruction says, and ways out of a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import contract, ptx
from static_views import ptx_view

from workbench.findings import Finding
from workbench.verify.ordering.rules.tmem import tmem_lifetime

ALLOC = "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [sm], 64;\n"
MEET = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;\n"
SLOT = "ld.shared.b32 %r11, [sm];\n"
USE = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r12}, [%r11]; tcgen05.wait::ld.sync.aligned;\n"
FREE = "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 64;\n"
LATER = "ld.global.u32 %r14, [%rd1]; setp.gt.u32 %p5, %r14, 3;"
"""A condition that the kernel reads."""
RELINQUISH = "@%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"


def found(folder: Path, body: str) -> list[Finding]:
    return list(tmem_lifetime(ptx_view(folder, ptx(body), contract(pdl=False))))


QUIET = {
    "the whole life": ALLOC + RELINQUISH + MEET + SLOT + USE + MEET + FREE,
    "one warp alone": "@!%p2 ret;\n" + (ALLOC + SLOT + USE + FREE).replace("@%p2 ", ""),
    "twice in a row": (ALLOC + MEET + SLOT + USE + MEET + FREE) * 2,
    "another warp frees": (
        ALLOC + MEET + SLOT + USE + MEET + "setp.eq.u32 %p5, %r2, 3;\n" + FREE.replace("%p2", "%p5")
    ),
    "allocated and freed on one condition": (
        f"{LATER} @!%p5 bra E;\n{ALLOC}{MEET}{SLOT}{USE}{MEET}E: @!%p5 bra F;\n{FREE}F:\n"
    ),
    "trap on the way": f"{ALLOC}{MEET}{LATER} @!%p5 bra G; trap;\nG:\n{SLOT}{USE}{MEET}{FREE}",
    "columns in a register": (
        "mov.u32 %r13, 64;\n" + (ALLOC + MEET + SLOT + USE + MEET + FREE).replace("64;", "%r13;")
    ),
}
WRONG = {
    "cta groups": (
        ALLOC + MEET + SLOT + USE + MEET + FREE.replace("group::1", "group::2"),
        "different CTA groups",
    ),
    "elected lane": (ALLOC.replace("%p2", "%p1") + MEET + SLOT + USE + MEET + FREE, "all 32 lanes"),
    "every warp frees": (ALLOC + MEET + SLOT + USE + MEET + FREE.replace("@%p2 ", ""), "each of them frees"),
    "1024 columns": ((ALLOC + MEET + SLOT + USE + MEET + FREE).replace("64;", "%r13;"), "power of two"),
    "more than there is": (
        ALLOC.replace("64", "512")
        + ALLOC.replace("64", "32")
        + MEET
        + SLOT
        + MEET
        + FREE.replace("64", "512"),
        "544 columns",
    ),
    "used after the free": (ALLOC + MEET + SLOT + MEET + FREE + USE, "after tensor memory was freed"),
    "a way out": (
        f"{ALLOC}{MEET}{LATER} @%p5 ret;\n{SLOT}{USE}{MEET}{FREE}",
        "not freed on the path",
    ),
}


@pytest.mark.parametrize("name", list(QUIET))
def test_right_lives_are_quiet(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, QUIET[name]) == []


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_lives_are_found(tmp_path: Path, name: str) -> None:
    body, text = WRONG[name]
    body = "mov.u32 %r13, 1024;\n" + body
    assert any(text in f.message for f in found(tmp_path, body)), [f.message for f in found(tmp_path, body)]
