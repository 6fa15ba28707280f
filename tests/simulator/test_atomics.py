"""Atomic operations against a loop over the lanes in order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.kernels import lanes

RNG = np.random.default_rng(5)
COUNT = 96
BUCKETS = 7
KEYS = RNG.integers(0, BUCKETS, COUNT, dtype=np.uint32)
LOAD_KEY = "mul.wide.u32 %d1, %r0, 4;\nadd.s64 %d2, %d1, %key;\nld.global.u32 %r2, [%d2];\n"


def step(op, kind, old, b, c):
    """One atomic operation on NumPy scalars of the right dtype."""
    with np.errstate(over="ignore"):
        match op:
            case "add":
                return old + b
            case "min":
                return min(old, b)
            case "max":
                return max(old, b)
            case "and":
                return old & b
            case "or":
                return old | b
            case "xor":
                return old ^ b
            case "exch":
                return b
            case "cas":
                return c if old == b else old
            case "inc":
                return old * 0 if old >= b else old + old.dtype.type(1)
            case "dec":
                return b if old == 0 or old > b else old - old.dtype.type(1)
    raise AssertionError(op, kind)


CASES = [
    *(("add", k) for k in ("u32", "s32", "u64", "f32", "f64")),
    *((op, k) for op in ("min", "max") for k in ("u32", "s32", "u64", "s64")),
    *((op, k) for op in ("and", "or", "xor") for k in ("b32", "b64")),
    *((op, k) for op in ("exch", "cas") for k in ("b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_atom(op, kind, space):
    size = int(kind[1:]) // 8
    dtype = np.dtype({"u": "uint", "s": "int", "b": "uint", "f": "float"}[kind[0]] + kind[1:])
    if kind[0] == "f":
        b = RNG.standard_normal(COUNT).astype(dtype)
        start = RNG.standard_normal(BUCKETS).astype(dtype)
    else:
        high = 6 if op in ("cas", "inc", "dec") else 2 ** (8 * size) - 1
        b = RNG.integers(0, high, COUNT, dtype=f"u{size}").view(dtype)
        start = RNG.integers(0, high, BUCKETS, dtype=f"u{size}").view(dtype)
    c = RNG.integers(0, 6, COUNT, dtype=f"u{size}").view(dtype)
    register = {4: "%r", 8: "%d"}[size]
    value, third, result = f"{register}10", f"{register}11", f"{register}12"
    bits = f"b{8 * size}"
    body = (
        LOAD_KEY
        + f"""
    mul.wide.u32 %d3, %r0, {size};
    add.s64 %d4, %d3, %b; ld.global.{bits} {value}, [%d4];
    add.s64 %d5, %d3, %c; ld.global.{bits} {third}, [%d5];
    mul.wide.u32 %d6, %r2, {size};
    """
    )
    modifiers = "relaxed.gpu"
    if space == "shared":
        # CTA 0 alone works; it copies the buckets to shared memory and back.
        body += f"""
        mov.u32 %r20, s;
        mad.lo.u32 %r21, %r2, {size}, %r20;
        setp.lt.u32 %p1, %r0, {BUCKETS};
        mad.lo.u32 %r22, %r0, {size}, %r20;
        add.s64 %d7, %d3, %start;
        @%p1 ld.global.{bits} {register}13, [%d7];
        @%p1 st.shared.{bits} [%r22], {register}13;
        bar.sync 0;
        """
        where, name = "[%r21]", f"atom.{modifiers}.shared.{op}.{kind}"
    else:
        body += "add.s64 %d7, %d6, %start;\n"
        where = "[%d7]"
        name = f"atom.{modifiers}.{'global.' if space == 'global' else ''}{op}.{kind}"
    body += f"{name} {result}, {where}, {value}{', ' + third if op == 'cas' else ''};\n"
    if space == "shared":
        body += (
            f"bar.sync 0;\n@%p1 ld.shared.{bits} {register}14, [%r22];\nadd.s64 %d8, %d3, %start;\n"
            f"@%p1 st.global.{bits} [%d8], {register}14;\n"
        )
    body += f"add.s64 %d9, %d3, %old; st.global.{bits} [%d9], {result};\nmov.u32 %r1, 0;"
    inputs = {"key": KEYS, "b": b, "c": c, "start": start.copy(), "old": np.zeros(COUNT, dtype)}
    got = lanes(
        body,
        COUNT,
        COUNT if space == "shared" else 32,
        inputs=inputs,
        variables=".shared .align 8 .b8 s[64];",
    )
    assert got.rules == [], got.outcome.findings
    state = start.copy()
    olds = np.zeros(COUNT, dtype)
    for n in range(COUNT):
        olds[n] = state[KEYS[n]]
        state[KEYS[n]] = step(op, kind, state[KEYS[n]], b[n], c[n])
    raw = f"u{size}"
    np.testing.assert_array_equal(got["start"].view(raw), state.view(raw))
    np.testing.assert_array_equal(got["old"].view(raw), olds.view(raw))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "f32"])
def test_red_add_with_many_lanes_on_one_address(kind):
    size = int(kind[1:]) // 8
    register = "%d3" if size == 8 else "%r3"
    body = "mov.u32 %r1, 0;\n" + (
        "cvt.u64.u32 %d3, %r0;\n"
        if size == 8
        else "cvt.rn.f32.u32 %f1, %r0;\nmov.b32 %r3, %f1;\n"
        if kind == "f32"
        else "mov.u32 %r3, %r0;\n"
    )
    body += f"red.global.add.{kind} [%x], {register};"
    dtype = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "f32": np.float32}[kind]
    result = lanes(body, 512, inputs={"x": np.full(1, 3, dtype)})
    assert result.rules == []
    assert result["x"][0] == 3 + 511 * 256


def test_returned_sums_are_a_running_total():
    body = "add.u32 %r3, %r0, 1;\natom.global.add.u32 %r1, [%x], %r3;"
    result = lanes(body, 512, inputs={"x": np.full(1, 10, np.uint32)})
    n = np.arange(512)
    np.testing.assert_array_equal(result["out"], 10 + n * (n + 1) // 2)


def test_packed_and_half_precision_adds():
    x = np.zeros(4, ml_dtypes.bfloat16)
    body = (
        "mov.u32 %r1, 0x3f804000;\nred.global.add.noftz.bf16x2 [%x], %r1;\nmov.u16 %h1, 0x3f80;\n"
        "red.global.add.noftz.bf16 [%x+4], %h1;"
    )
    result = lanes(body, 32, inputs={"x": x.view(np.uint16)})
    assert result.rules == []
    np.testing.assert_array_equal(result["x"].view(ml_dtypes.bfloat16).astype(float), [64, 32, 32, 0])


def test_vector_red():
    body = (
        "mov.f32 %f1, 0f3F800000;\nmov.f32 %f2, 0f40000000;\n"
        "red.global.add.v2.f32 [%x], {%f1, %f2};\nmov.u32 %r1, 0;"
    )
    result = lanes(body, 64, inputs={"x": np.zeros(2, np.float32)})
    assert result.rules == []
    np.testing.assert_array_equal(result["x"], [64, 128])


def test_atomic_faults():
    assert lanes("atom.global.add.u32 %r1, [%x+4], 1;", 32, inputs={"x": np.zeros(1, np.uint32)}).rules == [
        "out-of-bounds"
    ]
    assert lanes("atom.global.add.u32 %r1, [%x+2], 1;", 32, inputs={"x": np.zeros(2, np.uint32)}).rules == [
        "misaligned"
    ]
    variables = ".shared .align 4 .b8 s[4];"
    result = lanes("mov.u32 %r2, s;\natom.shared.add.u32 %r1, [%r2], 1;", 32, variables=variables)
    assert result.rules == ["uninitialized-read"]


def test_spin_lock_guards_a_counter():
    # One lane of each CTA takes the lock, adds to a plain counter and gives the lock back.
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, %tid.x;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra OUT;
    AGAIN:
    atom.acquire.gpu.global.cas.b32 %r3, [%x], 0, 1;
    setp.ne.u32 %p2, %r3, 0;
    @%p2 bra AGAIN;
    ld.volatile.global.u32 %r4, [%x+4];
    add.u32 %r4, %r4, 1;
    st.volatile.global.u32 [%x+4], %r4;
    st.release.gpu.global.u32 [%x], 0;
    OUT:
    """
    result = lanes(body, 640, 64, inputs={"x": np.zeros(2, np.uint32)}, chunk_lanes=128)
    assert result.rules == [], result.outcome.findings
    assert result["x"].tolist() == [0, 10]
