"""Candidates verified a minute by the offline proposer, and where a candidate's time goes.

    python benchmarks/loop.py [--workers 2] [--rounds 4] [--batch 7] [OP:WORKLOAD ...]

Each run has a workspace of its own with an empty cache, so that every candidate is compiled. The rate counts
the search: from the start of the workers, which import torch, to the last candidate; the winner's full
verification is left out. Wall-clock time suffers from whatever else the machine does; processor time, of the
run's process and of all its children, says what the same run takes where nothing else runs. The shares are of
one process that evaluates a few of the run's candidates again, compiled anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from workbench.agent import evaluate, offline
from workbench.agent.evaluate import Evaluator, Job
from workbench.agent.events import Event, FinalistStarted
from workbench.agent.run import Proposal, RunResult, Status
from workbench.verify import inputs, runs
from workbench.verify.runs import Level
from workbench.workspace import Workspace

TARGETS = {"skinny_gemm:small_b1": 40.0, "moe_experts:tp8_b1": 10.0}
STAGES: dict[str, tuple[Any, str]] = {
    "compile": (evaluate, "compile_candidate"),
    "simulate": (runs, "simulate"),
    "ordering": (runs, "audit"),
    "honesty": (runs, "check_honesty"),
    "disassemble": (runs, "_disassembled"),
    "goldens": (inputs.Case, "create"),
    "compare": (inputs.Case, "judge"),
    "predict": (evaluate, "predict"),
}
_SAMPLE = 6
"""Candidates whose time is looked into."""


@contextmanager
def fresh_workspace() -> Iterator[Workspace]:
    """Contracts and templates of this workspace, and nothing else of it."""
    root = Workspace.find(Path(__file__)).root
    with tempfile.TemporaryDirectory(prefix="workbench-loop-") as folder:
        for name in ("verifiers", "templates"):
            shutil.copytree(root / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("generated_kernels", "tuning_db"):
            Path(folder, name).mkdir()
        yield Workspace(Path(folder))


def processor_seconds() -> float:
    """Processor time of this process and everything below it; who ended is counted with its parent."""
    used, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(used.get(pid, 0.0) for pid in below)


def search(
    workspace: Workspace, op: str, workload: str, args: argparse.Namespace
) -> tuple[RunResult, float, float]:
    """A run; returns its result with the wall-clock and processor seconds of its search."""
    started, before = time.perf_counter(), processor_seconds()
    ended: list[tuple[float, float]] = []

    def note(event: Event) -> None:
        if isinstance(event, FinalistStarted) and not ended:
            ended.append((time.perf_counter(), processor_seconds()))

    result = offline.propose(
        workspace, op, workload, rounds=args.rounds, batch=args.batch, workers=args.workers, export=False,
        on_event=note,
    )  # fmt: skip
    if not ended:
        raise SystemExit(f"{op} {workload}: no candidate passed: {result.candidates[0].reason}")
    return result, ended[0][0] - started, ended[0][1] - before


def look_into(workspace: Workspace, result: RunResult) -> dict[str, float]:
    """Wall-clock seconds a candidate by stage, in this process."""
    shutil.rmtree(workspace.cache)
    spent: dict[str, float] = defaultdict(float)
    good = [c.proposal for c in result.candidates if c.status is Status.VERIFIED]
    evaluator = Evaluator()
    _evaluate(workspace, result, evaluator, good[-1])  # what a worker does once: inputs, goldens, imports
    with patched(spent):
        for proposal in good[:_SAMPLE]:
            started = time.perf_counter()
            _evaluate(workspace, result, evaluator, proposal)
            spent["all"] += time.perf_counter() - started
    count = len(good[:_SAMPLE])
    return {name: seconds / count for name, seconds in spent.items()}


def _evaluate(workspace: Workspace, result: RunResult, evaluator: Evaluator, proposal: Proposal) -> None:
    s = result.settings
    job = Job(workspace=workspace.root, op=s.op, workload=s.workload, arch=s.arch, machine=s.machine,
              seed=s.seed, level=Level.SCREEN, proposal=proposal)  # fmt: skip
    evaluator(job)


@contextmanager
def patched(spent: dict[str, float]) -> Iterator[None]:
    """Time each stage while this lasts."""

    def timed(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return f(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in STAGES.items():
            stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="candidates verified a minute, and where their time goes")
    parser.add_argument("what", nargs="*", default=list(TARGETS), metavar="OP:WORKLOAD")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for what in args.what:
        op, _, workload = what.partition(":")
        with fresh_workspace() as workspace:
            result, wall, processor = search(workspace, op, workload, args)
            found.append((what, result, wall, processor, look_into(workspace, result)))
    report(found, args.workers)


def report(found: list[tuple[str, RunResult, float, float, dict[str, float]]], workers: int) -> None:
    """Print both tables."""
    columns = f"{'verified':>9} {'wall':>8} {'a minute':>9} {'processor':>10} {'a minute*':>10} {'target':>7}"
    print(f"{'':24} {columns}")
    for what, result, wall, processor, _ in found:
        good = sum(c.status is Status.VERIFIED for c in result.candidates)
        print(
            f"{what:24} {good:4} / {len(result.candidates):2} {wall:6.1f} s {60 * good / wall:9.1f}"
            f" {processor:8.1f} s {60 * good * workers / processor:10.1f} {TARGETS.get(what, 0):7.0f}"
        )
    print(f"* if {workers} cores did nothing else: verified candidates over processor time\n")
    print(f"{'share of a candidate':24} " + " ".join(f"{n:>11}" for n in (*STAGES, "other")) + f" {'all':>8}")
    for what, *_, spent in found:
        whole = spent.pop("all")
        shares = [*(spent.get(n, 0.0) for n in STAGES), whole - sum(spent.values())]
        print(f"{what:24} " + " ".join(f"{100 * s / whole:9.1f} %" for s in shares) + f" {whole:6.2f} s")


if __name__ == "__main__":
    main()
