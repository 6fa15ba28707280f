"""Rules barrier-divergence and barrier-reuse beyond their pairs: what is right must stay quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import LOAD_X, STORE, contract, ptx, rules
from static_views import ptx_view

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.verify.ordering import audit_file
from workbench.verify.ordering.rules.barriers import barriers_ptx

TAIL = LOAD_X + STORE
QUIET = {
    "all": "bar.sync 0;",
    "role with its count": "@%p2 bra S; bar.sync 1, 96;\nS:\n bar.sync 0;",
    "both roles at one": "@%p2 bra S; bar.sync 0; bra J;\nS:\n bar.sync 0;\nJ:\n",
    "early return of lanes": "setp.ge.u32 %p5, %r1, 100; @%p5 ret; bar.sync 0;",
    "early return of warps": "@%p2 ret; bar.sync 0;",
    "not aligned, two places": (
        "and.b32 %r10, %r1, 1; setp.eq.u32 %p5, %r10, 0; @%p5 bra S; barrier.sync 3; bra J;\n"
        "S:\n barrier.sync 3;\nJ:\n"
    ),
    "number that is not known": "add.u32 %r10, %r2, 1; bar.sync %r10, 32;",
    "a pair of warps each": "shr.u32 %r10, %r2, 1; add.u32 %r10, %r10, 1; bar.sync %r10, 64;",
    "predicate that is not known": "setp.gt.u32 %p5, %r9, 7; @%p5 bar.sync 0;",
    "one number in two epochs": (
        "@!%p2 bra S; bar.sync 1, 32;\nS:\n bar.sync 0; @%p2 bra T; bar.sync 1, 96;\nT:\n"
    ),
    "half a warp in its mask": (
        "and.b32 %r10, %r5, 16; setp.ne.u32 %p5, %r10, 0; @%p5 bra S; bar.warp.sync 0xffff;\nS:\n"
    ),
}
WRONG = {
    "guard of one lane": ("@%p1 bar.sync 0;", "barrier-divergence"),
    "and of a known and an unknown": (
        "setp.gt.u32 %p5, %r9, 7; and.pred %p6, %p5, %p3; @!%p6 bra S; bar.sync 2, 32;\nS:\n",
        "barrier-divergence",
    ),
    "cluster barrier of odd lanes": (
        "and.b32 %r10, %r1, 1; setp.eq.u32 %p5, %r10, 0; @%p5 bra S; barrier.cluster.arrive.aligned;\nS:\n",
        "barrier-divergence",
    ),
    "more than the block": ("bar.sync 1, 256;", "barrier-divergence"),
    "arrival in a loop": (
        "mov.u32 %r10, 0; @!%p2 bra C;\n"
        "L: bar.arrive 4, 128; add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 3; "
        "@%p5 bra L; bra J;\nC: bar.sync 4, 128; add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, 3; "
        "@%p5 bra C;\nJ:\n",
        "barrier-reuse",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(QUIET))
def test_right_uses_are_quiet(tmp_path: Path, name: str) -> None:
    assert not list(barriers_ptx(ptx_view(tmp_path, ptx(QUIET[name] + TAIL), contract(pdl=False))))


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_uses_are_found(tmp_path: Path, name: str) -> None:
    body, rule = WRONG[name]
    (finding,) = barriers_ptx(ptx_view(tmp_path, ptx(body + TAIL), contract(pdl=False)))
    assert finding.rule == rule
    assert finding.ptx_line is not None


def test_a_cubin_alone_is_judged_by_its_code(tmp_path: Path) -> None:
    text = ptx("and.b32 %r10, %r1, 1; setp.eq.u32 %p5, %r10, 0; @%p5 bra S; bar.sync 0;\nS:\n" + TAIL)
    alone = tmp_path / "alone.cubin"
    alone.write_bytes(assemble(text, "sm_103a", DEFAULT_PTXAS_FLAGS, Limits()).cubin)
    terms = tmp_path / "alone.toml"
    terms.write_text(contract(pdl=False))
    (target,) = audit_file(alone, terms).targets
    assert "barrier-divergence" in rules(target)
