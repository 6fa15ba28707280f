from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import chain, product

import pytest

from workbench.export.module.k3_decode.steps import (
    DRAFTS,
    MAX_ROWS,
    Counts,
    Rotation,
    Step,
    batches,
    captured,
    drafts_problem,
    first_tap,
    prepared,
    recognise,
    signature,
    smallest,
    window,
)

VERIFY = tuple(1 + drafts for drafts in DRAFTS)
ENGINE_SIZES = (1, 2, 4, *range(8, 129, 8))


# Rows


@pytest.mark.parametrize("tokens", (1, *VERIFY))
def test_rows_of_tokens_and_of_requests_each_cover_the_step_once(tokens: int) -> None:
    for requests in range(1, MAX_ROWS // tokens + 1):
        step = Step(requests, tokens)
        every = range(step.rows)
        by_token = [list(every[step.of_token(t)]) for t in range(tokens)]
        by_request = [list(every[step.of_request(r)]) for r in range(requests)]
        assert sorted(chain(*by_token)) == sorted(chain(*by_request)) == list(every)
        for request, token in product(range(requests), range(tokens)):
            row = step.row(request, token)
            assert by_token[token][request] == by_request[request][token] == row
        for live in range(requests + 1):
            assert list(every[step.padding(live)]) == list(chain(*by_request[live:]))


def test_what_a_step_is_not() -> None:
    for drafts in (-1, 1, 2, 8):
        assert "not supported" in drafts_problem(drafts)
        with pytest.raises(ValueError, match=f"{drafts} draft tokens are not supported"):
            Step(1, 1 + drafts)
    assert not any(drafts_problem(n) for n in (0, *DRAFTS))
    with pytest.raises(ValueError, match="at least one request"):
        Step(0)
    with pytest.raises(IndexError):
        Step(2, 4).row(2, 0)
    with pytest.raises(IndexError):
        Step(2, 4).of_token(4)
    with pytest.raises(ValueError, match="3 requests do not fit a step of 2"):
        Step(2, 4).padding(3)


@pytest.mark.parametrize("tokens", (1, *VERIFY))
def test_a_token_sees_the_tokens_before_it_and_itself(tokens: int) -> None:
    step = Step(1, tokens)
    for context in (0, 1, 100):
        total = context + tokens
        assert [step.length(total, t) for t in range(tokens)] == [context + t + 1 for t in range(tokens)]
    assert {step.length(0, t) for t in range(tokens)} == {0}


def test_the_window_holds_every_choice_of_taps() -> None:
    for tokens in (1, *VERIFY):
        starts = [first_tap(accepted) for accepted in range(1, tokens + 1)]
        assert starts[0] == 0 and starts[-1] + 3 == window(tokens)


# Captured sizes


@pytest.mark.parametrize("tokens", VERIFY)
def test_captured_sizes_are_whole_requests_and_every_batch_has_the_next(tokens: int) -> None:
    steps = captured(ENGINE_SIZES, tokens)
    assert all(s.rows % tokens == 0 and s.rows <= MAX_ROWS for s in steps)
    for size in ENGINE_SIZES:
        up = size + -size % tokens
        assert (up in {s.rows for s in steps}) == (up <= MAX_ROWS)
    for requests in range(1, MAX_ROWS + 1):
        found = smallest(steps, requests, tokens)
        holding = [s.requests for s in steps if s.requests >= requests]
        assert (found.requests if found else None) == min(holding, default=None)
    assert smallest(steps, 1) is None, "a batch of one token a request never replays a verify graph"
    assert smallest(steps, 0, tokens) is None


def test_captured_sizes_by_hand() -> None:
    assert [s.rows for s in captured((1, 2, 4, 8, 16, 63, 64), 5)] == [5, 10, 20]
    assert [s.rows for s in captured((1, 2, 4, 8, 16, 61, 64), 8)] == [8, 16, 64]
    assert [s.rows for s in captured((1, 2, 4, 8), 4, max_requests=1)] == [4]
    assert captured((), 4) == captured((65,)) == ()
    assert batches(prepared((1, 8), 4)) == (1, 2, 4, 8)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        captured((0,))


# Recognising


KNOWN = prepared(ENGINE_SIZES, 4)


def verify(requests: int, live: int) -> tuple[Counts, Counts]:
    """Counts of a KDA and an MLA layer in a verify step of 4 tokens, `live` requests of the graph's."""
    kda = Counts(verifies=live, verify_tokens=4 * live, staged=requests)
    return kda, Counts(decodes=requests, decode_tokens=4 * requests)


def decode(requests: int) -> tuple[Counts, Counts]:
    return Counts(decodes=requests, decode_tokens=requests, verifies=0), Counts(
        decodes=requests, decode_tokens=requests
    )


@pytest.mark.parametrize("live", [1, 3, 4])
def test_a_verify_step_is_recognised_with_its_padding(live: int) -> None:
    assert recognise(16, 4, verify(4, live), KNOWN).step == Step(4, 4)


def test_a_decode_step_is_recognised_with_and_without_speculation() -> None:
    for tokens in (1, 4):
        assert recognise(16, tokens, decode(16), KNOWN).step == Step(16)


def test_every_other_step_is_left_with_its_reason() -> None:
    kda, mla = verify(4, 4)
    cases = [
        (16, (replace(kda, prefills=1), mla), "some requests are in prefill"),
        (16, (kda, replace(mla, prefills=1)), "some requests are in prefill"),
        (18, (kda, mla), "18 rows are not whole requests of 4 tokens"),
        (68, verify(17, 17), "17 requests of 4 tokens (68 rows) was not prepared"),
        (16, (replace(kda, decodes=1), mla), "verify rows are mixed with decode rows"),
        (16, (replace(kda, verify_tokens=15), mla), "not every request verifies 4 tokens"),
        (16, (replace(kda, staged=3), mla), "slots are staged for 3 requests, the graph has 4"),
        (16, (replace(kda, staged=None), mla), "slots are staged for 0 requests, the graph has 4"),
        (16, (kda, replace(mla, decodes=5)), "16 rows of 5 requests are not 4 tokens a request"),
        (16, (kda, replace(mla, decode_tokens=12)), "12 rows of 4 requests are not 4 tokens a request"),
        (12, decode(12), "12 requests of one token (12 rows) was not prepared"),
        (16, (decode(16)[0], mla), "16 rows of 4 requests are not one token a request"),
        (16, decode(17), "17 rows of 17 requests are not one token a request"),
        (16, (), "no layer has attention metadata"),
    ]
    for rows, layers, reason in cases:
        found = recognise(rows, 4, layers, KNOWN)
        assert not found and found.reason == reason


def test_verify_requests_without_speculation_are_left() -> None:
    kda, mla = decode(16)
    known = prepared(ENGINE_SIZES)
    assert recognise(16, 1, (kda, mla), known)
    found = recognise(16, 1, (replace(kda, verifies=1), mla), known)
    assert found.reason == "drafts are verified (requests: 1), and there is no speculation"


def test_ranks_that_decide_alike_agree_in_every_process() -> None:
    seen = {signature(s) for s in KNOWN} | {
        signature(None),
        signature(KNOWN[0], "tp8"),
        signature(KNOWN[0], 1),
    }
    assert len(seen) == len(KNOWN) + 3 and all(0 <= n < 2**63 for n in seen)
    code = (
        "from workbench.export.module.k3_decode.steps import Step, signature;"
        "print(signature(Step(4, 4), 'tp8', 3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert int(done.stdout) == signature(Step(4, 4), "tp8", 3)


# Mailboxes


def replayed(rotation: Rotation, steps: list[Step]) -> str:
    """What goes wrong where these steps are replayed in turn, every row of every parity followed."""
    dirty: set[tuple[int, int]] = set()
    for n, step in enumerate(steps):
        for call in range(rotation.calls):
            own = {(rotation.publishes(call), row) for row in range(step.rows)}
            if own & dirty:
                return f"replay {n}, call {call} publishes to rows that are not armed"
            rearmed = {(rotation.rearms(call), row) for row in range(step.rows)}
            if own & rearmed:
                return f"replay {n}, call {call} re-arms what it publishes"
            dirty = (dirty | own) - rearmed
    return ""


@pytest.mark.parametrize("parities", [2, 3])
def test_a_rotation_has_a_problem_just_where_replays_go_wrong(parities: int) -> None:
    sizes = [Step(1), Step(2, 4), Step(64)]
    for calls in range(1, 9):
        rotation = Rotation(calls, parities)
        wrong = any(replayed(rotation, list(steps)) for steps in product(sizes, repeat=3))
        assert wrong == bool(rotation.problem), calls


def test_rotations_of_kimi_k3() -> None:
    assert not Rotation(92, 3).problem, "92 MoE layers over three parities"
    assert "91 calls over 3 parities cannot be repeated" in Rotation(91, 3).problem
    assert "93 calls over 2 parities cannot be repeated" in Rotation(93, 2).problem
    assert Rotation(0, 3).problem and Rotation(5, 1).problem
