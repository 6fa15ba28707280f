"""Candidates evaluated in the background: several chains share the workers, and a chain need not wait.

One thread owns the worker pool. A candidate that was evaluated before the run was interrupted is answered
from the run's folder.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from workbench.agent.evaluate import Job
from workbench.agent.events import CandidateFinished, CandidateStarted, OnEvent
from workbench.agent.run import Candidate, Proposal, RunStore, Status, lost
from workbench.agent.workers import Lost, WorkerPool
from workbench.verify.runs import Level

_PATIENCE = 0.05
"""Seconds between two looks at the queue of new jobs."""


class Evaluations:
    """Evaluates proposals in a pool; use it as a context manager.

    Args:
        pool: the workers; nobody else may use them meanwhile.
        store: of the run; keeps what is evaluated.
        job: makes the job of a proposal.
        on_event: is told what starts and finishes, from the thread that owns the pool.
        on_finished: is called with each new candidate, before its future is done.
    """

    def __init__(
        self,
        pool: WorkerPool,
        store: RunStore,
        job: Callable[[Proposal, Level], Job],
        on_event: OnEvent = lambda event: None,
        on_finished: Callable[[Candidate], None] = lambda candidate: None,
    ) -> None:
        self._pool, self._store, self._job = pool, store, job
        self._on_event, self._on_finished = on_event, on_finished
        self._known = {Level.SCREEN: store.candidates(), Level.FULL: store.candidates(checked=True)}
        self._new: queue.SimpleQueue[tuple[Proposal, Level, Future[Candidate]]] = queue.SimpleQueue()
        self._open: dict[int, tuple[Proposal, Level, Future[Candidate]]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)

    def __enter__(self) -> Evaluations:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def submit(self, proposal: Proposal, level: Level = Level.SCREEN) -> Future[Candidate]:
        """Have a proposal evaluated; the future never raises for a candidate's own fault."""
        future: Future[Candidate] = Future()
        known = self._known[level].get(proposal.index)
        if known is not None and known.proposal == proposal:
            if level is Level.SCREEN:
                self._on_event(CandidateFinished(known, known=True))
            future.set_result(known)
        else:
            self._new.put((proposal, level, future))
        return future

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take()
                for ticket, answer in self._pool.poll(self._started, _PATIENCE):
                    self._finish(ticket, answer)
        except BaseException as e:  # nobody would hear of it
            for *_, future in self._open.values():
                future.set_exception(e)
            raise

    def _take(self) -> None:
        """Take in new proposals; while nothing is being worked on, wait for one."""
        wait = not self._open
        while True:
            try:
                proposal, level, future = self._new.get(timeout=_PATIENCE) if wait else self._new.get_nowait()
            except queue.Empty:
                return
            wait = False
            ticket = self._pool.add(self._job(proposal, level).model_dump_json())
            self._open[ticket] = (proposal, level, future)

    def _started(self, ticket: int) -> None:
        self._on_event(CandidateStarted(self._open[ticket][0]))

    def _finish(self, ticket: int, answer: str | Lost) -> None:
        proposal, level, future = self._open[ticket]
        if isinstance(answer, Lost):
            candidate = lost(proposal, answer.reason, answer.detail)
        else:
            candidate = Candidate.model_validate_json(answer)
        if level is Level.SCREEN:  # before it counts as evaluated: an interruption in between costs nothing
            self._on_finished(candidate)
        if (
            level is Level.SCREEN or candidate.status is not Status.LOST
        ):  # no conversation hears of such a check
            self._store.add(candidate, checked=level is Level.FULL)
            self._known[level][proposal.index] = candidate
        if level is Level.SCREEN:
            self._on_event(CandidateFinished(candidate, known=False))
        del self._open[ticket]  # only now: should anything above fail, the future is told
        future.set_result(candidate)
