from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module as module
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.export import vllm_stock as stock
from tests.export.module_winners import SimulatedProgram
from tests.export.vllm_stock import Backbone, Batch, Request, batch

CLOSE = 1e-2
"""Root mean square of the difference over that of stock's, of each row."""


class Host:
    """The serving engine: hands the batch's context to the executor and to the stock forward."""

    def __init__(self, group: Any, model: Backbone) -> None:
        self.group, self.model = group, model
        self.in_capture = False

    def context(self) -> Any:
        return self.model.context

    def capturing(self) -> bool:
        return self.in_capture

    def stock_residual(self, backbone: Any, prefix: Any, delta: Any, blocks: Any) -> torch.Tensor:
        return stock.stock_residual(backbone, prefix, delta, blocks)


class Served:
    """A model behind the forward that vLLM has: plan, then run, or stock and normalize."""

    def __init__(self, model: Backbone, executor: Any = None) -> None:
        self.model, self.executor = model, executor
        self.taken: list[Any] = []

    def __call__(self, b: Batch) -> Any:
        self.model.context = b.context
        try:
            if self.executor is not None:
                plan = self.executor.plan(b.positions, None)
                self.taken.append(None if plan is None else plan.step)
                if plan is not None:
                    return self.executor.run(plan, b.ids, None)
                return self.executor.normalize(self.model(b.ids, b.positions))
            out = self.model(b.ids, b.positions)
            return (self.model.norm(out[0]), out[1]) if isinstance(out, tuple) else self.model.norm(out)
        finally:
            self.model.context = None


def executor_of(
    package: ModuleType,
    model: Backbone,
    tokens: int = 1,
    group: Any = None,
    sizes: tuple[int, ...] = (),
    **asked: Any,
) -> Any:
    executor = module("k3_decode.vllm.executor")
    settings, wrong = module("k3_decode.vllm.settings").read({"reference": True, **asked})
    assert not wrong
    deployment = executor.Deployment(settings, tokens, sizes)
    made = executor.Executor(model, deployment, Host(group or package.layer.glue.Alone(), model))
    made.prepare_kv()
    return made


def ids(seed: int, n: int) -> list[int]:
    return [(7 * seed + 13 * i + i * i) % stock.VOCAB for i in range(n)]


def advance(work: list[tuple[Request, int]], accepted: int = 0) -> None:
    """The step is over: all its tokens are kept, or so many of each verifying request."""
    for r, n in work:
        r.context += accepted or n
        r.accepted = accepted or 1


def same_caches(one: Backbone, two: Backbone) -> None:
    """Caches agree; bytes that the stock forward leaves are left alone."""
    for a, b in zip(one.layers, two.layers, strict=True):
        if a.kind == "mla":
            left, right = a.self_attn.kv_cache, b.self_attn.kv_cache
            same = (left == 0x7F).all(-1) == (right == 0x7F).all(-1)
            assert same.all(), "another row of the cache was written"
            x, y = (t.view(torch.float8_e4m3fn).float() for t in (left.contiguous(), right.contiguous()))
            assert torch.allclose(x, y, rtol=0.26, atol=0.1, equal_nan=True)
            continue
        for x, y in zip(a.self_attn.kv_cache, b.self_attn.kv_cache, strict=True):
            assert torch.equal(x.isnan(), y.isnan()), "another slot was written"
            assert torch.allclose(x.float(), y.float(), rtol=8e-2, atol=8e-2, equal_nan=True)


def check(one: Any, two: Any, live: int, close: float = CLOSE) -> None:
    """Live rows agree."""
    a, b = (x[0] if isinstance(x, tuple) else x for x in (one, two))
    a, b = a[:live].double(), b[:live].double()
    assert not b.isnan().any() and b.square().mean(-1).sqrt().min() > 0.5
    off = ((a - b).square().mean(-1).sqrt() / b.square().mean(-1).sqrt()).max().item()
    assert off < close


@dataclass
class Pair:
    """Two models with requests of their own: stock, and what is compared with it."""

    one: Served
    two: Served
    tokens: int = 1

    def __post_init__(self) -> None:
        self.requests = [[Request(n, self.tokens - 1) for n in range(6)] for _ in range(2)]
        self.seed = 0

    def step(self, work: dict[int, int], pad_to: int = 0, accepted: int = 0, **more: Any) -> None:
        """So many new tokens of each request, in both models; outputs and caches are compared."""
        self.seed += 1
        outs = []
        for served, own in zip((self.one, self.two), self.requests, strict=True):
            pairs = [(own[r], n) for r, n in work.items()]
            b = batch(pairs, ids(self.seed, sum(work.values())), self.tokens, pad_to, **more)
            outs.append(served(b))
            advance(pairs, accepted)
        check(*outs, sum(work.values()))
        same_caches(self.one.model, self.two.model)

    @property
    def taken(self) -> list[int | None]:
        """Rows of each step that the executor took."""
        return [None if s is None else s.rows for s in self.two.taken]


def pair(package: ModuleType, tokens: int = 1, **asked: Any) -> Pair:
    one, two = (Backbone(spec=tokens - 1) for _ in range(2))
    return Pair(Served(one), Served(two, executor_of(package, two, tokens, **asked)), tokens)


