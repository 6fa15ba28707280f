"""mma.sync and movmatrix: every shape and type against fragment tables written out lane by lane."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.kernels import kernel, run
from tests.simulator.legal import complaint
from workbench.simulator import UnsupportedInstruction

RNG = np.random.default_rng(11)
BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4,
    "b1": 1,
}  # fmt: skip
FLOATS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "f64": np.float64,
}  # fmt: skip


# -- where the ISA puts the elements of a fragment (9.7.14.5.1 to 9.7.14.5.14), element by element ---------


def place_a(m: int, k: int, kind: str, lane: int, i: int) -> tuple[int, int]:
    """Row and column of A's element i of a lane."""
    group, thread = lane >> 2, lane % 4
    match (m, k, kind):
        case (8, 4, "f64"):
            return group, thread
        case (16, 4, "f64") | (16, 4, "tf32"):
            return group + 8 * i, thread
        case (16, 8, "f64") | (16, 8, "tf32"):
            return group + 8 * (i in (1, 3)), thread + 4 * (i >= 2)
        case (16, 16, "f64"):
            return (group, i * 2 + thread) if i % 2 == 0 else (group + 8, i * 2 - 2 + thread)
        case (16, 8, "f16") | (16, 8, "bf16"):
            return group + 8 * (i >= 2), thread * 2 + (i & 1)
        case (16, 16, "f16") | (16, 16, "bf16"):
            return (
                group if 0 <= i < 2 or 4 <= i < 6 else group + 8,
                thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8,
            )
        case (16, 16, "s8" | "u8" | "e4m3" | "e5m2"):
            return (group if i < 4 else group + 8), thread * 4 + (i & 3)
        case (16, 32, "s8" | "u8" | "e4m3" | "e5m2"):
            return (
                group if 0 <= i < 4 or 8 <= i < 12 else group + 8,
                thread * 4 + (i & 3) + (0 if i < 8 else 16),
            )
        case (8, 16, "s8" | "u8"):
            return group, thread * 4 + i
        case (8, 32, "s4" | "u4"):
            return group, thread * 8 + i
        case (16, 32, "s4" | "u4"):
            return (group if i < 8 else group + 8), thread * 8 + (i & 7)
        case (16, 64, "s4" | "u4"):
            return (
                group if 0 <= i < 8 or 16 <= i < 24 else group + 8,
                thread * 8 + (i & 7) + (0 if i < 16 else 32),
            )
        case (8, 128, "b1"):
            return group, thread * 32 + i
        case (16, 128, "b1"):
            return (group if i < 32 else group + 8), thread * 32 + (i & 31)
        case (16, 256, "b1"):
            return (
                group if 0 <= i < 32 or 64 <= i < 96 else group + 8,
                thread * 32 + (i & 31) + (0 if i < 64 else 128),
            )
    raise AssertionError


def place_b(k: int, kind: str, lane: int, i: int) -> tuple[int, int]:
    """Row (along k) and column of B's element i of a lane."""
    group, thread = lane >> 2, lane % 4
    match kind:
        case "f64" | "tf32":
            return thread + 4 * i, group
        case "f16" | "bf16":
            return thread * 2 + (i & 1) + (0 if i < 2 else 8), group
        case "s8" | "u8" | "e4m3" | "e5m2":
            return thread * 4 + (i & 3) + (0 if i < 4 else 16), group
        case "s4" | "u4":
            return thread * 8 + (i & 7) + (0 if i < 8 else 32), group
    return thread * 32 + (i & 31) + (0 if i < 32 else 128), group


def place_c(lane: int, i: int) -> tuple[int, int]:
    """Row and column of the accumulator's element i of a lane."""
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


# -- packing and unpacking -----------------------------------------------------------------------------------


def encode(values, kind):
    """Return the bits of numbers."""
    if kind in FLOATS:
        return values.astype(FLOATS[kind]).view(f"u{BITS[kind] // 8}").astype(np.uint64)
    if kind == "tf32":
        return values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (values.astype(np.int64) & ((1 << BITS[kind]) - 1)).astype(np.uint64)


