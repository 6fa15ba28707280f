"""Traces of a thread and of an address, dumps at findings, and that tracing changes no result."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from tests.simulator.kernels import INDEX, kernel, run
from tests.simulator.rank_kernels import Reduction, all_reduce
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.findings import Finding, Severity
from workbench.report.trace import print_trace
from workbench.simulator import SimulationOptions, Trace, simulate_ranks
from workbench.verify.report import Check, Report, Verdict
from workbench.verify.trace import witness

BODY = """
setp.lt.u32 %p1, %r0, 5;
cvt.rn.f32.u32 %f1, %r0;
@%p1 mul.f32 %f1, %f1, 0f40000000;
@%p1 st.global.f32 [%d0], %f1;
@!%p1 st.global.f32 [%d0], 0f00000000;
mov.u32 %r3, 0;
LOOP:
add.u32 %r3, %r3, 1;
setp.lt.u32 %p2, %r3, 3;
@%p2 bra LOOP;
"""
TEXT = kernel(INDEX + BODY, ["out"])


def traced(text: str = TEXT, count: int = 64, **trace):
    return run(text, {"out": (count, np.float32)}, grid=2, trace=Trace(**trace))


def steps_of(result, opcode: str):
    return [s for s in result.outcome.trace.steps if f" {s.text}".replace("@", " ").find(f" {opcode}") >= 0]


def test_a_thread_is_followed_with_its_values():
    result = traced(thread=(1, 3))
    steps = result.outcome.trace.steps
    assert [s.step for s in steps] == list(range(len(steps)))
    assert {s.thread for s in steps} == {"cta=(1,0,0) thread=(3,0,0)"}
    assert steps_of(result, "mad.lo")[0].writes == {"%r0": "0x00000023 35"}
    conversion = steps_of(result, "cvt")[0]
    assert conversion.reads == {"%r0": "0x00000023 35"}
    assert conversion.writes == {"%f1": "0x420c0000 35"}
    assert [s.writes["%r3"][-1] for s in steps_of(result, "add.u32 %r3")] == ["1", "2", "3"]
    assert [s.executed for s in steps_of(result, "bra")] == [True, True, False]
    assert steps[-1].text == "ret;"


@pytest.mark.parametrize(("thread", "small"), [(3, True), (7, False)])
def test_predicated_instructions_say_whether_they_were_executed(thread, small):
    result = traced(thread=(0, thread))
    stores = steps_of(result, "st.global")
    assert [(s.text.startswith("@%p1"), s.executed) for s in stores] == [(True, small), (False, not small)]
    product = steps_of(result, "mul.f32")[0]
    assert product.executed is small
    assert product.writes["%f1"].split()[1] == str(thread * (2 if small else 1))


def test_threads_may_be_named_by_coordinates():
    a, b = traced(thread=(1, 3)), traced(thread=((1, 0, 0), (3, 0, 0)))
    assert a.outcome.trace == b.outcome.trace
    assert traced(thread=(7, 0)).outcome.trace.steps == ()
    assert traced(thread=((0, 2, 0), 0)).outcome.trace.steps == ()


def test_an_address_shows_who_touches_it_and_how_it_changes():
    body = (
        INDEX
        + "st.global.u32 [%out+16], 7;\nld.global.u32 %r1, [%d0];\natom.global.add.u32 %r2, [%out+16], 2;"
    )
    result = run(
        kernel(body, ["out"]), {"out": np.arange(32, dtype=np.uint32)}, trace=Trace(buffer="out", offset=16),
        check_races=False,
    )  # fmt: skip
    assert result.rules == []
    seen = [(s.text.split()[0], s.lanes, s.before, s.after) for s in result.outcome.trace.steps]
    assert seen == [
        ("st.global.u32", 32, "0x00000004", "0x00000007"),
        ("ld.global.u32", 1, "0x00000007", "0x00000007"),
        ("atom.global.add.u32", 32, "0x00000007", "0x00000047"),
    ]
    assert result.outcome.trace.steps[1].thread == "cta=(0,0,0) thread=(4,0,0)"
    address = result.memory.address("out") + 16
    again = run(kernel(body, ["out"]), {"out": np.arange(32, dtype=np.uint32)}, trace=Trace(address=address))
    assert again.outcome.trace.steps == result.outcome.trace.steps


def test_a_bulk_copy_shows_where_it_arrives():
    body = """
