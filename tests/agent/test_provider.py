from __future__ import annotations

import time
from pathlib import Path

import pytest
from model_server import Answer, Fail, Garbage, Server, serve

from workbench.agent.model import (
    BudgetError,
    ContextOverflowError,
    Ledger,
    Limits,
    Message,
    ModelError,
    Profile,
    RecordedProvider,
    ReplayError,
    Request,
    ToolSpec,
    Transcript,
    Usage,
    load_prices,
    load_profile,
)
from workbench.agent.model.client import OpenAIProvider
from workbench.agent.model.profile import Price
from workbench.errors import ContentError, WorkbenchError

KEY = "sk-canary-7f3a91"
TOOL = ToolSpec(name="submit", description="Submit.", parameters={"type": "object", "properties": {}})


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_MODEL_KEY", KEY)


def provider(server: Server, **changes: object) -> OpenAIProvider:
    fields = {
        "model": "test-model",
        "base_url": server.url,
        "api_key_env": "TEST_MODEL_KEY",
        "timeout_seconds": 5.0,
        "retries": 2,
        **changes,
    }
    return OpenAIProvider(Profile.model_validate(fields))


def request(text: str = "hello", **changes: object) -> Request:
    fields = {"model": "test-model", "messages": (Message(role="user", content=text),), "tools": (TOOL,),
              "max_output_tokens": 500, **changes}  # fmt: skip
    return Request.model_validate(fields)


@pytest.mark.parametrize("stream", [True, False])
def test_text_and_usage(stream: bool) -> None:
    with serve(Answer("a longer answer in several pieces", usage=(31, 9))) as server:
        reply = provider(server, stream=stream).complete(request(), 0, 0)
    assert reply.message.content == "a longer answer in several pieces"
    assert (reply.usage.prompt, reply.usage.completion, reply.finish) == (31, 9, "stop")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert server.requests[0]["max_completion_tokens"] == 500


@pytest.mark.parametrize("stream", [True, False])
def test_parallel_tool_calls_interleaved_in_the_stream(stream: bool) -> None:
    calls = [("submit", {"source": "x = 1\n" * 9}), ("read", {"name": "moe"}), ("submit", {"source": "y"})]
    with serve(Answer("two at once", calls=calls)) as server:
        reply = provider(server, stream=stream).complete(request(), 0, 0)
    assert [c.name for c in reply.message.tool_calls] == ["submit", "read", "submit"]
    assert '"x = 1\\n' in reply.message.tool_calls[0].arguments and reply.finish == "tool_calls"
    assert len({c.id for c in reply.message.tool_calls}) == 3


def test_malformed_arguments_and_refusals_come_back_as_they_are() -> None:
    with serve(Answer(calls=[("submit", '{"source": "x')]), Answer(refusal="I cannot."), Answer()) as server:
        it = provider(server)
        assert it.complete(request(), 0, 0).message.tool_calls[0].arguments == '{"source": "x'
        assert it.complete(request(), 0, 1).refusal == "I cannot."
        assert it.complete(request(), 0, 2).message.content == ""


def test_429_waits_as_retry_after_says() -> None:
    busy = Fail(429, "slow down", headers={"Retry-After": "1"})
    with serve(busy, Answer("now")) as server:
        started = time.monotonic()
        assert provider(server).complete(request(), 0, 0).message.content == "now"
        assert time.monotonic() - started >= 0.9
    assert len(server.requests) == 2


def test_500_is_tried_again_and_then_said_in_one_line() -> None:
    quick = {"Retry-After-Ms": "1"}
    with serve(Fail(500, headers=quick), Answer("fine")) as server:
        assert provider(server).complete(request(), 0, 0).message.content == "fine"
    with serve(Fail(503, "overloaded\nnow", headers=quick)) as server:
        with pytest.raises(ModelError, match=r"failed with 503, after 3 tries: .*overloaded now") as caught:
            provider(server).complete(request(), 0, 0)
        assert len(server.requests) == 3 and "\n" not in str(caught.value)


