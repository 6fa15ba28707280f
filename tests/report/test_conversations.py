"""What a run with a model shows of its conversations, on the terminal, as Markdown and as HTML."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from workbench.agent.events import CandidateFinished, ModelAnswered, RunStarted
from workbench.agent.model import Limits, Message, Profile, Reply, Spend, ToolCall, Usage
from workbench.agent.run import AgentSettings, RunResult
from workbench.report.conversations import answered, spending, summary
from workbench.report.html import run_html
from workbench.report.markdown import run_markdown
from workbench.report.progress import RunProgress
from workbench.report.tables import print_run
from workbench.workspace import Workspace

SPEND = Spend(calls=3, usage=Usage(prompt=41_000, cached=9000, completion=1200), usd=0.0561)


@pytest.fixture
def conversed(result: RunResult) -> RunResult:
    """The run of four candidates as a model's: two conversations, the third candidate made from the first."""
    model = AgentSettings(
        profile=Profile(model="some-model"), strategy="islands", chains=2, migrate_every=4, tune_batch=2,
        limits=Limits(), prompt_hash="p", tools_hash="t",
    )  # fmt: skip
    first, second, third, fourth = result.candidates
    third = third.model_copy(
        update={"proposal": third.proposal.model_copy(update={"parents": (0,), "idea": "more | rows"})}
    )
    fourth = fourth.model_copy(update={"proposal": fourth.proposal.model_copy(update={"index": 10_000})})
    return result.model_copy(
        update={
            "settings": result.settings.model_copy(update={"model": model, "agent": "some-model"}),
            "candidates": (first, second, third, fourth),
            "spend": SPEND,
            "ends": ("finished: good", "stall: 8 turns without a better candidate"),
        }
    )


def test_every_report_says_what_was_spent_and_why_conversations_ended(conversed: RunResult) -> None:
    out = io.StringIO()
    print_run(conversed, Console(file=out, width=160))
    said = (
        "some-model (islands): 3 calls, 41,000 tokens in (9,000 cached), 1,200 out, 0.0561 USD",
        "conversation 0: 3 candidates, finished: good",
        "conversation 1: 1 candidates, stall: 8 turns without a better candidate",
    )
    page = run_html(Workspace(Path(__file__).parents[2]), conversed)
    for line in said:
        assert line in out.getvalue() and line in run_markdown(conversed) and line in page
    assert "from #0; more | rows" in out.getvalue() and "from #0; more | rows" in page
    assert "from #0; more \\| rows" in run_markdown(conversed)


def test_what_was_lost_or_is_unknown_is_said() -> None:
    spend = SPEND.model_copy(
        update={"calls": 1, "usd": None, "wasted": Usage(prompt=700), "lost": Usage(prompt=900)}
    )
    text = spending(spend)
    assert text.startswith("1 call, ") and text.endswith("price unknown")
    assert (
        "700 in answers that broke off" in text and "about 900 in calls that an interruption cut off" in text
    )


def test_a_run_without_a_model_says_nothing_of_it(result: RunResult) -> None:
    assert summary(result) == []


def test_progress_has_a_line_a_turn(conversed: RunResult) -> None:
    calls = tuple(
        ToolCall(id=str(n), name=x, arguments="{}") for n, x in enumerate(("submit", "read", "submit"))
    )
    reply = Reply(message=Message(role="assistant", tool_calls=calls), usage=Usage(prompt=1))
    refused = Reply(message=Message(role="assistant"), refusal="no", usage=Usage())
    out = io.StringIO()
    with RunProgress(Console(file=out, width=200)) as progress:
        progress(RunStarted(conversed.settings, 0))
        progress(ModelAnswered(1, 4, reply, SPEND))
        progress(CandidateFinished(conversed.candidates[0], known=False))
    assert "conversation 1, turn 5: 2 x submit, read; 42,200 tokens so far, 0.0561 USD" in out.getvalue()
    assert answered(0, 0, refused, SPEND.model_copy(update={"usd": None})).endswith(
        "refusal; 42,200 tokens so far"
    )
