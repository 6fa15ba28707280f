"""Rule tcgen05-order on small kernels: barriers, fences and pipelines beyond the pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import audit, contract, ptx
from static_views import ptx_view

from workbench.findings import Finding
from workbench.verify.ordering.rules.tcgen05 import tcgen05_order

ALLOC = "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [sm+64], 64;\n"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [sm], 1;\n"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
MEET = BEFORE + "bar.sync 0;\n" + AFTER
START = ALLOC + INIT + MEET + "ld.shared.b32 %r11, [sm+64];\nmov.u64 %rd10, 0; mov.u64 %rd11, 0;\n"
MMA = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd10, %rd11, %r12, %p4;\n"
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [sm];\n"
LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r13, %r14}, [%r11];\n"
ST = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r11], {%r13, %r14};\n"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;\n", "tcgen05.wait::st.sync.aligned;\n"
FREE = MEET + "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 64;\n"


def poll(n: int = 0, label: str = "W", more: str = "") -> str:
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p5, [sm], {n}{more}; @!%p5 bra {label};\n"


def found(folder: Path, body: str) -> list[Finding]:
    return list(tcgen05_order(ptx_view(folder, ptx(body), contract(pdl=False))))


def severities(folder: Path, body: str) -> list[str]:
    return [f.severity.value for f in found(folder, body)]


QUIET = {
    "commit, wait, fence": START + MMA + COMMIT + poll() + AFTER + LD + WAIT_LD + FREE,
    "one warp waits for all": (
        START + MMA + COMMIT + "@!%p2 bra M;\n" + poll() + AFTER + "M:\n" + MEET + LD + WAIT_LD + FREE
    ),
    "mma after mma": START + MMA + MMA + COMMIT + poll() + AFTER + LD + WAIT_LD + FREE,
    "used without its wait": START
    + MMA
    + COMMIT
    + poll()
    + AFTER
    + LD
    + "add.u32 %r15, %r13, %r14;\n"
    + WAIT_LD
    + FREE,
    "no fence where nothing was before": START.replace(AFTER, "")
    + MMA
    + COMMIT
    + poll()
    + AFTER
    + LD
    + WAIT_LD
    + FREE,
    "rescaled in place": (
        START
        + MMA
        + COMMIT
        + poll()
        + AFTER
        + LD
        + "add.u32 %r13, %r13, %r13; add.u32 %r14, %r14, %r14;\n"
        + ST
        + WAIT_ST
        + WAIT_LD
        + FREE
    ),
    "second tile after the first": (
        START
        + MMA
        + COMMIT
        + poll()
        + AFTER
        + LD
        + WAIT_LD
        + MEET
        + MMA
        + COMMIT
        + poll(1, "X")
        + AFTER
        + LD
        + WAIT_LD
        + FREE
    ),
}
WRONG = {
    "no commit at all": (START + MMA + MEET + LD + WAIT_LD + FREE, "no tcgen05.commit follows"),
    "commit before the mma": (
        START + COMMIT + MMA + poll() + AFTER + LD + WAIT_LD + FREE,
        "no tcgen05.commit follows",
    ),
    "second tile without the wait": (
        START
        + MMA
        + COMMIT
        + poll()
        + AFTER
        + LD
        + MEET
        + WAIT_LD
        + MMA
        + COMMIT
        + poll(1, "X")
        + AFTER
        + FREE,
        "hands the tensor memory on",
    ),
    "no fence after the meeting": (
        START
        + MMA
        + COMMIT
        + "@!%p2 bra M;\n"
        + poll()
        + AFTER
        + "M:\n"
        + BEFORE
        + "bar.sync 0;\n"
        + LD
        + WAIT_LD
        + FREE,
        "no tcgen05.fence::after_thread_sync",
    ),
    "store without wait, then the mma": (
        START + ST + MEET + MMA + COMMIT + poll() + AFTER + LD + WAIT_LD + FREE,
        "wait::st",
    ),
}


@pytest.mark.parametrize("name", list(QUIET))
def test_right_orders_are_quiet(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, QUIET[name]) == []


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_orders_are_found(tmp_path: Path, name: str) -> None:
    body, text = WRONG[name]
    messages = [f.message for f in found(tmp_path, body) if f.severity.value == "error"]
    assert any(text in m for m in messages), messages


def test_a_kernel_without_any_fence_is_judged_by_its_waits(tmp_path: Path) -> None:
    """The DSL's pipelines wait with acquire and have no tcgen05 fence: a remark, but no fault."""
    body = (START + MMA + COMMIT + "POLL" + LD + WAIT_LD + FREE).replace(BEFORE, "").replace(AFTER, "")
    assert severities(tmp_path, body.replace("POLL", poll(more=", 10000000"))) == ["info"]
    assert severities(tmp_path, body.replace("POLL", poll())) == ["error"]
    relaxed = poll(more=", 10000000").replace("parity.", "parity.relaxed.cta.")
    assert severities(tmp_path, body.replace("POLL", relaxed)) == ["error"]


def test_registers_used_before_the_hand_over_make_it_a_warning(tmp_path: Path) -> None:
    use = "add.u32 %r15, %r13, %r14;\n"
    body = (
        START + MMA + COMMIT + poll() + AFTER + LD + "USE" + MEET + MMA + COMMIT + poll(1, "X") + AFTER + FREE
    )
    assert severities(tmp_path, body.replace("USE", "")) == ["error"]
    assert severities(tmp_path, body.replace("USE", use)) == ["warning"]


def test_what_the_sass_keeps_is_shown(tmp_path: Path) -> None:
    used = "add.u32 %r15, %r13, %r14; st.global.b32 [%rd7], %r15;\n"
    for use, text in (("", "no instruction between"), (used, "holds the arrival back")):
        body = START + MMA + COMMIT + poll() + AFTER + LD + use + MEET + MMA + COMMIT + poll(1, "X") + AFTER
        body += "st.global.v2.b32 [%rd7], {%r13, %r14};\n" + FREE
        target = audit(tmp_path, ptx(body), contract(pdl=False))
        shown = [f for f in target.findings if f.message.startswith("in the SASS LDTM")]
        assert len(shown) == 1 and shown[0].sass_offset is not None
        assert "LDTM" in shown[0].message and "BAR.SYNC" in shown[0].message and text in shown[0].message
