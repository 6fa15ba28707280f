"""The executor on several simulated ranks, and captured once and replayed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from importlib import import_module as module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.export.module_winners import SimulatedProgram
from tests.export.test_module_layer import Meeting, Rank
from tests.export.test_vllm_executor import Pair, Served, advance, check, executor_of, ids, pair
from tests.export.vllm_stock import Backbone, H, Request, batch, normal


def together(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """What each rank's thread returned; the first error is raised."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def served(package: ModuleType, meeting: Meeting, rank: int, tokens: int, **asked: Any) -> Served:
    model = Backbone(rank, meeting.ranks, spec=tokens - 1)
    group = Rank(package, meeting, rank)
    model.reduce = group.sum
    return Served(model, executor_of(package, model, tokens, group, **asked))


WORK: list[tuple[dict[int, int], int, int]] = [
    ({0: 3, 1: 2}, 0, 0), ({0: 4, 1: 4}, 12, 3), ({1: 4}, 0, 1), ({1: 4, 2: 2}, 0, 1), ({0: 4, 1: 4}, 8, 2),
]  # fmt: skip
"""New tokens of each request, rows to pad to, tokens that are accepted."""


def test_all_ranks_plan_alike_and_equal_stocks_ranks(package: ModuleType) -> None:
    """Stock is split over as many ranks: partials of bf16 summed as the ranks sum them."""
    ranks, tokens = 2, 4
    meeting = Meeting(ranks)

    def run(rank: int) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor], Any]:
        own = served(package, meeting, rank, tokens, sizes=(12,))
        outs = serve(own, tokens)
        stocks = Backbone(rank, ranks, spec=tokens - 1)
        stocks.reduce = own.model.reduce
        return own.taken, outs, serve(Served(stocks), tokens), own.executor

    results = together(ranks, run)
    plans, outs, stocks, executors = zip(*results, strict=True)
    assert plans[0] == plans[1]
    assert [None if s is None else s.rows for s in plans[0]] == [None, 12, 4, None, 8]
    assert executors[0].signature() == executors[1].signature()
    assert "rank 1 of 2" in executors[1].explain()
    for i, (work, _, _) in enumerate(WORK):
        live = sum(work.values())
        assert torch.equal(outs[0][i][:live], outs[1][i][:live])
        check(stocks[0][i], outs[0][i], live)


def serve(model: Served, tokens: int) -> list[torch.Tensor]:
    requests = [Request(n, tokens - 1) for n in range(3)]
    outs = []
    for seed, (work, pad, accepted) in enumerate(WORK):
        pairs = [(requests[r], n) for r, n in work.items()]
        outs.append(model(batch(pairs, ids(seed, sum(work.values())), tokens, pad)))
        for r, n in pairs:
            r.context += accepted if n == tokens else n
            r.accepted = accepted if n == tokens else 1
    return outs


def test_a_plan_looks_at_the_host_alone(package: ModuleType) -> None:
    """On ranks whose tensors hold other values, or none at all, the plans are the same."""
    both = pair(package, tokens=4, sizes=(12,))
    work = [(Request(0, 3, context=2), 4), (Request(1, 3, context=5), 4)]
    b = batch(work, ids(0, 8), 4, pad_to=12)
    seen = both.two.model
    seen.context = b.context
    plan = both.two.executor.plan(b.positions, None)
    for name, m in b.context.metadata.items():
        for holder in (m, getattr(m, "decode", None)):
            for field, value in vars(holder).items() if holder is not None else ():
                if isinstance(value, torch.Tensor):
                    setattr(holder, field, value.to("meta"))
        b.context.slot_mapping[name] = b.context.slot_mapping[name].to("meta")
    again = both.two.executor.plan(b.positions.to("meta"), None)
    assert plan is not None and again is not None and plan.step == again.step


def test_ranks_that_would_run_other_things_do_not_start(package: ModuleType) -> None:
    meeting = Meeting(2)
    differ = module("k3_decode.vllm.executor").RanksDiffer

    def run(rank: int) -> str:
        with pytest.raises(differ, match=r"ranks \[1\] would run other parts than rank 0") as e:
            served(package, meeting, rank, 1, off=[2] if rank else [])
        return str(e.value)

    told = together(2, run)
    assert "feed_forward in 4 layers" in told[1] and "feed_forward in 5 layers" in told[0]


# Graphs


