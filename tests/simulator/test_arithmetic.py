"""Arithmetic as the engine executes it, bit for bit against the registry's functions called directly.

The functions themselves are tested against oracles elsewhere; here operands, widths, immediates,
predicates, halves, pairs and NaN handling of generated code are at stake.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.simulator.kernels import HEADER, kernel, lanes, run
from workbench.isa.ptx import parse
from workbench.simulator import KernelLaunch, Memory, arith, simulate_module
from workbench.simulator.arith.registry import forms
from workbench.simulator.emit_alu import _HANDLERS

LANES = 256
RNG = np.random.default_rng(11)
SPECIAL32 = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x3F800000,
     0xBF800000,
     0x00800000, 0x7F7FFFFF, 0x007FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F7FFFFF, 0x4B800000], np.uint32
)  # fmt: skip


def operand_bits(k: int) -> np.ndarray:
    """64-bit patterns for source `k`: random, few-bit floats, special values."""
    rng = np.random.default_rng(100 + k)
    bits = rng.integers(0, 2**64, LANES, dtype=np.uint64)
    words = bits.view(np.uint32).reshape(LANES, 2)
    words[:60, 0] = rng.standard_normal(60).astype(np.float32).view(np.uint32)
    words[60:120, 0] = rng.choice(SPECIAL32, 60)
    words[60:120, 1] = rng.choice(SPECIAL32, 60)
    words[120:150] = rng.integers(0, 8, (30, 2))
    return bits


OPERANDS = [operand_bits(k) for k in range(4)]
CLASS = {"bool": "p", "uint8": "h", "int8": "h", "uint16": "h", "int16": "h", "uint32": "r", "int32": "r",
         "float32": "r", "uint64": "d", "int64": "d", "float64": "d"}  # fmt: skip
LOAD = {"h": "ld.global.b16", "r": "ld.global.b32", "d": "ld.global.b64"}
STORE = {"h": "st.global.b16", "r": "st.global.b32", "d": "st.global.b64"}


def typed(bits: np.ndarray, dtype: str) -> np.ndarray:
    """What a register of the operand's class shows as `dtype`, as (1, lanes)."""
    if dtype == "bool":
        return (bits & np.uint64(1)).astype(bool)[None]
    size = np.dtype(dtype).itemsize
    return bits.astype(f"u{size}").view(dtype)[None]


def expected(function, semantics, values) -> list[np.ndarray]:
    with arith.quiet():
        results = function(*values)
    results = results if isinstance(results, tuple) else (results,)
    out = []
    for array, dtype in zip(results, semantics.results, strict=True):
        array = np.broadcast_to(array, (1, LANES))
        if not semantics.canonical and dtype == "float32":
            array = arith.canonicalise_f32(array)
        if not semantics.canonical and dtype == "uint64":  # f32x2
            array = arith.canonicalise_f32(np.ascontiguousarray(array).view(np.float32)).view(np.uint64)
        if not semantics.canonical and dtype == "float64":
            array = arith.canonicalise_f64(array)
        if dtype == "bool":
            out.append(array.astype(np.uint64)[0])
            continue
        register = {"h": 2, "r": 4, "d": 8}[CLASS[dtype]]
        kind = array.dtype.kind if array.dtype.kind in "iu" else "u"
        raw = (
            np.ascontiguousarray(array)
            if kind in "iu" and array.dtype.kind in "iu"
            else np.ascontiguousarray(array).view(f"u{array.itemsize}")
        )
        out.append(raw.astype(f"{kind}{register}").view(f"u{register}").astype(np.uint64)[0])
    return out


