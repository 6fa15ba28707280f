"""A run with a model that is killed at any moment and resumed comes to what an uninterrupted one comes to.

`workbench propose` runs as a process of its own against the chat server of the tests. What is killed is its
process group, so that workers and compile servers, which have sessions of their own, must find their own end.

A call is charged once: the server sees each request once, and once more for each kill that came while it was
being answered, since nobody has that answer. Such a call is not part of the spending that is compared; its
tokens, guessed, are in `spend.lost`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from authors import edit, last_results, turn_of
from model_server import Answer, Server, serve
from small_workspace import make_workspace

from workbench.agent.model import Transcript
from workbench.agent.model.transcript import Asked
from workbench.agent.run import RunResult, RunStore
from workbench.workspace import Workspace

KEY = "sk-canary-0ddba11"
COMMAND = [sys.executable, "-m", "workbench", "propose", "--quiet", "--json"]
WAIT = "        cute.arch.griddepcontrol_wait()\n"
LONGEST = 300.0
"""Seconds after which a run is taken to hang."""


def author(request: dict[str, Any]) -> Answer:
    """Submits a wrong and a right candidate side by side, mends the wrong one, and ends."""
    turn = turn_of(request)
    delay = 0.3
    if turn == 0:
        right = ("submit", {"base": "row", "knobs": {"threads": 64, "vec": 2}})
        return Answer("two", calls=[edit("row", WAIT, ""), right], delay=delay)
    if turn == 1:
        assert "REFUSED" in last_results(request)[0] and "VERIFIED" in last_results(request)[1]
        early = "        cute.arch.griddepcontrol_launch_dependents()\n"
        return Answer("mend", calls=[edit("c0-0", early, WAIT + early)], delay=delay)
    if turn == 2:
        assert "VERIFIED" in last_results(request)[0]
        return Answer("look", calls=[("compare", {"first": "c0-0", "second": "c0-1"})], delay=delay)
    return Answer(
        calls=[("finish", {"summary": "mended", "lessons": ["Wait before x is read."]})], delay=delay
    )


@dataclass
class Sitting:
    """One process of a run."""

    process: subprocess.Popen[bytes]

    @staticmethod
    def start(workspace: Workspace, *arguments: str, workers: int = 1) -> Sitting:
        environment = {**os.environ, "WORKBENCH_ROOT": str(workspace.root), "TEST_MODEL_KEY": KEY}
        environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(
            [*COMMAND, "--workers", str(workers), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, cwd=workspace.root, start_new_session=True,
        )  # fmt: skip
        return Sitting(process)

    def ends_before(self, moment: Callable[[], bool]) -> bool:
        """Wait for the end of the process or for a moment, whichever comes first."""
        deadline = time.monotonic() + LONGEST
        while self.process.poll() is None:
            if moment():
                return False
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        """Kill the process group; everything below it must be gone soon after."""
        below = _below(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        deadline = time.monotonic() + 20
        while left := [pid for pid, started in below.items() if _started(pid) == started]:
            assert time.monotonic() < deadline, [Path(f"/proc/{p}/cmdline").read_bytes() for p in left]
            time.sleep(0.02)

    def result(self) -> RunResult:
        out, err = self.process.communicate(timeout=LONGEST)
        assert self.process.returncode == 0, err.decode()
        return RunResult.model_validate_json(out)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    """When a process started; empty if it is gone or only its exit code is left."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _below(root: int) -> dict[int, str]:
    """Every process below one, with when it started."""
    parents = {int(p.name): _stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    found = {root}
    while more := {pid for pid, f in parents.items() if f and int(f[1]) in found} - found:
        found |= more
    return {pid: _started(pid) for pid in found - {root} if _started(pid)}


def begin(workspace: Workspace, server: Server) -> list[str]:
    profile = workspace.root / "profile.toml"
    profile.write_text(
        f'model = "test-model"\nbase_url = "{server.url}"\napi_key_env = "TEST_MODEL_KEY"\n'
        "[price]\ninput = 1.0\noutput = 2.0\n"
    )
    return ["--op", "rmsnorm", "--workload", "small_b1", "--profile", str(profile), "--tune-batch", "2"]


def run_id(workspace: Workspace) -> str | None:
    found = [p.parent.name for p in workspace.runs.glob("*/run.json")] if workspace.runs.is_dir() else []
    assert len(found) <= 1
    return found[0] if found else None


def comparable(result: RunResult) -> object:
    candidates = [(c.proposal, c.status, c.reason, c.artifact_key, c.predicted_us) for c in result.candidates]
    assert result.spend is not None
    spend = (result.spend.calls, result.spend.usage, result.spend.wasted, result.spend.usd)
    return candidates, result.winner, result.exported, result.ends, spend


def body(request: dict[str, Any]) -> str:
    """A request as it is paid for; the room for an answer may differ."""
    return json.dumps({k: v for k, v in request.items() if k != "max_completion_tokens"}, sort_keys=True)


def check_payments(workspace: Workspace, server: Server, kills: int) -> int:
    """Every request was made once, and again only where a kill cut its answer off; returns how often."""
    name = run_id(workspace)
    assert name is not None
    transcript = RunStore(workspace.runs / name).transcript
    lines = [json.loads(line) for line in transcript.read_text().splitlines()]
    asked = [Asked.model_validate(x) for x in lines if "asked" in x]
    answered = len(lines) - len(asked)
    times = Counter(body(r) for r in server.requests)
    assert len(times) == answered == len(Transcript(transcript).exchanges)
    again = len(server.requests) - answered
    # A call that is on record as asked may have been cut off before it reached the server.
    assert again <= len(asked) - answered <= kills
    return again


class Killer:
    """Kills one run after another at random moments until there were as many kills as wanted."""

    def __init__(self, folder: Path, seed: int, template: Workspace) -> None:
        self.folder, self.random, self.cache = folder, random.Random(seed), template.cache
        self.kills = self.runs = self.again = 0
        self.stages: Counter[str] = Counter()

    def moment(self, workspace: Workspace, server: Server, whole: float) -> Callable[[], bool]:
        """A random moment: some time from now, or a little after the next call, candidate or full check."""
        events = (
            lambda: 0,
            lambda: len(server.requests),
            lambda: sum(1 for _ in workspace.runs.glob("*/candidates/*.json")),
            lambda: sum(1 for _ in workspace.runs.glob("*/checked/*.json")),
        )
        kind = self.random.choice((0, 0, 1, 1, 1, 2, 2, 3))
        wanted = events[kind]() + (kind > 0)
        after = self.random.uniform(0.0, (0.5 * whole, 0.4, 0.05 * whole, 0.5)[kind])
        since: list[float] = []

        def has_come() -> bool:
            if not since and events[kind]() >= wanted:
                since.append(time.monotonic())
            return bool(since) and time.monotonic() >= since[0] + after

        return has_come

    def one_run(self, wanted: int, whole: float) -> RunResult:
        """Begin a run, kill it until it ends before its moment comes, and return what it came to."""
        self.runs += 1
        workspace = make_workspace(self.folder / f"run{self.runs}")
        if self.random.random() < 0.5:  # compiled before, so that kills fall on other stages
            shutil.copytree(self.cache, workspace.cache)
        kills = 0
        with serve(author) as server:
            first = begin(workspace, server)
            while True:
                name = run_id(workspace)
                arguments = ["--resume", name] if name else first
                workers = 1 + (self.runs % 2)
                sitting = Sitting.start(workspace, *arguments, workers=workers)
                never = self.kills >= wanted
                moment = (lambda: False) if never else self.moment(workspace, server, whole)
                if sitting.ends_before(moment):
                    break
                sitting.kill()
                kills += 1
                self.kills += 1
                self.stages[stage(workspace)] += 1
            result = sitting.result()
            self.again += check_payments(workspace, server, kills)
        assert KEY not in (workspace.runs / result.run_id / "transcript.jsonl").read_text()
        lessons = (workspace.tuning_db / "lessons.jsonl").read_text()
        assert lessons.count("Wait before x is read.") == 1
        return result


def stage(workspace: Workspace) -> str:
    """How far a run was when it was killed."""
    name = run_id(workspace)
    if name is None:
        return "before the run"
    store = RunStore(workspace.runs / name)
    if (store.root / "result.json").is_file():
        return "at the end"
    if not store.transcript.is_file():
        return "before the first call"
    lines = store.transcript.read_text().splitlines(keepends=True)
    asked = sum('"asked"' in line for line in lines)
    in_flight = "in a call" if asked > len(lines) - asked else "between calls"
    return f"turn {len(lines) // 2}, {in_flight}"


@pytest.mark.parametrize(
    "wanted", [pytest.param(5, id="5 kills"), pytest.param(50, id="50 kills", marks=pytest.mark.slow)]
)
def test_killed_anywhere_a_run_goes_on_to_the_same_end_for_the_same_price(
    tmp_path: Path, wanted: int
) -> None:
    undisturbed = make_workspace(tmp_path / "undisturbed")
    started = time.monotonic()
    with serve(author) as server:
        expected = Sitting.start(undisturbed, *begin(undisturbed, server)).result()
        assert len(server.requests) == 4 and check_payments(undisturbed, server, 0) == 0
    whole = time.monotonic() - started
    assert expected.winner is not None and expected.ends == ("finished: mended",)
    assert len(expected.candidates) >= 5 and expected.spend is not None and expected.spend.lost.total == 0
    killer = Killer(tmp_path, seed=wanted, template=undisturbed)
    while killer.kills < wanted:
        assert comparable(killer.one_run(wanted, whole)) == comparable(expected)
        print(f"{killer.kills} kills in {killer.runs} runs")
    print(f"{killer.again} calls were made again; killed at:")
    print(*(f"  {count:2} {name}" for name, count in sorted(killer.stages.items())), sep="\n")
