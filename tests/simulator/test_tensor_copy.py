"""Tensor copies against loops over elements, and what is found about wrong ones."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.legal import complaint
from tests.simulator.tensor_kernels import SHARED, Run, load, store, walk
from workbench.simulator import UnsupportedInstruction
from workbench.simulator.swizzle import (
    NONE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_128B_ATOM_32B,
    SWIZZLE_128B_ATOM_32B_FLIP_8B,
    SWIZZLE_128B_ATOM_64B,
    Swizzle,
)
from workbench.simulator.tensor_box import Box
from workbench.simulator.tensormap import BY_NAME, TensorMap

SWIZZLES = [NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_ATOM_32B, SWIZZLE_128B_ATOM_64B]
SENTINEL = 0xA5


def tensor_of(
    rng: random.Random, rank: int, name: str, swizzle: Swizzle, *, nan: bool = False, inner: int | None = None
) -> tuple[Any, TensorMap, np.ndarray]:
    """Return a maker of maps of a small random tensor by address, one map, and the tensor's bytes."""
    element = BY_NAME[name]
    size = element.data
    quantum = 16 // size
    span = swizzle.span or rng.choice([16, 48, 96])
    width = span // size if inner is None else inner
    dims = (quantum * rng.randint(1, 12) + rng.choice([0, 1]), *(rng.randint(1, 6) for _ in range(rank - 1)))
    strides = []
    step = -(-dims[0] * size // 16) * 16 + 16 * rng.randint(0, 2)
    for d in dims[1:]:
        strides.append(step)
        step = step * d + 16 * rng.randint(0, 1)
    box = [width]
    room = 48
    for _ in range(rank - 1):
        box.append(rng.randint(1, min(5, room)))
        room //= box[-1]
    steps = (1, *(rng.choice([1, 1, 2, 3]) for _ in range(rank - 1)))

    def make(address: int) -> TensorMap:
        return TensorMap(address, element, dims, tuple(strides), tuple(box), steps, swizzle, nan)

    raw = np.frombuffer(rng.randbytes(max(step, 64)), np.uint8).copy()
    return make, make(0), raw


def origin_of(rng: random.Random, m: TensorMap) -> tuple[int, ...]:
    return tuple(
        rng.randint(-b, d + 1) if rng.random() < 0.6 else rng.randint(0, d - 1)
        for b, d in zip(m.box, m.dims, strict=True)
    )


def fill_byte(m: TensorMap, b: int) -> int:
    return (0xF7, 0x7F)[b % 2] if m.fill_nan else 0


@pytest.mark.parametrize("swizzle", SWIZZLES[:-1], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_load_equals_a_loop(rank: int, swizzle: Swizzle) -> None:
    rng = random.Random(f"{rank} {swizzle}")
    for name in ("u8", "u16", "f32", "u64", "bf16", "s32", "f16", "f64", "f32.ftz", "s64", "u32"):
        nan = BY_NAME[name].floating and rng.random() < 0.5
        make, m, raw = tensor_of(rng, rank, name, swizzle, nan=nan)
        origin = origin_of(rng, m)
        base = 128 * rng.randint(0, 9)
        run = Run(load(rank, Box(m).nbytes, base), make, origin, raw)
        assert run.outcome.completed and run.rules == []
        expected = np.full(SHARED, SENTINEL, np.uint8)
        for at, source, b in walk(m, origin, base):
            expected[at] = fill_byte(m, b) if source is None else raw[source]
        assert (run.out == expected).all(), (name, origin, m)


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_store_equals_a_loop(rank: int, swizzle: Swizzle) -> None:
    rng = random.Random(f"store {rank} {swizzle}")
    for name in ("u8", "f16", "f32", "u64"):
        make, m, raw = tensor_of(rng, rank, name, swizzle)
        origin = origin_of(rng, m)
        base = 128 * rng.randint(0, 9)
        out = np.frombuffer(rng.randbytes(SHARED), np.uint8)
        run = Run(store(rank, base), make, origin, raw, out)
        assert run.outcome.completed and run.rules == []
        expected = raw.copy()
        for at, target, _ in walk(m, origin, base):
            if target is not None:
                expected[target] = out[at]
        assert (run.x == expected).all(), (name, origin, m)


def test_every_side_out_of_bounds() -> None:
    """A 3d box moved past each face and corner of a 5 x 4 x 24 tensor."""
    rng = random.Random(1)
    raw = np.frombuffer(rng.randbytes(5 * 4 * 24 * 4), np.uint8).copy()

    def make(address: int) -> TensorMap:
        return TensorMap(address, BY_NAME["u32"], (24, 4, 5), (96, 384), (8, 2, 3), swizzle=SWIZZLE_32B)

    m = make(0)
    text = load(3, Box(m).nbytes)
    for c0 in (-8, -3, 0, 18, 24):
        for c1 in (-2, -1, 3, 4):
            for c2 in (-3, -1, 3, 5):
                run = Run(text, make, (c0, c1, c2), raw)
                expected = np.full(SHARED, SENTINEL, np.uint8)
                for at, source, _ in walk(m, (c0, c1, c2), 0):
                    expected[at] = 0 if source is None else raw[source]
                assert (run.out == expected).all(), (c0, c1, c2)


def test_flip_of_8_bytes() -> None:
    rng = random.Random(2)
    make, m, raw = tensor_of(rng, 2, "u16", SWIZZLE_128B_ATOM_32B_FLIP_8B)
    run = Run(load(2, Box(m).nbytes, 384), make, (0, 0), raw)
    expected = np.full(SHARED, SENTINEL, np.uint8)
    for at, source, _ in walk(m, (0, 0), 384):
        expected[at] = 0 if source is None else raw[source]
    assert (run.out == expected).all()
    with pytest.raises(UnsupportedInstruction, match="8-byte flip"):
        Run(store(2), make, (0, 0), raw, np.zeros(SHARED, np.uint8))


def test_narrow_rows_take_a_whole_span_of_the_swizzle() -> None:
    rng = random.Random(4)
    make, m, raw = tensor_of(rng, 2, "f32", SWIZZLE_128B, inner=8)
    run = Run(load(2, Box(m).nbytes), make, (0, 0), raw)
    expected = np.full(SHARED, SENTINEL, np.uint8)
    for at, source, _ in walk(m, (0, 0), 0):
        expected[at] = 0 if source is None else raw[source]
    assert (run.out == expected).all() and run.rules == []


@pytest.mark.parametrize(
    ("name", "unit", "pitch"), [("b4x16", 8, 8), ("b4x16_p64", 8, 16), ("b6x16_p32", 12, 16)]
)
@pytest.mark.parametrize("swizzle", [NONE, SWIZZLE_128B], ids=str)
def test_sub_byte_elements(name: str, unit: int, pitch: int, swizzle: Swizzle) -> None:
    """16 elements are 8 or 12 bytes in global memory, 8 or 16 in shared memory; the former are counted."""
    rng = random.Random(5)
    raw = np.frombuffer(rng.randbytes(8192), np.uint8).copy()
    row = 256 // 16 * unit

    def make(address: int) -> TensorMap:
        return TensorMap(address, BY_NAME[name], (256, 6), (row + 64,), (128, 4), swizzle=swizzle)

    for origin in ((0, 0), (128, 1), (256, 0), (128, 4), (-128, -1)):
        run = Run(load(2, 4 * 8 * unit, 256), make, origin, raw)
        assert run.outcome.completed and run.rules == []
        expected = np.full(SHARED, SENTINEL, np.uint8)
        width = max(8 * pitch, swizzle.span)
        for r in range(4):
            for u in range(8):
                for b in range(unit):
                    at = 256 + r * width + u * pitch + b
                    if swizzle.span:
                        at ^= (at >> 7 & 7) << 4
                    inside = 0 <= origin[0] < 256 and 0 <= origin[1] + r < 6
                    expected[at] = (
                        raw[(origin[1] + r) * (row + 64) + origin[0] // 16 * unit + u * unit + b]
                        if inside
                        else 0
                    )
        assert (run.out == expected).all()


KINDS = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}


def one(op: str, old: Any, new: Any) -> Any:
    if op == "add":
        return old + new
    if op in ("min", "max"):
        return min(old, new) if op == "min" else max(old, new)
    if op == "inc":
        return 0 if old >= new else old + 1
    if op == "dec":
        return new if old == 0 or old > new else old - 1
    return {"and": old & new, "or": old | new, "xor": old ^ new}[op] if op in ("and", "or", "xor") else None


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("add", "u32"),
        ("add", "s32"),
        ("add", "u64"),
        ("add", "f32"),
        ("add", "f64"),
        ("add", "f16"),
        ("add", "bf16"),
        ("min", "s32"),
        ("max", "u32"),
        ("min", "s64"),
        ("max", "f16"),
        ("min", "bf16"),
        ("inc", "u32"),
        ("dec", "u32"),
        ("and", "u32"),
        ("or", "s32"),
        ("xor", "u64"),
    ],
)
def test_reductions(op: str, name: str) -> None:
    kind = np.dtype(KINDS[name])
    rng = np.random.default_rng(6)
    x = rng.integers(0, 9, 6 * 16).astype(kind).reshape(6, 16)
    y = rng.integers(0, 9, 4 * 16).astype(kind).reshape(4, 16)

    def make(address: int) -> TensorMap:
        return TensorMap(address, BY_NAME[name], (16, 6), (16 * kind.itemsize,), (16, 4))

    out = np.zeros(SHARED, np.uint8)
    out[: y.nbytes] = y.view(np.uint8).ravel()
    run = Run(store(2, reduce=op), make, (0, 3), x, out)
    assert run.rules == []
    expected = x.copy()
    for r in range(3):  # the fourth row is outside
        for c in range(16):
            old, new = (v[()].item() if kind.kind in "iu" else v for v in (x[r + 3, c], y[r, c]))
            expected[r + 3, c] = one(op, old, new)
    assert (run.x.view(kind).reshape(6, 16) == expected).all()