def program(cases) -> str:
    """One entry a case: sources from `in0..3`, results to `out`, 16 bytes a lane."""
    entries = []
    for n, (text, semantics, immediate) in enumerate(cases):
        name, _, rest = text.partition(" ")
        names = [x.strip() for x in rest.split(",")]
        destination, sources = names[0], names[1:]
        body, given = [], []
        for k, dtype in enumerate(semantics.operands):
            cls = CLASS[dtype]
            if immediate is not None and k == len(semantics.operands) - 1:
                given.append(str(immediate))
                continue
            if cls == "p":
                body += [
                    f"ld.global.b32 %r{k}, [%in{k}];",
                    f"and.b32 %r{k}, %r{k}, 1;",
                    f"setp.eq.u32 %p{k}, %r{k}, 1;",
                ]
            else:
                body.append(f"{LOAD[cls]} %{cls}{k}, [%in{k}];")
            given.append(f"%{cls}{k}")
        given += sources[len(semantics.operands) :]
        results = [f"%{CLASS[d]}{10 + k}" for k, d in enumerate(semantics.results)]
        into = "|".join(results) if "|" in destination else results[0]
        body.append(f"{name} {into}, {', '.join(given)};")
        for k, (register, dtype) in enumerate(zip(results, semantics.results, strict=True)):
            cls = CLASS[dtype]
            if cls == "p":
                body += [
                    f"selp.b32 %r{20 + k}, 1, 0, {register};",
                    f"st.global.b32 [%o+{8 * k}], %r{20 + k};",
                ]
            else:
                body.append(f"{STORE[cls]} [%o+{8 * k}], {register};")
        pointers = "\n".join(
            f"ld.param.u64 %in{k}, [q{k}];\nadd.s64 %in{k}, %in{k}, %lane8;" for k in range(4)
        )
        entries.append(f"""
.visible .entry k{n}(.param .u64 q0, .param .u64 q1, .param .u64 q2, .param .u64 q3, .param .u64 q4)
{{ .reg .pred %p<30>; .reg .b16 %h<30>; .reg .b32 %r<30>; .reg .b64 %d<30>; .reg .b64 %in<4>;
.reg .b64 %o; .reg .b64 %lane8;
mov.u32 %r29, %tid.x; mul.wide.u32 %lane8, %r29, 8; {pointers}
ld.param.u64 %o, [q4]; mad.wide.u32 %o, %r29, 16, %o;
{chr(10).join(body)}
ret; }}""")
    return HEADER + "\n".join(entries)


def check(cases) -> None:
    module = parse(program(cases))
    memory = Memory(1 << 24)
    for k, bits in enumerate(OPERANDS):
        memory.allocate(f"in{k}", 8 * LANES, initialized=True)[:] = bits.view(np.uint8)
    memory.allocate("out", 16 * LANES)
    raw = b"".join(struct.pack("<Q", memory.address(n)) for n in ("in0", "in1", "in2", "in3", "out"))
    for n, (text, semantics, immediate) in enumerate(cases):
        memory.view("out")[:] = 0
        outcome = simulate_module(module, [KernelLaunch(f"k{n}", (1, 1, 1), (LANES, 1, 1), raw)], memory)
        assert outcome.findings == (), text
        values = [typed(bits, dtype) for bits, dtype in zip(OPERANDS, semantics.operands, strict=False)]
        if immediate is not None:
            size = 8 if semantics.operands[-1] == "bool" else np.dtype(semantics.operands[-1]).itemsize
            pattern = np.full(LANES, immediate & (2 ** (8 * size) - 1), np.uint64)
            values[-1] = typed(pattern, semantics.operands[-1])
        got = memory.view("out").view(np.uint64).reshape(LANES, 2)
        for k, want in enumerate(expected(semantics.function, semantics, values)):
            np.testing.assert_array_equal(got[:, k], want, err_msg=f"{text} with {immediate}")


def selection():
    """Every form that the engine writes out itself, and a sample of all others."""
    rng = np.random.default_rng(4)
    chosen = []
    for form in forms():
        s = form.semantics
        if s.carry_in or s.carry_out or form.immediate_required:
            continue
        opcode = form.text.split(".")[0].split(" ")[0]
        share = 0.05 if opcode in ("set", "setp") else 0.25 if opcode == "cvt" else 1.0
        if opcode == "setp" and form.text.count(".") == 2:
            share = 1.0
        if "{" in form.text or rng.random() > share:
            continue
        chosen.append((form.text, s, None))
    return chosen


SELECTED = selection()
GROUPS = 24


@pytest.mark.parametrize("group", range(GROUPS))
def test_forms(group):
    check(SELECTED[group::GROUPS])


def immediates():
    for text, s, _ in SELECTED:
        opcode = text.split(".")[0]
        last = s.operands[-1]
        if (
            opcode in _HANDLERS
            and opcode not in ("cvt", "selp", "mov")
            and last not in ("bool", "float32", "float64")
        ):
            if any(x in text for x in ("f16", "f32", "f64")):
                continue
            for value in (
                (0, 1, 5, 16, 0xFFFF0000) if opcode not in ("shl", "shr") else (0, 1, 16, 31, 33, 70)
            ):
                yield text, s, value if np.dtype(last).itemsize > 2 else value & 0x7FFF


IMMEDIATES = list(immediates())


