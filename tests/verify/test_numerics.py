"""Findings of the numerics check: which fault it names, where it points, and what it lets pass."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.findings import Severity
from workbench.ops import Op, load_op
from workbench.ops.dtypes import DType
from workbench.ops.rounding import to_bf16
from workbench.simulator.memory import Memory
from workbench.verify.inputs import POISONS, Case
from workbench.verify.numerics import judge
from workbench.verify.report import Check, Verdict
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])
OPS = {name: load_op(WORKSPACE, name) for name in ("rmsnorm", "moe_topk", "moe_experts", "moe")}
SMALL = ("small_b1", "small_b3")


@pytest.fixture(scope="module")
def case():
    """Cases, made once for the module."""
    made: dict[tuple[str, str, str], Case] = {}

    def get(op: str, workload: str = "small_b3", generator: str = "ordinary") -> Case:
        key = (op, workload, generator)
        if key not in made:
            made[key] = Case.create(OPS[op], OPS[op].workload(workload), generator, 0, Memory(1 << 28))
        return made[key]

    return get


def stored(op: Op, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a kernel would leave in memory."""
    return {
        b.name: to_bf16(tensors[b.name])
        if b.dtype is DType.BF16
        else tensors[b.name].to(getattr(torch, b.dtype.torch_name))
        for b in op.outputs
    }


def golden(c: Case) -> dict[str, torch.Tensor]:
    return stored(c.op, dict(c.standard.golden))


def rules(check: Check) -> list[str]:
    return [f.rule for f in check.findings if f.severity is Severity.ERROR]


ALL = [(n, w, g) for n, op in OPS.items() for w in SMALL for g in op.generators]


@pytest.mark.parametrize(("name", "workload", "generator"), ALL)
def test_honest_results_pass(case, name: str, workload: str, generator: str) -> None:
    c = case(name, workload, generator)
    for run in (c.op.baseline, c.op.reference, *c.op.honest):
        check = c.judge(stored(c.op, dict(run(c.inputs, c.workload.axes))), poison=POISONS[0])
        assert check.verdict is Verdict.PASS, check
        assert check.name == f"numerics/{generator}"
        assert all(math.isfinite(v) for v in check.measures.values())


FAULTS = [(n, f) for n, op in OPS.items() for f in op.faults]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_every_known_mistake_is_refused_and_named(case, name: str, fault: str) -> None:
    """At small sizes, by the generators together; and whatever a generator refuses it blames on nothing
    else."""
    op = OPS[name]
    mistake = op.faults[fault]
    refused, named = False, set()
    for workload in SMALL:
        if not mistake.applies(op.workload(workload).axes):
            continue
        for generator in op.generators:
            c = case(name, workload, generator)
            out = stored(op, dict(mistake.reference(c.inputs, c.workload.axes)))
            if c.judge(out, diagnose=False).verdict is Verdict.FAIL:
                refused = True
                if mistake.rule not in named:
                    named |= set(rules(c.judge(out)))
    applies = any(mistake.applies(op.workload(w).axes) for w in SMALL)
    assert refused == applies
    assert mistake.rule in named or not applies


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("swapped-gate-up", "swapped-gate-up"),
        ("interleaved-gate-up", "swapped-gate-up"),
        ("no-scales", "missing-scale"),
        ("no-w13-scale", "missing-scale"),
        ("no-w2-scale", "missing-scale"),
        ("next-slot", "wrong-expert"),
        ("next-token", "wrong-expert"),
        ("dropped-l-32", "dropped-tail"),
        ("dropped-i-32", "dropped-tail"),
        ("nibble-order", "nibble-order"),
    ],
)
@pytest.mark.parametrize("name", ["moe_experts", "moe"])
def test_the_first_finding_says_which(case, name: str, fault: str, rule: str) -> None:
    c = case(name)
    mistake = c.op.faults[fault]
    check = c.judge(stored(c.op, dict(mistake.reference(c.inputs, c.workload.axes))))
    finding = check.findings[0]
    assert finding.rule == rule and mistake.summary in finding.message
    assert "expected" in finding.message and "got" in finding.message and finding.count > 0


def test_rounding_gate_and_up_is_named(case) -> None:
    c = case("moe_experts", "small_b3", "negative_gates")
    out = stored(c.op, dict(c.op.faults["rounded-gate-up"].reference(c.inputs, c.workload.axes)))
    assert rules(c.judge(out)) == ["wrong-rounding"]


def test_rounding_the_running_sum_is_named(case) -> None:
    c = case("moe", "small_b1", "large")
    out = stored(c.op, dict(c.op.faults["rounded-sum"].reference(c.inputs, c.workload.axes)))
    finding = c.judge(out).findings[0]
    assert finding.rule == "wrong-rounding" and "running sum" in finding.message


def test_reading_an_expert_that_was_not_chosen(case) -> None:
    """The kernel takes the slot number for the expert: poisoned scales make its rows NaN."""
    c = case("moe_experts")
    inputs = {**c.inputs, "ids": torch.arange(4, dtype=torch.int32).expand(3, 4)}
    out = stored(c.op, dict(c.op.reference(inputs, c.workload.axes)))
    finding = c.judge(out, poison=POISONS[1]).findings[0]
    assert finding.rule == "wrong-expert" and "not chosen are NaN" in finding.message
    assert "unless memory was read" not in finding.message
    assert "unless memory was read" in c.judge(out, poison=POISONS[0]).findings[0].message or (
        c.judge(out, poison=POISONS[0]).findings[0].rule == "output-not-written"
    )


