"""Each rule on small PTX kernels, with the fault and without it, on the PTX and on the SASS ptxas makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from snippets import LOAD_W, LOAD_X, STORE, WAIT, audit, clean, contract, only, ptx, rules

from workbench.verify.report import Verdict

ARCHS = pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])


@ARCHS
def test_wait_then_load_is_clean(tmp_path: Path, arch: str) -> None:
    target = audit(
        tmp_path, ptx(LOAD_W + WAIT + LOAD_X + "add.f32 %f1,%f1,%f2;" + STORE, arch=arch), contract()
    )
    assert clean(target)
    assert target.coverage.accesses == target.coverage.proved == 6
    assert target.arch == arch


@ARCHS
def test_activation_read_before_the_wait(tmp_path: Path, arch: str) -> None:
    target = audit(tmp_path, ptx(LOAD_X + WAIT + STORE, arch=arch), contract())
    assert target.verdict is Verdict.FAIL
    assert rules(target) == ["pdl-load-before-wait"]
    finding = only(target, "pdl-load-before-wait")
    assert finding.buffer == "x"
    assert finding.ptx_line is not None
    assert finding.sass_offset is not None
    assert "read before griddepcontrol.wait" in finding.message


@pytest.mark.parametrize("role", ["activation", "state", "scratch", "output", "flag", "mailbox"])
def test_every_role_that_may_change_counts(tmp_path: Path, role: str) -> None:
    assert rules(audit(tmp_path, ptx(LOAD_X + WAIT + STORE), contract(x=role))) == ["pdl-load-before-wait"]


@pytest.mark.parametrize("role", ["weight", "metadata"])
def test_what_cannot_change_may_be_read_before(tmp_path: Path, role: str) -> None:
    assert clean(audit(tmp_path, ptx(LOAD_X + WAIT + STORE), contract(x=role)))


def test_without_pdl_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert clean(audit(tmp_path, ptx(LOAD_X + STORE), contract(pdl=False)))


@ARCHS
def test_output_written_before_the_wait(tmp_path: Path, arch: str) -> None:
    target = audit(tmp_path, ptx("mov.f32 %f1, 0f00000000;" + STORE + WAIT, arch=arch), contract())
    assert rules(target) == ["pdl-load-before-wait"]
    finding = only(target, "pdl-load-before-wait")
    assert finding.buffer == "out"
    assert "written before" in finding.message


GROUP = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def test_atomics_and_copies_count_as_accesses(tmp_path: Path) -> None:
    for early, buffer in [
        ("red.global.add.f32 [%rd7], 0f3F800000;", "out"),
        ("atom.global.add.f32 %f1, [%rd5], 0f3F800000;", "x"),
        ("cp.async.ca.shared.global [%r8], [%rd5], 4;", "x"),
        (
            "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%rd5], 16, [%r8];",
            "x",
        ),
        (f"@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd7], [%r8], 64; {GROUP}", "out"),
        (
            f"@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd7], [%r8], 64; {GROUP}",
            "out",
        ),
        ("ld.b32 %r10, [%rd5]; st.shared.b32 [%r8], %r10;", "x"),
    ]:
        target = audit(tmp_path, ptx(early + WAIT + LOAD_X + STORE), contract())
        assert rules(target) == ["pdl-load-before-wait"], early
        assert only(target, "pdl-load-before-wait").buffer == buffer, early
        assert only(target, "pdl-load-before-wait").sass_offset is not None, early


def test_prefetches_into_l2_may_stand_before(tmp_path: Path) -> None:
    early = "prefetch.global.L2 [%rd5]; @%p1 cp.async.bulk.prefetch.L2.global [%rd5], 512;"
    assert clean(audit(tmp_path, ptx(early + WAIT + LOAD_X + STORE), contract()))


# -- C40: no wait at all ---------------------------------------------------------------------------


@ARCHS
def test_wait_missing_under_pdl(tmp_path: Path, arch: str) -> None:
    target = audit(tmp_path, ptx(LOAD_X + STORE, arch=arch), contract())
    assert rules(target) == ["pdl-wait-missing"]
    assert only(target, "pdl-wait-missing").buffer == "out, x"
    assert clean(audit(tmp_path, ptx(WAIT + LOAD_X + STORE, arch=arch), contract()))


def test_wait_that_no_thread_reaches_is_missing(tmp_path: Path) -> None:
    body = "setp.gt.u32 %p5, %r1, 500; @%p5 griddepcontrol.wait;" + LOAD_X + STORE
    assert rules(audit(tmp_path, ptx(body), contract())) == ["pdl-wait-missing"]


# -- elected waits ---------------------------------------------------------------------------------

ELECTED = {
    "thread": "@%p1 griddepcontrol.wait;",
    "warp": "@!%p2 bra L; griddepcontrol.wait;\nL:\n",
    "elect": "@!%p2 bra L; { .reg .pred q; elect.sync _|q, -1; @q griddepcontrol.wait; }\nL:\n",
    "last": "setp.eq.u32 %p5, %r1, 127; @%p5 griddepcontrol.wait;",
    "scalar": "setp.lt.u32 %p5, %r1, %r9; and.pred %p5, %p5, %p1; @%p5 griddepcontrol.wait;",
}


@ARCHS
@pytest.mark.parametrize("who", list(ELECTED))
def test_elected_wait_with_and_without_a_barrier(tmp_path: Path, arch: str, who: str) -> None:
    with_barrier = audit(tmp_path, ptx(ELECTED[who] + "bar.sync 0;" + LOAD_X + STORE, arch=arch), contract())
    assert clean(with_barrier)
    without = audit(tmp_path, ptx(ELECTED[who] + LOAD_X + STORE, arch=arch), contract())
    assert set(rules(without)) == {"pdl-load-before-wait"}
    assert {f.buffer for f in without.findings} == {"x", "out"}


@ARCHS
def test_a_barrier_before_the_elected_wait_does_not_help(tmp_path: Path, arch: str) -> None:
    body = "bar.sync 0; @%p1 griddepcontrol.wait;" + LOAD_X + "bar.sync 0;" + STORE
    target = audit(tmp_path, ptx(body, arch=arch), contract())
    assert [f.buffer for f in target.findings] == ["x"]


@ARCHS
def test_wait_under_a_condition_of_the_whole_cta(tmp_path: Path, arch: str) -> None:
    body = "setp.lt.u32 %p5, %r3, 4; @!%p5 bra L; griddepcontrol.wait;\nL: bar.sync 0;" + LOAD_X + STORE
    assert set(rules(audit(tmp_path, ptx(body, arch=arch), contract()))) == {"pdl-load-before-wait"}


@ARCHS
def test_one_lane_waits_for_its_warp(tmp_path: Path, arch: str) -> None:
    ordered = ptx("@%p3 griddepcontrol.wait; bar.warp.sync -1;" + LOAD_X + STORE, arch=arch)
    assert clean(audit(tmp_path, ordered, contract()))
    loose = audit(tmp_path, ptx("@%p3 griddepcontrol.wait;" + LOAD_X + STORE, arch=arch), contract())
    assert set(rules(loose)) == {"pdl-load-before-wait"}
    half = ptx("@%p3 griddepcontrol.wait; bar.warp.sync 0xffff;" + LOAD_X + STORE, arch=arch)
    assert set(rules(audit(tmp_path, half, contract()))) == {"pdl-load-before-wait"}


@ARCHS
def test_waiting_warp_arrives_and_the_others_sync(tmp_path: Path, arch: str) -> None:
    roles = "@!%p2 bra L; griddepcontrol.wait; {0} bra D;\nL: {1}\n" + LOAD_X + STORE + "D:\n"
    named = roles.format("bar.arrive 1, 128;", "bar.sync 1, 128;")
    assert clean(audit(tmp_path, ptx(named, arch=arch), contract()))
    other = roles.format("bar.arrive 2, 128;", "bar.sync 1, 96;")
    assert "pdl-load-before-wait" in rules(audit(tmp_path, ptx(other, arch=arch), contract()))


@ARCHS
def test_mbarrier_carries_the_wait(tmp_path: Path, arch: str) -> None:
    poll = "{ .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r8], 0; @q bra D; bra W; D: }\n"
    start = "@%p1 mbarrier.init.shared.b64 [%r8], 1; bar.sync 0;"
    good = (
        start + "@%p1 griddepcontrol.wait; @%p1 mbarrier.arrive.shared.b64 _, [%r8];" + poll + LOAD_X + STORE
    )
    assert clean(audit(tmp_path, ptx(good, arch=arch), contract()))
    early = (
        start + "@%p1 mbarrier.arrive.shared.b64 _, [%r8]; @%p1 griddepcontrol.wait;" + poll + LOAD_X + STORE
    )
    assert "pdl-load-before-wait" in rules(audit(tmp_path, ptx(early, arch=arch), contract()))


def test_an_arrival_at_an_unknown_mbarrier_leaves_it_undecided(tmp_path: Path) -> None:
    poll = "{ .reg .pred q; W: mbarrier.try_wait.parity.shared.b64 q, [%r8], 0; @q bra D; bra W; D: }\n"
    body = (
        "@%p1 mbarrier.init.shared.b64 [%r8], 1; and.b32 %r11, %r3, 8; add.u32 %r12, %r8, %r11; bar.sync 0;"
        "@%p1 mbarrier.arrive.shared.b64 _, [%r12]; @%p1 griddepcontrol.wait;"
        "@%p1 mbarrier.arrive.shared.b64 _, [%r8];" + poll + LOAD_X + STORE
    )
    target = audit(tmp_path, ptx(body), contract())
    assert target.verdict is Verdict.UNKNOWN
    assert target.coverage.unknown > 0
    assert rules(target, "info").count("undecided") >= 1


def test_cluster_barrier_carries_the_wait_unless_relaxed(tmp_path: Path) -> None:
    for arrive, good in (("release", True), ("relaxed", False)):
        barrier = f"barrier.cluster.arrive.{arrive}; barrier.cluster.wait;"
        target = audit(tmp_path, ptx("@%p1 griddepcontrol.wait;" + barrier + LOAD_X + STORE), contract())
        assert clean(target) == good
        assert bool(rules(target)) != good


# -- C41: roles ------------------------------------------------------------------------------------

THREE_ROLES = """
setp.eq.u32 %p5, %r2, 1; setp.eq.u32 %p6, %r2, 2;
@%p2 bra ONE; @%p5 bra TWO; @%p6 bra THREE; bra.uni END;
ONE: griddepcontrol.wait; {0} cp.async.ca.shared.global [%r8], [%rd5], 4; bra.uni END;
TWO: {1} cp.async.ca.shared.global [%r8+128], [%rd6], 4; bra.uni END;
THREE: {2} ld.global.f32 %f1, [%rd7]; st.global.f32 [%rd7], %f1;
END:
"""


@ARCHS
@pytest.mark.parametrize(
    ("barriers", "at_fault"),
    [
        (("", "", ""), {"w", "out"}),
        (("bar.sync 1, 64;", "bar.sync 1, 64;", ""), {"out"}),
        (("bar.sync 1, 96;", "bar.sync 1, 96;", "bar.sync 1, 96;"), set()),
        (("bar.arrive 1, 64; bar.arrive 2, 64;", "bar.sync 1, 64;", "bar.sync 2, 64;"), set()),
        (("bar.arrive 1, 64;", "bar.sync 1, 64;", "bar.sync 2, 32;"), {"out"}),
    ],
)
def test_only_the_unordered_roles_are_named(
    tmp_path: Path, arch: str, barriers: tuple[str, str, str], at_fault: set[str]
) -> None:
    target = audit(tmp_path, ptx(THREE_ROLES.format(*barriers), arch=arch), contract(w="activation"))
    assert {f.buffer for f in target.findings if f.severity == "error"} == at_fault
    assert (target.verdict is Verdict.PASS) == (not at_fault)


def test_a_role_that_reads_only_weights_need_not_wait(tmp_path: Path) -> None:
    body = (
        "@%p2 bra L; "
        + WAIT
        + LOAD_X
        + STORE
        + "bra.uni D;\nL: cp.async.ca.shared.global [%r8], [%rd6], 4;\nD:\n"
    )
    assert clean(audit(tmp_path, ptx(body), contract()))


# -- read-only loads -------------------------------------------------------------------------------

NC = "ld.global.nc.f32 %f1, [%rd5];\n"


@ARCHS
def test_nc_load_behind_an_elected_wait_moves_in_the_sass(tmp_path: Path, arch: str) -> None:
    target = audit(
        tmp_path, ptx("@!%p2 bra L; griddepcontrol.wait;\nL: bar.sync 0;" + NC + STORE, arch=arch), contract()
    )
    assert rules(target) == ["nc-load-of-mutable"]
    finding = only(target, "nc-load-of-mutable")
    assert finding.buffer == "x"
    assert finding.ptx_line is not None
    assert finding.sass_offset is not None
    assert "the assembler moved" in finding.message


@ARCHS
def test_nc_load_after_the_threads_own_wait_is_a_warning(tmp_path: Path, arch: str) -> None:
    target = audit(tmp_path, ptx(WAIT + NC + STORE, arch=arch), contract())
    assert target.verdict is Verdict.PASS
    assert rules(target) == []
    assert rules(target, "warning") == ["nc-load-of-mutable"]


def test_nc_load_after_an_ordinary_boundary_is_fine(tmp_path: Path) -> None:
    assert clean(audit(tmp_path, ptx(NC + STORE), contract(pdl=False)))


def test_nc_load_of_a_weight_is_fine(tmp_path: Path) -> None:
    text = ptx(
        "ld.global.nc.f32 %f2, [%rd6];"
        + "@%p1 griddepcontrol.wait; bar.sync 0;"
        + LOAD_X
        + "add.f32 %f1,%f1,%f2;"
        + STORE
    )
    target = audit(tmp_path, text, contract())
    assert target.verdict is Verdict.PASS
    assert rules(target) == []


@pytest.mark.parametrize("pdl", [True, False])
def test_nc_load_of_what_the_kernel_writes(tmp_path: Path, pdl: bool) -> None:
    body = WAIT + "st.global.f32 [%rd7+4], 0f00000000; bar.sync 0; ld.global.nc.f32 %f1, [%rd7];" + STORE
    target = audit(tmp_path, ptx(body), contract(pdl=pdl))
    assert "nc-load-of-mutable" in rules(target)
    assert "this kernel also writes it" in only(target, "nc-load-of-mutable").message


# -- prefetches ------------------------------------------------------------------------------------


@ARCHS
def test_prefetch_that_sinks_below_the_wait(tmp_path: Path, arch: str) -> None:
    use = "add.f32 %f1, %f1, %f2;" + STORE
    sunk = audit(tmp_path, ptx("ld.global.nc.f32 %f2, [%rd6];" + WAIT + LOAD_X + use, arch=arch), contract())
    assert sunk.verdict is Verdict.PASS
    assert rules(sunk, "performance") == ["prefetch-sunk"]
    assert only(sunk, "prefetch-sunk").buffer == "w"
    kept = audit(tmp_path, ptx(LOAD_W + WAIT + LOAD_X + use, arch=arch), contract())
    assert clean(kept)
    used = "ld.global.nc.f32 %f2, [%rd6]; st.shared.f32 [%r8], %f2;" + WAIT + LOAD_X + use
    assert rules(audit(tmp_path, ptx(used, arch=arch), contract()), "performance") == []


# -- what cannot be decided ------------------------------------------------------------------------


def test_pointer_from_memory_before_the_wait_is_undecided(tmp_path: Path) -> None:
    body = "ld.global.b64 %rd8, [%rd2]; ld.global.f32 %f1, [%rd8];" + WAIT + STORE
    target = audit(tmp_path, ptx(body), contract())
    assert target.verdict is Verdict.UNKNOWN
    assert target.coverage.unknown == 2
    after = audit(
        tmp_path, ptx(WAIT + "ld.global.b64 %rd8, [%rd2]; ld.global.f32 %f1, [%rd8];" + STORE), contract()
    )
    assert clean(after)


def test_everything_immutable_needs_no_buffer(tmp_path: Path) -> None:
    body = "ld.global.b64 %rd8, [%rd2]; ld.global.f32 %f1, [%rd8]; st.shared.f32 [%r8], %f1;"
    assert clean(audit(tmp_path, ptx(body), contract(x="weight", out="metadata")))


def test_pointer_of_either_buffer_counts_as_both(tmp_path: Path) -> None:
    body = "selp.b64 %rd8, %rd5, %rd6, %p3; ld.global.f32 %f1, [%rd8];" + WAIT + STORE
    target = audit(tmp_path, ptx(body), contract())
    assert only(target, "pdl-load-before-wait").buffer == "x"


def test_without_a_contract_only_what_always_holds_passes(tmp_path: Path) -> None:
    assert audit(tmp_path, ptx(WAIT + LOAD_X + STORE), None).verdict is Verdict.PASS
    assert audit(tmp_path, ptx(LOAD_X + WAIT + STORE), None).verdict is Verdict.UNKNOWN
    assert audit(tmp_path, ptx(LOAD_X + STORE), None).verdict is Verdict.UNKNOWN


# -- conditions that nobody knows ------------------------------------------------------------------


@ARCHS
def test_wait_and_load_under_the_same_condition(tmp_path: Path, arch: str) -> None:
    """Branches on one unknown predicate go the same way: whoever loads has waited."""
    start = "setp.lt.u32 %p5, %r3, %r1; mov.f32 %f1, 0f00000000;"
    loads = "cp.async.ca.shared.global [%r8], [%rd5], 4;"
    same = start + "@!%p5 bra S; griddepcontrol.wait;\nS: bar.warp.sync -1;\n@!%p5 bra E; " + loads + "\nE:\n"
    assert clean(audit(tmp_path, ptx(same, arch=arch), contract()))
    predicated = start + "@%p5 griddepcontrol.wait; @%p5 " + loads
    assert clean(audit(tmp_path, ptx(predicated, arch=arch), contract()))
    opposite = start + "@%p5 griddepcontrol.wait; @!%p5 " + loads
    assert rules(audit(tmp_path, ptx(opposite, arch=arch), contract())) == ["pdl-load-before-wait"]
    changed = start + "@%p5 griddepcontrol.wait; setp.lt.u32 %p5, %r1, %r3; @%p5 " + loads
    assert rules(audit(tmp_path, ptx(changed, arch=arch), contract())) == ["pdl-load-before-wait"]


def test_a_call_before_the_wait_is_undecided(tmp_path: Path) -> None:
    called = ".func f(.param .b64 a) { .reg .b64 d; ld.param.b64 d, [a]; st.global.b32 [d], 1; ret; }\n"
    call = "{ .param .b64 p0; st.param.b64 [p0], %rd5; call.uni f, (p0); }\n"
    text = ptx(call + WAIT + LOAD_X + STORE).replace(".visible", called + ".visible", 1)
    assert audit(tmp_path, text, contract()).verdict is not Verdict.PASS
    after = ptx(WAIT + call + LOAD_X + STORE).replace(".visible", called + ".visible", 1)
    assert rules(audit(tmp_path, after, contract())) == []


def test_parameters_of_a_struct_are_told_apart(tmp_path: Path) -> None:
    """Two pointers in one parameter, read through its address."""
    declare = (
        ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; mov.b64 %rd1, S; cvta.param.u64 %rd2, %rd1;\n"
        "ld.param.b64 %rd3, [%rd1+8]; ld.param.b64 %rd4, [%rd1+16]; ld.param.b64 %rd5, [S];\n"
    )
    head = ".version 9.0\n.target sm_103a\n.address_size 64\n.visible .entry k(.param .align 8 .b8 S[24])\n"
    terms = "[[kernel]]\ngrid = [1, 1, 1]\nblock = [128, 1, 1]\npdl = true\n"
    for offset, name, role in ((0, "out", "output"), (8, "x", "activation"), (16, "w", "weight")):
        terms += f'[[kernel.buffer]]\nparam = 0\noffset = {offset}\nname = "{name}"\nrole = "{role}"\n'
    body = "{\n" + declare
    for early, fault in (("%rd4", None), ("%rd3", "x"), ("%rd5", "out")):
        kernel = head + ".reqntid 128,1,1\n" + body
        kernel += (
            f"ld.global.f32 %f1, [{early}];\ngriddepcontrol.wait;\nst.global.f32 [%rd5], %f1;\nret;\n}}\n"
        )
        target = audit(tmp_path, kernel, terms)
        assert {f.buffer for f in target.findings} == ({fault} if fault else set()), early