@pytest.mark.parametrize("group", range(4))
def test_integer_immediates(group):
    check(IMMEDIATES[group::4])


def bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_halves_and_packs_round_trip():
    body = """
    mul.wide.u32 %d1, %r0, 8; add.s64 %d1, %d1, %x; ld.global.b64 %d2, [%d1];
    mov.b64 {%r2, %r3}, %d2;
    mov.b32 {%h1, %h2}, %r2;
    mov.b32 {%h3, %h4}, %r3;
    mov.b32 %r4, {%h4, %h1};
    mov.b64 %d3, {%h2, %h3, %h4, %h1};
    mov.b64 %d4, {%r3, %r2};
    mov.b64 {_, %r5}, %d3;
    mov.b32 %r6, {%h1, %h2};
    xor.b32 %r7, %r6, %r2;
    mul.wide.u32 %d5, %r0, 32; add.s64 %d5, %d5, %y;
    st.global.v2.b64 [%d5], {%d3, %d4};
    st.global.v4.b32 [%d5+16], {%r4, %r5, %r7, %r3};
    mov.u32 %r1, 0;
    """
    x = OPERANDS[0][:64]
    y = lanes(body, 64, inputs={"x": x, "y": np.zeros(256, np.uint64)})["y"]
    h = x.view(np.uint16).reshape(64, 4)
    r = x.view(np.uint32).reshape(64, 2)
    got16, got32 = y.view(np.uint16).reshape(64, 16), y.view(np.uint32).reshape(64, 8)
    np.testing.assert_array_equal(got16[:, :4], h[:, [1, 2, 3, 0]])
    np.testing.assert_array_equal(got32[:, 2:4], r[:, ::-1])
    np.testing.assert_array_equal(got16[:, 8:10], h[:, [3, 0]])
    np.testing.assert_array_equal(got16[:, 10:12], h[:, [3, 0]])
    assert not got32[:, 6].any()


def test_bytes_of_a_word():
    body = """
    .reg .b8 %b<4>;
    mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d1, %x; ld.global.b32 %r2, [%d1];
    mov.b32 {%b0, %b1, %b2, %b3}, %r2;
    mov.b32 %r1, {%b3, %b2, %b1, %b0};
    """
    x = OPERANDS[1].view(np.uint32)[:64]
    np.testing.assert_array_equal(lanes(body, 64, inputs={"x": x})["out"], x.byteswap())


def test_float_results_keep_their_bits_across_blocks_and_moves():
    # A register that holds raw bits on one path and a float result on the other must not lose a NaN payload.
    body = """
    mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d1, %x; ld.global.b32 %r2, [%d1];
    and.b32 %r3, %r0, 1;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra RAW;
    add.f32 %f1, %r2, %r2;
    mov.b32 %r1, %f1;
    bra OUT;
    RAW:
    mov.b32 %r1, %r2;
    OUT:
    """.replace("add.f32 %f1, %r2, %r2", "mov.b32 %f2, %r2; add.f32 %f1, %f2, %f2")
    x = np.full(64, 0xFFC12345, np.uint32)
    np.testing.assert_array_equal(lanes(body, 64, inputs={"x": x})["out"], [0xFFC12345, 0x7FFFFFFF] * 32)


def test_selected_float_results():
    body = """
    mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d1, %x; ld.global.b32 %r1, [%d1];
    mov.b32 %f2, %r1;
    setp.lt.u32 %p1, %r0, 16;
    @%p1 add.f32 %f2, %f2, 0f3F800000;
    mov.b32 %r1, %f2;
    """
    x = np.full(64, 0xFFC12345, np.uint32)
    np.testing.assert_array_equal(
        lanes(body, 64, inputs={"x": x})["out"], [0x7FFFFFFF] * 16 + [0xFFC12345] * 48
    )


NARROW = {
    "bf16 fma": "mov.b32 {%h1, %h2}, %r2; mov.b32 {%h3, %h4}, %r3; mov.b32 %f3, %r4; "
    "fma.rn.f32.bf16 %f1, %h1, %h4, %f3;",
    "shifted": "shl.b32 %r2, %r2, 16; and.b32 %r3, %r3, 0xffff0000; "
    "mov.b32 %f4, %r2; mov.b32 %f2, %r3; mov.b32 %f3, %r4; fma.rn.f32 %f1, %f4, %f2, %f3;",
}