def test_reductions_that_do_not_exist_are_refused() -> None:
    def make(address: int) -> TensorMap:
        return TensorMap(address, BY_NAME["u16"], (16, 6), (32,), (16, 4))

    with pytest.raises(UnsupportedInstruction, match=r"reduction \.add on \.u16"):
        Run(store(2, reduce="add"), make, (0, 0), np.zeros(1024, np.uint8), np.zeros(SHARED, np.uint8))


def plain(address: int) -> TensorMap:
    return TensorMap(address, BY_NAME["u32"], (32, 8), (128,), (32, 4))


X = np.arange(256, dtype=np.uint32)


def test_map_in_global_memory() -> None:
    run = Run(load(2, 512, where="%d4"), plain, (0, 2), X, in_memory=True)
    assert run.outcome.counters[0].async_bytes == 512
    assert run.rules == [] and (run.out.view(np.uint32)[:128] == X[64:192]).all()


def test_a_missing_wait_reads_unwritten_bytes() -> None:
    run = Run(load(2, 512, wait=False), plain, (0, 0), X)
    assert run.rules == ["uninitialized-read"]


@pytest.mark.parametrize("tx", [256, 1024])
def test_wrong_expect_tx_deadlocks_with_its_barrier(tx: int) -> None:
    run = Run(load(2, 512, tx=tx), plain, (0, 0), X)
    assert "deadlock" in run.rules or "mbarrier-phase" in run.rules


