"""A pool of evaluation processes that survives any of them: a worker that hangs or dies costs its own job.

A worker that dies for want of memory may be the victim of others: its job is tried once more with no other
worker beside it, before it is given up.

Workers are fresh interpreters that read one JSON job a line on standard input and answer one JSON line on a
private pipe: a pool works the same from a script, a notebook or a test, and nothing but data crosses over.
Of the environment they inherit what they need, and no credentials.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from workbench.environment import kept

STARTUP_SECONDS = 60.0
"""Grace for a worker's first job: it imports torch and loads the op's inputs."""
OUT_OF_MEMORY = 71
"""Exit code of a worker that could not get the memory it needs."""


@dataclass(frozen=True)
class Lost:
    """A job that came to nothing because its worker had to be killed or died."""

    reason: str
    """`timeout`, `crash`, or `memory`: it ran out twice, the second time alone."""
    detail: str


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    answers: int
    """File descriptor the worker's answers are read from."""
    job: int | None = None
    """Ticket of the job it works on."""
    text: str = ""
    """The job itself."""
    deadline: float = 0.0
    fresh: bool = True
    received: bytearray = field(default_factory=bytearray)


class WorkerPool:
    """Evaluates JSON jobs in `count` processes that run `python -m module`.

    Use it as a context manager; leaving it kills every worker with all of its children.
    """

    def __init__(
        self, module: str, count: int, seconds_a_job: float, environment: dict[str, str] | None = None
    ) -> None:
        self._module, self.count, self._limit = module, count, seconds_a_job
        self._environment = kept(**(environment or {}))
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[tuple[int, str]] = deque()
        self._again: deque[tuple[int, str]] = deque()
        """Jobs whose worker ran out of memory."""
        self._alone: int | None = None
        """Ticket of the job that nothing else may run beside."""
        self._tickets = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in list(self._workers):
            self._kill(worker)
        self._selector.close()

    def run(
        self, jobs: Sequence[str], on_start: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, str | Lost]]:
        """Evaluate `jobs`; yield `(index, answer)` as they finish, in no particular order."""
        index = {self.add(job): n for n, job in enumerate(jobs)}
        started = None if on_start is None else lambda ticket: on_start(index[ticket])
        open_jobs = len(jobs)
        while open_jobs:
            for ticket, answer in self.poll(started):
                open_jobs -= 1
                yield index[ticket], answer

    def add(self, job: str) -> int:
        """Put a job into the queue; returns the ticket that `poll` answers under."""
        self._tickets += 1
        self._waiting.append((self._tickets, job))
        return self._tickets

    def poll(
        self, on_start: Callable[[int], None] | None = None, patience: float | None = None
    ) -> Iterator[tuple[int, str | Lost]]:
        """Hand out waiting jobs and yield the answers that come in.

        Args:
            on_start: is told the ticket of each job that a worker takes up.
            patience: longest time to wait for an answer, in seconds; None to wait for one, or for a deadline.
        """
        self._hand_out(on_start)
        yield from self._collect(patience)

    def _hand_out(self, on_start: Callable[[int], None] | None) -> None:
        if self._alone is not None:
            return
        if self._again:  # what runs goes to its end, nothing new begins
            if any(w.job is not None for w in self._workers):
                return
            for idle in list(self._workers):
                self._kill(idle)
            ticket, job = self._again.popleft()
            self._alone = ticket
            self._give(self._start(), ticket, job)
            return
        while self._waiting:
            worker = next((w for w in self._workers if w.job is None), None)
            if worker is None:
                if len(self._workers) >= self.count:
                    return
                worker = self._start()
            ticket, job = self._waiting.popleft()
            self._give(worker, ticket, job)
            if on_start is not None:
                on_start(ticket)

    def _give(self, worker: _Worker, ticket: int, job: str) -> None:
        worker.job, worker.text = ticket, job
        worker.deadline = time.monotonic() + self._limit + (STARTUP_SECONDS if worker.fresh else 0.0)
        assert worker.process.stdin is not None
        # A worker that died since its last answer is noticed when its pipe is read.
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.write(job.encode() + b"\n")
            worker.process.stdin.flush()

    def _died(self, worker: _Worker) -> Iterator[tuple[int, Lost]]:
        """Note the death of a worker; yields what became of its job, unless that is tried again."""
        code, ticket = worker.process.wait(), worker.job
        self._kill(worker)
        if ticket is None:
            return
        # Nobody but the kernel kills a worker that this pool did not.
        starved = code in (-signal.SIGKILL, OUT_OF_MEMORY)
        if starved and self._alone != ticket:
            self._again.append((ticket, worker.text))
            return
        self._settle(ticket)
        if starved:
            yield (
                ticket,
                Lost("memory", "the evaluation process ran out of memory twice, the second time alone"),
            )
        else:
            yield ticket, Lost("crash", f"the evaluation process ended with code {code}")

    def _settle(self, ticket: int) -> None:
        if self._alone == ticket:
            self._alone = None

    def _collect(self, patience: float | None) -> Iterator[tuple[int, str | Lost]]:
        busy = [w for w in self._workers if w.job is not None]
        if busy:
            left = max(0.0, min(w.deadline for w in busy) - time.monotonic())
            patience = left if patience is None else min(left, patience)
        for key, _ in self._selector.select(timeout=patience or 0.0):
            worker: _Worker = key.data
            chunk = os.read(worker.answers, 1 << 20)
            if not chunk:
                yield from self._died(worker)
                continue
            worker.received += chunk
            if worker.received.endswith(b"\n") and worker.job is not None:
                answer, ticket = worker.received.decode(), worker.job
                worker.received.clear()
                worker.job, worker.fresh = None, False
                self._settle(ticket)
                yield ticket, answer
        now = time.monotonic()
        for worker in [w for w in self._workers if w.job is not None and w.deadline <= now]:
            late = worker.job
            self._kill(worker)
            assert late is not None
            self._settle(late)
            yield late, Lost("timeout", f"no answer within {self._limit:.0f} s")

    def _start(self) -> _Worker:
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(write_end,),
            env=self._environment,
            start_new_session=True,
        )
        os.close(write_end)
        worker = _Worker(process, read_end)
        self._workers.append(worker)
        self._selector.register(read_end, selectors.EVENT_READ, worker)
        return worker

    def _kill(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.answers)
        os.close(worker.answers)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        if worker.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        worker.process.wait()
