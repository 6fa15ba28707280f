from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from workbench.artifact import Artifact
from workbench.compile import CompileRequest, compile_candidate
from workbench.ops import load_op
from workbench.templates import load_template
from workbench.verify.report import Check, Report, Verdict
from workbench.workspace import Workspace

if TYPE_CHECKING:
    from tests.export.evidence_bundles import Evidence
    from tests.export.module_winners import SimulatedProgram

TUNED = (1, 8, 16, 32)
"""Batches of the packaged rmsnorm."""
REPOSITORY = Workspace(Path(__file__).parents[2])


@pytest.fixture(scope="session")
def artifact() -> Artifact:
    """The default point of the first rmsnorm template at its smallest workload."""
    op = load_op(REPOSITORY, "rmsnorm")
    template = load_template(REPOSITORY.template("rmsnorm", REPOSITORY.template_names("rmsnorm")[0]))
    workload = op.workload("small_b1")
    point = next(iter(template.space(workload.axes).points()))
    return compile_candidate(CompileRequest.of(op, workload, template, point))


def make_report(artifact: Artifact, *checks: tuple[str, Verdict]) -> Report:
    return Report(
        op=artifact.op,
        workload=artifact.workload,
        template=artifact.template,
        knobs=artifact.knobs,
        arch=artifact.arch,
        artifact_key=artifact.key,
        device="simulator",
        checks=tuple(Check(name=n, verdict=v, summary=f"{n} came to {v.value}") for n, v in checks),
    )


@pytest.fixture
def report(artifact: Artifact) -> Report:
    return make_report(artifact, ("numerics/ordinary", Verdict.PASS), ("ordering/static", Verdict.PASS))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "space")


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A workspace with one kernel, verified in full and exported, and a bundle of it."""
    from tests.export.evidence_bundles import made

    return made(tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="session")
def winners() -> list[Artifact]:
    """rmsnorm tuned at 1, 8, 16 and 32 rows, at 64 for sm_100a; what a small layer can use."""
    from tests.export.module_winners import compiled

    return [
        *(compiled("rmsnorm", f"tp8_b{b}", B=b, N=7168) for b in TUNED),
        compiled("rmsnorm", "tp8_b64", arch="sm_100a", B=64, N=7168),
        compiled("rmsnorm", "latent_b3", B=3, N=128),
        compiled("moe_topk", "route_b3", B=3, E=32, K=4),
        compiled("moe", "small_b3"),
        compiled("moe", "alone_b3", B=3, H=256, E=32, K=4, L=128, I=64, D=128),
    ]


@pytest.fixture(scope="session")
def project(winners: list[Artifact], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported package's folder."""
    from tests.export.module_winners import put
    from workbench.export.module import write_module

    root = tmp_path_factory.mktemp("module")
    write_module(put(Workspace(root / "space"), *winners), root / "project", plugin=True)
    return root / "project"


@pytest.fixture(scope="session")
def package(project: Path) -> ModuleType:
    """The package imported: once a process, since its ops are registered once."""
    from tests.export.module_winners import imported

    return imported(project)


@pytest.fixture
def simulated(
    package: ModuleType, winners: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[SimulatedProgram]]:
    """The package's kernels answer on CPU tensors, their PTX simulated."""
    from tests.export.module_winners import SimulatedProgram

    SimulatedProgram.knows(*winners)
    SimulatedProgram.calls.clear()
    monkeypatch.setattr(package.runtime, "make_program", SimulatedProgram)
    monkeypatch.setattr(package.ops, "pretended_arch", "sm_103a")
    package.reset()
    yield SimulatedProgram
    package.runtime.forget()
