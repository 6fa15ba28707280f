"""tcgen05.mma and .cp in small kernels: every kind, swizzle and layout against NumPy, and planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.tcgen05_kernels import (
    COMMIT,
    FREE,
    IMAGE,
    SETUP,
    WAIT,
    argument,
    descriptor,
    idesc,
    launch,
    module,
    place,
    read,
)
from workbench.simulator import UnsupportedInstruction

SMALL = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}


def values_of(codes, exponent, mantissa, bias):
    e = codes.astype(int) >> mantissa & ((1 << exponent) - 1)
    m = codes.astype(int) & ((1 << mantissa) - 1)
    size = np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (1 + m / (1 << mantissa)) * 2.0 ** (e - bias))
    return np.where(codes.astype(int) >> (exponent + mantissa) & 1, -size, size)


def packed(codes, bits):
    """Lay small codes out: groups of 16 at the low end of 16 bytes."""
    rows, depth = codes.shape
    out = np.zeros((rows, depth), np.uint8)
    for row in range(rows):
        for group in range(depth // 16):
            number = sum(int(c) << (bits * j) for j, c in enumerate(codes[row, 16 * group : 16 * group + 16]))
            out[row, 16 * group : 16 * group + 2 * bits] = np.frombuffer(
                number.to_bytes(2 * bits, "little"), np.uint8
            )
    return out


def operand(rng, name, rows, depth):
    """Return stored elements and their values."""
    if name == "f16":
        x = rng.standard_normal((rows, depth)).astype(np.float16)
        return x, x.astype(np.float64)
    if name == "bf16":
        x = rng.standard_normal((rows, depth)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return (x >> np.uint32(16)).astype(np.uint16), x.view(np.float32).astype(np.float64)
    if name == "tf32":
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        return x, (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name in ("s8", "u8"):
        x = rng.integers(0, 256, (rows, depth), dtype=np.uint8)
        return x, (x.view(np.int8) if name == "s8" else x).astype(np.float64)
    exponent, mantissa, bias = SMALL[name]
    bits = 1 + exponent + mantissa
    codes = rng.integers(0, 1 << bits, (rows, depth), dtype=np.uint8)
    if bits == 8:
        codes &= np.uint8(0xBF)
    values = values_of(codes, exponent, mantissa, bias)
    return (codes if bits == 8 else packed(codes, bits)), values


ISSUE = "@%first tcgen05.mma.cta_group::1.kind::KIND [%tm], %a0, %a1, %r2, PRED;\n"
DESCRIPTORS = (
    argument(0, "%a0") + argument(1, "%a1") + argument(2, "%r2", 32)
    + "add.s64 %a0, %a0, %origin;\nadd.s64 %a1, %a1, %origin;\n"
    + "setp.ne.u32 %p1, 0, 0;\nsetp.eq.u32 %p2, 0, 0;\n"
)  # fmt: skip


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-30)


CODES = {
    "f16": 0,
    "bf16": 1,
    "tf32": 2,
    "e4m3": 0,
    "e5m2": 1,
    "e2m3": 3,
    "e3m2": 4,
    "e2m1": 5,
    "u8": 0,
    "s8": 1,
}
SIZES = {"f16": 2, "bf16": 2, "tf32": 4}


def tile(kind, m, n, a_name, b_name, swizzles=(2, 2), majors=(True, True), d=1, more=0, seed=0):
    """Run one MMA; return the accumulator as stored and the exact product."""
    rng = np.random.default_rng(seed)
    ka, kb = 32 // SIZES.get(a_name, 1), 32 // SIZES.get(b_name, 1)
    image = np.zeros(IMAGE, np.uint8)
    widths = [{0: 16, 6: 32, 4: 64, 2: 128}[s] if k else 32 for s, k in zip(swizzles, majors, strict=True)]
    stored_a, a = operand(rng, a_name, m, ka if not majors[0] else max(widths[0], 32) * ka // 32)
    stored_b, b = operand(rng, b_name, n, kb if not majors[1] else max(widths[1], 32) * kb // 32)
    end, lead_a, step_a = place(image, 0, stored_a, swizzles[0], majors[0])
    start = -(-end // 1024) * 1024
    _, lead_b, step_b = place(image, start, stored_b, swizzles[1], majors[1])
    args = [
        descriptor(0, lead_a, step_a, swizzles[0]),
        descriptor(start, lead_b, step_b, swizzles[1]),
        idesc(m, n, CODES[a_name], CODES[b_name], d, not majors[0], not majors[1], more),
    ]
    issue = ISSUE.replace("KIND", kind).replace("PRED", "%p1")
    text = module(SETUP, DESCRIPTORS, issue, COMMIT, WAIT, read(n, m == 64), FREE)
    result, out = launch(text, image, n if m == 128 else n // 2, args)
    assert result.rules == [], result.outcome.findings
    if m == 64:
        out = out.reshape(4, 2, 16, n // 32, 16).transpose(0, 2, 3, 1, 4).reshape(64, n)
    return out, a[:, :ka] @ b[:, :kb].T


@pytest.mark.parametrize("swizzle", [0, 6, 4, 2])
@pytest.mark.parametrize("majors", [(True, True), (True, False), (False, True), (False, False)])
def test_f16_swizzles_and_majors(swizzle, majors):
    out, want = tile("f16", 128, 64, "f16", "f16", (swizzle, swizzle), majors)
    close(out.view(np.float32), want)


@pytest.mark.parametrize(("m", "n"), [(128, 16), (128, 256), (64, 64), (64, 32), (128, 48)])
def test_shapes(m, n):
    out, want = tile("f16", m, n, "bf16", "bf16") if n != 48 else tile("f16", m, 64, "bf16", "bf16")
    close(out.view(np.float32), want)


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        ("tf32", "tf32", "tf32"),
        ("f8f6f4", "e4m3", "e5m2"),
        ("f8f6f4", "e2m3", "e3m2"),
        ("f8f6f4", "e2m1", "e4m3"),
    ],
)
@pytest.mark.parametrize("swizzle", [0, 2])
def test_float_kinds(kind, a, b, swizzle):
    out, want = tile(kind, 128, 64, a, b, (swizzle, swizzle))
    close(out.view(np.float32), want)


@pytest.mark.parametrize(("a", "b"), [("s8", "s8"), ("u8", "s8")])
def test_integers(a, b):
    out, want = tile("i8", 128, 32, a, b, d=2)
    np.testing.assert_array_equal(out.view(np.int32), want)


def test_mn_major_bytes():
    out, want = tile("f8f6f4", 128, 128, "e4m3", "e4m3", majors=(False, False))
    close(out.view(np.float32), want)


def test_f16_accumulator_lies_in_the_low_half():
    out, want = tile("f16", 128, 32, "f16", "f16", d=0)
    np.testing.assert_array_equal(out.astype(np.uint16).view(np.float16), want.astype(np.float16))


def test_negation():
    out, want = tile("f16", 128, 32, "f16", "f16", more=1 << 13)
    close(out.view(np.float32), -want)


@pytest.mark.parametrize(("m", "n"), [(128, 64), (64, 64), (64, 128), (32, 128)])
@pytest.mark.parametrize("collector", ["", ".collector::b2::fill"])
def test_weight_stationary(m, n, collector):
    """`.ws`: with fewer rows than lanes, further parts of the columns lie in further lanes."""
    rng = np.random.default_rng(m)
    stored_a, a = operand(rng, "f16", m, 16)
    stored_b, b = operand(rng, "f16", n, 16)
    image = np.zeros(IMAGE, np.uint8)
    place(image, 0, stored_a, 6)
    place(image, 16384, stored_b, 6)
    args = [descriptor(0, 16, 256, 6), descriptor(16384, 16, 256, 6), idesc(m, n)]
    mma = f"@%first tcgen05.mma.ws.cta_group::1.kind::f16{collector} [%tm], %a0, %a1, %r2, %p1;\n"
    columns = n * m // 128
    result, out = launch(
        module(SETUP, DESCRIPTORS, mma, COMMIT, WAIT, read(columns), FREE), image, columns, args
    )
    assert result.rules == [], result.outcome.findings
    want = a @ b.T
    for part in range(128 // m):
        close(out[part * m : part * m + m].view(np.float32), want[:, part * columns : (part + 1) * columns])


# -- accumulation, masks, A in tensor memory -----------------------------------------------------


def operands16(rng, k=64, n=64):
    a, b = rng.standard_normal((128, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    image = np.zeros(IMAGE, np.uint8)
    place(image, 0, a, 2)
    place(image, 16384, b, 2)
    args = [descriptor(0, 16, 1024, 2), descriptor(16384, 16, 1024, 2), idesc(128, n)]
    return a.astype(np.float64), b.astype(np.float64), image, args


NEXT = "add.s64 %a0, %a0, 2;\nadd.s64 %a1, %a1, 2;\n"


def issue16(predicate, more=""):
    return ISSUE.replace("KIND", "f16").replace("PRED", more + predicate)


def test_steps_along_k_accumulate():
    a, b, image, args = operands16(np.random.default_rng(3))
    steps = issue16("%p1") + 3 * (NEXT + issue16("%p2"))
    result, out = launch(module(SETUP, DESCRIPTORS, steps, COMMIT, WAIT, read(64), FREE), image, 64, args)
    assert result.rules == [], result.outcome.findings
    np.testing.assert_allclose(out.view(np.float32), a @ b.T, rtol=1e-5, atol=1e-5)


def test_scale_of_d_and_disabled_lanes():
    a, b, image, args = operands16(np.random.default_rng(4))
    masks = "mov.u32 %r3, 0;\nmov.u32 %r4, 0x80000001;\n"
    steps = issue16("%p1") + NEXT + issue16("%p2, 3", "{%r3, %r4, %r3, %r3}, ")
    result, out = launch(
        module(SETUP, DESCRIPTORS, masks, steps, COMMIT, WAIT, read(64), FREE), image, 64, args
    )
    assert result.rules == [], result.outcome.findings
    first = (a[:, :16] @ b[:, :16].T).astype(np.float32).astype(np.float64)
    want = first / 8 + a[:, 16:32] @ b[:, 16:32].T
    for lane in (32, 63):
        want[lane] = first[lane]
    close(out.view(np.float32), want)


def test_a_from_tensor_memory():
    a, b, image, args = operands16(np.random.default_rng(5))
    store = """
    shl.b32 %r1, %warp, 21;
    add.u32 %r1, %r1, %tm;
    mul.wide.u32 %d0, %tx, 32;
    add.s64 %d0, %image, %d0;
    add.s64 %d0, %d0, 32768;
    """
    names = [f"%v{j}" for j in range(8)]
    store += "\n".join(f"ld.global.b32 {n}, [%d0+{4 * j}];" for j, n in enumerate(names))
    store += f"\ntcgen05.st.sync.aligned.32x32b.x8.b32 [%r1+256], {{{', '.join(names)}}};\n"
    store += "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
    image[32768 : 32768 + 4096] = a[:, :16].astype(np.float16).view(np.uint8).ravel()
    mma = "add.u32 %r3, %tm, 256;\n@%first tcgen05.mma.cta_group::1.kind::f16 [%tm], [%r3], %a1, %r2, %p1;\n"
    parts = (SETUP, DESCRIPTORS, store, mma, COMMIT, WAIT, read(64), FREE)
    result, out = launch(module(*parts), image, 64, args)
    assert result.rules == [], result.outcome.findings
    close(out.view(np.float32), a[:, :16] @ b[:, :16].T)
    without = module(*parts).replace("tcgen05.wait::st.sync.aligned;", "")
    result, _ = launch(without, image, 64, args)
    assert "tcgen05-order" in result.rules


# -- block scaling -------------------------------------------------------------------------------


def scale_image(codes):
    """Lay out scale factor codes (rows, 4), rows a multiple of 32, for tcgen05.cp.32x128b.warpx4."""
    out = np.zeros(-(-len(codes) // 128) * 512, np.uint8)
    for row in range(len(codes)):
        block, r = divmod(row, 128)
        at = 512 * block + r % 32 * 16 + r // 32 * 4
        out[at : at + 4] = codes[row]
    return out


SCALES = (
    argument(3, "%a2") + argument(4, "%a3") + "add.s64 %a2, %a2, %origin;\nadd.s64 %a3, %a3, %origin;\n"
    + "add.u32 %r3, %tm, 256;\nadd.u32 %r4, %tm, 260;\n"
    + "@%first tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3], %a2;\n"
    + "@%first tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4], %a3;\n"
)  # fmt: skip


def scaled_tile(kind, qualifier, name, factors, format_bit, first, n=64):
    rng = np.random.default_rng(7)
    image = np.zeros(IMAGE, np.uint8)
    if kind == "mxf8f6f4":
        stored_a, a = operand(rng, name, 128, 32)
        stored_b, b = operand(rng, "e4m3", n, 32)
    else:
        codes = [rng.integers(0, 16, (rows, 64), dtype=np.uint8) for rows in (128, n)]
        a, b = (values_of(c, *SMALL["e2m1"]) for c in codes)
        stored_a, stored_b = ((c[:, ::2] | c[:, 1::2] << 4) for c in codes)
    place(image, 0, stored_a, 6)
    place(image, 4096, stored_b, 6)
    if format_bit:
        scales = [rng.integers(120, 134, (128, 4), dtype=np.uint8) for _ in range(2)]
        numbers = [2.0 ** (s.astype(int) - 127) for s in scales]
    else:
        scales = [rng.integers(8, 120, (128, 4), dtype=np.uint8) for _ in range(2)]
        numbers = [values_of(s, *SMALL["e4m3"]) for s in scales]
    image[16384:16896], image[16896:17408] = scale_image(scales[0]), scale_image(scales[1])
    code = CODES[name] if kind == "mxf8f6f4" else 1
    b_code = 0 if kind == "mxf8f6f4" else 1
    more = format_bit << 23 | first << 29 | first << 4
    args = [
        descriptor(0, 16, 256, 6), descriptor(4096, 16, 256, 6), idesc(128, n, code, b_code, 0, more=more),
        descriptor(16384, 16, 128, 0), descriptor(16896, 16, 128, 0),
    ]  # fmt: skip
    mma = f"@%first tcgen05.mma.cta_group::1.kind::{kind}.block_scale{qualifier} "
    mma += "[%tm], %a0, %a1, %r2, [%r3], [%r4], %p1;\n"
    text = module(SETUP, DESCRIPTORS, SCALES, mma, COMMIT, WAIT, read(n), FREE)
    result, out = launch(text, image, n, args)
    assert result.rules == [], result.outcome.findings
    block = a.shape[1] // factors
    used = slice(first, first + factors)
    a = a * np.repeat(numbers[0][:, used], block, axis=1)
    b = b * np.repeat(numbers[1][:n, used], block, axis=1)
    close(out.view(np.float32), a @ b.T)


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_mxf8f6f4(name, first):
    scaled_tile("mxf8f6f4", ".scale_vec::1X" if first else ".block32", name, 1, 1, first)


@pytest.mark.parametrize(
    ("kind", "qualifier", "factors", "format_bit", "first"),
    [
        ("mxf4", "", 2, 1, 0),
        ("mxf4", ".block32", 2, 1, 2),
        ("mxf4nvf4", ".block32", 2, 1, 0),
        ("mxf4nvf4", ".scale_vec::4X", 4, 0, 0),
        ("mxf4nvf4", ".block16", 4, 1, 0),
    ],
)
def test_four_bit_kinds(kind, qualifier, factors, format_bit, first):
    scaled_tile(kind, qualifier, "e2m1", factors, format_bit, first, n=128)


# -- planted faults ------------------------------------------------------------------------------


def faulty(*parts):
    _, _, image, args = operands16(np.random.default_rng(3))
    return launch(module(*parts), image, 64, args)


def test_reading_before_the_barrier_is_a_finding():
    result, out = faulty(SETUP, DESCRIPTORS, issue16("%p1"), COMMIT, "bar.sync 0;\n", read(64), WAIT, FREE)
    assert "tcgen05-order" in result.rules
    assert (out == 0x7FF7DEAD).all()


def test_commit_before_the_mma_does_not_cover_it():
    result, _ = faulty(SETUP, DESCRIPTORS, COMMIT, issue16("%p1"), WAIT, read(64), FREE)
    assert "tcgen05-order" in result.rules


def test_reusing_an_operand_stage_too_early_is_a_finding():
    overwrite = "mov.u32 %r5, 0x40404040;\n@%first st.shared.b32 [%smem], %r5;\n"
    result, _ = faulty(
        SETUP, DESCRIPTORS, issue16("%p1"), COMMIT, overwrite, "bar.sync 0;\n", WAIT, read(64), FREE
    )
    assert result.rules == ["buffer-reuse"]
    result, _ = faulty(
        SETUP, DESCRIPTORS, issue16("%p1"), COMMIT, WAIT, overwrite, "bar.sync 0;\n", read(64), FREE
    )
    assert result.rules == []


def test_accumulating_into_unwritten_cells_is_a_finding():
    result, _ = faulty(SETUP, DESCRIPTORS, issue16("%p2"), COMMIT, WAIT, read(64), FREE)
    assert result.rules == ["uninitialized-read"]


def test_missing_scale_factors_are_a_finding():
    args = [descriptor(0, 16, 256, 6), descriptor(4096, 16, 256, 6), idesc(128, 64, d=0, more=1 << 23)]
    mma = "add.u32 %r3, %tm, 256;\n@%first tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale "
    mma += "[%tm], %a0, %a1, %r2, [%r3], [%r3], %p1;\n"
    text = module(SETUP, DESCRIPTORS, mma, COMMIT, WAIT, read(64), FREE)
    result, _ = launch(text, np.zeros(16, np.uint8), 64, args)
    assert result.rules == ["uninitialized-read"]


def test_operands_outside_shared_memory_are_a_finding():
    _, _, image, args = operands16(np.random.default_rng(3))
    args[0] = descriptor(IMAGE - 1024, 16, 1024, 2)
    result, _ = launch(module(SETUP, DESCRIPTORS, issue16("%p1"), COMMIT, WAIT, FREE), image, 64, args)
    assert result.rules == ["out-of-bounds"]


def test_sparse_and_reserved_descriptors_are_refused_by_name():
    _, _, image, args = operands16(np.random.default_rng(3))
    text = module(SETUP, DESCRIPTORS, issue16("%p1"), COMMIT, WAIT, FREE)
    with pytest.raises(UnsupportedInstruction, match="sparse"):
        launch(text, image, 64, [args[0], args[1], args[2] | 4])
    with pytest.raises(UnsupportedInstruction, match="swizzle mode 3"):
        launch(text, image, 64, [args[0] & ~(7 << 61) | 3 << 61, args[1], args[2]])


def test_unknown_forms_are_refused():
    for line in (
        "tcgen05.shift.cta_group::1.down [%tm];",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%tm], %a0, %a1, %r2, %p1, %a2;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%tm], %a0, %a1, [%tm], %r2, %p1;",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%tm], %a0;",
    ):
        with pytest.raises(UnsupportedInstruction):
            launch(module(line), np.zeros(16, np.uint8), 1, [0])


FENCE = "fence.proxy.async.shared::cta;\n"


@pytest.mark.parametrize(
    ("before", "after", "found"), [(FENCE, "", False), ("", "@%first " + FENCE, False), ("", "", True)]
)
def test_proxy_fence(before, after, found):
    """A fence in every writing thread, or in the issuing one, is enough."""
    assert SETUP.count(FENCE) == 1
    setup = SETUP.replace(FENCE, before)
    result, _ = faulty(setup, DESCRIPTORS, after, issue16("%p1"), COMMIT, WAIT, read(64), FREE)
    assert result.rules == (["proxy-fence-missing"] if found else [])


def test_padding_and_scale_factors_of_missing_rows_need_not_be_written():
    """Packed four-bit elements leave 8 of 16 bytes unused; factors past N are not looked at."""
    rng = np.random.default_rng(1)
    image = np.zeros(IMAGE, np.uint8)
    stored, values = operand(rng, "e2m1", 128, 32)
    place(image, 0, stored, 6)
    place(image, 4096, stored[:8], 6)
    image[16384:17408] = 127
    skip = """
    and.b32 %r3, %i, 2;
    setp.ne.u32 %p4, %r3, 0;
    setp.lt.u32 %p5, %i, 4096;
    and.pred %p4, %p4, %p5;
    sub.u32 %r3, %i, 4256;
    setp.lt.u32 %p6, %r3, 96;
    or.pred %p4, %p4, %p6;
    """
    store = "st.shared.b32 [%r1], %r0;"
    assert SETUP.count(store) == 1
    setup = SETUP.replace(store, f"{skip}@!%p4 {store}")
    args = [
        descriptor(0, 16, 256, 6), descriptor(4096, 16, 256, 6), idesc(128, 8, 5, 5, 0, more=1 << 23),
        descriptor(16384, 16, 128, 0), descriptor(16896, 16, 128, 0),
    ]  # fmt: skip
    mma = "@%first tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale "
    mma += "[%tm], %a0, %a1, %r2, [%r3], [%r4], %p1;\n"
    result, out = launch(module(setup, DESCRIPTORS, SCALES, mma, COMMIT, WAIT, read(8), FREE), image, 8, args)
    assert result.rules == [], result.outcome.findings
    close(out.view(np.float32), values @ values[:8].T)