@pytest.mark.parametrize("case", NARROW)
def test_products_of_bf16_are_rounded_once_even_when_they_overflow(case):
    rng = np.random.default_rng(8)
    n = 4096
    a, b = (rng.integers(0, 2**32, n, dtype=np.uint32) for _ in range(2))
    c = rng.integers(0, 2**32, n, dtype=np.uint32)
    # halves where the product over- or underflows and c nearly cancels it
    a[:512] = (a[:512] & 0x007F007F) | 0x7F007F00
    b[:512] = (b[:512] & 0x807F807F) | 0x3F803F80
    c[:512] = (c[:512] & 0x007FFFFF) | 0xFF000000
    a[512:1024] = (a[512:1024] & 0x007F007F) | 0x10001000
    b[512:1024] = (b[512:1024] & 0x807F807F) | 0x30003000
    c[512:1024] &= 0x80FFFFFF
    body = """
    mul.wide.u32 %d1, %r0, 4;
    add.s64 %d2, %d1, %a; ld.global.b32 %r2, [%d2];
    add.s64 %d2, %d1, %b; ld.global.b32 %r3, [%d2];
    add.s64 %d2, %d1, %c; ld.global.b32 %r4, [%d2];
    """ + NARROW[case] + "\nmov.b32 %r1, %f1;"  # fmt: skip
    result = lanes(body, n, 256, inputs={"a": a, "b": b, "c": c})
    x = bf16(a & 0xFFFF)
    y = bf16(b >> 16)
    item = parse(kernel("fma.rn.f32 %f1, %f2, %f3, %f4;", ["out"])).kernels[0].instructions[1]
    with arith.quiet():
        want = arith.canonicalise_f32(
            arith.lookup(item).function(x[None], y[None], c.view(np.float32)[None])
        )[0]
    np.testing.assert_array_equal(result["out"], want.view(np.uint32))


SCALED = {
    "low half shifted": "shl.b32 %r6, %r5, 16; mov.b32 %f2, %r6; fma.rn.f32 %f1, %f2, %f3, %f4;",
    "high half masked": "and.b32 %r6, %r5, 0xffff0000; mov.b32 %f2, %r6; fma.rn.f32 %f1, %f3, %f2, %f4;",
    "half converted": "mov.b32 {%h2, %h3}, %r5; cvt.f32.bf16 %f2, %h3; fma.rn.f32 %f1, %f2, %f3, %f4;",
    "product first": "shl.b32 %r6, %r5, 16; mov.b32 %f2, %r6; mul.rn.f32 %f5, %f2, %f2; "
    "fma.rn.f32 %f1, %f5, %f3, %f4;",
}


@pytest.mark.parametrize("case", SCALED)
def test_powers_of_two_times_any_float_are_rounded_once(case):
    rng = np.random.default_rng(17)
    n = 8192
    scale = rng.integers(0, 256, n, dtype=np.uint32)
    b, c = (rng.integers(0, 2**32, n, dtype=np.uint32) for _ in range(2))
    # products near the range of subnormals, and sums that cancel
    scale[:2048] = rng.integers(0, 40, 2048)
    b[:2048] = (b[:2048] & 0x80FFFFFF) | (rng.integers(0, 64, 2048, dtype=np.uint32) << 24)
    c[:2048] &= 0x81FFFFFF
    body = """
    mul.wide.u32 %d1, %r0, 4;
    add.s64 %d2, %d1, %s; ld.global.b32 %r2, [%d2];
    add.s64 %d2, %d1, %b; ld.global.b32 %r3, [%d2];
    add.s64 %d2, %d1, %c; ld.global.b32 %r4, [%d2];
    mov.b32 {%h1, %h4}, %r2; cvt.rn.bf16x2.ue8m0x2 %r5, %h1;
    mov.b32 %f3, %r3; mov.b32 %f4, %r4;
    """
    both = scale | (scale << np.uint32(8))
    got = lanes(body + SCALED[case] + "\nmov.b32 %r1, %f1;", n, 256, inputs={"s": both, "b": b, "c": c})
    x = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int64) - 127)).astype(np.float32)
    with arith.quiet():
        x = x * x if case == "product first" else x
        want = arith.canonicalise_f32(arith.fp32.fma_rn(x, b.view(np.float32), c.view(np.float32)))
    np.testing.assert_array_equal(got["out"], want.view(np.uint32))


