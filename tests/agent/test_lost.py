"""Candidates that this machine has no memory for: not held against them, and tried anew by a resumed run."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_workspace import make_workspace

from workbench.agent import begin, offline
from workbench.agent.desk import Desk
from workbench.agent.evaluate import Job
from workbench.agent.evaluations import Evaluations
from workbench.agent.feedback import describe
from workbench.agent.lessons import Lessons
from workbench.agent.run import Candidate, Proposal, RunStore, Status, lost
from workbench.agent.worker import is_shortage
from workbench.agent.workers import Lost, WorkerPool
from workbench.errors import MemoryShortageError, WorkbenchError
from workbench.ops import load_op
from workbench.records import RecordStore
from workbench.verify.runs import Level

HERE = Path(__file__).parent


def test_what_says_that_memory_is_short() -> None:
    torch_says = "[enforce fail at alloc_cpu.cpp:115] . DefaultCPUAllocator: can't allocate memory"
    short = (MemoryError(), MemoryShortageError("x"), OSError(errno.ENOMEM, "x"), RuntimeError(torch_says))
    assert all(is_shortage(e) for e in short)
    others = (WorkbenchError("memory"), OSError(errno.ENOENT, "x"), RuntimeError("out of memory"))
    assert not any(is_shortage(e) for e in others)


def test_it_is_no_lesson_and_its_author_is_told(tmp_path: Path) -> None:
    proposal = Proposal(index=0, round=0, template="c0_0", knobs={}, source="x = 1")
    candidate = lost(proposal, "memory", "it ran out twice")
    assert candidate.status is Status.LOST
    assert "memory: it ran out twice" in describe(candidate, 1.0) and "submit it again" in describe(
        candidate, 1.0
    )
    lessons = Lessons(tmp_path / "lessons.jsonl")
    lessons.add("rmsnorm", "run", [candidate], [])
    assert not lessons.all()
    assert lost(proposal, "crash", "code 7").status is Status.FAILED


class NoMemory:
    """A pool that has no memory for anything."""

    count = 1

    def __init__(self) -> None:
        self.tickets: list[int] = []

    def add(self, job: str) -> int:
        self.tickets.append(len(self.tickets))
        return self.tickets[-1]

    def poll(self, on_start: Callable[[int], None], patience: float) -> Iterator[tuple[int, Lost]]:
        while self.tickets:
            yield self.tickets.pop(), Lost("memory", "it ran out twice")


def test_a_finalist_that_cannot_be_checked_stays_what_it_was_and_is_checked_again(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "space")
    settings = begin.settings_of(
        workspace, "rmsnorm", "small_b1", arch="sm_103a", machine="gb300", seed=0, agent="mcp"
    )
    store = RunStore.create(workspace.runs, settings)
    op = load_op(workspace, "rmsnorm")
    good = Candidate(proposal=Proposal(index=0, round=0, template="row", knobs={}), status=Status.VERIFIED)

    def job(proposal: Proposal, level: Level) -> Job:
        return begin.job_of(workspace, settings, proposal, level)

    with Evaluations(NoMemory(), store, job) as evaluations:  # type: ignore[arg-type]
        desk = Desk(workspace, op, op.workload("small_b1"), settings, 1.0, evaluations)
        desk.keep(good)
        assert desk.check(good).status is Status.LOST
        assert desk.find("c0-0") is good and not store.candidates(checked=True)
        # A conversation hears of this one, so that a resumed run must tell it the same.
        screened = good.proposal.model_copy(update={"index": 1})
        assert evaluations.submit(screened).result().status is Status.LOST
        assert store.candidates()[1].status is Status.LOST


def test_a_run_goes_on_and_a_resumed_one_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = make_workspace(tmp_path)
    with monkeypatch.context() as starving:

        def pool(count: int | None = None) -> WorkerPool:
            return WorkerPool("starved_worker", count or 2, 60.0, {"PYTHONPATH": str(HERE)})

        starving.setattr(offline, "worker_pool", pool)
        first = offline.propose(workspace, "rmsnorm", "small_b1", rounds=1, batch=3, workers=2, export=False)
    assert [c.status for c in first.candidates] == [Status.VERIFIED, Status.LOST, Status.VERIFIED]
    assert first.candidates[1].reason.startswith("memory: ") and first.winner in (0, 2)
    tries = {n: (tmp_path / f"starved-{n}").read_text().split() for n in (1, 2)}
    assert len(tries[1]) == 2 and len(set(tries[1])) == 2  # once beside others, once alone
    assert len(tries[2]) >= 2
    records = RecordStore(workspace.tuning_db / "records.sqlite")
    assert len(records) == 2
    again = offline.propose(workspace, "rmsnorm", "small_b1", resume=first.run_id, workers=1, export=False)
    assert [c.status for c in again.candidates] == [Status.VERIFIED] * 3
    assert [c.proposal for c in again.candidates] == [c.proposal for c in first.candidates]
