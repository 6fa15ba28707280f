"""The proposing loop on a small op: seeded, resumable, and indifferent to candidates that misbehave."""

import shutil
from pathlib import Path

import pytest

from workbench.agent import offline
from workbench.agent.events import CandidateFinished, RunStarted, WinnerExported
from workbench.agent.run import RunStore, Status, load_result
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.export import load_exported
from workbench.records import RecordStore
from workbench.verify.report import Verdict
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace(tmp_path):
    for folder in ("verifiers", "templates"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("generated_kernels", "tuning_db"):
        (tmp_path / folder).mkdir()
    return Workspace(tmp_path)


def propose(workspace, **settings):
    settings = {"rounds": 2, "batch": 3, "workers": 1} | settings
    return offline.propose(workspace, "rmsnorm", "small_b3", **settings)


def outcomes(result):
    return [(c.proposal, c.status, c.artifact_key, c.predicted_us) for c in result.candidates]


def test_a_run_ends_in_an_exported_winner_with_its_evidence(workspace):
    events = []
    result = propose(workspace, on_event=events.append)
    assert [c.proposal.index for c in result.candidates] == list(range(6))
    assert len({tuple(c.proposal.knobs.items()) for c in result.candidates}) == 6
    assert all(c.status is Status.VERIFIED for c in result.candidates)
    winner = result.best()
    assert winner.predicted_us == min(c.predicted_us for c in result.candidates)
    exported = load_exported(workspace.root / result.exported)
    assert exported.artifact.key == winner.artifact_key
    assert exported.report.verdict is Verdict.PASS
    names = {c.name for c in exported.report.checks}
    assert {"ordering/static", "memory", "determinism", "held-out/small_b1", "numerics/nan_inf"} <= names
    assert isinstance(events[0], RunStarted) and isinstance(events[-1], WinnerExported)
    records = RecordStore(workspace.tuning_db / "records.sqlite").query(op="rmsnorm")
    assert len(records) == 6
    assert load_result(workspace.runs, result.run_id) == result


def test_the_seed_decides_the_run_whatever_the_number_of_workers(workspace):
    one = propose(workspace, seed=3, workers=1)
    two = propose(workspace, seed=3, workers=2)
    assert outcomes(one) == outcomes(two)
    assert one.best().proposal == two.best().proposal
    assert one.exported == two.exported


def test_an_interrupted_run_goes_on_where_it_was(workspace):
    whole = propose(workspace, seed=5)

    class InterruptError(Exception):
        pass

    seen = []

    def stop_at_the_fourth(event):
        if isinstance(event, CandidateFinished):
            seen.append(event)
            if len(seen) == 4:
                raise InterruptError

    with pytest.raises(InterruptError):
        propose(workspace, seed=5, on_event=stop_at_the_fourth)
    (unfinished,) = [
        p.parent.name for p in workspace.runs.glob("*/run.json") if p.parent.name != whole.run_id
    ]
    with pytest.raises(WorkbenchError, match="has not finished"):
        load_result(workspace.runs, unfinished)
    damaged = workspace.runs / unfinished / "candidates" / "00001.json"
    damaged.write_text(damaged.read_text()[:100])
    fresh = []

    def count(event):
        if isinstance(event, CandidateFinished) and not event.known:
            fresh.append(event.candidate.proposal.index)

    resumed = offline.propose(workspace, "", "", resume=unfinished, workers=1, on_event=count)
    assert fresh == [1, 4, 5]
    assert outcomes(resumed) == outcomes(whole)


def test_a_run_is_not_resumed_with_another_template(workspace):
    result = propose(workspace, rounds=1)
    template = workspace.template("rmsnorm", "row")
    template.write_text(template.read_text() + "\n# changed\n")
    with pytest.raises(WorkbenchError, match="other templates"):
        offline.propose(workspace, "", "", resume=result.run_id)


def test_unknown_and_damaged_runs_are_said_so(workspace):
    with pytest.raises(UnknownNameError, match="unknown run"):
        RunStore.open(workspace.runs, "nothing")
    result = propose(workspace, rounds=1, batch=1)
    settings = workspace.runs / result.run_id / "run.json"
    settings.write_text('{"format": 99}')
    before = settings.read_text()
    with pytest.raises(WorkbenchError, match=r"run\.json"):
        RunStore.open(workspace.runs, result.run_id)
    assert settings.read_text() == before


HOSTILE = {
    "hangs.py": ("while True:\n        pass", "timeout"),
    "ends.py": ("raise SystemExit(3)", "user"),
    "imports.py": ("import os", "rejected"),
}


def test_bad_candidates_cost_their_own_trial(workspace):
    """Templates that hang, crash or are refused stand beside a good one; the run still ends in a winner."""
    good = workspace.template("rmsnorm", "row").read_text()
    for name, (statement, _) in HOSTILE.items():
        head, _, _ = good.rpartition("    return RowNorm(axes, knobs)")
        (workspace.templates / "rmsnorm" / name).write_text(
            f"{head}    {statement}\n    return RowNorm(axes, knobs)\n"
        )
    result = propose(workspace, rounds=1, batch=4)
    by_template = {f"{c.proposal.template}.py": c for c in result.candidates}
    for name, (_, kind) in HOSTILE.items():
        assert by_template[name].status is Status.FAILED
        assert by_template[name].reason.startswith(kind), by_template[name].reason
    assert result.best().proposal.template == "row"
