"""The kernels that the corpus compiles: one entry a call of the package's own compile functions.

Shapes, batches and tensor-parallel sizes are those that the package's runtime asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernel_package import ARCH

ROOT = "vllm.models.kimi_k3.nvidia"
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Entry:
    """One call that compiles one kernel or several."""

    family: str
    name: str
    compile: Callable[[], Any]


def _module(name: str, root: str = f"{ROOT}.specialized_decode.cutedsl") -> Any:
    return importlib.import_module(f"{root}.{name}")


def _meta(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def entries() -> Iterator[Entry]:
    """Every entry, in a fixed order."""
    for make in (_residual, _dense, _kda, _mla, _oproj, _gemm, _front, _experts, _shared, _tail,
                 _small_batch, _operators, _recover):  # fmt: skip
        yield from make()


def _residual() -> Iterator[Entry]:
    def consumer(*args: Any) -> Callable[[], Any]:
        return lambda: _module("attn_res.prepared").compile_consumer(*args)

    yield Entry("attn_res", "attn_res_nb0", consumer(0, False, 0, False, 0, 0, ARCH))
    yield Entry("attn_res", "attn_res_nb0_delta", consumer(0, True, -1, False, 0, 0, ARCH))
    for nb in range(1, 9):
        yield Entry("attn_res", f"attn_res_nb{nb}", consumer(nb, True, -1, False, 0, 0, ARCH))
        yield Entry("attn_res", f"attn_res_nb{nb}_ring", consumer(nb, True, -1, False, 1, 64, ARCH))
    for nb in (1, 4, 7):
        yield Entry("attn_res", f"attn_res_nb{nb}_write", consumer(nb, True, nb, False, 1, 64, ARCH))
    yield Entry("attn_res", "attn_res_final", consumer(8, True, -1, True, 1, 64, ARCH))
    yield Entry("attn_res", "attn_res_final_aux", consumer(8, True, -1, True, 1, 64, ARCH, True))


def _dense() -> Iterator[Entry]:
    def gather(dtype: str, shard: int) -> Callable[[], Any]:
        import torch

        return lambda: _module("common.embedding").compile_gather(getattr(torch, dtype), shard, ARCH)

    yield Entry("embedding", "embedding_i32_tp8", gather("int32", 20480))
    yield Entry("embedding", "embedding_i64_tp16", gather("int64", 10240))
    for hidden, padded, tp in ((4224, 4224, 8), (2112, 2176, 16)):
        yield Entry(
            "dense_situ", f"dense_situ_tp{tp}",
            lambda h=hidden, p=padded: _module("moe.dense")._compile_activation(h, p, ARCH),
        )  # fmt: skip
    yield Entry(
        "l2_prefetch", "l2_prefetch", lambda: _module("common.prefetch").compile_kernel(8, 16, 100, 0)
    )


def _kda_specs(heads: int, rows: int, tokens: int, slots: int) -> tuple[Any, ...]:
    """Layouts of KdaSplit's operands, as PreparedKda passes them."""
    from kernel_package import layout

    dim, pitch = heads * 128, 6288 if heads == 12 else 3216
    projected = _meta(rows, pitch)
    part = lambda start, width: projected[:, start : start + width]  # noqa: E731
    conv = _meta(slots, 2 + tokens, 3 * dim).transpose(-1, -2)
    state = _meta(slots, heads, 128, 128, dtype="float32")
    ids = (rows // tokens, tokens) if tokens > 1 else (rows,)
    operands = [
        part(0, 3 * dim), _meta(3, 4, dim), _meta(dim, dtype="float32"), conv, part(4 * dim, 128),
        part(4 * dim + 128, heads), _meta(heads, dtype="float32"), _meta(dim, dtype="float32"),
        _meta(*ids, dtype="int32"), state, _meta(rows, dim), part(3 * dim, dim),
        _meta(128, dtype="float32"), _meta(dim, 128),
    ]  # fmt: skip
    if tokens > 1:
        operands.append(_meta(rows // tokens, dtype="int32"))
    return tuple(map(layout, operands))


def _kda() -> Iterator[Entry]:
    def split(heads: int, rows: int, mode: int, tokens: int) -> Callable[[], Any]:
        return lambda: _module("kda.prepared").executable(
            _kda_specs(heads, rows, tokens, rows + 9), heads, mode, False, 0, tokens
        )

    for tp, heads in ((8, 12), (16, 6)):
        for b in BATCHES:
            mode = (1 if b == 1 else 2 if b <= 8 else 0) if tp == 8 else 0
            yield Entry("kda_split", f"kda_tp{tp}_b{b}", split(heads, b, mode, 1))
        for b, q in ((1, 8), (2, 8), (8, 4)):
            yield Entry("kda_split", f"kda_tp{tp}_verify_b{b}_q{q}", split(heads, b * q, int(tp == 8), q))


def _mla() -> Iterator[Entry]:
    def core(tp: int, batch: int, dcp: int = 0, q: int = 1) -> Callable[[], Any]:
        from kernel_package import layout

        h, pitch = 96 // tp, 3648 if tp == 8 else 2880
        weights = [
            _meta(1536), _meta(512), _meta(h * 192, 1536), _meta(h, 128, 512),
            _meta(h, 256, 512)[:, 128:].transpose(1, 2), _meta(1, dtype="float32"),
            _meta(1, dtype="float32"), _meta(8, 64, 576, dtype="uint8"),
        ]  # fmt: skip
        specs = tuple(map(layout, weights))
        return lambda: _module("mla.prepared").compile_core(batch, h, pitch, specs, 0, dcp, 148, q)

    for tp in (8, 16):
        for b in (1, 2, 8, 16, 64):
            yield Entry("mla", f"mla_tp{tp}_b{b}", core(tp, b))
    yield Entry("mla", "mla_tp8_b8_q4", core(8, 8, 0, 4))
    yield Entry("mla", "mla_tp8_b8_dcp8", core(8, 8, 8))


def _oproj() -> Iterator[Entry]:
    def oproj(kind: str, tp: int, b: int, **more: Any) -> Callable[[], Any]:
        args = {"nb": 4, "has_delta": True, "mla": False} | more
        return lambda: _module("oproj.prepared").compile_oproj(
            kind, 12288 // tp, b, tp, args.pop("nb"), args.pop("has_delta"), args.pop("mla"), **args
        )

    for tp in (8, 16):
        for b in (1, 2, 8, 16, 32, 64):
            two = b > (32 if tp == 8 else 16)
            yield Entry(
                "oproj_producer", f"oproj_producer_tp{tp}_b{b}", oproj("producer", tp, b, twoshot=two)
            )
        yield Entry("oproj_producer", f"oproj_producer_mla_tp{tp}_b1", oproj("producer", tp, 1, mla=True))
        for nb, b in ((1, 1), (4, 8), (8, 16), (4, 64)):
            two = b > (32 if tp == 8 else 16)
            yield Entry(
                "oproj_consumer", f"oproj_consumer_tp{tp}_b{b}_nb{nb}",
                oproj("consumer", tp, b, nb=nb, twoshot=two),
            )  # fmt: skip
        yield Entry("oproj_consumer", f"oproj_consumer_tp{tp}_b1_front", oproj("consumer", tp, 1, front=True))
        yield Entry(
            "oproj_consumer",
            f"oproj_consumer_tp{tp}_nb0_first",
            oproj("consumer", tp, 8, nb=1, has_delta=False),
        )
    for b in (1, 8):
        yield Entry("oproj_fused", f"oproj_fused_tp16_b{b}", oproj("fused", 16, b))


def _gemm() -> Iterator[Entry]:
    def projection(tactic: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        import torch

        return lambda: _module("gemm.projection").compile_projection(tactic, getattr(torch, dtype), ARCH)

    tactics = (
        (128, 8, 2, 6), (128, 16, 2, 6), (128, 32, 2, 5), (64, 64, 1, 6), (64, 8, 4, 8), (64, 16, 2, 10),
        (64, 32, 2, 8), (64, 64, 2, 6), (64, 64, 2, 5), (128, 8, 1, 6), (128, 16, 1, 6),
    )  # fmt: skip
    for t in sorted(tactics):
        yield Entry("splitk_gemm", "splitk_" + "_".join(map(str, t)), projection(t, "bfloat16"))
    yield Entry("splitk_gemm", "splitk_128_8_4_6_f32", projection((128, 8, 4, 6), "float32"))

    def skinny(m: int, *tactic: int, residual: bool = False, k: int | None = 7168) -> Callable[[], Any]:
        def build() -> Any:
            import torch

            root = "vllm.model_executor.kernels.linear.cute_dsl"
            module = _module("skinny_gemm", root)
            gemm = module.ShapeDynamicSkinnyGemm()
            gemm._use_pdl = lambda: True
            gemm._stream = importlib.import_module("cutlass.cute.runtime").make_fake_stream
            return gemm._compile(torch.bfloat16, module.SkinnyGemmConfig(m, *tactic, 8, k), residual)

        return build

    yield Entry("skinny_gemm", "skinny_b1", skinny(1, 128, 4, 1))
    yield Entry("skinny_gemm", "skinny_b2", skinny(2, 64, 4, 2))
    yield Entry("skinny_gemm", "skinny_b1_dynamic", skinny(1, 224, 3, 4, k=None))
    yield Entry("skinny_gemm", "skinny_b4_residual", skinny(4, 64, 4, 2, residual=True, k=None))


def _front() -> Iterator[Entry]:
    def publish(tp: int, b: int) -> Callable[[], Any]:
        def build() -> Any:
            front = _module("moe.front")
            n, split = (560, 112) if tp == 8 else (288, 64)
            return front.compile_publish(n, split, 896 // tp, b, 0, front.front_ks(b, n))

        return build

    def route(tp: int, b: int, roles: tuple[bool, ...], polled: bool, plan: bool) -> Callable[[], Any]:
        return lambda: _module("moe.front").compile_route(b, 6144 // tp, True, roles, 0, polled, plan)

    for tp in (8, 16):
        for b in (1, 2, 8, 16, 64):
            yield Entry("moe_front", f"front_gemm_tp{tp}_b{b}", publish(tp, b))
        for b in (1, 8, 16, 64):
            yield Entry("moe_route", f"route_tp{tp}_b{b}", route(tp, b, (True, True, False), True, b > 8))
        for b in (1, 8):
            yield Entry("moe_situ", f"situ_tp{tp}_b{b}", route(tp, b, (False, False, True), False, False))
    yield Entry("moe_route", "route_local_b2", route(8, 2, (True, False, False), False, False))


def _experts() -> Iterator[Entry]:
    def experts(tp: int, b: int, publish: Any) -> Callable[[], Any]:
        def build() -> Any:
            runtime = _module("moe.experts_runtime")
            grids = {3: 148, 4: 148, 5: 128, 6: 128, 7: 132, 8: 136} if tp == 8 else {}
            grid = (152 if b > 8 else grids.get(b, 136)) if tp == 8 else 152
            knobs = runtime.streamed(b), runtime.pregrouped(tp, b), runtime.stealing(b)
            return runtime.compile_experts(tp, 896, b, grid, 0, publish, *knobs)

        return build

    for tp in (8, 16):
        for b in (1, 2, 4, 8, 16, 64):
            published = b > (4 if tp == 8 else 8)
            mode = "twoshot" if tp == 16 and b > 32 else published
            yield Entry("moe_experts", f"experts_tp{tp}_b{b}", experts(tp, b, mode))
        yield Entry(
            "experts_group", f"experts_group_tp{tp}_b16",
            lambda t=tp: _module("moe.experts_runtime").compile_group(t, 896, 16, 152, 0, t == 8),
        )  # fmt: skip
    for b in (9, 16, 64):
        yield Entry(
            "experts_plan", f"experts_plan_b{b}",
            lambda n=b: _module("moe.experts_runtime").compile_plan(n, 0),
        )  # fmt: skip


def _shared() -> Iterator[Entry]:
    for tp in (8, 16):
        for b in (16, 64):
            yield Entry(
                "shared_expert", f"shared_gate_tp{tp}_b{b}",
                lambda t=tp, n=b: _module("moe.shared").compile_shared(t, n, 0, True),
            )  # fmt: skip
            yield Entry(
                "shared_expert", f"shared_down_tp{tp}_b{b}",
                lambda t=tp, n=b: _module("moe.shared").compile_down(t, n, 0, 4),
            )  # fmt: skip
        yield Entry(
            "shared_expert", f"shared_fused_tp{tp}_b16",
            lambda t=tp: _module("moe.shared").compile_shared(t, 16, 0),
        )  # fmt: skip


def _tail() -> Iterator[Entry]:
    def tail(tp: int, b: int, mode: str, **more: Any) -> Callable[[], Any]:
        return lambda: _module("moe.tail_runtime").compile_tail(tp, b, 0, mode, **more)

    for tp in (8, 16):
        for b in (1, 2, 4):
            yield Entry("moe_tail", f"tail_front_tp{tp}_b{b}", tail(tp, b, "front"))
        yield Entry(
            "moe_tail", f"tail_poll_tp{tp}_b1", tail(tp, 1, "front_poll", trigger=3 if tp == 8 else 2)
        )
    for tp, b in ((8, 5), (8, 8), (8, 16), (8, 64), (16, 16), (16, 32)):
        yield Entry(
            "moe_tail_wave", f"tail_wave_tp{tp}_b{b}",
            tail(tp, b, "publish", early=b > 8, umma=b > 8 and tp == 8),
        )  # fmt: skip
    yield Entry("moe_tail_wave", "tail_wave_tp16_b64_twoshot", tail(16, 64, "twoshot", early=True, umma=True))
    for tp, b in ((8, 5), (8, 64), (16, 16)):
        yield Entry(
            "moe_tail_push", f"tail_push_tp{tp}_b{b}",
            lambda t=tp, n=b: _module("moe.tail_runtime").compile_push(n, 0, t),
        )  # fmt: skip


def _small_batch() -> Iterator[Entry]:
    def chain(
        kind: str, tensors: Callable[[], tuple[Any, ...]], *args: Any, **kwargs: Any
    ) -> Callable[[], Any]:
        def build() -> Any:
            from kernel_package import layout

            specs = tuple(map(layout, tensors()))
            return _module("moe.small_batch.chain")._compile(kind, specs, 0, *args, **kwargs)

        return build

    u32, i32, f32 = {"dtype": "uint32"}, {"dtype": "int32"}, {"dtype": "float32"}
    w13, w2 = 896 * 768 * 112, 896 * 3584 * 12
    u8 = {"dtype": "uint8"}

    def head() -> tuple[Any, ...]:
        return (_meta(896, 7168), _meta(896, **f32), _meta(2, 1, 4, 7168), _meta(256, **u32))

    yield Entry("moe_front_small", "small_front_tp8", chain(
        "front", lambda: (*head(), _meta(7168, **u32), _meta(16, **i32), _meta(3, 8, 16), _meta(448, 7168),
                          _meta(2, 8, 3584), _meta(3584), _meta(1536, 7168), _meta(6144, **u32)),
        grid=144, renorm=True))  # fmt: skip
    yield Entry("moe_shared_small", "small_shared_tp8", chain(
        "shared", lambda: (_meta(2, 1, 4, 7168), _meta(7168, 768), _meta(131072, **f32), _meta(6144, **u32),
                           _meta(3, 8, 7168)), grid=56))  # fmt: skip
    yield Entry("situ_tables", "situ_tables", chain("tables", lambda: (_meta(131072, **f32),)))
    yield Entry("moe_experts_small", "small_experts_tp8", chain(
        "experts_tp8", lambda: (_meta(3584), _meta(16, **i32), _meta(3, 128, **u8), _meta(w13, **u8),
                                _meta(w2, **u8), _meta(16, 3584), _meta(1, **i32))))  # fmt: skip
    for b in (1, 2):
        yield Entry("moe_front_small", f"small_front_tp16_b{b}", chain(
            "front16", lambda n=b: (*head(), _meta(2 * n * 896 * 2, **u32), _meta(n * 16, **i32),
                                    _meta(3, 8, 16), _meta(224, 7168), _meta(2, 8, 3584), _meta(768, 7168),
                                    _meta(2 * n * 768, **u32), _meta(7168, 384), _meta(3, 8, 7168),
                                    _meta(168, **i32)), b, grid=152 - 7 * b, renorm=True))  # fmt: skip
        yield Entry("moe_experts_small", f"small_experts_tp16_b{b}", chain(
            "experts_tp16", lambda n=b: (_meta(n * 3584), _meta(n * 16, **i32), _meta(2, 128, **u8),
                                         _meta(896 * 512 * 112, **u8), _meta(896 * 3584 * 8, **u8),
                                         _meta(n * 16, 3584)), b))  # fmt: skip


def _operators() -> Iterator[Entry]:
    ops = f"{ROOT}.ops.cute_dsl"
    copy = lambda: _module("latent_moe_tail.lamport_copy", ops).compile_kernel(7168, 128, 32, 128, 0)  # noqa: E731
    yield Entry("lamport_copy", "lamport_copy", copy)

    def fab(which: str, rows: int) -> Callable[[], Any]:
        return lambda: getattr(_module("kda_skinny_gemm", ops).KdaSkinnyGemm(), which)(rows)

    for rows in (2, 4):
        yield Entry("kda_fab", f"kda_fa_b{rows}", fab("_compile_n", rows))
        yield Entry("kda_fab", f"kda_fb_b{rows}", fab("_compile_k", rows))

    def up(m: int) -> Callable[[], Any]:
        def build() -> Any:
            module = _module("latent_moe_tail.fused_add_multicast_skinny_gemm", ops)
            config = module.SkinnyConfig(block_size=224, outputs_per_block=2, vector_width=8)
            return module.compile_kernel(
                num_rows=m, latent_dim=3584, hidden_dim=7168, shard_dim=896, config=config
            )

        return build

    for m in (1, 4):
        yield Entry("multicast_skinny", f"multicast_skinny_b{m}", up(m))


def _recover() -> Iterator[Entry]:
    def verify(heads: int, window: int, ws: bool) -> Callable[[], Any]:
        def build() -> Any:
            import torch

            kernels = _module("recoverssm.kernels", ROOT)
            return kernels._compile_verify(heads, window, ARCH, 152, ws, False, torch.float32)

        return build

    def commit(heads: int, window: int) -> Callable[[], Any]:
        def build() -> Any:
            import torch

            return _module("recoverssm.kernels", ROOT)._compile_commit(
                heads, window, ARCH, torch.float32, False
            )

        return build

    for ws in (False, True):
        yield Entry("recoverssm_verify", f"recover_verify{'_ws' if ws else ''}_h12_q8", verify(12, 8, ws))
    yield Entry("recoverssm_commit", "recover_commit_h12_q8", commit(12, 8))