mov.u32 %r1, 77;
st.shared.v4.u32 [buffer], {%r1, %r1, %r1, %r1};
fence.proxy.async.shared::cta;
mov.u32 %r2, buffer;
cp.async.bulk.global.shared::cta.bulk_group [%out], [%r2], 16;
cp.async.bulk.commit_group;
mov.u32 %r3, 5;
cp.async.bulk.wait_group 0;
"""
    text = kernel(body, ["out"], ".shared .align 16 .b8 buffer[16];")
    result = run(text, {"out": (4, np.uint32)}, block=1, trace=Trace(buffer="out", offset=4))
    assert result.rules == []
    (step,) = result.outcome.trace.steps
    assert (step.lanes, step.before, step.after) == (0, "0x00000000", "0x0000004d")


def test_the_number_of_steps_is_bounded():
    result = traced(thread=(0, 0), limit=4)
    assert len(result.outcome.trace.steps) == 4
    assert result.outcome.trace.total > 20


def test_a_finding_leaves_the_threads_registers_and_last_steps():
    text = kernel(INDEX + "mov.u32 %r7, 77;\nld.global.u32 %r1, [%d0+4000];\nmov.u32 %r7, 78;", ["out"])
    result = traced(text, thread=(0, 2))
    (dump,) = result.outcome.trace.dumps
    assert dump.rule == "out-of-bounds"
    assert dump.text == "ld.global.u32 %r1, [%d0+4000];"
    assert dump.registers["%r7"] == "0x0000004d 77"
    assert dump.registers["%r0"].endswith(" 2")
    assert dump.steps[-1].text == "mov.u32 %r7, 77;"
    assert len(dump.steps) <= 12


def test_tracing_changes_neither_results_nor_findings():
    plain = run(TEXT, {"out": (64, np.float32)}, grid=2)
    for trace in ({"thread": (0, 1)}, {"buffer": "out"}):
        result = traced(**trace)
        np.testing.assert_array_equal(result["out"], plain["out"])
        assert result.outcome.findings == plain.outcome.findings
        assert result.outcome.counters == plain.outcome.counters
    assert plain.outcome.trace.steps == ()


def test_a_trace_over_ranks_names_them():
    reduction = Reduction(2)
    for r in range(2):
        reduction.fill(r, 0, np.full(512, r + 1, np.float32))
    launches = reduction.launches(all_reduce(2))
    outcome = simulate_ranks(
        reduction.domain, launches, SimulationOptions(trace=Trace(buffer="box@0", offset=0))
    )
    assert outcome.completed
    writers = [s for s in outcome.trace.steps if s.before != s.after]
    assert [s.text.split(".")[0] for s in writers] == ["multimem", "st"]
    assert {s.thread.split()[0] for s in outcome.trace.steps} == {"rank=0"}
    reduction = Reduction(2)
    for r in range(2):
        reduction.fill(r, 0, np.ones(512, np.float32))
    outcome = simulate_ranks(
        reduction.domain,
        reduction.launches(all_reduce(2)),
        SimulationOptions(trace=Trace(thread=(0, 5), rank=1)),
    )
    assert {s.thread for s in outcome.trace.steps} == {"rank=1 cta=(0,0,0) thread=(5,0,0)"}


@pytest.mark.parametrize(
    ("text", "trace"),
    [
        ("thread=3:17", Trace(thread=(3, 17))),
        ("thread=1,2,0:4,0,1", Trace(thread=((1, 2, 0), (4, 0, 1)))),
        ("address=out+0x10", Trace(buffer="out", offset=16)),
        ("address=out", Trace(buffer="out")),
        ("address=0x7f2a00001000", Trace(address=0x7F2A00001000)),
    ],
)
def test_what_to_trace_is_read_from_text(text, trace):
    assert Trace.parse(text) == trace


@pytest.mark.parametrize(
    "text", ["", "thread", "thread=3", "thread=a:b", "address=", "address=x+", "warp=1:2", "thread=1,2:3"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(WorkbenchError, match="CTA:THREAD"):
        Trace.parse(text)


def test_traces_of_nothing_and_of_bytes_outside_are_refused():
    with pytest.raises(WorkbenchError, match="one thing"):
        Trace()
    with pytest.raises(WorkbenchError, match="no byte 256"):
        traced(buffer="out", offset=256)
    with pytest.raises(UnknownNameError, match="nearest: out"):
        traced(buffer="oat")
    with pytest.raises(WorkbenchError, match="no buffer is at"):
        traced(address=64)


def test_traces_and_dumps_are_readable_and_plain_data():
    text = kernel(INDEX + "ld.global.u32 %r1, [%d0+4000];", ["out"])
    record = traced(text, thread=(0, 2)).outcome.trace
    console = Console(file=io.StringIO(), width=120)
    print_trace(record, "thread 0:2", console)
    shown = console.file.getvalue()
    assert "out-of-bounds at PTX line" in shown
    assert "%r0 = 0x00000002 2" in shown
    assert json.loads(record.model_dump_json())["total"] == record.total
    print_trace(traced(thread=(9, 0)).outcome.trace, "nobody", console)
    assert "nobody: nothing was executed there" in console.file.getvalue()


def test_the_witness_of_a_report_is_its_first_error_with_a_thread():
    def finding(rule: str, thread: str | None, severity: Severity = Severity.ERROR) -> Finding:
        return Finding(rule=rule, severity=severity, message="m", ptx_line=3, thread=thread)

    report = Report.model_construct(
        checks=(
            Check(name="ordering", verdict=Verdict.PASS, summary="", findings=()),
            Check(
                name="memory",
                verdict=Verdict.FAIL,
                summary="",
                findings=(
                    finding("a", None),
                    finding("b", "cta=(0,0,0) thread=(1,0,0)", Severity.WARNING),
                    finding("c", "cta=(4,5,6) thread=(7,8,9)"),
                ),
            ),
        )
    )
    found = witness(report)
    assert found is not None
    assert (found[0].rule, found[1]) == ("c", ((4, 5, 6), (7, 8, 9)))
    assert witness(Report.model_construct(checks=())) is None
