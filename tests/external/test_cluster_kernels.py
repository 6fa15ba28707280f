"""Kernels with clusters and mailboxes: attention residual and KDA, judged by the contracts of the ops."""

from __future__ import annotations

import pytest
import torch
from contracts import contract, generated, judge, run_kda
from running import Device, clean, run

pytestmark = pytest.mark.usefixtures("index")


WIDTH, TOKENS = 7168, 2


def axes_of(nb: int, write: bool) -> dict[str, int]:
    return {"B": TOKENS, "N": WIDTH, "V": nb + 1, "A": nb + write, "M": 8}


def residual(name: str, nb: int, generator: str, write: bool = False, ring: bool = False) -> None:
    """Run a residual kernel on the contract's inputs; with `ring` the delta comes out of a mailbox."""
    op, axes, device = contract("attn_res"), axes_of(nb, write), Device()
    given = generated(op, axes, generator)
    t = {n: device.put(value, n) for n, value in given.items() if n != "delta"}
    t["out"] = device.empty(TOKENS, WIDTH, name="out")
    delta = given["delta"]
    if ring:  # one slot of the ring holds the delta; it is armed again afterwards
        armed = torch.full((1, 64, WIDTH // 2), -0x80000000, dtype=torch.int32).view(torch.bfloat16)
        armed[0, :TOKENS] = delta
        delta = armed
    source = device.put(delta, "delta")
    clean(run(name, device, source, t["prefix"], t["blocks"], t["norm"], t["query"], t["out_norm"], t["out"],
              1e-5, 1e-5))  # fmt: skip
    judge(op, axes, given, t)
    if ring:
        assert (source.view(torch.int32) == -0x80000000).all()


@pytest.mark.parametrize(
    ("name", "nb", "generator", "write"),
    [
        ("attn_res_nb0", 0, "no_prefix", True),  # the delta takes the prefix's place
        ("attn_res_nb0_delta", 0, "ordinary", False),
        ("attn_res_nb1", 1, "ordinary", False),
        ("attn_res_nb4", 4, "unused", False),
        ("attn_res_nb8", 8, "ordinary", False),
    ],
)
def test_attention_residual(name: str, nb: int, generator: str, write: bool) -> None:
    residual(name, nb, generator, write)


@pytest.mark.parametrize("generator", ["sharp", "deep", "tiny", "large", "denormals", "negative_zero",
                                       "all_equal", "nan_inf"])  # fmt: skip
def test_attention_residual_at_the_edges(generator: str) -> None:
    residual("attn_res_nb4", 4, generator)


@pytest.mark.parametrize(("name", "nb", "write"), [
    ("attn_res_nb4_ring", 4, False), ("attn_res_nb4_write", 4, True), ("attn_res_final", 8, False),
])  # fmt: skip
def test_attention_residual_from_a_mailbox(name: str, nb: int, write: bool) -> None:
    residual(name, nb, "ordinary", write, ring=True)


@pytest.mark.parametrize(("tp", "b"), [(8, 1), (8, 2), (16, 2), (8, 8), (16, 16), (8, 16)])
def test_kda(tp: int, b: int) -> None:
    op = contract("kda")
    axes = {**op.workload(f"tp{tp}_b{b}").axes, "S": b + 9}  # the slots that the corpus is compiled for
    generator = "padding" if b > 2 else "ordinary"
    given = generated(op, axes, generator)
    outcome, after = run_kda(f"kda_tp{tp}_b{b}", axes, given)
    clean(outcome)
    judge(op, axes, given, after)


EDGES = (
    "tame_gates", "steep_gates", "closed_gates", "decayed_state", "nan_inf", "extreme_beta", "large_state",
    "zero_keys", "denormals",
)  # fmt: skip


@pytest.mark.parametrize("generator", EDGES)
@pytest.mark.parametrize(("tp", "b"), [(8, 2), (16, 2)])
def test_kda_at_the_edges(tp: int, b: int, generator: str) -> None:
    """Gates at both ends of their range, beta 0 and 1, states of any size."""
    op = contract("kda")
    axes = {**op.workload(f"tp{tp}_b{b}").axes, "S": b + 9}  # the slots that the corpus is compiled for
    given = generated(op, axes, generator)
    outcome, after = run_kda(f"kda_tp{tp}_b{b}", axes, given)
    clean(outcome)
    judge(op, axes, given, after)