@pytest.mark.parametrize("usage", [None, (100, 20)])
def test_a_stream_that_breaks_off_is_asked_for_again_and_counted(usage: tuple[int, int] | None) -> None:
    broken = Answer("the beginning of a long answer", cut_after=3, usage=usage)
    with serve(broken, Answer("whole", usage=(50, 5))) as server:
        reply = provider(server).complete(request(), 0, 0)
    assert reply.message.content == "whole" and reply.attempts == 2
    assert reply.usage.total == 55 and reply.wasted.total > 0 and reply.wasted.estimated


def test_a_server_that_always_breaks_off() -> None:
    with serve(Answer("the beginning of a long answer", cut_after=3)) as server:
        with pytest.raises(ModelError, match="broke off its answer") as caught:
            provider(server).complete(request(), 0, 0)
        assert len(server.requests) == 3 and caught.value.wasted.total > 0


def test_a_wrong_model_name_lists_near_ones() -> None:
    with (
        serve(Fail(404, "The model `test-modal` does not exist", "model_not_found")) as server,
        pytest.raises(ModelError, match=r"no model 'test-modal' \(it has test-model"),
    ):
        provider(server, model="test-modal").complete(request(model="test-modal"), 0, 0)


def test_a_context_overflow_is_told_apart() -> None:
    said = "This model's maximum context length is 8192 tokens, however you requested 9000"
    with serve(Fail(400, said, "context_length_exceeded")) as server, pytest.raises(ContextOverflowError):
        provider(server).complete(request(), 0, 0)
    with (
        serve(Fail(400, "unknown parameter")) as server,
        pytest.raises(ModelError, match="refuses") as caught,
    ):
        provider(server).complete(request(), 0, 0)
    assert not isinstance(caught.value, ContextOverflowError)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "body", ["<html>gateway</html>", "{}", '{"choices": []}', "null", "data: {]\n\n", "data: 7\n\n"]
)
def test_what_is_no_completion_is_one_line(body: str, stream: bool) -> None:
    kind = "text/event-stream" if body.startswith("data") else "application/json"
    with serve(Garbage(body, kind)) as server, pytest.raises(ModelError) as caught:
        provider(server, stream=stream).complete(request(), 0, 0)
    assert "\n" not in str(caught.value)


def test_the_key_is_in_no_message() -> None:
    with serve(Fail(401, f"Incorrect API key provided: {KEY}")) as server:
        with pytest.raises(ModelError, match="does not accept the key in TEST_MODEL_KEY") as caught:
            provider(server).complete(request(), 0, 0)
        assert KEY not in str(caught.value)


def test_no_server_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Profile(model="m", base_url="http://127.0.0.1:9/v1", api_key_env="TEST_MODEL_KEY", retries=0)
    with pytest.raises(ModelError, match="cannot be reached"):
        OpenAIProvider(dead).complete(request(), 0, 0)
    monkeypatch.delenv("TEST_MODEL_KEY")
    with pytest.raises(WorkbenchError, match="set TEST_MODEL_KEY"):
        OpenAIProvider(dead)


# -- profiles, budgets, transcripts ------------------------------------------------------------------


def test_a_profile_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('model = "m"\n[sampling]\ntemperature = 0.5\n[price]\ninput = 1\noutput = 2\n')
    profile = load_profile(path)
    assert profile.sampling == {"temperature": 0.5} and profile.price == Price(input=1, output=2)
    for text, said in (("model = 7", "model"), ("", "model"), ('model="m"\nkey="x"', "key"), ("[", "TOML")):
        path.write_text(text)
        with pytest.raises(ContentError, match=said):
            load_profile(path)
    with pytest.raises(ContentError, match="cannot be read"):
        load_profile(tmp_path / "absent.toml")


def test_prices_are_positive_and_cached_input_is_no_dearer() -> None:
    prices = load_prices()
    assert prices
    for price in prices.values():
        assert 0 < (price.cached or price.input) <= price.input < price.output


def test_a_limit_is_overshot_by_one_call_at_most() -> None:
    with serve(Answer("x", usage=(400, 200))) as server:
        ledger = Ledger(Limits(tokens=1000), None)
        it = RecordedProvider(Transcript(Path("/nonexistent/x")), ledger, provider(server))
        it.transcript.add = lambda exchange: None  # type: ignore[method-assign]
        with pytest.raises(BudgetError) as caught:
            for turn in range(9):
                it.complete(request(), 0, turn)
    assert caught.value.limit == "tokens"
    assert ledger.spend.calls == 2 and ledger.spend.usage.total == 1200