def test_rows_that_changed_places(case) -> None:
    """A permutation that no known mistake describes."""
    c = case("moe_experts")
    out = golden(c)
    out["expanded"] = out["expanded"][:, [2, 1, 0, 3]].contiguous()
    finding = c.judge(out).findings[0]
    assert finding.rule == "wrong-expert" and "row [0, 0] has the values of row [0, 2]" in finding.message
    assert "6 of 12 rows" in finding.message


@pytest.mark.parametrize("byte", POISONS)
def test_nothing_written(case, byte: int) -> None:
    c = case("moe_experts")
    c.restore(byte)
    check = c.judge(c.read_outputs(), poison=byte)
    assert rules(check) == ["output-not-written"] and "nothing was written" in check.findings[0].message


@pytest.mark.parametrize("byte", POISONS)
@pytest.mark.parametrize(
    ("name", "output"), [("moe_experts", "expanded"), ("moe", "out"), ("rmsnorm", "out")]
)
def test_unwritten_tail(case, byte: int, name: str, output: str) -> None:
    c = case(name)
    c.restore(byte)
    left = c.read_outputs()[output]
    out = golden(c)
    n = left.shape[-1]
    out[output][..., n - 8 :] = left[..., n - 8 :]
    finding = c.judge(out, poison=byte).findings[0]
    assert finding.rule == "dropped-tail" and f"from index {n - 8} of {n}" in finding.message


@pytest.mark.parametrize("byte", POISONS)
def test_unwritten_hole(case, byte: int) -> None:
    c = case("moe_experts")
    c.restore(byte)
    out = golden(c)
    out["expanded"][1, 2] = c.read_outputs()["expanded"][1, 2]
    finding = c.judge(out, poison=byte).findings[0]
    assert finding.rule == "output-not-written" and "128 of 1536" in finding.message
    assert "only at B = 1" in finding.message and "only at K = 2" in finding.message


def test_last_rows_wrong(case) -> None:
    c = case("moe_experts")
    out = golden(c)
    out["expanded"][..., 96:] = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1))
    finding = c.judge(out).findings[0]
    assert finding.rule == "dropped-tail" and "from index 96 of 128" in finding.message


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.1, -1.0])
def test_a_lost_factor(case, factor: float) -> None:
    c = case("rmsnorm")
    out = golden(c)
    out["out"] = to_bf16(out["out"].double() * factor)
    finding = c.judge(out).findings[0]
    assert finding.rule == "missing-scale" and "times the expected" in finding.message


def test_bf16_accumulation_looks_like_rounding(case) -> None:
    c = case("rmsnorm")
    noise = 1 + 0.02 * torch.randn(3, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = {"out": to_bf16(c.standard.golden["out"] * noise)}
    assert rules(c.judge(out)) == ["wrong-rounding"]


def test_garbage_is_plain_numerics(case) -> None:
    c = case("rmsnorm")
    out = {"out": torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)}
    assert rules(c.judge(out)) == ["numerics"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_found_and_placed(case, value: float) -> None:
    c = case("rmsnorm")
    out = golden(c)
    out["out"][1, 17] = value
    finding = c.judge(out).findings[0]
    assert finding.rule == "numerics" and "out[1, 17]" in finding.message


def test_a_number_where_nan_is_expected(case) -> None:
    c = case("rmsnorm", "small_b3", "nan_inf")
    out = golden(c)
    assert out["out"][0].isnan().all()
    out["out"][0, 5] = 0.0
    assert "out[0, 5]" in c.judge(out).findings[0].message


def test_ids_are_exact(case) -> None:
    c = case("moe_topk")
    out = golden(c)
    out["ids"][2, 1] += 1
    check = c.judge(out)
    assert check.verdict is Verdict.FAIL and check.findings[0].buffer == "ids"
    assert check.measures["ids.wrong"] == 1 and "ids[2, 1]" in check.findings[0].message


def test_tie_order(case) -> None:
    c = case("moe_topk", "small_b3", "ties")
    out = stored(c.op, dict(c.op.faults["higher-id-first"].reference(c.inputs, c.workload.axes)))
    assert rules(c.judge(out)) == ["tie-order"]


def test_the_gathered_columns_of_the_latent_must_stay(case) -> None:
    c = case("moe")
    out = golden(c)
    out["latent"][:, 100] *= 1.05
    assert rules(c.judge(out)) and c.judge(out).findings[0].buffer == "latent"


def test_a_missing_output_and_a_wrong_shape(case) -> None:
    c = case("moe")
    out = golden(c)
    out["latent"] = out["latent"][:2]
    del out["out"]
    check = c.judge(out)
    assert check.verdict is Verdict.FAIL and {f.buffer for f in check.findings} == {"out", "latent"}
    assert any("wrong shape" in f.message for f in check.findings)


def test_suspiciously_exact_is_information_only(case) -> None:
    c = case("moe_experts")
    assert not c.judge(golden(c)).findings, "float32 accumulation alone may be as good as golden"
    inexact = replace(c.standard, least={"expanded": 3e-3})
    check = judge(c.op, c.workload.axes, inexact, golden(c), c.label)
    assert check.verdict is Verdict.PASS
    assert [(f.rule, f.severity) for f in check.findings] == [("better-than-honest", Severity.INFO)]
    honest = c.judge(stored(c.op, dict(c.op.baseline(c.inputs, c.workload.axes))))
    assert not honest.findings