def test_misaligned_shared_address() -> None:
    run = Run(load(2, 512, base=64), plain, (0, 0), X)
    assert "misaligned" in run.rules


def test_box_past_the_end_of_shared_memory() -> None:
    run = Run(load(2, 512, base=SHARED - 128), plain, (0, 0), X)
    assert "out-of-bounds" in run.rules


def test_tensor_past_the_end_of_its_buffer() -> None:
    def long(address: int) -> TensorMap:
        return TensorMap(address, BY_NAME["u32"], (32, 9), (128,), (32, 4))

    run = Run(load(2, 512), long, (0, 6), X)
    (f, *_) = run.outcome.findings
    assert f.rule == "out-of-bounds" and f.buffer == "x"
    assert Run(load(2, 512), long, (0, 4), X).rules == []


def test_misaligned_global_address() -> None:
    run = Run(load(2, 512), lambda a: plain(a + 8), (0, 0), X)
    assert "misaligned" in run.rules


def test_rank_of_instruction_and_map_differ() -> None:
    assert "out-of-bounds" in Run(load(3, 512), plain, (0, 0), X).rules


def test_uninitialised_map_and_unknown_bits_are_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match="uninitialized tensor map"):
        Run(load(2, 512, where="%d2"), plain, (0, 0), X, raw=bytes(128))