def test_packed_f32x2_across_a_loop():
    body = """
    mov.b64 %d1, {%f30, %f31};
    mul.wide.u32 %d9, %r0, 8; add.s64 %d9, %d9, %x;
    ld.global.b64 %d2, [%d9];
    mov.u32 %r2, 0;
    L:
    fma.rn.f32x2 %d1, %d1, %d2, %d2;
    add.rn.f32x2 %d1, %d1, %d2;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 5;
    @%p1 bra L;
    mul.rn.f32x2 %d1, %d1, %d2;
    mul.wide.u32 %d3, %r0, 8; add.s64 %d3, %d3, %y;
    st.global.b64 [%d3], %d1;
    mov.u32 %r1, 0;
    """
    body = "mov.f32 %f30, 0f3F800000; mov.f32 %f31, 0fC0000000;" + body
    rng = np.random.default_rng(2)
    x = rng.standard_normal(128).astype(np.float32)
    got = lanes(body, 64, inputs={"x": x, "y": np.zeros(128, np.float32)})["y"].reshape(64, 2)
    item = parse(kernel("fma.rn.f32 %f1, %f2, %f3, %f4;", ["out"])).kernels[0].instructions[1]
    fma = arith.lookup(item).function
    t = np.tile(np.array([1, -2], np.float32), (64, 1))
    v = x.reshape(64, 2)
    for _ in range(5):
        t = fma(t, v, v) + v
    np.testing.assert_array_equal(got, t * v)


def test_e2m1_weights_times_bf16_activations():
    rng = np.random.default_rng(6)
    packed = rng.integers(0, 2**32, 64, dtype=np.uint32)
    x = rng.standard_normal(64 * 8).astype(np.float32).view(np.uint32) >> 16
    body = """
    .reg .b8 %b<4>;
    mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d1, %w; ld.global.b32 %r2, [%d1];
    mul.wide.u32 %d2, %r0, 16; add.s64 %d2, %d2, %x;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d2];
    mov.b32 {%b0, %b1, %b2, %b3}, %r2;
    mov.f32 %f1, 0f00000000;
    """
    for k in range(4):
        conversion = "cvt.rn.bf16x2.e2m1x2" if k % 2 else "cvt.rn.f16x2.e2m1x2"
        body += f"{conversion} %r20, %b{k}; mov.b32 {{%h1, %h2}}, %r20; mov.b32 {{%h3, %h4}}, %r{10 + k};\n"
        if k % 2:
            body += "fma.rn.f32.bf16 %f1, %h1, %h3, %f1; fma.rn.f32.bf16 %f1, %h2, %h4, %f1;\n"
        else:
            body += (
                "cvt.f32.f16 %f2, %h1; cvt.f32.f16 %f3, %h2; cvt.f32.bf16 %f4, %h3; cvt.f32.bf16 %f5, %h4;\n"
            )
            body += "fma.rn.f32 %f1, %f2, %f4, %f1; fma.rn.f32 %f1, %f3, %f5, %f1;\n"
    body += "mov.b32 %r1, %f1;"
    result = lanes(body, 64, inputs={"w": packed, "x": x.astype(np.uint16)})
    assert result.rules == []
    codes = (packed[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    want = np.zeros(64, np.float32)
    for k in range(8):
        want = (want.astype(np.float64) + values[:, k] * bf16(x).reshape(64, 8)[:, k]).astype(np.float32)
    np.testing.assert_array_equal(result["out"].view(np.float32), want)


def test_carry_chains():
    body = """
    mul.wide.u32 %d1, %r0, 8; add.s64 %d1, %d1, %x; ld.global.v2.u32 {%r2, %r3}, [%d1];
    add.cc.u32 %r4, %r2, 0xfffffff0;
    addc.u32 %r1, %r3, 5;
    """
    x = OPERANDS[0][:64]
    result = lanes(body, 64, inputs={"x": x})
    low, high = x.view(np.uint32).reshape(64, 2).T.astype(np.uint64)
    want = (high + 5 + ((low + 0xFFFFFFF0) >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    np.testing.assert_array_equal(result["out"], want)


def test_run_is_reproducible_after_an_overflow_elsewhere():
    # The flag of an earlier overflow must not change what a later product gives.
    text = kernel(
        "mov.f32 %f1, 0f7F7FFFFF; mul.f32 %f2, %f1, %f1; mov.u16 %h1, 0x3f80;\n"
        "fma.rn.f32.bf16 %f3, %h1, %h1, %f1; st.global.f32 [%out], %f3; st.global.f32 [%out+4], %f2;",
        ["out"],
    )
    got = run(text, {"out": (2, np.float32)}, block=1)["out"]
    assert got.tolist() == [np.float32(3.4028235e38), np.inf]
