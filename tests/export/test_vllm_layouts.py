"""Layouts of loaded experts, by a model of the other direction written from their description."""

from __future__ import annotations

from importlib import import_module as module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.export.test_vllm_executor import Host, executor_of, pair
from tests.export.vllm_stock import WIDE, Backbone, E, L
from workbench.ops.random import stream


@pytest.fixture
def layouts(package: ModuleType) -> ModuleType:
    return module("k3_decode.vllm.layouts")


def shuffled_rows(rows: list[Any], gated: bool) -> list[Any]:
    """Rows as the shuffled layout has them: up and gate in turn, then each 32 dealt onto 4 piles of 8."""
    if gated:
        half = len(rows) // 2
        rows = [row for up, gate in zip(rows[half:], rows[:half], strict=True) for row in (up, gate)]
    out = []
    for first in range(0, len(rows), 32):
        piles: list[list[Any]] = [[], [], [], []]
        for i, row in enumerate(rows[first : first + 32]):
            piles[i % 4].append(row)
        out += [row for pile in piles for row in pile]
    return out


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """One expert's scales in tiles of 128 rows by 4 columns, byte by byte."""
    rows, columns = scales.shape
    flat = torch.empty(rows * columns, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            flat[tile * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c]
    return flat.view(rows, columns)


def shuffled(plain: Any) -> Any:
    """vLLM's routed experts as its TensorRT-LLM backend keeps them."""
    made = SimpleNamespace(
        quant_method=SimpleNamespace(mxfp4_backend=SimpleNamespace(name="FLASHINFER_TRTLLM_MXFP4_MXFP8"))
    )
    for name, gated in (("w13", True), ("w2", False)):
        weight, scale = getattr(plain, f"{name}_weight"), getattr(plain, f"{name}_weight_scale")
        rows = torch.tensor(shuffled_rows(list(range(weight.shape[1])), gated))
        setattr(made, f"{name}_weight", weight[:, rows].contiguous())
        scales = torch.stack([tiled(one[rows]) for one in scale])
        setattr(made, f"{name}_weight_scale", scales.view(torch.float8_e4m3fn))
    return made


def experts(rows: int, columns: int, count: int = 3) -> Any:
    rng = stream(0, "layouts")

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)

    return SimpleNamespace(
        quant_method=SimpleNamespace(mxfp4_backend=SimpleNamespace(name="B12X_MXFP4_BF16")),
        w13_weight=codes(count, 2 * rows, columns // 2),
        w13_weight_scale=codes(count, 2 * rows, columns // 32),
        w2_weight=codes(count, columns, rows // 2),
        w2_weight_scale=codes(count, columns, rows // 32),
    )


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (256, 384), (384, 128)])
def test_the_shuffled_layout_is_undone(layouts: ModuleType, rows: int, columns: int) -> None:
    plain = experts(rows, columns)
    found = layouts.experts_of(shuffled(plain))
    assert found.layout == layouts.SHUFFLED
    assert found.nbytes == sum(t.numel() for t in layouts.experts_of(plain).tensors.values())
    back = layouts.row_major(found)
    for name, attribute in layouts.NAMES.items():
        assert torch.equal(back[name], getattr(plain, attribute)), name
        assert not torch.equal(found.tensors[name], getattr(plain, attribute)), name


def test_the_checkpoints_order_is_used_in_place(layouts: ModuleType) -> None:
    plain = experts(64, 128)
    used = layouts.row_major(layouts.experts_of(plain))
    assert all(used[n].data_ptr() == getattr(plain, a).data_ptr() for n, a in layouts.NAMES.items())


def test_what_is_not_known_is_not_guessed(layouts: ModuleType) -> None:
    plain = experts(64, 128)
    plain.quant_method.mxfp4_backend.name = "MARLIN"
    found = layouts.experts_of(plain)
    assert found.layout == "unknown: backend MARLIN"
    with pytest.raises(ValueError, match="unknown: backend MARLIN"):
        layouts.row_major(found)
    with pytest.raises(ValueError, match="not whole blocks of 32"):
        layouts.source_rows(48, False)
    with pytest.raises(ValueError, match="not whole tiles"):
        layouts.scales_in_rows(torch.zeros(1, 64, 4, dtype=torch.uint8))
    del plain.w2_weight
    with pytest.raises(ValueError, match="no w2_weight"):
        layouts.experts_of(plain)
    plain.w2_weight = torch.zeros(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not MXFP4"):
        layouts.experts_of(plain)


def unknown(plain: Any) -> Any:
    plain.quant_method.mxfp4_backend.name = "DEEPGEMM_MXFP4"
    return plain


def test_experts_in_an_unknown_layout_are_stocks(package: ModuleType) -> None:
    made = executor_of(package, Backbone(experts=unknown))
    told = made.explain()
    assert "cannot use, 4 parts: the layout of the routed experts is unknown: backend DEEPGEMM_MXFP4" in told
    assert "feed_forward in 1 layers" in told and "attention in 5 layers" in told


def test_a_copy_of_the_experts_is_made_within_the_memory_given(package: ModuleType) -> None:
    weights, layouts = module("k3_decode.vllm.weights"), module("k3_decode.vllm.layouts")
    plain = experts(128, 256)
    size = layouts.experts_of(plain).nbytes
    small = weights.Copies(limit=size - 1)
    with pytest.raises(weights.CannotUse, match=r"layout trtllm-shuffled would have to be copied, 0\.1 MiB"):
        weights._experts(shuffled(plain), small)
    assert small.nbytes == 0 and not small.made, "nothing is made beyond the limit"
    enough = weights.Copies(limit=size)
    made = weights._experts(shuffled(plain), enough)
    assert torch.equal(made["w13"], plain.w13_weight) and enough.nbytes == size
    assert list(enough.made) == ["routed experts in the layout trtllm-shuffled"]


def test_copies_are_counted_and_said(package: ModuleType) -> None:
    both = pair(package)
    executor = both.two.executor
    heads, wide = 2, 256
    taps, keys, norms = 2 * 3 * 4 * wide, 2 * heads * 128 * 32, 4 * 128
    assert executor.repacked_bytes == 3 * (taps + norms) + 2 * keys
    told = executor.explain()
    assert "copied: convolution taps, 0.0 MiB" in told and "copied: absorbed keys, 0.0 MiB" in told
    status = module("k3_decode.vllm.registering").status()
    assert status.repacked_bytes == executor.repacked_bytes and "of weights repacked" in str(status)
    del both
    model = Backbone()
    settings, _ = module("k3_decode.vllm.settings").read({"reference": True, "repack_gib": 0})
    deployment = module("k3_decode.vllm.executor").Deployment(settings)
    none = module("k3_decode.vllm.executor").Executor(
        model, deployment, Host(package.layer.glue.Alone(), model)
    )
    none.prepare_kv()
    assert none.repacked_bytes == 0
    assert all("attention" not in part for c in none.choices.values() for _, part in c.own)
    assert "would have to be copied" in none.explain()


def test_every_weight_is_used_in_place_or_counted(package: ModuleType) -> None:
    """No weight of the executor lies in memory that is neither vLLM's nor on the account."""
    model = Backbone()
    executor = executor_of(package, model)
    theirs = storages(model)
    own = {}
    for layer in executor.layers:
        for name, t in layer.weights.items():
            if t.untyped_storage().data_ptr() not in theirs:
                own[layer.index, name] = t.numel() * t.element_size()
    assert {name for _, name in own} == {"conv_weight", "head_norm", "uk"}
    assert sum(own.values()) == executor.repacked_bytes
    assert executor.repacked_bytes < E * L * WIDE, "the experts are not among them"


def storages(model: Backbone) -> set[int]:
    found: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if isinstance(thing, torch.Tensor):
            found.add(thing.untyped_storage().data_ptr())
        elif depth and isinstance(thing, list | tuple):
            for one in thing:
                visit(one, depth - 1)
        elif depth and hasattr(thing, "__dict__"):
            for one in vars(thing).values():
                if not isinstance(one, Backbone):
                    visit(one, depth - 1)

    visit(model.layers, 8)
    return found
