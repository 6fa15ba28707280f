"""Generators: deterministic in their seed, true to what they promise, and sparing with memory."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.ops import Op, load_op, routing
from workbench.ops.compare import compare, standard_of
from workbench.ops.trivial import zero_inputs
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])
OPS = {name: load_op(WORKSPACE, name) for name in WORKSPACE.op_names()}
CASES = [(n, w.name, g) for n, op in OPS.items() for w in op.workloads if not w.real for g in op.generators]


def generate(op: Op, workload: str, generator: str, seed: int) -> dict[str, torch.Tensor]:
    axes = op.workload(workload).axes
    storage = zero_inputs(op, axes)
    given = op.generators[generator](axes, seed, storage.__getitem__)
    assert set(given) == {b.name for b in op.inputs}
    assert all(given[n].data_ptr() == storage[n].data_ptr() for n in storage)
    return storage


def raw(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: t.view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


@pytest.mark.parametrize(("name", "workload", "generator"), CASES)
def test_a_seed_says_everything(name: str, workload: str, generator: str) -> None:
    op = OPS[name]
    first = raw(generate(op, workload, generator, 7))
    torch.manual_seed(123)  # the global generator has no part in it
    assert raw(generate(op, workload, generator, 7)) == first
    if (name, generator) not in {("moe_topk", "all_equal"), ("situ", "all_equal")}:
        assert raw(generate(op, workload, generator, 8)) != first


@pytest.mark.parametrize(("name", "workload", "generator"), CASES)
def test_golden_is_mostly_finite_and_honest_computations_pass(
    name: str, workload: str, generator: str
) -> None:
    op, axes = OPS[name], OPS[name].workload(workload).axes
    for seed in range(3):
        inputs = generate(op, workload, generator, seed)
        standard = standard_of(op, inputs, axes)
        for run in (op.baseline, *op.honest):
            out = run(inputs, axes)
            for b in op.outputs:
                golden, tolerance = standard.golden[b.name], op.tolerances[b.name]
                assert compare(golden, out[b.name], tolerance, standard.honest[b.name]).passed
        finite = torch.cat([standard.golden[b.name].isfinite().flatten() for b in op.outputs])
        assert finite.double().mean() > 0.4


@pytest.mark.parametrize("name", ["moe_topk", "moe"])
@pytest.mark.parametrize("generator", ["ordinary", "power_law", "ties", "nan_inf", "denormals", "large"])
def test_neighbouring_keys_are_tied_or_far_apart(name: str, generator: str) -> None:
    op = OPS[name]
    axes = op.workload("small_b3").axes
    for seed in range(5):
        t = generate(op, "small_b3", generator, seed)
        logits = t["logits"] if name == "moe_topk" else t["x"].double() @ t["w_router"].double().T
        assert routing.smallest_gap(logits, t["bias"], axes["K"]) >= routing.MARGIN


@pytest.mark.parametrize("name", ["moe_topk", "moe"])
def test_ties_cross_the_last_rank(name: str) -> None:
    op = OPS[name]
    k = op.workload("small_b3").axes["K"]
    t = generate(op, "small_b3", "ties", 0)
    logits = t["logits"] if name == "moe_topk" else t["x"].double() @ t["w_router"].double().T
    keys = routing.routing_keys(logits, t["bias"])
    for row in keys:
        ranked = row.sort(descending=True).values
        assert ranked[k - 1] == ranked[k], "the tie decides who is chosen"


def test_nan_is_chosen_only_where_it_is_meant_to_be() -> None:
    op = OPS["moe_topk"]
    axes = op.workload("small_b3").axes
    weights = op.reference(generate(op, "small_b3", "nan_inf", 0), axes)["weights"]
    assert weights.isfinite().all()
    weights = op.reference(generate(op, "small_b3", "nan_chosen", 0), axes)["weights"]
    assert weights[-1].isnan().all() and weights[:-1].isfinite().all()


@pytest.mark.parametrize("name", ["moe_experts", "moe"])
def test_nan_stays_in_its_token(name: str) -> None:
    op = OPS[name]
    out = op.reference(generate(op, "small_b3", "nan_inf", 0), op.workload("small_b3").axes)
    result = out["expanded" if name == "moe_experts" else "out"]
    assert result[0].isnan().all() and result[1:].isfinite().all()


def test_power_law_shares_experts() -> None:
    op = OPS["moe_experts"]
    axes = op.workload("tp8_b8").axes
    ids = {}
    for power_law in (False, True):
        rng = torch.Generator().manual_seed(1)
        chosen = routing.choose_experts(axes["B"], axes["E"], axes["K"], rng, power_law)
        ids[power_law] = len(set(chosen.flatten().tolist()))
    assert ids[True] < 0.75 * ids[False]


@pytest.mark.parametrize("name", ["moe_experts", "moe"])
def test_experts_that_are_not_chosen_are_poison(name: str) -> None:
    op = OPS[name]
    t = generate(op, "small_b1", "ordinary", 0)
    alive = [e for e in range(len(t["w13"])) if bool((t["w13_scale"][e] != 0xFF).all())]
    assert len(alive) == op.workload("small_b1").axes["K"]
    for e in set(range(len(t["w13"]))) - set(alive):
        assert (t["w13_scale"][e] == 0xFF).all() and (t["w2_scale"][e] == 0xFF).all()
        assert not t["w13"][e].any() and not t["w2"][e].any()


def resident(array: np.ndarray) -> np.ndarray:
    """Which pages of an anonymous mapping are in memory, from /proc/self/pagemap (bit 63)."""
    first = array.ctypes.data
    assert first % mmap.PAGESIZE == 0
    with Path("/proc/self/pagemap").open("rb") as f:
        f.seek(first // mmap.PAGESIZE * 8)
        entries = np.frombuffer(f.read(-(-array.nbytes // mmap.PAGESIZE) * 8), np.uint64)
    return (entries >> np.uint64(62)) != 0


@pytest.mark.parametrize("name", ["moe_experts", "moe"])
def test_real_size_touches_only_the_chosen_experts(name: str) -> None:
    """w13 and w2 are 1.8 GB at real size; one token may touch 16 of 896 experts, in generator, golden and
    baseline."""
    op = OPS[name]
    axes = op.workload("tp8_b1").axes
    storage = zero_inputs(op, axes)
    maps = {}
    for n in ("w13", "w2"):
        maps[n] = mmap.mmap(-1, storage[n].numel())  # storage of its own, aligned to pages
        maps[n].madvise(mmap.MADV_NOHUGEPAGE)
        storage[n] = torch.from_numpy(np.frombuffer(maps[n], np.uint8)).view(storage[n].shape)
    op.generators["ordinary"](axes, 0, storage.__getitem__)
    op.reference(storage, axes)
    op.baseline(storage, axes)
    for n in ("w13", "w2"):
        pages = resident(np.frombuffer(maps[n], np.uint8))
        needed = axes["K"] * storage[n][0].numel() / mmap.PAGESIZE
        assert needed <= pages.sum() <= needed + 2 * axes["K"]
