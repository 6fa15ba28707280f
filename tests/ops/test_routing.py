"""Stable top-k against Python's own sort; the guarantees that generators give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.ops import routing
from workbench.ops.random import stream

VALUES = st.sampled_from([0.0, 0.25, 0.5, -1.0, 3.5, math.inf, -math.inf, math.nan])


def by_sorting(keys: list[float], k: int) -> list[int]:
    numbers = [e for e in range(len(keys)) if not math.isnan(keys[e])]
    nans = [e for e in range(len(keys)) if math.isnan(keys[e])]
    return (sorted(numbers, key=lambda e: (-keys[e], e)) + nans)[:k]


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=24), st.integers(1, 24))
def test_stable_top(keys: list[float], k: int) -> None:
    k = min(k, len(keys))
    assert routing.stable_top(torch.tensor([keys]), k)[0].tolist() == by_sorting(keys, k)


def test_weights_sum_to_one_and_a_nan_spoils_them_all() -> None:
    logits = torch.tensor([[0.0, 2.0, math.nan, -1.0]], dtype=torch.float64)
    ids, weights = routing.route(logits, torch.zeros(4), 3)
    assert ids.tolist() == [[1, 0, 3]] and math.isclose(float(weights.sum()), 1.0)
    ids, weights = routing.route(logits, torch.zeros(4), 4)
    assert ids.tolist() == [[1, 0, 3, 2]] and weights.isnan().all()


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 64, 4), (3, 32, 4), (8, 896, 16), (16, 896, 16)])
def test_separated_keys_are_far_apart(tokens: int, experts: int, k: int) -> None:
    rng = stream(5, "separate", str(tokens))
    logits = torch.randn(tokens, experts, generator=rng) * 1.5
    start = torch.randn(experts, generator=rng) * 0.1
    bias = routing.separate_bias(logits, start, k, rng)
    keys = (torch.sigmoid(logits.double()).float() + bias).sort(descending=True).values[:, : k + 1].double()
    assert float((keys[:, :-1] - keys[:, 1:]).min()) >= routing.MARGIN
    assert routing.smallest_gap(logits, bias, k) >= routing.MARGIN
    assert (bias != start).double().mean() < 0.5, "most biases are left alone"


def test_a_separation_that_is_not_found_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_ROUNDS", 1)
    logits = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="no bias separates"):
        routing.separate_bias(logits, torch.zeros(8), 4, stream(1, "y"))


@pytest.mark.parametrize("k", [3, 4, 6, 8, 12, 16])
def test_a_tie_crosses_the_last_rank(k: int) -> None:
    owner = routing.tie_owners(896, k, stream(k, "owners"))
    sizes = torch.bincount(owner, minlength=896)
    groups = sizes[sizes > 1]
    assert int(groups.sum()) > k and len(set(groups.tolist())) == 1 and k % int(groups[0]) != 0
    assert (owner <= torch.arange(896)).all(), "a group is owned by its lowest id"


def test_choice_is_distinct_and_power_law_is_skewed() -> None:
    uniform = routing.choose_experts(200, 896, 16, stream(1, "u"))
    skewed = routing.choose_experts(200, 896, 16, stream(1, "p"), power_law=True)
    for ids in (uniform, skewed):
        assert all(len(set(row)) == 16 for row in ids.tolist()) and int(ids.max()) < 896
    assert len(set(skewed.flatten().tolist())) < 0.8 * len(set(uniform.flatten().tolist()))
