"""The scoreboard: hand-counted cycles of small pieces of code."""

from __future__ import annotations

import pytest
from costs import PTX, loads

from workbench.cost.scoreboard import Code, Step, ptx_code, sass_code, walk
from workbench.isa.ptx import parse
from workbench.isa.sass.parser import parse_sass

LATENCY = {"alu": 4.0, "load_global": 100.0, "barrier": 30.0, "async_wait": 100.0}


def step(kind: str, writes: str = "", reads: str = "", load: int = 0) -> Step:
    return Step(kind, tuple(reads.split()), tuple(writes.split()), load)


def cycles(*steps: Step) -> float:
    return walk(Code(steps, (), True), LATENCY).cycles


def test_independent_instructions_issue_one_a_cycle() -> None:
    assert cycles(*(step("fp32", f"r{i}", "x") for i in range(10))) == 9 + 4


def test_dependent_instructions_wait() -> None:
    assert cycles(*(step("fp32", "r", "r") for _ in range(10))) == 10 * 4


def test_loads_overlap_until_one_is_used() -> None:
    together = [step("load_global", f"r{i}", "a", 16) for i in range(4)]
    used = [step("fp32", "s", f"s r{i}") for i in range(4)]
    w = walk(Code((*together, *used), (), True), LATENCY)
    assert w.cycles == 100 + 4 * 4 and (w.peak_loads, w.peak_load_bytes) == (4, 64)
    one_by_one = [s for pair in zip(together, used, strict=True) for s in pair]
    w = walk(Code(tuple(one_by_one), (), True), LATENCY)
    # Each load issues while the sum before it is still under way.
    assert w.cycles == 4 * 100 + 3 * 1 + 4 and w.peak_loads == 1


def test_barrier_blocks_and_async_waits_for_its_copy() -> None:
    assert cycles(step("barrier"), step("fp32", "r")) == 30 + 1 + 4
    assert cycles(step("async_copy"), step("async_wait"), step("fp32", "r")) == 100 + 1 + 4
    assert cycles(step("async_wait"), step("fp32", "r")) == 1 + 4


def test_loops_are_charged_by_their_body() -> None:
    """A body of one dependent chain: every further pass takes its own length."""
    body = [step("fp32", "r", "r") for _ in range(5)]
    code = Code((*body, step("branch")), ((0, 5),), True)
    w = walk(code, LATENCY)
    assert w.loop_cycles_per_instruction == pytest.approx(5 * 4 / 6)
    assert w.cycles_for(w.issued + 60) == pytest.approx(w.cycles + 60 * 20 / 6)
    assert w.cycles_for(w.issued / 2) == w.cycles / 2


def test_ptx_code_of_a_kernel() -> None:
    kernel = parse(PTX.replace("LOADS", loads(4, together=True))).kernel("k")
    code = ptx_code(kernel)
    assert code.loops == () and code.issued == len(code.steps) - 1  # the move is free
    assert [s.load_bytes for s in code.steps if s.kind == "load_global"] == [16] * 4
    assert walk(code, LATENCY).peak_loads == 4
    # ptxas moves loads of a block up, so PTX that uses each at once is no slower than it has to be.
    serial = ptx_code(parse(PTX.replace("LOADS", loads(4, together=False))).kernel("k"))
    assert walk(serial, LATENCY).cycles == walk(code, LATENCY).cycles < 150


def test_ptx_loads_do_not_cross_a_barrier() -> None:
    split = loads(2, together=True).replace(
        "    add.f32 %f30, %f30, %f0;", "    bar.sync 0;\n    add.f32 %f30, %f30, %f0;"
    )
    apart = "    bar.sync 0;\n".join(loads(1, together=True) + "\n" for _ in range(2))
    one, two = (walk(ptx_code(parse(PTX.replace("LOADS", b)).kernel("k")), LATENCY) for b in (split, apart))
    assert one.peak_loads == 2 and two.peak_loads == 2
    used = "    bar.sync 0;\n".join(
        loads(1, together=True) + "\n    setp.lt.f32 %p1, %f0, %f30;\n    @%p1 bra DONE;\n" for _ in range(2)
    )
    serial = walk(ptx_code(parse(PTX.replace("LOADS", used + "DONE:")).kernel("k")), LATENCY)
    assert serial.peak_loads == 1 and serial.cycles > 200


def test_head_is_what_precedes_the_wait() -> None:
    """Weights loaded before the wait are there when it ends; loaded after it, they are still to come."""
    load, use = step("load_global", "w", "a", 16), step("fp32", "s", "w")
    before = Code((step("pdl_launch"), load, step("pdl_wait"), use), (), True)
    after = Code((step("pdl_launch"), step("pdl_wait"), load, use), (), True)
    a, b = walk(before, LATENCY), walk(after, LATENCY)
    assert (a.head_load_bytes, b.head_load_bytes) == (16, 0) and before.releases
    assert a.head_cycles == a.cycles - 4 and b.head_cycles == 2
    assert walk(Code((load, use), (), True), LATENCY).head_cycles == 0


def test_ptx_knows_the_wait() -> None:
    body = "    griddepcontrol.launch_dependents;\n    griddepcontrol.wait;\n" + loads(1, together=True)
    code = ptx_code(parse(PTX.replace("LOADS", body)).kernel("k"))
    assert code.releases and code.wait is not None and code.steps[code.wait].kind == "pdl_wait"


def test_ptx_loop_is_found() -> None:
    body = "TOP:\n    add.f32 %f1, %f1, %f2;\n    setp.lt.f32 %p1, %f1, %f3;\n    @%p1 bra TOP;"
    code = ptx_code(parse(PTX.replace("LOADS", body)).kernel("k"))
    assert len(code.loops) == 1
    first, last = code.loops[0]
    assert [s.kind for s in code.steps[first : last + 1]] == ["fp32", "predicate", "branch"]


SASS = """
	.target	sm_103a
	.elftype	@"ET_EXEC"
	.section	.text.k,"ax",@progbits
	.text.k:
.L_top:
        /*0000*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0010*/                   LDG.E.128 R8, desc[UR6][R2.64+0x200] ;
        /*0020*/                   FADD R12, R4, R11 ;
        /*0030*/                   ISETP.GE.AND P0, PT, R12, R0, PT ;
        /*0040*/              @!P0 BRA `(.L_top) ;
        /*0050*/                   STG.E desc[UR6][R2.64], R12 ;
        /*0060*/                   EXIT ;
        /*0070*/                   NOP ;
"""


def test_sass_code_of_a_function() -> None:
    code = sass_code(parse_sass(SASS).functions[0])
    kinds = [s.kind for s in code.steps]
    assert kinds == ["load_global", "load_global", "fp32", "int", "branch", "store_global", "branch"]
    assert code.steps[0].writes == ("R4", "R5", "R6", "R7")
    assert set(code.steps[2].reads) == {"R4", "R11"} and code.steps[3].writes == ("P0",)
    assert "P0" in code.steps[4].reads and code.loops == ((0, 4),)
    assert code.steps[5].writes == () and set(code.steps[5].reads) >= {"R2", "R3", "R12"}
    w = walk(code, LATENCY)
    assert w.peak_load_bytes == 32 and w.cycles >= 100 + 4 + 4
