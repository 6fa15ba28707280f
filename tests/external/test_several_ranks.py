"""The o-projection's two ends over eight ranks: partials multicast into mailboxes, then summed."""

from __future__ import annotations

import pytest
import references
import torch
from contracts import contract
from running import bind, clean, load, normal, packed

from workbench.simulator import Domain, RankLaunch, simulate_ranks

pytestmark = pytest.mark.usefixtures("index")

RANKS = 8


class Rank:
    """One rank's share of a domain, addressed as `running.Device` is."""

    def __init__(self, domain: Domain, rank: int) -> None:
        self.domain, self.rank = domain, rank
        self.addresses: dict[int, int] = {}

    def put(self, name: str, value: torch.Tensor, written: bool = True) -> torch.Tensor:
        raw = self.domain.allocate(self.rank, name, value.numel() * value.element_size(), initialized=written)
        return self.known(name, raw, value)

    def known(self, name: str, raw: object, value: torch.Tensor) -> torch.Tensor:
        view = torch.from_numpy(raw).view(value.dtype).view(value.shape)
        view.copy_(value)
        self.addresses[view.data_ptr()] = self.domain.address(self.rank, name)
        return view

    def address(self, tensor: torch.Tensor) -> int:
        return self.addresses[tensor.data_ptr()]


def test_output_projection_and_its_consumer() -> None:
    b, nb = 1, 1
    domain = Domain(RANKS)
    ranks = [Rank(domain, r) for r in range(RANKS)]
    armed = torch.full((RANKS, 64, 3584), -0x80000000, dtype=torch.int32).view(torch.bfloat16)
    raws = domain.symmetric("mailbox", armed.numel() * 2, initialized=True)
    boxes = [ranks[r].known("mailbox", raws[r], armed) for r in range(RANKS)]
    weights = [normal(10 + r, 7168, 1536, std=(8 * 1536) ** -0.5) for r in range(RANKS)]
    locals_ = [normal(30 + r, b, 1536) for r in range(RANKS)]
    prefix, blocks = normal(1, b, 7168), normal(2, b, 8, 7168)
    norm, query, out_norm = (
        1 + normal(3, 7168, std=0.2),
        normal(4, 7168, std=0.05),
        1 + normal(5, 7168, std=0.2),
    )
    producer, consumer = load("oproj_producer_tp8_b1"), load("oproj_consumer_tp8_b1_nb1")
    launches, outs, prefixes = [], [], []
    for r, rank in enumerate(ranks):
        x, w = rank.put("x", locals_[r]), rank.put("w", weights[r])
        rows = [rank.put(n, t) for n, t in (
            ("prefix", prefix), ("blocks", blocks), ("norm", norm), ("query", query), ("out_norm", out_norm),
        )]  # fmt: skip
        out = rank.put("out", torch.zeros(b, 7168, dtype=torch.bfloat16), written=False)
        outs.append(out)
        prefixes.append(rows[0])
        ends = [
            (producer, (x, w, boxes[r], domain.multicast("mailbox"), r)),
            (consumer, (boxes[r], *rows, out, 1e-5, 1e-5)),
        ]
        launches.append(
            [
                RankLaunch(kernel.module, packed(kernel, raw))
                for kernel, values in ends
                for raw in bind(kernel, rank, values)
            ]
        )
    clean(simulate_ranks(domain, launches, schedule="skewed"))
    project, residual = contract("o_proj"), contract("attn_res")
    sizes = {"B": b, "N": 7168, "K": 1536}
    partials = [
        project.reference({"x": x, "weight": w}, sizes)["out"] for x, w in zip(locals_, weights, strict=True)
    ]
    total = references.rounded(references.grouped_sum(partials))
    given = {
        "prefix": prefix, "delta": total, "blocks": blocks, "norm": norm, "query": query,
        "out_norm": out_norm,
    }  # fmt: skip
    golden = residual.reference(given, {"B": b, "N": 7168, "V": nb + 1, "A": nb, "M": 8})
    want, new = golden["out"], golden["prefix"]
    for r in range(RANKS):
        torch.testing.assert_close(outs[r].double(), want, atol=3e-2, rtol=8e-2)
        torch.testing.assert_close(prefixes[r].double(), new, atol=2e-2, rtol=2e-2)
        assert torch.equal(outs[r], outs[0]) and torch.equal(prefixes[r], prefixes[0])
        assert (boxes[r].view(torch.int32) == -0x80000000).all()
