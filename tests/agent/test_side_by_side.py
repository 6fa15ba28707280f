"""What one turn submits is evaluated side by side, while other conversations wait for their answers.

Shown by the order of events, not by times: the server and the run each hold back until the other has come so
far, and a run that did one thing after another would never get there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from model_server import Answer, serve
from small_workspace import make_workspace

from workbench.agent import online
from workbench.agent.events import CandidateFinished, CandidateStarted, Event, ModelAnswered
from workbench.agent.model import Profile
from workbench.agent.online import Plan

PATIENCE = 120.0
"""Seconds after which something is taken never to come."""


def test_candidates_of_a_turn_and_other_conversations_go_on_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MODEL_KEY", "sk-none")
    both_started, other_answered = threading.Event(), threading.Event()
    order: list[str] = []
    came: list[bool] = []
    first, second = threading.Lock(), threading.Lock()

    def author(request: dict[str, Any]) -> Answer:
        """The conversation that asks first submits three candidates; the other thinks until two are begun."""
        if first.acquire(blocking=False):
            knobs = ({"threads": 32}, {"threads": 64}, {"threads": 128})
            return Answer(calls=[("submit", {"base": "row", "knobs": {**k, "vec": 2}}) for k in knobs])
        if second.acquire(blocking=False):
            came.append(both_started.wait(PATIENCE))
            return Answer(calls=[("read", {"what": "contract"})])
        return Answer(calls=[("finish", {})])

    def note(event: Event) -> None:
        match event:
            case CandidateStarted():
                order.append("started")
                if order.count("started") == 2:
                    both_started.set()
            case ModelAnswered(reply=reply):
                names = {c.name for c in reply.message.tool_calls}
                order.append(f"answered {', '.join(sorted(names))}")
                if names == {"read"}:
                    other_answered.set()
            case CandidateFinished():
                came.append(other_answered.wait(PATIENCE))  # nothing is done with it before
                order.append("finished")

    with serve(author) as server:
        profile = Profile(model="test-model", base_url=server.url, api_key_env="TEST_MODEL_KEY")
        plan = Plan(profile, chains=2, tune_batch=0)
        result = online.propose(
            make_workspace(tmp_path / "space"), "rmsnorm", "small_b1", plan, workers=2, on_event=note
        )
    assert came == [True] * 4 and result.winner is not None
    # Both workers had a candidate, the third waited for one, and meanwhile the other conversation went on.
    begun = [x for x in order if x in ("started", "finished")]
    assert begun[:3] == ["started", "started", "finished"] and begun.count("finished") == 3
    assert order.index("answered read") < order.index("finished")
    assert order[0] == "answered submit"