def test_tf32_and_im2col_are_refused() -> None:
    def tf32(address: int) -> TensorMap:
        return TensorMap(address, BY_NAME["tf32"], (32, 8), (128,), (32, 4))

    with pytest.raises(UnsupportedInstruction, match="tf32"):
        Run(load(2, 512), tf32, (0, 0), X)
    text = load(2, 512, form="shared::cta.global.im2col.mbarrier::complete_tx::bytes")
    with pytest.raises(UnsupportedInstruction, match="im2col"):
        Run(text, plain, (0, 0), X)


def test_atoms_of_64_bytes_are_not_loaded() -> None:
    make, _, raw = tensor_of(random.Random(8), 2, "u8", SWIZZLE_128B_ATOM_64B)
    with pytest.raises(UnsupportedInstruction, match="64-byte atoms"):
        Run(load(2, 128), make, (0, 0), raw)


def test_store_to_a_read_only_buffer() -> None:
    run = Run(store(2), plain, (0, 0), X, np.zeros(SHARED, np.uint8), writable=False)
    assert run.rules == ["read-only-write"]


def test_store_reads_its_source_when_its_group_is_waited_for() -> None:
    """Overwritten right after the store is issued: without wait_group.read the new data goes out."""
    out = np.full(SHARED // 4, 7, np.uint32)
    later = """mov.u32 %r20, 9;
st.shared.u32 [%r2], %r20;
"""
    text = store(2)
    bad = text.replace("@%p1 cp.async.bulk.wait_group 0;", later + "@%p1 cp.async.bulk.wait_group 0;")
    good = text.replace(
        "@%p1 cp.async.bulk.wait_group 0;",
        "@%p1 cp.async.bulk.wait_group.read 0;\nbar.sync 0;\n" + later + "@%p1 cp.async.bulk.wait_group 0;",
    )
    late, sound = Run(bad, plain, (0, 0), X, out), Run(good, plain, (0, 0), X, out)
    assert late.x.view(np.uint32)[0] == 9 and late.rules == ["buffer-reuse"]
    assert sound.x.view(np.uint32)[0] == 7 and sound.rules == []


def test_store_of_unwritten_shared_memory() -> None:
    text = store(2, base=1024).replace(
        "st.shared.u32 [%r6], %r7;", "setp.lt.u32 %p5, %r5, 1024;\n@%p5 st.shared.u32 [%r6], %r7;"
    )
    run = Run(text, plain, (0, 0), X, np.zeros(SHARED, np.uint8))
    assert "uninitialized-read" in run.rules


def test_prefetches_have_no_effect() -> None:
    text = load(2, 512).replace(
        "@%p1 mbarrier.arrive",
        """prefetch.tensormap [%d2];
@%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d2, {%r10, %r11}];
@%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.L2::cache_hint [%d2, {%r10, -4}], %d9;
@%p1 mbarrier.arrive""",
    )
    assert Run(text, plain, (0, 0), X).rules == []


def test_replaced_maps() -> None:
    """A map in global memory gets other sizes, box and origin; then it is used."""
    text = load(2, 256, where="%d4").replace(
        "@%p1 mbarrier.arrive",
        """mov.u32 %r20, 2;
mov.u32 %r21, 16;
@%p1 tensormap.replace.tile.box_dim.global.b1024.b32 [%d4], 1, %r20;
@%p1 tensormap.replace.tile.global_dim.global.b1024.b32 [%d4], 0, %r21;
fence.proxy.tensormap::generic.release.gpu;
fence.proxy.tensormap::generic.acquire.gpu [%d4], 128;
@%p1 mbarrier.arrive""",
    )
    run = Run(text, plain, (0, 2), X)
    expected = X.reshape(8, 32)[2:4].copy()
    expected[:, 16:] = 0
    assert run.rules == [] and (run.out.view(np.uint32)[:64] == expected.ravel()).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_seeds_give_the_same(seed: int) -> None:
    run = Run(load(2, 512), plain, (0, 1), X, seed=seed)
    assert run.rules == [] and (run.out.view(np.uint32)[:128] == X[32:160]).all()


FENCE = "fence.proxy.async.shared::cta;\n"


@pytest.mark.parametrize(
    ("fence", "rules"),
    [
        (FENCE, []),
        ("", ["proxy-fence-missing"]),
        ("fence.proxy.async;\n", []),
        ("fence.proxy.async.global;\n", ["proxy-fence-missing"]),
    ],
)
def test_stores_want_a_proxy_fence_after_ordinary_stores(fence: str, rules: list[str]) -> None:
    text = store(2)
    assert FENCE in text
    run = Run(text.replace(FENCE, fence), plain, (0, 0), X, np.zeros(SHARED, np.uint8))
    assert run.rules == rules


def test_a_fence_before_the_last_store_is_too_early() -> None:
    text = store(2)
    late = text.replace(
        "add.u32 %r8, %r2, 0;", "st.shared.u32 [%r2+16], %r1;\nbar.sync 0;\nadd.u32 %r8, %r2, 0;"
    )
    run = Run(late, plain, (0, 0), X, np.zeros(SHARED, np.uint8))
    assert "proxy-fence-missing" in run.rules
    assert "byte 16 of shared memory" in next(
        f.message for f in run.outcome.findings if f.rule == "proxy-fence-missing"
    )
    elsewhere = late.replace("[%r2+16]", "[%r2+4096]")
    assert "proxy-fence-missing" not in Run(elsewhere, plain, (0, 0), X, np.zeros(SHARED, np.uint8)).rules


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
def test_the_kernels_of_these_tests_assemble(rank: int, arch: str) -> None:
    assert complaint(load(rank, 512, arch=arch), arch) == ""
    assert complaint(load(rank, 512, where="%d4", arch=arch), arch) == ""
    assert complaint(store(rank, arch=arch), arch) == ""
    for op in ("add", "min", "max", "inc", "dec", "and", "or", "xor"):
        assert complaint(store(rank, reduce=op, arch=arch), arch) == ""


ROWS = (3, 7, -1, 0)


def single(address: int) -> TensorMap:
    return TensorMap(address, BY_NAME["u32"], (64, 8), (256,), (32, 1), swizzle=SWIZZLE_128B)


def narrow(address: int) -> TensorMap:
    return TensorMap(address, BY_NAME["u32"], (64, 8), (256,), (16, 1))


@pytest.mark.parametrize(("make", "width"), [(single, 32), (narrow, 16)])
@pytest.mark.parametrize("base", [0, 384])
def test_gather4(make: Any, width: int, base: int) -> None:
    """Four rows of a tensor become four rows of a tile, swizzled as one box; a row outside is zero."""
    x = np.arange(512, dtype=np.uint32)
    form = "shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    five = "{%r10, %r11, %r12, %r13, %r14}"
    text = load(2, 16 * width, base, form=form).replace("{%r10, %r11}", five)
    assert complaint(text) == ""
    run = Run(text, make, (32, *ROWS), x)
    assert run.outcome.completed and run.rules == []
    expected = np.full(SHARED, SENTINEL, np.uint8)
    for i, row in enumerate(ROWS):
        for b in range(4 * width):
            at = base + i * 4 * width + b
            at ^= (at >> 7 & 7) << 4 if make is single else 0
            expected[at] = x.view(np.uint8)[row * 256 + 128 + b] if row >= 0 else 0
    assert (run.out == expected).all()


def test_scatter4() -> None:
    x = np.arange(512, dtype=np.uint32)
    out = np.random.default_rng(9).integers(0, 255, SHARED).astype(np.uint8)
    text = store(2, 128).replace(".tile.bulk_group", ".tile::scatter4.bulk_group")
    text = text.replace("{%r10, %r11}", "{%r10, %r11, %r12, %r13, %r14}")
    assert complaint(text) == ""
    run = Run(text, single, (32, *ROWS), x, out)
    assert run.rules == []
    expected = x.view(np.uint8).copy()
    for i, row in enumerate(ROWS):
        for b in range(128):
            at = 128 + i * 128 + b
            at ^= (at >> 7 & 7) << 4
            if row >= 0:
                expected[row * 256 + 128 + b] = out[at]
    assert (run.x == expected).all()


def test_gather4_wants_a_box_of_one_row_and_room_for_four() -> None:
    form = "shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    five = "{%r10, %r11, %r12, %r13, %r14}"
    with pytest.raises(UnsupportedInstruction, match="box of 4 rows"):
        Run(load(2, 512, form=form).replace("{%r10, %r11}", five), plain, (0, 0, 1, 2, 3), X)
    text = load(2, 512, SHARED - 256, form=form).replace("{%r10, %r11}", five)
    assert "out-of-bounds" in Run(text, single, (0, 0, 1, 2, 3), np.arange(512, dtype=np.uint32)).rules
