"""What a run keeps of calls that an interruption cut off, and that two processes never work on one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.agent.model import (
    BudgetError,
    Ledger,
    Limits,
    Message,
    RecordedProvider,
    Reply,
    Request,
    Transcript,
    Usage,
)
from workbench.agent.model.profile import Price
from workbench.agent.run import RunStore
from workbench.errors import WorkbenchError


def request(text: str) -> Request:
    return Request(model="m", messages=(Message(role="user", content=text),), max_output_tokens=100)


class Live:
    """Answers, or is killed in the middle of an answer."""

    def __init__(self, killed_at: int = -1) -> None:
        self.calls, self._killed_at = 0, killed_at

    def complete(self, request: Request, chain: int, turn: int) -> Reply:
        self.calls += 1
        if turn == self._killed_at:
            raise KeyboardInterrupt  # nothing of this answer reaches the transcript
        return Reply(message=Message(role="assistant", content="yes"), usage=Usage(prompt=10, completion=5))


def test_a_call_that_was_cut_off_is_made_again_and_counted_apart(tmp_path: Path) -> None:
    path, long = tmp_path / "t.jsonl", "word " * 300
    price = Price(input=1.0, output=1.0)
    cut = RecordedProvider(Transcript(path), Ledger(Limits(), price), Live(killed_at=1))
    cut.complete(request("a"), 0, 0)
    with pytest.raises(KeyboardInterrupt):
        cut.complete(request(long), 0, 1)

    transcript, live = Transcript(path), Live()
    assert transcript.lost == Usage(prompt=request(long).estimated_tokens, estimated=True)
    ledger = Ledger(Limits(), price, lost=transcript.lost)
    resumed = RecordedProvider(transcript, ledger, live)
    resumed.complete(request("a"), 0, 0)
    resumed.complete(request(long), 0, 1)
    assert live.calls == 1  # the first answer came from the transcript
    assert ledger.spend.usage == Usage(prompt=20, completion=10) and ledger.spend.calls == 2
    assert ledger.spend.usd == pytest.approx(30e-6) and ledger.spend.lost == transcript.lost
    again = Transcript(path)
    assert again.lost == transcript.lost and len(again.exchanges) == 2  # it stays lost


def test_what_was_lost_counts_against_the_limits() -> None:
    lost = Usage(prompt=900, estimated=True)
    with (
        pytest.raises(BudgetError, match="900 of 1000 are used"),
        Ledger(Limits(tokens=1000), None, lost=lost).reserve(request("word " * 300)),
    ):
        pass


def test_a_run_is_held_by_one_process_until_it_is_gone(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from workbench.agent.run import RunStore\n"
        f"with RunStore(Path({str(tmp_path)!r})).held(): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(WorkbenchError, match="by another process"), store.held():
            pass
        other.kill()
    with store.held():
        pass