def fragment(bits, place, count, width):
    """Return words (32 lanes, registers) of 32 (or 64) bits, filled element by element."""
    size = max(32, width)
    out = [[0] * (count * width // size) for _ in range(32)]
    for lane in range(32):
        for i in range(count):
            r, c = place(lane, i)
            out[lane][i * width // size] |= int(bits[r, c]) << (i * width % size)
    return np.array(out, np.uint64 if size == 64 else np.uint32)


def draw(kind, shape):
    """Random numbers that the type holds exactly."""
    if kind == "b1":
        return RNG.integers(0, 2, shape).astype(np.float64)
    if kind[0] in "su":
        bits = BITS[kind]
        low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if kind[0] == "s" else (0, 1 << bits)
        return RNG.integers(low, high, shape).astype(np.float64)
    x = RNG.standard_normal(shape)
    if kind == "tf32":
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(float)
    return x.astype(FLOATS[kind]).astype(np.float64)


def body(name, registers, words, wide=False, accumulator=32):
    """PTX that loads the fragments of a lane from `a`, `b`, `c`, multiplies, and stores to `out`."""
    na, nb, nc = registers
    lines = ["mov.u32 %r50, %ctaid.x;", "mov.u32 %r51, %ntid.x;", "mov.u32 %r52, %tid.x;",
             "mad.lo.s32 %r0, %r50, %r51, %r52;"]  # fmt: skip
    source, size = ("%d", 8) if wide else ("%r", 4)
    first = {"a": 1, "b": 10, "c": 20}
    for x, n in (("a", na), ("b", nb), ("c", nc), ("out", nc)):
        lines += [f"mul.wide.u32 %d50, %r0, {n * size};", f"add.s64 %{x}, %{x}, %d50;"]
        if x != "out":
            kind = f"ld.global.b{8 * size}"
            lines += [f"{kind} {source}{first[x] + k}, [%{x}+{k * size}];" for k in range(n)]
    if wide or words == "f32":
        kind, reg = ("f64", "%q") if wide else ("f32", "%f")
        typed = {x: [f"{reg}{first[x] + k}" for k in range(n)] for x, n in (("a", na), ("b", nb), ("c", nc))}
        for x in "abc" if wide else "c":
            lines += [f"mov.b{8 * size} {t}, {source}{first[x] + k};" for k, t in enumerate(typed[x])]
    groups = []
    for x, n, base in (("out", nc, 30), ("a", na, 1), ("b", nb, 10), ("c", nc, 20)):
        prefix = "%q" if wide else "%f" if words == "f32" and x in ("out", "c") else "%r"
        groups.append("{" + ", ".join(f"{prefix}{base + k}" for k in range(n)) + "}")
    lines.append(f"{name} {', '.join(groups)};")
    prefix = "%q" if wide else "%f" if words == "f32" else "%r"
    lines += [f"st.global.b{8 * size} [%out+{k * size}], {prefix}{30 + k};" for k in range(nc)]
    return "\n".join(lines)


def program(name, registers, words, wide=False):
    return kernel(body(name, registers, words, wide), ["out", "a", "b", "c"], ".reg .f64 %q<40>;")


FORMS = [
    *[(16, k, t, t, c, "") for t, k, c in itertools.product(["f16"], [8, 16], ["f16", "f32"])],
    *[(16, k, "bf16", "bf16", "f32", "") for k in (8, 16)],
    *[(16, k, "tf32", "tf32", "f32", "") for k in (4, 8)],
    *[(m, k, "f64", "f64", "f64", "") for m, k in ((8, 4), (16, 4), (16, 8), (16, 16))],
    *[(16, k, a, b, c, "") for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")
      for c in ("f16", "f32")],
    *[(m, k, a, b, "s32", s) for m, k in ((8, 16), (16, 16), (16, 32)) for a in ("s8", "u8")
      for b in ("s8", "u8") for s in ("", "satfinite")],
    *[(m, k, a, b, "s32", s) for m, k in ((8, 32), (16, 32), (16, 64)) for a in ("s4", "u4")
      for b in ("s4", "u4") for s in ("", "satfinite")],
    *[(m, k, "b1", "b1", "s32", s) for m, k in ((8, 128), (16, 128), (16, 256)) for s in ("and", "xor")],
]  # fmt: skip


def name_of(m, k, a, b, c, extra):
    saturate = ".satfinite" if extra == "satfinite" else ""
    bits = f".{extra}.popc" if extra in ("and", "xor") else ""
    return f"mma.sync.aligned.m{m}n8k{k}.row.col{saturate}.{c}.{a}.{b}.{c}{bits}"


def multiply(form, a, b, c, **options):
    """Run a form on warps of matrices a (W, m, k), b (W, k, 8), c (W, m, 8); return D as stored numbers."""
    m, k, ka, kb, kc, _ = form
    wide = kc == "f64"
    na, nb, nc = m * k // 32, k * 8 // 32, m * 8 // 32
    width = {"f16": 16, "f64": 64}.get(kc, 32)
    kind_c = {"f16": "f16", "f64": "f64"}.get(kc)
    warps = len(a)
    if kc == "f32":
        bits_c = c.astype(np.float32).view(np.uint32)
    elif kc == "s32":
        bits_c = c.astype(np.int64).astype(np.uint32)
    else:
        bits_c = encode(c, kind_c)
    fa = np.stack([
        fragment(encode(a[w], ka), lambda x, i: place_a(m, k, ka, x, i), na, BITS[ka]) for w in range(warps)
    ])  # fmt: skip
    fb = np.stack([
        fragment(encode(b[w], kb), lambda x, i: place_b(k, kb, x, i), nb, BITS[kb]) for w in range(warps)
    ])  # fmt: skip
    fc = np.stack([fragment(bits_c[w], place_c, nc, width) for w in range(warps)])
    registers = (fa.shape[2], fb.shape[2], fc.shape[2])
    block = options.pop("block", 64)
    text = program(name_of(*form), registers, kc, wide)
    assert complaint(text) == ""
    result = run(
        text, {"out": (fc.size, fc.dtype), "a": fa, "b": fb, "c": fc}, grid=warps * 32 // block, block=block,
        **options,
    )  # fmt: skip
    stored = result["out"].reshape(warps, 32, -1)
    dtype = {"f16": np.uint16, "f32": np.float32, "f64": np.float64, "s32": np.int32}[kc]
    lanes = np.ascontiguousarray(stored).view(dtype)
    d = np.zeros((warps, m, 8), dtype)
    for lane in range(32):
        for i in range(nc):
            r, col = place_c(lane, i)
            d[:, r, col] = lanes[:, lane, i]
    assert result.rules == [], result.outcome.findings
    return d, result


@pytest.mark.parametrize("form", FORMS, ids=lambda f: name_of(*f)[17:])
def test_every_shape_and_type(form):
    m, k, ka, kb, kc, extra = form
    a, b = draw(ka, (4, m, k)), draw(kb, (4, k, 8))
    if kc == "s32":
        c = RNG.integers(-(1 << 31), 1 << 31, (4, m, 8)).astype(np.float64)
        c[0] = (1 << 31) - 5  # sums leave the range
        c[1] = -(1 << 31) + 3
    else:
        c = RNG.standard_normal((4, m, 8)).astype({"f16": np.float16}.get(kc, np.float32)).astype(np.float64)
    d, result = multiply(form, a, b, c)
    product = (a[:, :, :, None] != b[:, None, :, :]).sum(axis=2) if extra == "xor" else np.matmul(a, b)
    total = product + c
    if kc == "s32":
        whole = total.astype(np.int64)
        want = np.clip(whole, -(1 << 31), (1 << 31) - 1) if extra == "satfinite" else whole
        np.testing.assert_array_equal(d, want.astype(np.int32))
    elif kc == "f16":
        np.testing.assert_array_equal(d, total.astype(np.float16).view(np.uint16))
    elif kc == "f32":
        np.testing.assert_array_equal(d, total.astype(np.float32))
    else:
        np.testing.assert_allclose(d, total, rtol=1e-13, atol=1e-13)
    assert result.outcome.counters[0].warp_instructions["tensor"] == 4


def test_rounding_happens_once_and_at_the_end():
    """2**24 + 1 + 1 is right only if the two ones meet before the sum is rounded."""
    form = (16, 16, "bf16", "bf16", "f32", "")
    a, b, c = np.zeros((2, 16, 16)), np.zeros((2, 16, 8)), np.full((2, 16, 8), 2.0**24)
    a[:, :, :2] = 1
    b[:, :2, :] = 1
    assert (multiply(form, a, b, c)[0] == 2.0**24 + 2).all()


def test_infinities_and_nan_are_ptx_nan():
    form = (16, 16, "f16", "f16", "f32", "")
    a, b, c = np.zeros((2, 16, 16)), np.ones((2, 16, 8)), np.zeros((2, 16, 8))
    a[:, 0, 0], a[:, 1, 0], a[:, 1, 1] = np.inf, np.inf, -np.inf
    d, _ = multiply(form, a, b, c)
    assert (d[:, 0] == np.inf).all()
    assert (d[:, 1].view(np.uint32) == 0x7FFFFFFF).all()
    assert (d[:, 2:] == 0).all()
    half, _ = multiply((16, 16, "f16", "f16", "f16", ""), a, b, c)
    assert (half[:, 1] == 0x7FFF).all()


def test_operands_may_be_the_accumulator_and_uniform():
    text = kernel(
        """
        mov.u32 %r0, %tid.x;
        mov.f32 %f1, 0f3F800000;
        mov.b32 %r1, 0x3c003c00;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1},
            {%r1, %r1}, {%f1, %f1, 0f40000000, %f1};
        add.f32 %f1, %f1, %f3;
        mul.wide.u32 %d1, %r0, 4;
        add.s64 %out, %out, %d1;
        st.global.f32 [%out], %f1;
        """,
        ["out"],
    )
    assert (run(text, {"out": (96, np.float32)}, block=96)["out"] == 17 + 18).all()


def test_warps_that_part_in_a_chequered_pattern():
    """Warps take one of two paths by the sum of CTA and warp, so that no cohort is a rectangle."""
    form = (16, 16, "bf16", "bf16", "f32", "")
    name = name_of(*form)
    text = program(name, (4, 2, 4), "f32")
    start = text.index(name)
    product = text[start : text.index(";", start) + 1]
    other = product.replace("{%f20, %f21, %f22, %f23}", "{%f24, %f24, %f24, %f24}")
    text = text.replace(
        product,
        f"""shr.u32 %r53, %r52, 5;
        add.u32 %r53, %r53, %r50;
        and.b32 %r53, %r53, 1;
        setp.eq.u32 %p1, %r53, 0;
        mov.b32 %f24, 0f00000000;
        @%p1 bra EVEN;
        {product}
        bra OUT;
        EVEN:
        {other}
        OUT:""",
    )
    assert complaint(text) == ""
    a, b = draw("bf16", (12, 16, 16)), draw("bf16", (12, 16, 8))
    c = RNG.standard_normal((12, 16, 8)).astype(np.float32)
    fa = np.stack([
        fragment(encode(x, "bf16"), lambda lane, i: place_a(16, 16, "bf16", lane, i), 8, 16) for x in a
    ])  # fmt: skip
    fb = np.stack(
        [fragment(encode(x, "bf16"), lambda lane, i: place_b(16, "bf16", lane, i), 4, 16) for x in b]
    )
    fc = np.stack([fragment(x.view(np.uint32), place_c, 4, 32) for x in c])
    for seed in (0, 1, 2):
        result = run(
            text, {"out": (fc.size, np.float32), "a": fa, "b": fb, "c": fc}, grid=3, block=128, seed=seed
        )
        assert result.rules == []
        odd = (np.arange(12) // 4 + np.arange(12) % 4) % 2 == 1
        want = (np.matmul(a, b) + np.where(odd[:, None, None], c, 0)).astype(np.float32)
        stored = result["out"].reshape(12, 32, 4)
        for lane in range(32):
            for i in range(4):
                np.testing.assert_array_equal(stored[:, lane, i], want[:, *place_c(lane, i)])


def test_warp_that_is_not_whole_is_found():
    text = kernel(
        """
        mov.u32 %r0, %tid.x;
        mov.b32 %r1, 0;
        mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r2, %r3}, {%r1}, {%r1}, {%r1, %r1};
        """,
        ["out"],
    )
    assert run(text, {"out": (40, np.float32)}, block=40).rules == ["inactive-lane"]


@pytest.mark.parametrize(
    ("name", "registers", "reason"),
    [
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e3m2.f32", (4, 2, 4), "f8f6f4"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.s8.s8.f32", (2, 1, 4), "accumulators"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.f16.bf16.f32", (2, 1, 4), "types"),
    ],
)
def test_other_forms_are_refused_by_name(name, registers, reason):
    with pytest.raises(UnsupportedInstruction, match=reason):
        run(program(name, registers, "f32"), {x: np.zeros(256, np.uint32) for x in ("out", "a", "b", "c")})


def test_sparse_form_is_refused_by_name():
    text = kernel(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, "
        "{%r1, %r2}, {%r3, %r4}, {%f1, %f2, %f3, %f4}, %r5, 0x0;",
        [],
    )
    with pytest.raises(UnsupportedInstruction, match="sparse"):
        run(text, {})


@pytest.mark.parametrize("block", [32, 96])
def test_movmatrix(block):
    text = kernel(
        """
        mov.u32 %r0, %tid.x;
        mul.wide.u32 %d1, %r0, 4;
        add.s64 %d2, %x, %d1;
        add.s64 %out, %out, %d1;
        ld.global.b32 %r1, [%d2];
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
        st.global.b32 [%out], %r2;
        """,
        ["out", "x"],
    )
    x = RNG.integers(0, 1 << 16, (block // 32, 8, 8)).astype(np.uint16)
    result = run(text, {"out": (block * 2, np.uint16), "x": x}, block=block)
    assert result.rules == []
    np.testing.assert_array_equal(result["out"].reshape(-1, 8, 8), x.swapaxes(1, 2))


def quad_element(order, kind, lane, i):
    """Product, row and column of element i of a lane of mma.m8n8k4 (ISA 9.7.14.5.1)."""
    high = 0 if lane < 16 else 4
    which = lane % 16 // 4
    if kind == "a":
        return which, *((lane % 4 + high, i) if order == "row" else (i % 4 + high, lane % 4))
    if kind == "b":
        return which, *((lane % 4, i + high) if order == "row" else (i, lane % 4 + high))
    if kind == "f16":
        return which, lane % 4 + high, i
    return which, (lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1)


@pytest.mark.parametrize(("d", "c"), [("f32", "f32"), ("f16", "f16"), ("f32", "f16")])
@pytest.mark.parametrize("orders", list(itertools.product(("row", "col"), repeat=2)))
def test_four_small_products_of_a_warp(orders, d, c):
    name = f"mma.sync.aligned.m8n8k4.{orders[0]}.{orders[1]}.{d}.f16.f16.{c}"
    nd, nc = 8 if d == "f32" else 4, 8 if c == "f32" else 4
    prefix = {"f32": "%f", "f16": "%r"}
    groups = [[f"{prefix[d]}{k}" for k in range(nd)], ["%r10", "%r11"], ["%r12", "%r13"],
              [f"{prefix[c]}{20 + k}" for k in range(nc)]]  # fmt: skip
    lines = ["mov.u32 %r40, %tid.x;"]
    for x, size in (("a", 8), ("b", 8), ("c", 4 * nc), ("out", 4 * nd)):
        lines += [f"mul.wide.u32 %d1, %r40, {size};", f"add.s64 %{x}, %{x}, %d1;"]
    lines += ["ld.global.v2.b32 {%r10, %r11}, [%a];", "ld.global.v2.b32 {%r12, %r13}, [%b];"]
    lines += [f"ld.global.b32 {r}, [%c+{4 * k}];" for k, r in enumerate(groups[3])]
    lines.append(f"{name} {', '.join('{' + ', '.join(g) + '}' for g in groups)};")
    lines += [f"st.global.b32 [%out+{4 * k}], {r};" for k, r in enumerate(groups[0])]
    text = kernel("\n".join(lines), ["out", "a", "b", "c"])
    assert complaint(text) == ""
    numpy = {"f16": np.float16, "f32": np.float32}
    values = {"a": RNG.standard_normal((2, 4, 8, 4)), "b": RNG.standard_normal((2, 4, 4, 8)),
              "c": RNG.standard_normal((2, 4, 8, 8))}  # fmt: skip
    inputs = {}
    for x, order, kind in (("a", orders[0], "a"), ("b", orders[1], "b"), ("c", "", c)):
        dtype = numpy[c] if x == "c" else np.float16
        values[x] = values[x].astype(dtype)
        inputs[x] = np.zeros((2, 32, 8 if x == "c" else 4), dtype)
        for lane in range(32):
            for i in range(inputs[x].shape[2]):
                which, row, column = quad_element(order, kind, lane, i)
                inputs[x][:, lane, i] = values[x][:, which, row, column]
    result = run(text, {"out": (64 * 8, numpy[d]), **inputs}, block=64)
    assert result.rules == []
    wide = {x: v.astype(np.float64) for x, v in values.items()}
    total = (np.matmul(wide["a"], wide["b"]) + wide["c"]).astype(numpy[d])
    got = result["out"].reshape(2, 32, 8)
    for lane in range(32):
        for i in range(8):
            which, row, column = quad_element("", d, lane, i)
            np.testing.assert_array_equal(got[:, lane, i], total[:, which, row, column])
