"""The loop against a scripted model: what it is told, what it costs, how it ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from authors import edit, last_results, learner, turn_of
from model_server import Answer, Fail, Server, Step, serve
from small_workspace import make_workspace

from workbench.agent import online
from workbench.agent.model import Limits, Profile, Transcript, Usage
from workbench.agent.model.client import OpenAIProvider
from workbench.agent.model.profile import Price
from workbench.agent.online import Plan
from workbench.agent.run import RunResult, RunStore, Status
from workbench.agent.strategies import Strategy
from workbench.errors import WorkbenchError
from workbench.workspace import Workspace

KEY = "sk-canary-51c0ffee"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_MODEL_KEY", KEY)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "space")


def propose(workspace: Workspace, server: Server, **changes: Any) -> RunResult:
    profile = Profile(model="test-model", base_url=server.url, api_key_env="TEST_MODEL_KEY", retries=1,
                      price=Price(input=1.0, output=2.0))  # fmt: skip
    fields = {"tune_batch": 0, **changes}
    return online.propose(workspace, "rmsnorm", "small_b1", Plan(profile, **fields), workers=2)


def run(workspace: Workspace, *steps: Step, **changes: Any) -> tuple[RunResult, Server]:
    with serve(*steps) as server:
        return propose(workspace, server, **changes), server


def test_an_author_gets_from_a_wrong_kernel_to_a_verified_one(
    workspace: Workspace,
) -> None:
    result, server = run(workspace, learner)
    statuses = [c.status for c in result.candidates]
    assert statuses[0] is Status.FAILED and statuses[-1] is Status.VERIFIED and len(statuses) == 4
    assert statuses[1:3] == [Status.REFUSED, Status.REFUSED]  # the second by what only a finalist meets
    assert [c.proposal.parents for c in result.candidates] == [(), (0,), (1,), (2,)]
    assert result.winner == 3 and result.exported is not None and result.ends[0].startswith("finished")
    assert result.spend is not None and result.spend.calls == len(server.requests) == 7
    assert result.spend.usd == pytest.approx(7 * (100 + 2 * 20) / 1e6)
    lessons = (workspace.tuning_db / "lessons.jsonl").read_text()
    assert "Keep the epsilon inside the root." in lessons and "was never closed" in lessons
    for path in workspace.root.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    second, server = run(workspace, Answer(calls=[("finish", {})]))
    assert "Keep the epsilon inside the root." in server.requests[0]["messages"][1]["content"]
    assert second.winner is None


def test_parallel_calls_bad_calls_and_knobs(workspace: Workspace) -> None:
    calls = [
        ("submit", {"base": "row", "knobs": {"threads": 32}}),
        ("submit", '{"base": "row", "knobs'),
        ("submit", {"base": "row", "knobs": {"thread": 32}}),
        ("submit", {"base": "nobody"}),
        ("submit", {}),
        ("sudo", {}),
        ("read", {"what": "secrets"}),
        ("submit", {"base": "row", "knobs": {"threads": 64}}),
        ("submit", {"base": "row", "knobs": {"threads": 33}}),
        edit("row", "held", "x"),
    ]
    seen: list[str] = []

    def author(request: dict[str, Any]) -> Answer:
        if turn_of(request) == 0:
            return Answer(calls=calls)
        if turn_of(request) == 1:
            seen.extend(last_results(request))
            names = [("compare", {"first": "c0-0", "second": "c0-1"}), ("what_bounds", {"candidate": "c0-0"}),
                     ("read_report", {"candidate": "c0-1"}), ("list_space", {"name": "c0-0"})]  # fmt: skip
            return Answer(calls=names)
        seen.extend(last_results(request))
        return Answer(calls=[("finish", {"summary": "x"})])

    result, _ = run(workspace, author)
    assert [c.status for c in result.candidates] == [Status.VERIFIED, Status.VERIFIED, Status.FAILED]
    assert "VERIFIED" in seen[0] and "VERIFIED" in seen[7] and "threads=33" in seen[8]
    said = (
        "not JSON",
        "no knob 'thread'",
        "no candidate 'nobody'",
        "give either source",
        "no tool 'sudo'",
        "what",
    )
    for text, part in zip(seen[1:7], said, strict=True):
        assert text.startswith("error: ") and part in text
    assert "occurs" in seen[9]
    assert "knob threads: 32 / 64" in seen[10] and "us" in seen[11] and "VERIFIED" in seen[12]
    assert "threads: 32, 64" in seen[13]


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        ([Answer("I think ...")], "model: it called nothing 3 times"),
        ([Answer(refusal="I will not.")], "model: it refused 3 times"),
        ([Answer("")], "model: it called nothing 3 times"),
        ([Fail(404, "no such model")], "model: the server"),
        (
            [Fail(400, "maximum context length is 10", "context_length_exceeded")],
            "model: the conversation is too long",
        ),
    ],
)
def test_a_model_that_is_of_no_use_ends_the_run_with_one_line(
    workspace: Workspace, steps: list[Step], end: str
) -> None:
    result, _ = run(workspace, *steps)
    assert result.ends[0].startswith(end) and "\n" not in result.ends[0] and result.winner is None


def test_what_was_reached_before_a_failure_is_kept(workspace: Workspace) -> None:
    first = Answer(calls=[("submit", {"base": "row", "knobs": {"threads": 32}})])
    result, _ = run(workspace, first, Fail(401, "expired"))
    assert result.winner == 0 and result.exported is not None and "does not accept the key" in result.ends[0]


def test_a_long_conversation_is_shortened_where_the_server_says_so(workspace: Workspace) -> None:
    overflow = Fail(400, "maximum context length", "context_length_exceeded")
    reading = Answer(calls=[("read", {"what": "template", "name": "row"})] * 2)
    result, server = run(workspace, reading, reading, reading, overflow, Answer(calls=[("finish", {})]))
    before, after = server.requests[3]["messages"], server.requests[4]["messages"]
    assert result.ends[0].startswith("finished") and len(before) == len(after)
    assert sum("left out" in str(m["content"]) for m in after) > sum(
        "left out" in str(m["content"]) for m in before
    )


def test_budgets_end_a_run_and_are_named(workspace: Workspace) -> None:
    reading = Answer(calls=[("read", {"what": "contract"})], usage=(1000, 100))
    result, server = run(workspace, reading, limits=Limits(tokens=9000))
    assert result.ends[0].startswith("budget: ") and result.spend is not None
    assert result.spend.usage.total <= 9000 + 1100 and len(server.requests) == result.spend.calls
    result, _ = run(workspace, reading, limits=Limits(rounds=3))
    assert result.ends[0] == "rounds: all 3 used" and result.spend is not None and result.spend.calls == 3
    result, _ = run(workspace, reading, limits=Limits(stall=2))
    assert result.ends[0].startswith("stall: 2 turns")


def test_knobs_of_verified_variants_are_tuned_while_the_model_thinks(workspace: Workspace) -> None:
    told: list[str] = []

    def author(request: dict[str, Any]) -> Answer:
        turn = turn_of(request)
        if turn == 0:
            return Answer(calls=[("submit", {"base": "row"})])
        told.extend(str(m["content"]) for m in request["messages"] if "Knobs were tuned" in str(m["content"]))
        return Answer(calls=[("read", {"what": "contract"})]) if turn < 3 else Answer(calls=[("finish", {})])

    result, _ = run(workspace, author, tune_batch=3)
    assert len(result.candidates) == 3 and all(c.proposal.parents == (0,) for c in result.candidates[1:])
    assert told and "2 settings tried" in told[0]
    best = min(c.predicted_us for c in result.candidates if c.predicted_us is not None)
    winner = result.best()
    assert winner is not None and winner.predicted_us == best


# -- resume and replay -------------------------------------------------------------------------------


def outcome(result: RunResult) -> object:
    candidates = [(c.proposal, c.status, c.reason, c.artifact_key, c.predicted_us) for c in result.candidates]
    spend = result.spend.model_copy(update={"seconds": 0.0, "lost": Usage()}) if result.spend else None
    return candidates, result.winner, result.ends, spend


def islander(request: dict[str, Any]) -> Answer:
    """Begins alike everywhere; then the first finds something faster; goes on from what is shown."""
    turn, shown = turn_of(request), re.compile(r"another author|Another author")
    guests = [str(m["content"]) for m in request["messages"] if shown.search(str(m["content"]))]
    knobs: dict[str, Any] = {"threads": 32, "vec": 2}
    if guests:
        base = re.findall(r"candidate (c\d+-\d+)", guests[-1])[0]
        return Answer(f"turn {turn}", calls=[("submit", {"base": base, "knobs": {**knobs, "threads": 64}})])
    if turn == 1:
        knobs |= {"threads": 128} if "c0-0" in last_results(request)[0] else {"weight_early": False}
    return Answer(f"turn {turn}", calls=[("submit", {"base": "row", "knobs": knobs})])


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy.ISLANDS,
        pytest.param(Strategy.CHAIN, marks=pytest.mark.slow),
        pytest.param(Strategy.BEAM, marks=pytest.mark.slow),
    ],
)
def test_every_strategy_gives_the_same_run_twice_and_replays(
    workspace: Workspace, strategy: Strategy
) -> None:
    plan = {
        "strategy": strategy,
        "chains": 2,
        "migrate_every": 2,
        "limits": Limits(rounds=3),
        "tune_batch": 2 if strategy is Strategy.CHAIN else 0,
    }
    first, server = run(workspace, islander, **plan)
    assert first.winner is not None and len(first.ends) == (2 if strategy is not Strategy.BEAM else 3)
    children = [c.proposal for c in first.candidates if c.proposal.parents and c.proposal.index >= 10_000]
    strangers = [p for p in children if p.parents[0] < 10_000]
    assert bool(strangers) == (strategy is not Strategy.CHAIN)
    transcript = RunStore(workspace.runs / first.run_id).transcript
    again = online.replay(workspace, transcript, workers=1)
    assert outcome(again) == outcome(first)
    assert len(Transcript(transcript).exchanges) == len(server.requests)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_cut_anywhere_goes_on_to_the_same_end_and_pays_the_same(
    workspace: Workspace, every: int
) -> None:
    whole, _ = run(workspace, learner)
    store = RunStore(workspace.runs / whole.run_id)
    lines = store.transcript.read_bytes().splitlines(keepends=True)
    candidates = sorted((store.root / "candidates").glob("*.json"))
    kept = {p: p.read_bytes() for p in candidates}
    answered = [b'"asked"' not in line for line in lines]
    for cut in range(1, len(lines), every):
        store.transcript.write_bytes(b"".join(lines[:cut]) + lines[cut][: 20 * (cut % 2)])
        for n, path in enumerate(candidates):
            path.unlink(missing_ok=True)
            if n < cut // 2 - 2:
                path.write_bytes(kept[path])
        (store.root / "result.json").unlink(missing_ok=True)
        with serve(learner) as again:
            assert whole.settings.model is not None
            profile = whole.settings.model.profile.model_copy(update={"base_url": again.url})
            resumed = online.resume(workspace, whole.run_id, provider=OpenAIProvider(profile))
            assert len(again.requests) == sum(answered[cut:])
        assert outcome(resumed) == outcome(whole)


def test_a_run_is_not_resumed_with_another_verifier(workspace: Workspace) -> None:
    result, _ = run(workspace, Answer(calls=[("finish", {})]))
    path = workspace.verifier("rmsnorm")
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(WorkbenchError, match="another verifier"):
        online.resume(workspace, result.run_id)