class Graph:
    """What a CUDA graph is: the device operations of one call without its Python, on the same memory."""

    def __init__(self, package: ModuleType, both: Pair, b: Any) -> None:
        self.b, served = b, both.two
        served.model.context = b.context
        plan = served.executor.plan(b.positions, None)
        assert plan is not None
        frozen = {id(t): t.clone() for t in caches_of(served.model)}
        self.graph = make_fx(lambda i: served.executor.run(plan, i, None), tracing_mode="real")(b.ids)
        for t in caches_of(served.model):  # a capture runs nothing: undo what tracing did
            t.copy_(frozen[id(t)])
        served.model.context = None
        self.plans = len(served.taken)

    def replay(self, other: Any) -> torch.Tensor:
        """Replay with another batch's ids and metadata in the memory that was captured."""
        self.b.ids.copy_(other.ids)
        pairs = zip(self.b.context.metadata.values(), other.context.metadata.values(), strict=True)
        for mine, new in pairs:
            copy_tensors(mine, new)
            if getattr(mine, "decode", None) is not None:
                copy_tensors(mine.decode, new.decode)
        for mine, new in zip(
            self.b.context.slot_mapping.values(), other.context.slot_mapping.values(), strict=True
        ):
            mine.copy_(new)
        out: torch.Tensor = self.graph(self.b.ids)
        return out


def captured(part: Any, x: torch.Tensor, held: Any) -> Any:
    return make_fx(lambda y: part(y, y, y, held), tracing_mode="real")(x)


def caches_of(model: Backbone) -> list[torch.Tensor]:
    return [
        t
        for layer in model.layers
        for t in ([layer.self_attn.kv_cache] if layer.kind == "mla" else layer.self_attn.kv_cache)
    ]


def copy_tensors(into: Any, of: Any) -> None:
    for name, value in vars(into).items():
        if isinstance(value, torch.Tensor):
            value.copy_(getattr(of, name))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_a_step_is_captured_once_and_replayed(package: ModuleType, tokens: int) -> None:
    """Two graphs of one deployment, replayed in turn with other batches, padding and accepted tokens: each
    replay equals stock, with nothing of Python's left to count them."""
    both = pair(package, tokens, sizes=(3 * tokens,))
    both.step({0: 3, 1: 2, 2: 1})
    own, stocks = both.requests[1], both.requests[0]

    def now(requests: list[Request], who: list[int], rows: int) -> Any:
        work = [(requests[r], tokens) for r in who]
        return batch(work, ids(len(who) + sum(who), tokens * len(who)), tokens, pad_to=rows)

    small, large = (Graph(package, both, now(own, [0], n * tokens)) for n in (1, 3))
    counted = dict(module("k3_decode.vllm.state").executor_facts()[2])
    for who, graph, accepted in (([0, 1], large, 1), ([2], small, 2), ([1, 2, 0], large, 3), ([0], small, 1)):
        rows = graph.b.ids.shape[0]
        want = both.one(now(stocks, who, rows))
        got = graph.replay(now(own, who, rows))
        check(want, got, tokens * len(who))
        for requests in (own, stocks):
            advance([(requests[r], tokens) for r in who], min(accepted, tokens) if tokens > 1 else 0)
    assert module("k3_decode.vllm.state").executor_facts()[2] == counted, "no replay was planned"


def test_kernels_are_replayed(package: ModuleType, simulated: type[SimulatedProgram]) -> None:
    """Kernels' own memory (flags, counters) goes from one replay to the next; sizes alternate."""
    both = pair(package, reference=False)
    layer, mlp = both.two.executor.layers[1], both.two.model.layers[1].mlp
    held = module("k3_decode.vllm.parts").Held(None, {})
    graphs = {}
    for rows in (2, 3):
        own = both.two.executor.choices[module("k3_decode.steps").Step(rows)].own
        part = functools.partial(both.two.executor._part, layer, "feed_forward", own)
        graphs[rows] = captured(part, normal(f"x{rows}", rows, H), held)
        calls = [str(n.target) for n in graphs[rows].graph.nodes if "k3_decode" in str(n.target)]
        assert calls == ["k3_decode.moe.default", "k3_decode.rmsnorm.default"]
    for replay, rows in enumerate((3, 2, 3, 3)):
        x = normal(f"replay{replay}", rows, H)
        check(mlp(x), graphs[rows](x), rows, close=3e-2)
