"""Candidates that compile to the same kernels under other sources: told, and never winners over the first."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from authors import WRONG_BIT, edit, last_results, turn_of
from model_server import Answer, serve

from workbench.agent import online
from workbench.agent.desk import Desk
from workbench.agent.feedback import CHAIN_STRIDE
from workbench.agent.model import Profile
from workbench.agent.online import Plan
from workbench.agent.run import Candidate, Proposal, RunStore, Status, repeats
from workbench.agent.strategies import Strategy, run_chains
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
        assert result.winner in (0, 3) and result.identical == {1: 0, 2: 0}

        # Interrupted after the first answer and resumed: what was known before the interruption counts.
        store = RunStore(workspace.runs / result.run_id)
        lines = store.transcript.read_text().splitlines(keepends=True)
        store.transcript.write_text("".join(lines[:2]))
        for path in store.root.glob("c*/*.json"):
            if path.name != "00000.json":
                path.unlink()
        before = said.copy()
        said.clear()
        resumed = online.resume(workspace, result.run_id, workers=1)
    assert said == before and "same kernels as c0-0" in said[1]
    assert resumed.identical == result.identical and resumed.winner == result.winner


def tried(index: int, turn: int, object_hash: str) -> Candidate:
    proposal = Proposal(index=index, round=turn, template="c", knobs={}, source=f"# {index}\n")
    return Candidate(proposal=proposal, status=Status.REFUSED, reason="wrong", object_hash=object_hash)


def test_of_equals_in_different_conversations_the_earlier_turn_is_the_first() -> None:
    found = [
        tried(0, 0, "a"),
        tried(1, 3, "b"),
        tried(10_000, 1, "b"),
        tried(10_001, 1, "a"),
        tried(2, 4, ""),
    ]
    assert repeats(found) == {1: 10_000, 10_001: 0}
    assert repeats([tried(0, 0, ""), tried(1, 1, "")]) == {}


@dataclass
class FakeChain:
    """A conversation that tries given kernels, one a turn."""

    desk: Desk
    hashes: list[str]
    ended: str | None = None
    born: int = 0
    turn: int = 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            index = self.desk.chain * CHAIN_STRIDE + self.turn
            candidate = tried(index, self.born + self.turn, self.hashes[self.turn])
            self.desk.keep(candidate)
            said.setdefault(self.desk.chain, []).append(self.desk.report(candidate))
            self.turn += 1


said: dict[int, list[str]] = {}


def test_conversations_hear_of_each_others_kernels_when_they_have_met() -> None:
    said.clear()

    def chain(number: int, improve: Candidate | None) -> Any:
        hashes = [["a", "b", "c", "d"], ["x", "a", "b", "y"]][number]
        return FakeChain(Desk(Workspace(ROOT), None, None, None, 1.0, None, number), hashes)  # type: ignore[arg-type]

    run_chains(Strategy.ISLANDS, chain, 2, rounds=4, every=2)
    same = ["same kernels as c0-1 of another conversation" in text for text in said[1]]
    assert same == [False, False, True, False]  # `a` was tried before they met
    assert not any("same kernels" in text for text in said[0])


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
