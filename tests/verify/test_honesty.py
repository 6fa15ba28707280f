"""Honesty of compiled code: kernels that are right today for the wrong reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from workbench import api
from workbench.artifact import Artifact
from workbench.compile import FENCES, CompileRequest, compile_candidate
from workbench.compile.request import ErrorKind
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.simulator.counters import Counters
from workbench.templates import parse_template
from workbench.verify.differential import check_differential
from workbench.verify.honesty import check_honesty, check_moved
from workbench.verify.report import Verdict
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]
F4, R4 = "{%f,%f,%f,%f}", "{%r,%r,%r,%r}"
ROW = (ROOT / "templates" / "rmsnorm" / "row.py").read_text()


@pytest.fixture(scope="module")
def op() -> Op:
    return load_op(Workspace(ROOT), "rmsnorm")


@pytest.fixture(scope="module")
def artifact(op: Op) -> Artifact:
    template = parse_template(ROW, Path("row.py"))
    return compile_candidate(CompileRequest.of(op, "small_b1", template, template.default))


def altered(artifact: Artifact, change: Callable[[str], str]) -> Artifact:
    ptx = change(artifact.ptx)
    assert ptx != artifact.ptx
    return artifact.model_copy(update={"ptx": ptx})


def rules(artifact: Artifact, op: Op) -> set[str]:
    return {f.rule for f in check_honesty(artifact, op).findings if f.severity.value == "error"}


def test_a_shipped_kernel_is_honest(artifact: Artifact, op: Op) -> None:
    assert check_honesty(artifact, op).verdict is Verdict.PASS


def moved(**counts: int) -> Counters:
    return Counters(
        kernel="k", ctas=1, warps=1, lane_instructions=1, warp_instructions={}, longest_warp={}, **counts
    )


def test_who_moves_less_than_half_of_what_the_op_must_is_impossibly_fast(op: Op) -> None:
    workload = op.workload("small_b1")
    must = op.compulsory_bytes(workload.axes)
    half = must // 2 // 32 * 32
    for counters in (
        [moved(unique_load_bytes=must)],
        [moved(unique_load_bytes=half), moved(unique_store_bytes=must - half)],
        [moved(unique_load_bytes=half - 32, atomics=1)],
    ):
        assert check_moved(op, workload, counters).verdict is Verdict.PASS
    check = check_moved(op, workload, [moved(unique_load_bytes=half - 32)])
    assert check.verdict is Verdict.FAIL and [f.rule for f in check.findings] == ["impossible-speed"]
    assert f"must move {must}" in check.findings[0].message


@pytest.mark.parametrize("register", ["%clock", "%clock64", "%globaltimer", "%gridid", "%envreg3"])
def test_clocks_and_the_like_are_hidden_inputs(artifact: Artifact, op: Op, register: str) -> None:
    size = "64" if register in ("%clock64", "%globaltimer", "%gridid") else "32"
    line = f"\t.reg .b{size} %hidden;\n\tmov.u{size} %hidden, {register};\n"
    bad = altered(artifact, lambda ptx: ptx.replace("{\n", "{\n" + line, 1))
    assert rules(bad, op) == {"hidden-input"}


def test_the_place_on_the_machine_is_a_warning(artifact: Artifact, op: Op) -> None:
    line = "\t.reg .b32 %hidden;\n\tmov.u32 %hidden, %smid;\n"
    check = check_honesty(altered(artifact, lambda ptx: ptx.replace("{\n", "{\n" + line, 1)), op)
    assert check.verdict is Verdict.PASS and [f.rule for f in check.findings] == ["hidden-input"]


@pytest.mark.parametrize(
    "instruction",
    [
        "cvt.rn.satfinite.e4m3x2.f32 %h, %f, %f;",
        "cvt.rn.satfinite.e2m1x2.f32 %h8, %f, %f;",
        f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {F4}, {R4}, {{%r,%r}}, {F4};",
        f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {R4}, {R4}, {{%r,%r}}, {R4};",
    ],
)
def test_narrower_types_than_the_contract_has_are_downgrades(
    artifact: Artifact, op: Op, instruction: str
) -> None:
    declare = "\t.reg .b16 %h; .reg .b8 %h8; .reg .f32 %f; .reg .b32 %r;\n"
    bad = altered(artifact, lambda ptx: ptx.replace("{\n", "{\n" + declare + "\t" + instruction + "\n", 1))
    assert "dtype-downgrade" in rules(bad, op)


def test_conversions_between_wide_types_and_from_narrow_ones_are_fine(artifact: Artifact, op: Op) -> None:
    lines = (
        "\t.reg .b16 %h; .reg .f32 %f; .reg .b32 %r;\n\tcvt.rn.bf16.f32 %h, %f;\n"
        "\tcvt.rn.f16x2.e4m3x2 %r, %h;\n\tcvt.u32.u8 %r, %h;\n"
    )
    good = altered(artifact, lambda ptx: ptx.replace("{\n", "{\n" + lines, 1))
    assert rules(good, op) == set()


def test_code_for_another_target_is_refused(artifact: Artifact, op: Op) -> None:
    bad = altered(artifact, lambda ptx: ptx.replace(".target sm_103a", ".target sm_90a"))
    assert rules(bad, op) == {"wrong-target"}
    assert "wrong-target" in rules(artifact.model_copy(update={"cubin": b"no cubin"}), op)


def test_an_input_that_no_launch_is_given(artifact: Artifact, op: Op) -> None:
    (launch,) = artifact.launches
    kept = tuple(p for p in launch.params if all(r.buffer != "weight" for r in p.relocations))
    bad = artifact.model_copy(update={"launches": (launch.model_copy(update={"params": kept}),)})
    assert rules(bad, op) == {"input-unread"}
    assert "identical-launches" in rules(artifact.model_copy(update={"launches": ()}), op)


# -- what needs runs ---------------------------------------------------------------------------------


def compiled(op: Op, change: Callable[[str], str]) -> Artifact:
    source = change(ROW)
    assert source != ROW
    template = parse_template(source, Path("row.py"))
    return compile_candidate(CompileRequest.of(op, "small_b1", template, template.default))


def test_a_shipped_kernel_follows_its_inputs_and_not_its_addresses(artifact: Artifact, op: Op) -> None:
    check = check_differential(artifact, op, op.workload("small_b1"), 0)
    assert check.verdict is Verdict.PASS and "weight" in check.summary and "buffers moved" in check.summary


def test_an_input_that_is_read_and_forgotten(op: Op) -> None:
    bad = compiled(op, lambda s: s.replace("* scale * w.load().to(Float32)", "* scale"))
    check = check_differential(bad, op, op.workload("small_b1"), 0)
    weight = next(f for f in check.findings if f.buffer == "weight")
    assert weight.rule == "input-ignored" and "does not change with it" in weight.message


def test_a_kernel_that_looks_at_its_pointers(op: Op) -> None:
    trick = "(held[r].load().to(Float32) * scale"
    peek = "(held[r].load().to(Float32) * (scale + Float32((x.iterator.toint() >> 21) & 1))"
    bad = compiled(op, lambda s: s.replace(trick, peek))
    findings = check_differential(bad, op, op.workload("small_b1"), 0).findings
    assert "address-dependent" in {f.rule for f in findings}


def test_verify_itself_refuses(tmp_path: Path) -> None:
    path = tmp_path / "forgetful.py"
    path.write_text(ROW.replace("* scale * w.load().to(Float32)", "* scale"))
    artifact = api.compile_kernel(path, workload="small_b1", workspace=Workspace(ROOT))
    report = api.simulate(artifact, level="full", workspace=Workspace(ROOT)).report
    assert report.verdict is Verdict.FAIL and "honesty" in {c.name for c in report.checks}


# -- launch after launch -----------------------------------------------------------------------------

COUNTER = '    "scratch": {"count": {"shape": ["B"], "dtype": "i32", "zeroed": True}},\n'


def with_counter(before: str, after: str) -> Callable[[str], str]:
    """The shipped kernel with a counter in scratch; statements before and after the result is stored."""

    def change(source: str) -> str:
        source = source.replace('    "default"', COUNTER + '    "default"', 1)
        source = source.replace("out: cute.Tensor, stream", "out: cute.Tensor, count: cute.Tensor, stream")
        source = source.replace("out: cute.Tensor):", "out: cute.Tensor, count: cute.Tensor):")
        source = source.replace("self.kernel(x, weight, out)", "self.kernel(x, weight, out, count)")
        store = "            if row < self.tokens:\n"
        ends = f"        cute.arch.sync_threads()\n        if thread == 0:\n            {after}\n"
        return source.replace(store, before + store).replace(
            "self.store(result, out[row, None], thread)\n",
            "self.store(result, out[row, None], thread)\n" + ends,
        )

    return change


def test_a_counter_that_goes_on_from_launch_to_launch_is_fine(op: Op) -> None:
    good = compiled(op, with_counter("", "count[block] = count[block] + 1"))
    report = api.simulate(good, level="full", workspace=Workspace(ROOT)).report
    (check,) = (c for c in report.checks if c.name == "honesty/relaunch")
    assert check.verdict is Verdict.PASS and "find count as left" in check.summary
    assert report.verdict is Verdict.PASS, [c for c in report.checks if c.verdict is not Verdict.PASS]


def test_a_result_that_depends_on_the_counter_is_not(op: Op) -> None:
    skip = "            if count[block] == 3:\n                result.fill(BFloat16(0.0))\n"
    bad = compiled(op, with_counter(skip, "count[block] = count[block] + 1"))
    for level in ("screen", "full"):
        report = api.simulate(bad, level=level, workspace=Workspace(ROOT)).report
        failed = [c.name for c in report.checks if c.verdict is Verdict.FAIL]
        assert failed == (["honesty/relaunch"] if level == "full" else []), failed


def test_a_kernel_without_such_scratch_is_not_launched_again(artifact: Artifact) -> None:
    report = api.simulate(artifact, level="screen", workspace=Workspace(ROOT)).report
    assert "honesty/relaunch" not in {c.name for c in report.checks}


def test_every_rule_and_kind_of_failure_is_documented() -> None:
    page = (ROOT / "docs" / "honesty.md").read_text()
    files = ("honesty.py", "differential.py", "runs.py")
    rules = {
        r
        for f in files
        for r in re.findall(r'rule="([\w-]+)"', (ROOT / "workbench" / "verify" / f).read_text())
    }
    assert rules >= {"state-carried", "input-ignored", "hidden-input"}
    kinds = {*get_args(ErrorKind), "template:", "identical-object", *FENCES}
    assert not {name for name in rules | kinds if f"`{name}`" not in page}
