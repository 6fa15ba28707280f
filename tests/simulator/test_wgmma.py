"""wgmma: all types, sizes, layouts of shared memory and ways to wait, against matrices laid out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.kernels import kernel, run
from tests.simulator.legal import complaint
from workbench.simulator import UnsupportedInstruction

RNG = np.random.default_rng(23)
TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
WIDTHS = {"none": 0, "32": 32, "64": 64, "128": 128}
MODES = {"none": 0, "128": 1, "64": 2, "32": 3}
SMEM = 48 * 1024
BASE = 0x400
B_AT = 16 * 1024


def depth(kind):
    return 32 // np.dtype(TYPES[kind]).itemsize


def draw(kind, shape):
    """Numbers whose products and sums every accumulator holds exactly."""
    if kind == "s8":
        return RNG.integers(-128, 128, shape).astype(np.int8)
    if kind == "u8":
        return RNG.integers(0, 256, shape).astype(np.uint8)
    return RNG.integers(-4, 5, shape).astype(TYPES[kind])


def byte_of(row, k, size, swizzle, major, leading, stride):
    """Byte of element (row, k) after the start of a matrix, from the canonical layouts.

    K-major: ((8, m), (T, 2)) : ((row of the atom, SBO), (1, LBO)); MN-major: ((T, w, m), (8, k)) with strides
    ((1, T, LBO or SBO), (row of the atom, SBO or LBO)); T elements fill 16 bytes, w * T a swizzled row.
    """
    t = 16 // size
    width = WIDTHS[swizzle]
    if major == "k":
        if width:
            return (row % 8) * width + (row // 8) * stride + k * size
        return (row % 8) * 16 + (row // 8) * stride + (k // t) * leading + (k % t) * size
    if width:
        per = width // size
        return (row % per) * size + (row // per) * leading + (k % 8) * width + (k // 8) * stride
    return (row % t) * size + (row // t) * stride + (k % 8) * 16 + (k // 8) * leading


def swizzled(address, swizzle):
    """Swizzle<B, 4, 3> on a byte address, B = 0, 1, 2, 3."""
    bits = {"none": 0, "32": 1, "64": 2, "128": 3}[swizzle]
    return address ^ (((address >> 7) & ((1 << bits) - 1)) << 4)


def strides(rows, k, size, swizzle, major):
    """Leading and stride byte offsets of a dense layout, and its bytes."""
    width = WIDTHS[swizzle]
    if major == "k":
        if width:
            return 16, 8 * width, rows * width
        return rows * 16 + 128, 128, (rows * 16 + 128) * (k * size // 16)
    if width:
        across = -(-rows * size // width)
        return k * width, 8 * width, across * k * width
    return (rows * size // 16) * 128, 128, rows * size // 16 * 128 * (k // 8)


def lay(image, matrix, at, swizzle, major):
    """Write a matrix (rows, k) into shared memory at address `at`; return its descriptor."""
    rows, k = matrix.shape
    size = matrix.dtype.itemsize
    leading, stride, _ = strides(rows, k, size, swizzle, major)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, k, size)
    for r in range(rows):
        for c in range(k):
            where = swizzled(at + byte_of(r, c, size, swizzle, major, leading, stride), swizzle) - BASE
            image[where : where + size] = raw[r, c]
    return at >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | MODES[swizzle] << 62


def fragment_a(matrix):
    """A (64, k) in registers: (128 threads, 4 words)."""
    rows, k = matrix.shape
    per = 4 // matrix.dtype.itemsize
    words = np.ascontiguousarray(matrix).view(np.uint32).reshape(rows, k // per)
    out = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(4):
            out[thread, i] = words[16 * warp + lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)]
    return out


def accumulator(stored, n, kind):
    """D (64, n) from the registers that 128 threads stored."""
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[kind]
    values = np.ascontiguousarray(stored).view(dtype).reshape(128, -1)
    d = np.zeros((64, n), dtype)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(n // 2):
            d[16 * warp + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2] = values[thread, i]
    return d


PROLOGUE = f"""
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.s32 %r3, %r1, %r2, %r0;
mul.wide.u32 %d1, %r1, {SMEM};
add.s64 %image, %image, %d1;
mul.wide.u32 %d1, %r0, 16;
add.s64 %d1, %d1, %image;
mov.u32 %r4, s;
mad.lo.s32 %r5, %r0, 16, %r4;
mul.lo.u32 %r6, %r2, 16;
cvt.u64.u32 %d2, %r6;
mov.u32 %r7, 0;
FILL:
ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d1];
st.shared.v4.b32 [%r5], {{%r10, %r11, %r12, %r13}};
add.s64 %d1, %d1, %d2;
add.u32 %r5, %r5, %r6;
add.u32 %r7, %r7, %r6;
setp.lt.u32 %p1, %r7, {SMEM};
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
"""


def registers(n, prefix="%acc"):
    return "{" + ", ".join(f"{prefix}{k}" for k in range(n)) + "}"


def program(main, count, old=True):
    """A kernel that fills shared memory, loads `count` accumulators from `c`, runs `main`, stores them."""
    load = "\n".join(
        [f"mul.wide.u32 %d3, %r3, {4 * count};", "add.s64 %c, %c, %d3;", "add.s64 %out, %out, %d3;"]
        + [f"ld.global.b32 %acc{k}, [%c+{4 * k}];" for k in range(count if old else 0)]
    )
    load += "\nmul.wide.u32 %d4, %r3, 16;\nadd.s64 %fa, %fa, %d4;\n"
    load += "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%fa];\n"
    store = "\n".join(f"st.global.b32 [%out+{4 * k}], %acc{k};" for k in range(count))
    text = kernel(
        PROLOGUE + load + main + "\n" + store, ["out", "image", "c", "fa"],
        f".shared .align 1024 .b8 s[{SMEM}];\n.reg .b32 %acc<{count + 1}>;\n.reg .b32 %a<4>;\n"
        ".reg .b64 %desc<4>;\n.reg .pred %q;",
    )  # fmt: skip
    return text.replace("sm_103a", "sm_90a")


def descriptors(a, b):
    return f"mov.b64 %desc0, {a:#x};\nmov.b64 %desc1, {b:#x};\n"


def execute(text, image, c, fa=None, ctas=1, threads=128, **options):
    assert complaint(text, "sm_90a") == ""
    fa = np.zeros((ctas * threads, 4), np.uint32) if fa is None else fa
    return run(
        text,
        {"out": (c.size, c.dtype), "image": image, "c": c, "fa": fa},
        grid=ctas,
        block=threads,
        **options,
    )


def one(kind, n, d="f32", swizzle="128", majors="kk", source="s", other="", scale=(1, 1), add=1):
    """One wgmma over random matrices; return D, what it should be, and the run."""
    other = other or kind
    k = depth(kind)
    a, b = draw(kind, (64, k)), draw(other, (n, k))
    # nothing else may be read: the rest of shared memory holds NaN or large numbers
    image = np.full(SMEM, 0x7F, np.uint8)
    desc_a = lay(image, a, BASE if source == "s" else BASE + 8192, swizzle, "k" if majors[0] == "k" else "mn")
    desc_b = lay(image, b, BASE + B_AT, swizzle, "k" if majors[1] == "k" else "mn")
    count = n // (4 if d == "f16" else 2)
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
    c = RNG.integers(-4, 5, (128, n // 2)).astype(dtype)
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{kind}.{other}"
    left = "%desc0" if source == "s" else "{%a0, %a1, %a2, %a3}"
    tail = ""
    if dtype is not np.int32:
        tail = f", {scale[0]}, {scale[1]}"
        if kind in ("f16", "bf16"):
            flags = [int(m != "k") for m in (majors if source == "s" else majors[1])]
            tail += "".join(f", {x}" for x in flags)
    main = descriptors(desc_a, desc_b) + f"setp.ne.u32 %q, {add}, 0;\n"
    main += "wgmma.fence.sync.aligned;\n"
    main += f"{name} {registers(count)}, {left}, %desc1, %q{tail};\n"
    main += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    text = program(main, count)
    result = execute(text, image, c.view(np.uint32), fragment_a(a))
    product = a.astype(np.float64) @ b.astype(np.float64).T * (scale[0] * scale[1])
    want = product + (accumulator(c, n, d).astype(np.float64) if add else 0)
    return accumulator(result["out"], n, d), want, result


def check(*args, **kwargs):
    got, want, result = one(*args, **kwargs)
    assert result.rules == [], result.outcome.findings
    np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
@pytest.mark.parametrize(
    ("kind", "majors"),
    [("bf16", "kk"), ("f16", "mk"), ("bf16", "km"), ("f16", "mm"), ("tf32", "kk"), ("e4m3", "kk"),
     ("s8", "kk")],
)  # fmt: skip
def test_layouts(kind, majors, swizzle):
    check(kind, 64, "s32" if kind == "s8" else "f32", swizzle, majors)


@pytest.mark.parametrize("n", [8, 24, 40, 96, 128, 200, 256])
def test_sizes(n):
    check("bf16", n)


@pytest.mark.parametrize("source", ["s", "r"])
@pytest.mark.parametrize(
    ("kind", "other", "d"),
    [
        ("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
        ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"), ("e4m3", "e4m3", "f16"), ("s8", "u8", "s32"),
        ("u8", "s8", "s32"), ("u8", "u8", "s32"),
    ],
)  # fmt: skip
def test_types(kind, other, d, source):
    check(kind, 32, d, other=other, source=source)


@pytest.mark.parametrize("scale", [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("add", [0, 1])
def test_signs_and_accumulation(scale, add):
    check("bf16", 16, scale=scale, add=add)
    check("e4m3", 16, scale=scale, add=add, source="r")


def test_saturation():
    n, k = 8, 32
    a, b = np.full((64, k), 127, np.int8), np.full((n, k), 127, np.int8)
    for extra in (".satfinite", ""):
        image = np.zeros(SMEM, np.uint8)
        main = descriptors(lay(image, a, BASE, "128", "k"), lay(image, b, BASE + B_AT, "128", "k"))
        main += f"""wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k32{extra}.s32.s8.s8 {registers(4)}, %desc0, %desc1, 1;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;"""
        c = np.full((128, 4), 2**31 - 1, np.int32)
        result = execute(program(main, 4), image, c.view(np.uint32))
        total = 127 * 127 * 32 + 2**31 - 1
        want = 2**31 - 1 if extra else total - 2**32
        assert (result["out"].view(np.int32) == want).all()


FENCE, WAIT = "wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"


def chain(steps, fence=FENCE, wait=WAIT, between="", n=64):
    """PTX of products over `steps` slices of K, each a group of its own."""
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    lines = [fence]
    for s, (a, b) in enumerate(steps):
        product = f"{name} {registers(n // 2)}, %desc0, %desc1, {int(s > 0)}, 1, 1, 0, 0;"
        lines += [descriptors(a, b), product, "wgmma.commit_group.sync.aligned;"]
        if s == 0:
            lines.append(between)
    return "\n".join([*lines, wait])


def sliced(k_tiles, ctas=1, groups=1, n=64):
    """A and B with K = 16 * k_tiles as 128-byte swizzled tiles; descriptors step 32 bytes inside a row."""
    a = RNG.integers(-4, 5, (ctas, groups, 64, 16 * k_tiles)).astype(ml_dtypes.bfloat16)
    b = RNG.integers(-4, 5, (ctas, n, 16 * k_tiles)).astype(ml_dtypes.bfloat16)
    images = np.zeros((ctas, SMEM), np.uint8)
    for cta in range(ctas):
        for g in range(groups):
            lay(images[cta], a[cta, g], BASE + g * 8192, "128", "k")
        lay(images[cta], b[cta], BASE + B_AT, "128", "k")
    start = 64 << 32 | 1 << 62 | 1 << 16
    steps = [(start | (BASE + 32 * s) >> 4, start | (BASE + B_AT + 32 * s) >> 4) for s in range(k_tiles)]
    return a, b, images, steps


def test_chain_of_products_over_ctas_and_warpgroups():
    a, b, images, steps = sliced(4, ctas=3, groups=2)
    main = chain(steps)
    # the second warpgroup's A is 8 KiB further on
    main = main.replace("mov.b64 %desc1", "add.s64 %desc0, %desc0, %d5;\nmov.b64 %desc1")
    main = "shr.u32 %r20, %r0, 7;\nmul.lo.u32 %r20, %r20, 512;\ncvt.u64.u32 %d5, %r20;\n" + main
    c = np.zeros((3 * 256, 32), np.uint32)
    for seed in (0, 1, 2):
        result = execute(program(main, 32), images, c, ctas=3, threads=256, seed=seed)
        assert result.rules == [], result.outcome.findings
        stored = result["out"].reshape(3, 2, 128, 32)
        for cta in range(3):
            for g in range(2):
                want = a[cta, g].astype(np.float64) @ b[cta].astype(np.float64).T
                np.testing.assert_array_equal(accumulator(stored[cta, g], 64, "f32"), want)
        assert result.outcome.counters[0].warp_instructions["tensor"] == 3 * 8 * 4


def test_a_group_too_many_left_under_way_is_poison():
    _, _, images, steps = sliced(3)
    main = chain(steps, wait="wgmma.wait_group.sync.aligned 1;")
    result = execute(program(main, 32), images, np.zeros((128, 32), np.uint32))
    assert set(result.rules) == {"wgmma-order"}
    assert np.isnan(result["out"].view(np.float32)).all()


def test_wait_for_earlier_groups_delivers_their_accumulators():
    a, b, images, steps = sliced(2, n=16)
    first = registers(8)
    second = "{" + ", ".join(f"%acc{8 + k}" for k in range(8)) + "}"
    main = "wgmma.fence.sync.aligned;\n" + descriptors(*steps[0])
    form = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
    main += f"{form} {first}, %desc0, %desc1, 0, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\n"
    main += descriptors(*steps[1])
    main += f"{form} {second}, %desc0, %desc1, 0, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\n"
    main += "wgmma.wait_group.sync.aligned 1;\n"
    main += "\n".join(f"mov.b32 %acc{k}, %acc{k};" for k in range(8))
    main += "\nwgmma.wait_group.sync.aligned 0;\n"
    result = execute(program(main, 16), images, np.zeros((128, 16), np.uint32))
    assert result.rules == [], result.outcome.findings
    stored = result["out"].reshape(128, 16)
    for which in (0, 1):
        at = slice(16 * which, 16 * which + 16)
        want = a[0, 0, :, at].astype(np.float64) @ b[0, :, at].astype(np.float64).T
        got = accumulator(np.ascontiguousarray(stored[:, 8 * which : 8 * which + 8]), 16, "f32")
        np.testing.assert_array_equal(got, want)


def test_no_wait_is_found():
    _, _, images, steps = sliced(1)
    result = execute(program(chain(steps, wait=""), 32), images, np.zeros((128, 32), np.uint32))
    assert set(result.rules) == {"wgmma-order"}
    assert np.isnan(result["out"].view(np.float32)).all()


def test_no_fence_is_found():
    _, _, images, steps = sliced(1)
    result = execute(program(chain(steps, fence=""), 32), images, np.zeros((128, 32), np.uint32))
    assert result.rules == ["wgmma-order"]
    assert "fence" in result.outcome.findings[0].message


def test_accumulators_changed_under_way_are_found():
    _, _, images, steps = sliced(2)
    text = program(chain(steps, between="mov.b32 %acc3, 0;"), 32)
    result = execute(text, images, np.zeros((128, 32), np.uint32))
    assert "wgmma-order" in result.rules


def test_operand_is_read_as_late_as_the_wait():
    """Shared memory that is overwritten before the wait spoils the product."""
    a, b, images, steps = sliced(1)
    between = "st.shared.b32 [s], %r0;\nbar.sync 0;"
    result = execute(program(chain(steps, between=between), 32), images, np.zeros((128, 32), np.uint32))
    want = a[0, 0].astype(np.float64) @ b[0].astype(np.float64).T
    got = accumulator(result["out"], 64, "f32")
    assert "buffer-reuse" in result.rules
    assert not np.array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1:], want[1:])


def test_no_proxy_fence_after_ordinary_stores_is_found():
    _, _, images, steps = sliced(1)
    text = program(chain(steps), 32)
    c = np.zeros((128, 32), np.uint32)
    assert execute(text, images, c).rules == []
    assert execute(text.replace("fence.proxy.async.shared::cta;", ""), images, c).rules == [
        "proxy-fence-missing"
    ]


def test_unwritten_and_outside_shared_memory_is_found():
    main = chain([(64 << 32 | 1 << 62 | BASE >> 4, 64 << 32 | 1 << 62 | (BASE + B_AT) >> 4)])
    body = "mov.u32 %r0, %tid.x;\n" + main
    for size, rule in ((SMEM, "uninitialized-read"), (2048, "out-of-bounds")):
        declared = f".shared .align 1024 .b8 s[{size}];\n.reg .b32 %acc<33>;\n.reg .b64 %desc<4>;"
        assert rule in run(kernel(body, [], declared), {}, block=128).rules


def test_a_warpgroup_with_fewer_warps_is_found():
    _, _, images, steps = sliced(1)
    result = execute(program(chain(steps), 32), images, np.zeros((64, 32), np.uint32), threads=64)
    assert "inactive-lane" in result.rules


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16", "sparse"),
        ("wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc", "single-bit"),
        ("wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16", "shape"),
    ],
)
def test_other_forms_are_refused_by_name(name, reason):
    body = f"{name} {registers(4)}, %desc0, %desc1, 1, 1, 1, 0, 0;"
    with pytest.raises(UnsupportedInstruction, match=reason):
        run(kernel(body, [], ".reg .b32 %acc<8>;\n.reg .b64 %desc<4>;"), {}, block=128)


def test_base_offset_is_refused():
    main = chain([(1 << 49 | 64 << 32 | 1 << 62 | BASE >> 4, 64 << 32 | 1 << 62 | (BASE + B_AT) >> 4)])
    with pytest.raises(UnsupportedInstruction, match="base offset"):
        execute(program(main, 32), np.zeros(SMEM, np.uint8), np.zeros((128, 32), np.uint32))
