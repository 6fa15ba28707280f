"""At Kimi K3's real sizes the executor asks for exactly the shapes that the ops are verified at."""

from __future__ import annotations

from importlib import import_module as module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.export.module_winners import REPOSITORY_OPS

H, L, E = 7168, 3584, 896


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def of(kind: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def linear(*shape: int) -> Any:
    return SimpleNamespace(weight=bf16(*shape), bias=None)


def norm(width: int) -> Any:
    return SimpleNamespace(weight=bf16(width), variance_epsilon=1e-5)


def layer(kind: str, ranks: int, index: int) -> Any:
    """A decoder layer as vLLM holds it on one of so many ranks, without data."""
    heads, wide, shared = 96 // ranks, 12288 // ranks, 6144 // ranks
    if kind == "kda":
        pitch = 4 * wide + 128 + heads
        attention = SimpleNamespace(
            in_proj_qkvgfab=linear(pitch + -pitch % 16, H), f_b_proj=linear(wide, 128), head_dim=128,
            conv1d=SimpleNamespace(weight=torch.zeros(3 * wide, 1, 4), bias=None), conv_size=4,
            dt_bias=of(torch.float32, wide), A_log=of(torch.float32, heads), gate_lower_bound=-5.0,
            o_norm=SimpleNamespace(weight=bf16(128), eps=1e-5),
            kv_cache=[bf16(500, 3, 3 * wide), of(torch.float32, 500, heads, 128, 128)],
        )  # fmt: skip
    else:
        attention = SimpleNamespace(
            fused_qkv_a_g_proj=linear(2112 + wide, H), q_b_proj=linear(heads * 192, 1536),
            kv_b_proj=linear(heads * 256, 512), W_UK_T=bf16(heads, 256, 512)[:, :128], v_head_dim=128,
            q_a_layernorm=norm(1536), kv_a_layernorm=norm(512), scale=192**-0.5,
            q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, _q_scale_float=1.0, _k_scale_float=1.0,
            _q_scale_inv=torch.ones(1), _k_scale_inv=torch.ones(1), kv_cache=of(torch.uint8, 900, 64, 576),
        )  # fmt: skip
    attention.o_proj = linear(H, wide)
    routed = SimpleNamespace(
        quant_method=SimpleNamespace(mxfp4_backend=SimpleNamespace(name="B12X_MXFP4_BF16")),
        w13_weight=of(torch.uint8, E, shared, L // 2), w13_weight_scale=of(torch.uint8, E, shared, L // 32),
        w2_weight=of(torch.uint8, E, L, shared // 4), w2_weight_scale=of(torch.uint8, E, L, shared // 64),
    )  # fmt: skip
    mlp = SimpleNamespace(
        gate=SimpleNamespace(weight=bf16(E, H), bias=None, e_score_correction_bias=of(torch.float32, E)),
        routed_expert_down_proj=linear(L, H), routed_expert_up_proj=linear(H, L), routed_expert_norm=norm(L),
        shared_experts=SimpleNamespace(gate_up_proj=linear(2 * shared, H), down_proj=linear(H, shared)),
        experts=SimpleNamespace(routed_experts=routed),
    )  # fmt: skip
    return SimpleNamespace(
        layer_idx=index, hidden_size=H, is_moe_layer=True, self_attn=attention, mlp=mlp,
        prev_valid_blocks=-(-index // 12), is_block_write_layer=index % 12 == 0,
        input_layernorm=norm(H), post_attention_layernorm=norm(H), self_attention_res_norm=norm(H),
        mlp_res_norm=norm(H), self_attention_res_proj=linear(1, H), mlp_res_proj=linear(1, H),
    )  # fmt: skip


class Ranks:
    def __init__(self, ranks: int, rank: int) -> None:
        self.rank, self.ranks = rank, ranks


@pytest.fixture
def asked(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, int]]]:
    """Op and axes of everything that is asked for; `moe` is said to have a kernel."""
    found: list[tuple[str, dict[str, int]]] = []
    layer_module, dispatch = module("k3_decode.layer"), module("k3_decode.dispatch")

    def decide(op: str, tensors: Any, given: Any, arch: str | None = None) -> Any:
        known = package.table().ops[op]
        axes = module("k3_decode.contracts").infer(
            known, {n: tuple(t.shape) for n, t in tensors.items()}, given
        )
        found.append((op, dict(axes)))
        kernel = SimpleNamespace(key="k") if op in ("moe", "skinny_gemm") else None
        return dispatch.Decision(op, kernel, axes["B"], ())

    monkeypatch.setattr(layer_module, "_decide", decide)
    return found


@pytest.mark.parametrize(("ranks", "batch"), [(8, 1), (8, 8), (16, 1)])
def test_the_shapes_are_those_of_the_workloads(
    package: ModuleType, asked: list[tuple[str, dict[str, int]]], ranks: int, batch: int
) -> None:
    parts, step = module("k3_decode.vllm.parts"), module("k3_decode.steps").Step(batch)
    backbone = SimpleNamespace(config=SimpleNamespace(num_experts_per_token=16), num_attn_res_blocks=8)
    copies = module("k3_decode.vllm.weights").Copies(2**30)
    for kind, index in (("kda", 5), ("kda", 49), ("mla", 51)):
        held = layer(kind, ranks, index)
        for rank in (0, ranks - 1):
            made = parts.Layer(held, backbone, Ranks(ranks, rank), copies)
            assert not made.missing
            for part in parts.PARTS:
                made.planned(part, step, parts.empty_held(held, made.spec, step), "sm_103a")
    for op in ("kda", "moe", "mla_query", "mla_value", "o_proj"):
        seen = [axes for name, axes in asked if name == op]
        own = [dict(w.axes) for w in REPOSITORY_OPS(op).workloads if of_ranks(op, w.axes, ranks)]
        wanted = [w for w in own if w["B"] == batch]
        assert seen and own and all(w in seen for w in wanted), (op, seen[0])
    assert {"attn_res", "situ", "rmsnorm"} <= {op for op, _ in asked}
    if (ranks, batch) == (8, 1):
        assert ("moe", dict(REPOSITORY_OPS("moe").workload("tp8_b1").axes)) in asked
    experts = E * (12288 // ranks) * L // 2
    assert copies.nbytes < experts // 8, "no copy of experts"


def of_ranks(op: str, axes: Any, ranks: int) -> bool:
    """True if a workload's axes are those of one of so many ranks."""
    name, whole = {"moe": ("I", 3072), "o_proj": ("K", 12288)}.get(op, ("H", 96))
    return bool(axes[name] == whole // ranks)
