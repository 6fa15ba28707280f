from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.export import vllm_stock as stock
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
    from importlib import import_module

    executor = import_module("k3_decode.vllm.executor")
    settings, wrong = import_module("k3_decode.vllm.settings").read({"reference": True, **asked})
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


def check(one: Any, two: Any, live: int) -> None:
    """Live rows agree."""
    a, b = (x[0] if isinstance(x, tuple) else x for x in (one, two))
    a, b = a[:live].double(), b[:live].double()
    assert not b.isnan().any() and b.square().mean(-1).sqrt().min() > 0.5
    off = ((a - b).square().mean(-1).sqrt() / b.square().mean(-1).sqrt()).max().item()
    assert off < CLOSE


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


@pytest.mark.parametrize("tokens", [4, 5, 8])
def test_verify_steps_equal_stocks(package: ModuleType, tokens: int) -> None:
    both = pair(package, tokens, sizes=(tokens - 1, 2 * tokens + 1))
    both.step({0: 2, 1: 3})
    both.step({0: tokens, 1: tokens}, accepted=1, pad_to=3 * tokens)
    both.step({1: tokens, 0: tokens}, accepted=2)
    both.step({0: tokens}, accepted=1)
    both.step({0: tokens, 1: tokens, 2: 3}, accepted=0)
    assert both.taken == [None, 3 * tokens, 2 * tokens, tokens, None]
