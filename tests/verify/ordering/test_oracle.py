"""The audit against a plain simulation of straight-line programs of three warps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snippets import audit, contract, ptx

from workbench.isa.ptx import parse
from workbench.isa.ptx.cfg import build
from workbench.isa.ptx.model import Module
from workbench.isa.ptx.values import PtxValues
from workbench.isa.values import ParameterBlock, Threads
from workbench.verify.ordering.program import Kind
from workbench.verify.ordering.ptx import ptx_program
from workbench.verify.ordering.solver import ORDERED, solve

# A statement: (kind, warps that execute it).
Statement = tuple[str, frozenset[int]]
WARPS = (0, 1, 2, 3)
_some = st.frozensets(st.sampled_from(WARPS), min_size=1)
_statement = st.one_of(
    st.tuples(st.just("wait"), _some),
    st.tuples(st.just("load"), _some),
    st.tuples(st.just("sync"), st.just(frozenset(WARPS))),
    st.tuples(st.just("named"), st.frozensets(st.sampled_from(WARPS), min_size=2)),
)


def text(program: Sequence[Statement]) -> str:
    """Role branches on the warp number around each statement, with different named barriers for each."""
    lines = []
    for n, (kind, warps) in enumerate(program):
        mask = sum(1 << w for w in warps)
        lines.append(
            "{ .reg .pred q; .reg .b32 m; shl.b32 m, 1, %r2; "
            f"and.b32 m, m, {mask}; setp.eq.s32 q, m, 0; @q bra S;"
        )
        lines.append(
            {
                "wait": "griddepcontrol.wait;",
                "load": "cp.async.ca.shared.global [%r8], [%rd5], 4;",
                "sync": "bar.sync 0;",
                "named": f"bar.sync {n % 15 + 1}, {32 * len(warps)};",
            }[kind]
            + "\nS: }\n"
        )
    return "".join(lines)


def simulate(program: Sequence[Statement]) -> list[bool]:
    """For each load: True if every warp that executes it is ordered by then."""
    ordered = dict.fromkeys(WARPS, False)
    good = []
    for kind, warps in program:
        if kind == "wait":
            ordered.update(dict.fromkeys(warps, True))
        elif kind == "load":
            good.append(all(ordered[w] for w in warps))
        elif any(ordered[w] for w in warps):
            ordered.update(dict.fromkeys(warps, True))
    return good


def solved(module: Module) -> list[bool]:
    kernel = module.kernels[0]
    graph = build(kernel)
    program = ptx_program(graph, PtxValues(module, kernel, graph, Threads((128, 1, 1)), ParameterBlock()))
    solution = solve(program)
    return [solution.lowest(e) >= ORDERED for e in program.all_events(Kind.ACCESS)]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_statement, max_size=12))
def test_levels_on_the_ptx_are_those_of_the_simulation(program: list[Statement]) -> None:
    assert solved(parse(ptx(text(program)))) == simulate(program)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_statement, min_size=3, max_size=9))
def test_the_sass_agrees(program: list[Statement]) -> None:
    """Copies are not moved by the assembler, so PTX and SASS must be judged alike."""
    good = simulate(program)
    waits = any(kind == "wait" for kind, _ in program)
    with tempfile.TemporaryDirectory() as folder:
        target = audit(Path(folder), ptx(text(program)), contract())
    errors = [f for f in target.findings if f.severity == "error"]
    assert bool(errors) == (not all(good))
    for f in errors:
        assert f.ptx_line is not None
        assert f.rule == ("pdl-load-before-wait" if waits else "pdl-wait-missing")
    on_sass = [f for f in errors if f.sass_offset is not None]
    assert bool(on_sass) == bool(errors)
