"""Candidates that compile to the same kernels under other sources: told, and never winners over the first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from authors import WRONG_BIT, edit, last_results, turn_of
from model_server import Answer, serve

from workbench.agent import online
from workbench.agent.model import Profile
from workbench.agent.online import Plan
from workbench.artifact import Artifact
from workbench.compile import CompileRequest, compile_candidate
from workbench.ops import load_op
from workbench.templates import parse_template
from workbench.verify.identical import object_hash
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]
ROW = (ROOT / "templates" / "rmsnorm" / "row.py").read_text()


def compiled(source: str, **knobs: Any) -> Artifact:
    op = load_op(Workspace(ROOT), "rmsnorm")
    template = parse_template(source, Path("row.py"))
    return compile_candidate(CompileRequest.of(op, "small_b1", template, {**template.default, **knobs}))


def test_names_comments_and_lines_do_not_count() -> None:
    first = object_hash(compiled(ROW))
    assert object_hash(compiled("# a comment\n\n\n" + ROW)) == first
    assert object_hash(compiled(ROW.replace("RowNorm", "Renamed").replace('"rms_norm"', '"other"'))) == first
    assert object_hash(compiled(ROW.replace("held", "kept"))) == first


def test_code_launches_and_knobs_do() -> None:
    first = object_hash(compiled(ROW))
    assert object_hash(compiled(ROW.replace(*WRONG_BIT))) != first
    assert object_hash(compiled(ROW, vec=4)) != first
    assert object_hash(compiled(ROW.replace("use_pdl=True,", ""))) != first


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for folder in ("verifiers", "templates"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("generated_kernels", "tuning_db"):
        (tmp_path / folder).mkdir()
    return Workspace(tmp_path)


def test_the_author_is_told_and_the_first_wins(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_MODEL_KEY", "sk-key")
    said: list[str] = []

    def author(request: dict[str, Any]) -> Answer:
        said.extend(last_results(request))
        steps = [
            Answer(calls=[("submit", {"base": "row"})]),
            Answer(calls=[edit("c0-0", "held = []", "held = []  # quite another kernel")]),
            Answer(calls=[("submit", {"source": "# mine\n" + ROW})]),
            Answer(calls=[("submit", {"base": "row", "knobs": {"vec": 4}})]),
        ]
        turn = turn_of(request)
        return steps[turn] if turn < len(steps) else Answer(calls=[("finish", {})])

    with serve(author) as server:
        profile = Profile(model="test-model", base_url=server.url, api_key_env="TEST_MODEL_KEY", retries=1)
        result = online.propose(workspace, "rmsnorm", "small_b1", Plan(profile, tune_batch=0), workers=2)
    assert "identical-object" not in said[0] and "identical-object" not in said[3]
    assert "same kernels as c0-0" in said[1] and "same kernels as c0-0" in said[2]
    assert [c.same_as_template for c in result.candidates] == ["row"] * 4
    assert result.winner in (0, 3)


def test_a_copy_of_a_template_is_told(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_MODEL_KEY", "sk-key")
    said: list[str] = []

    def author(request: dict[str, Any]) -> Answer:
        said.extend(last_results(request))
        copy = Answer(calls=[("submit", {"source": "# my own idea\n" + ROW})])
        return copy if turn_of(request) == 0 else Answer(calls=[("finish", {})])

    with serve(author) as server:
        profile = Profile(model="test-model", base_url=server.url, api_key_env="TEST_MODEL_KEY", retries=1)
        online.propose(workspace, "rmsnorm", "small_b1", Plan(profile, tune_batch=0), workers=1)
    assert "same kernels as template row" in said[0]