def test_the_room_for_output_is_what_is_left() -> None:
    ledger = Ledger(Limits(usd=0.01), Price(input=1.0, output=10.0))
    asked = request("x" * 3000, max_output_tokens=100_000)
    with ledger.reserve(asked) as bounded:
        cost = ledger.cost(Usage(prompt=asked.estimated_tokens, completion=bounded.max_output_tokens))
        assert cost is not None and 0.0099 < cost <= 0.01
        with pytest.raises(BudgetError), ledger.reserve(asked):
            pass
    with pytest.raises(WorkbenchError, match="price"):
        Ledger(Limits(usd=1.0), None)


def test_cached_tokens_cost_less() -> None:
    ledger = Ledger(Limits(), Price(input=2.0, cached=0.5, output=8.0))
    assert ledger.cost(Usage(prompt=1_000_000, cached=400_000, completion=0)) == pytest.approx(1.4)


def conversation(turn: int) -> Request:
    said = [Message(role="user", content="begin")]
    for n in range(turn):
        said += [Message(role="assistant", content=f"answer {n}"), Message(role="user", content=f"more {n}")]
    return request(messages=tuple(said))


def test_a_resumed_run_pays_for_nothing_twice_and_has_spent_the_same(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serve(*(Answer(f"answer {n}", usage=(10 + n, 5)) for n in range(4))) as server:
        first = Ledger(Limits(), Price(input=1, output=1))
        it = RecordedProvider(Transcript(path), first, provider(server))
        for turn in range(4):
            it.complete(conversation(turn), 0, turn)
        again = Ledger(Limits(), Price(input=1, output=1))
        replayed = RecordedProvider(Transcript(path), again, None)
        for turn in range(4):
            assert replayed.complete(conversation(turn), 0, turn).message.content == f"answer {turn}"
        with pytest.raises(ReplayError, match="ends before chain 0, turn 4"):
            replayed.complete(conversation(4), 0, 4)
        assert len(server.requests) == 4
    assert again.spend.usage == first.spend.usage and again.spend.usd == first.spend.usd
    exchanges = Transcript(path).exchanges
    assert [len(e.new_messages) for e in exchanges] == [1, 1, 1, 1]
    assert KEY not in path.read_text()


def test_a_replay_that_asks_something_else_is_refused(tmp_path: Path) -> None:
    with serve(Answer("a")) as server:
        path = tmp_path / "t.jsonl"
        RecordedProvider(Transcript(path), Ledger(Limits(), None), provider(server)).complete(request(), 0, 0)
    replay = RecordedProvider(Transcript(path), Ledger(Limits(), None), None)
    with pytest.raises(ReplayError, match="was another request"):
        replay.complete(request("something else"), 0, 0)


def test_a_cut_last_line_is_dropped_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serve(Answer("a"), Answer("b")) as server:
        it = RecordedProvider(Transcript(path), Ledger(Limits(), None), provider(server))
        it.complete(conversation(0), 0, 0)
        it.complete(conversation(1), 0, 1)
    whole = path.read_bytes()
    first = b"".join(whole.splitlines(keepends=True)[:2])  # that it is asked, and the exchange
    for size in range(len(first), len(whole)):
        path.write_bytes(whole[:size])
        cut = Transcript(path)
        assert len(cut.exchanges) == 1 and path.read_bytes().endswith(b"\n")
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(ContentError, match=r":1: "):
        Transcript(path)


def test_what_failed_is_recorded_with_its_cost(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ledger = Ledger(Limits(), None)
    with serve(Answer("a long beginning", cut_after=3)) as server, pytest.raises(ModelError):
        RecordedProvider(Transcript(path), ledger, provider(server, retries=1)).complete(request(), 0, 0)
    (exchange,) = Transcript(path).exchanges
    assert exchange.reply is None and exchange.error and exchange.wasted.total > 0
    assert ledger.spend.wasted == exchange.wasted and Transcript(path).find(0, 0) is None
