"""Rule wgmma-order on small kernels: copies of registers, pipelines and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import contract, ptx
from static_views import ptx_view

from workbench.findings import Finding
from workbench.verify.ordering.rules.wgmma import wgmma_order

FENCE = "wgmma.fence.sync.aligned;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
STORE = "st.global.f32 [%rd7], %f1;\n"


def mma(first: int = 1, shape: str = "m64n8k16") -> str:
    names = ", ".join(f"%f{first + n}" for n in range(int(shape[4:].split("k")[0]) // 2))
    return f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16 {{{names}}}, %rd10, %rd11, 1, 1, 1, 0, 0;\n"


def wait(n: int) -> str:
    return f"wgmma.wait_group.sync.aligned {n};\n"


def found(folder: Path, body: str) -> list[Finding]:
    start = "mov.u64 %rd10, 0; mov.u64 %rd11, 0;\n"
    start += "".join(f"mov.f32 %f{n}, 0f00000000;\n" for n in range(1, 20))
    return list(wgmma_order(ptx_view(folder, ptx(start + body, arch="sm_90a"), contract(pdl=False))))


QUIET = {
    "the pattern": FENCE + mma() + mma() + COMMIT + wait(0) + STORE,
    "copies around the MMAs": (
        FENCE + "mov.f32 %f5, %f1; mov.f32 %f6, %f2; mov.f32 %f7, %f3; mov.f32 %f8, %f4;\n" + mma(5)
        + "mov.f32 %f9, %f5; mov.f32 %f10, %f6; mov.f32 %f11, %f7; mov.f32 %f12, %f8;\n" + mma(9)
        + COMMIT + wait(0) + "st.global.f32 [%rd7], %f9;\n"
    ),
    "older group at a loose wait": FENCE + mma(1) + COMMIT + mma(5) + COMMIT + wait(1) + STORE,
    "other registers meanwhile": FENCE + mma(1) + COMMIT + "add.f32 %f9, %f10, %f11;\n" + wait(0) + STORE,
    "loop": (
        "mov.u32 %r10, 0;\n" + FENCE + "L:\n" + mma() + COMMIT + wait(1)
        + "add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 4; @%p5 bra L;\n" + wait(0) + STORE
    ),
}  # fmt: skip
WRONG = {
    "copy of a pending accumulator": (
        FENCE + mma() + COMMIT + "mov.f32 %f9, %f1; add.f32 %f9, %f9, %f9;\n" + wait(0) + STORE,
        "%f9 is read here",
    ),
    "loop that leaves one pending": (
        "mov.u32 %r10, 0;\n" + FENCE + "L:\n" + mma() + COMMIT
        + "add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 4; @%p5 bra L;\n" + wait(1) + STORE,
        "no wgmma.wait_group that covers",
    ),
    "another shape": (FENCE + mma() + mma(1, "m64n16k16") + COMMIT + wait(0) + STORE, "another shape"),
    "never committed": (FENCE + mma() + wait(0) + STORE, "never committed"),
    "written after the fence": (
        FENCE + "mov.f32 %f2, 0f3f800000;\n" + mma() + COMMIT + wait(0) + STORE,
        "no wgmma.fence between",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(QUIET))
def test_right_uses_are_quiet(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, QUIET[name]) == []


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_uses_are_found(tmp_path: Path, name: str) -> None:
    body, text = WRONG[name]
    (finding,) = found(tmp_path, body)
    assert text in finding.message
