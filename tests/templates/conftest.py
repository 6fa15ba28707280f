"""Fixtures of the template tests: ops, templates and a compiler that remembers what it compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workbench.artifact import Artifact
from workbench.compile import CompileRequest, CompileServer, compile_candidate
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.templates import Knobs, Template, load_template
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("templates/*/*.py"))

Compile = Callable[..., Artifact]


@pytest.fixture(scope="session")
def workspace() -> Workspace:
    return Workspace(ROOT)


@pytest.fixture(params=FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def template(request: pytest.FixtureRequest) -> Template:
    return load_template(request.param)


STRUCTURES: dict[str, list[Knobs]] = {
    "moe": [{}, {"route": "inline"}, {"combine": "separate"}, {"route": "inline", "combine": "separate"}]
}
"""Knob changes that make other kernels of a template, by op; the default alone for the rest."""

VARIANTS = [
    pytest.param(
        (path, changes), id="-".join([f"{path.parent.name}/{path.stem}", *map(str, changes.values())])
    )
    for path in FILES
    for changes in STRUCTURES.get(path.parent.name, [{}])
]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> tuple[Template, Knobs]:
    """A template and the knob changes of one of its structures."""
    path, changes = request.param
    return load_template(path), changes


@pytest.fixture
def op(template: Template, workspace: Workspace) -> Op:
    return load_op(workspace, template.op)


@pytest.fixture(scope="session")
def real(workspace: Workspace, compiled: Compile) -> Callable[[tuple[Template, Knobs]], Artifact]:
    """`real(variant)`: the variant compiled for GB300 at the first real workload."""
    return lambda v: compiled(load_op(workspace, v[0].op), "tp8_b1", v[0], v[1])


@pytest.fixture(scope="session")
def server() -> Iterator[CompileServer]:
    with CompileServer() as running:
        yield running


@pytest.fixture(scope="session")
def compiled(server: CompileServer) -> Compile:
    """`compiled(op, workload, template, changes, arch)`: the default with some knobs changed, memoised."""
    memory: dict[tuple[object, ...], Artifact] = {}

    def get(
        op: Op, workload: str, template: Template, changes: Knobs | None = None, arch: str = "sm_103a"
    ) -> Artifact:
        knobs = {**template.default, **(changes or {})}
        key = (template.source_hash, workload, tuple(sorted(knobs.items())), arch)
        if key not in memory:
            request = CompileRequest.of(op, workload, template, knobs, arch)
            memory[key] = compile_candidate(request, server=server)
        return memory[key]

    return get
