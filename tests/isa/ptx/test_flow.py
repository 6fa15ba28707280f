"""Control flow and data flow of PTX against brute force and hand-written cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.isa.flow import Block, ControlFlowGraph
from workbench.isa.ptx import Kernel, PtxSyntaxError, Reg, parse
from workbench.isa.ptx.cfg import build
from workbench.isa.ptx.dataflow import liveness, reaching_definitions, reads, writes

DECLARE = (
    ".reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>; .reg .f32 %f<40>; "
    ".reg .b16 h<4>; .reg .b8 c<4>;\n"
)


def kernel(body: str) -> Kernel:
    text = f".version 9.4\n.target sm_103a\n.address_size 64\n.entry k(.param .u64 P) {{\n{DECLARE}{body}\n}}"
    return parse(text).kernels[0]


def test_blocks_and_edges_of_a_loop_with_a_predicated_return() -> None:
    graph = build(
        kernel("@%p1 ret;\nL: add.s32 %r1, %r1, 1;\n@%p2 bra L;\n@!%p3 bra OUT;\nmov.b32 %r2, 0;\nOUT: ret;")
    )
    assert [(b.start, b.end) for b in graph.blocks] == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert graph.successors == ((1,), (1, 2), (4, 3), (4,), ())
    assert graph.leaves == (True, False, False, False, True)
    assert graph.back_edges == {(1, 1)}
    assert graph.loops == {1: frozenset({1})}
    assert graph.immediate_dominators == (None, 0, 1, 2, 2)
    assert graph.immediate_post_dominators == (None, 2, 4, 4, None)
    assert graph.block_of == (0, 1, 1, 2, 3, 4)


def test_falling_off_the_end_and_labels_at_the_end() -> None:
    graph = build(kernel("@%p1 bra END;\nmov.b32 %r1, 0;\nEND:"))
    assert graph.leaves == (True, True)
    assert graph.successors == ((1,), ())


def test_indexed_branch_has_all_its_targets() -> None:
    graph = build(kernel("ts: .branchtargets A, B, A;\nbrx.idx %r1, ts;\nA: ret;\nB: trap;"))
    assert graph.successors[0] == (1, 2)


def test_branch_to_something_that_is_no_label() -> None:
    with pytest.raises(PtxSyntaxError, match="not a label"):
        build(kernel("bra P;"))


@st.composite
def graphs(draw: st.DrawFn) -> ControlFlowGraph[int]:
    n = draw(st.integers(1, 8))
    node = st.integers(0, n - 1)
    successors = tuple(tuple(dict.fromkeys(draw(st.lists(node, max_size=2)))) for _ in range(n))
    leaves = tuple(draw(st.booleans()) for _ in range(n))
    return ControlFlowGraph(tuple(range(n)), tuple(Block(i, i, i + 1) for i in range(n)), successors, leaves)


def reachable(start: int, edges: dict[int, set[int]], without: int) -> set[int]:
    if start == without:
        return set()
    seen, todo = {start}, [start]
    while todo:
        for s in edges.get(todo.pop(), set()):
            if s != without and s not in seen:
                seen.add(s)
                todo.append(s)
    return seen


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_dominators_agree_with_removing_each_block(graph: ControlFlowGraph[int]) -> None:
    n = len(graph.blocks)
    forward = {b: set(s) for b, s in enumerate(graph.successors)}
    full = reachable(0, forward, -1)
    for a in range(n):
        left = reachable(0, forward, a)
        for b in full:
            assert graph.dominates(a, b) == (b not in left or a == b), (a, b)
    end = n
    backward: dict[int, set[int]] = {end: {b for b in range(n) if graph.leaves[b]}}
    for b, s in forward.items():
        for x in s:
            backward.setdefault(x, set()).add(b)
    full = reachable(end, backward, -1)
    for a in range(n):
        left = reachable(end, backward, a)
        for b in full - {end}:
            assert graph.post_dominates(a, b) == (b not in left or a == b), (a, b)


@pytest.mark.parametrize(
    ("text", "written", "read"),
    [
        ("ld.global.v2.b32 {%r1, _}, [%rd1+4];", ["%r1"], ["%rd1"]),
        ("st.global.v2.b32 [%rd1+4], {%r1, %r2};", [], ["%rd1", "%r1", "%r2"]),
        ("@%p1 red.global.add.u32 [%rd1], %r1;", [], ["%rd1", "%r1", "%p1"]),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", ["%r1"], ["%rd1", "%r2"]),
        ("setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;", ["%p1", "%p2"], ["%r1", "%r2", "%p3"]),
        ("bar.sync %r1, %r2;", [], ["%r1", "%r2"]),
        ("barrier.cta.red.popc.u32 %r1, 0, %p1;", ["%r1"], ["%p1"]),
        ("elect.sync %r1|%p1, -1;", ["%r1", "%p1"], []),
        ("elect.sync _|%p1, -1;", ["%p1"], []),
        ("cp.async.ca.shared.global [%r1], [%rd1], 16;", [], ["%r1", "%rd1"]),
        ("cp.async.wait_group 0;", [], []),
        ("prefetch.global.L2 [%rd1];", [], ["%rd1"]),
        ("createpolicy.fractional.L2::evict_last.b64 %rd1, 0f3F800000;", ["%rd1"], []),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;", [], ["%r1"]),
        ("mbarrier.arrive.shared.b64 %rd1, [%r1];", ["%rd1"], ["%r1"]),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2, 1000;", ["%p1"], ["%r1", "%r2"]),
        ("mbarrier.init.shared.b64 [%r1], 1;", [], ["%r1"]),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];", ["%r1", "%r2"], ["%r3"]),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;", [], ["%r1"]),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
            [],
            ["%r1", "%rd1", "%rd2", "%r2", "%p1"],
        ),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", ["%r1", "%p1"], ["%r2"]),
        ("mov.b32 {h0, h1}, %r1;", ["h0", "h1"], ["%r1"]),
        ("mov.b64 %rd1, {%r1, %r2};", ["%rd1"], ["%r1", "%r2"]),
        ("setmaxnreg.inc.sync.aligned.u32 232;", [], []),
        ("nanosleep.u32 %r1;", [], ["%r1"]),
        ("griddepcontrol.wait;", [], []),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];",
         [], ["%r1", "%r2", "%r3"]),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
         ["%f1", "%f2"], ["%f1", "%f2", "%rd1", "%rd2", "%p1"]),
        ("wgmma.wait_group.sync.aligned 0;", [], []),
        ("multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1];", ["%f1"], ["%rd1"]),
        ("multimem.red.release.sys.global.add.u32 [%rd1], %r1;", [], ["%rd1", "%r1"]),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};", [], ["%r1", "%r2"]),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
         "{%r5,%r6}, {%f1,%f2,%f3,%f4};", ["%f1", "%f2", "%f3", "%f4"],
         ["%r1", "%r2", "%r3", "%r4", "%r5", "%r6", "%f1", "%f2", "%f3", "%f4"]),
    ],
)  # fmt: skip
def test_reads_and_writes(text: str, written: list[str], read: list[str]) -> None:
    (instruction,) = kernel(text).instructions
    assert [r.name for r in writes(instruction)] == written
    assert [r.name for r in reads(instruction)] == read


def test_liveness_across_a_loop_and_predicated_writes() -> None:
    graph = build(
        kernel(
            "mov.b32 %r1, 0; mov.b32 %r2, 1;\nL: add.s32 %r1, %r1, %r2; @%p1 mov.b32 %r3, 5;\n"
            "setp.lt.s32 %p2, %r1, 10; @%p2 bra L;\nst.shared.b32 [%r3], %r1; ret;"
        )
    )
    live = liveness(graph)
    names = [sorted(r.name for r in s) for s in live.live_in]
    assert names == [["%p1", "%r3"], ["%p1", "%r1", "%r2", "%r3"], ["%r1", "%r3"]]


def test_definitions_that_reach() -> None:
    graph = build(
        kernel(
            "mov.b32 %r1, 0;\n@%p1 mov.b32 %r1, 1;\n@%p2 bra L;\nmov.b32 %r1, 2;\n"
            "L: add.s32 %r2, %r1, %r3; ret;"
        )
    )
    reached = reaching_definitions(graph)
    assert reached[4] == {Reg("%r1"): frozenset({0, 1, 3}), Reg("%r3"): frozenset()}