def test_prefill_decode_and_mixed_steps_equal_stocks(package: ModuleType) -> None:
    both = pair(package, sizes=(4,))
    both.step({0: 5, 1: 3})
    both.step({0: 1, 1: 1})
    both.step({0: 1, 1: 1}, pad_to=4)
    both.step({0: 1, 2: 2, 1: 1})
    both.step({2: 1, 0: 1, 1: 1}, pad_to=4)
    assert both.taken == [None, 2, 4, None, 4]
    both.two.model.stock_calls.clear()
    both.step({1: 1})
    assert not both.two.model.stock_calls, "the whole layer is the package's"


@pytest.mark.parametrize("tokens", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7, 8))])
def test_verify_steps_equal_stocks(package: ModuleType, tokens: int) -> None:
    both = pair(package, tokens, sizes=(tokens - 1, 2 * tokens + 1))
    both.step({0: 2, 1: 3})
    both.step({0: tokens, 1: tokens}, accepted=1, pad_to=3 * tokens)
    both.step({1: tokens, 0: tokens}, accepted=2)
    both.step({0: tokens}, accepted=1)
    both.step({0: tokens, 1: tokens, 2: 3}, accepted=0)
    assert both.taken == [None, 3 * tokens, 2 * tokens, tokens, None]


def test_the_auxiliary_streams_are_stocks(package: ModuleType) -> None:
    both = pair(package)
    for served in (both.one, both.two):
        served.model.aux_hidden_state_layers = (0, 2, 5)
    outs: list[Any] = []
    for served, own in zip((both.one, both.two), both.requests, strict=True):
        served(batch([(own[0], 3)], ids(0, 3)))
        advance([(own[0], 3)])
        outs.append(served(batch([(own[0], 1)], ids(1, 1))))
    assert both.two.taken[1] is not None
    (a, one), (b, two) = outs
    check(a, b, 1)
    assert len(one) == len(two) == 3
    for x, y in zip(one, two, strict=True):
        check(x, y, 1)
    assert torch.equal(one[0], both.one.model.embed_input_ids(torch.tensor(ids(1, 1)))), "not normed"


# Parts


@pytest.mark.parametrize("part", ["residual", "attention", "feed_forward"])
def test_each_part_alone_beside_stocks_others(package: ModuleType, part: str) -> None:
    both = pair(package, parts=[part], off=[3])
    both.step({0: 3, 1: 2})
    both.two.model.stock_calls.clear()
    both.step({1: 1, 0: 1})
    assert both.taken == [None, 2]
    own = {"residual": {"before", "after"}}.get(part, {part})
    by_stock = {
        (i, p)
        for i in range(5)
        for p in ("before", "attention", "after", "feed_forward")
        if p not in own or i == 3
    }
    assert set(both.two.model.stock_calls) == by_stock
    told = both.two.executor.explain()
    assert "1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64 requests of one token: " in told
    assert f"{min(own)} in 4 layers" in told


def test_kernels_run_the_ops_that_they_cover_and_stock_the_rest(
    package: ModuleType, simulated: type[SimulatedProgram]
) -> None:
    """The package's kernels here: moe and rmsnorm, at up to 3 rows. Everything else is stock's."""
    both = pair(package, reference=False)
    tried = package.counts().kernels
    assert {op for op, _ in tried} == {"moe", "rmsnorm"}, "tried out beforehand, on padding"
    both.step({0: 2, 1: 2})
    both.two.model.stock_calls.clear()
    both.step({0: 1, 1: 1})
    both.step({0: 1, 1: 1}, pad_to=3)
    both.step({0: 1, 1: 1}, pad_to=4)
    assert both.taken == [None, 2, 3, None]
    assert [c for c in both.two.model.stock_calls[:16] if c[1] == "feed_forward"] == [(0, "feed_forward")]
    ran = {op: n - tried[op, key] for (op, key), n in package.counts().kernels.items()}
    assert ran == {"moe": 8, "rmsnorm": 8}, "four layers, two steps"
    told = both.two.executor.explain()
    assert (
        "1, 2, 3 requests of one token: feed_forward in 4 layers; by stock inside: shared expert, SiTU"
        in told
    )
    assert "4, 5, 6, 7, 8, 16, 32, 64 requests of one token: stock, " in told
    status = module("k3_decode.vllm.registering").status()
    assert status.state == "active" and status.plans["taken"] >= 2


def test_a_whole_layer_is_wanted_and_not_there(
    package: ModuleType, simulated: type[SimulatedProgram]
) -> None:
    both = pair(package, reference=False, mode="layer")
    both.step({0: 2})
    both.step({0: 1})
    assert both.taken == [None, None]
    status = module("k3_decode.vllm.registering").status()
    assert status.state == "idle" and "parts would be stock's: " in status.detail


def test_a_part_that_falls_back_when_tried_is_left_to_stock(
    package: ModuleType, simulated: type[SimulatedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the shapes promise and the launch does not keep: seen before a graph is captured."""

    def refused(*arguments: Any) -> None:
        raise package.launch.LaunchError("cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE")

    package.ops._plans.clear()
    monkeypatch.setattr(package.runtime, "make_program", refused)
    both = pair(package, reference=False)
    refusals = [c.refused for s, c in both.two.executor.choices.items() if s.rows < 4]
    assert len(refusals) == 3
    assert all("moe fell back: driver: cuModuleLoadData failed" in r for r in refusals)
    package.ops._plans.clear()
