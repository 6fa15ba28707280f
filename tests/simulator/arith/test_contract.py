"""What the engine may rely on: shapes, layouts, immutability, legality of forms, look-up."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_operands import FLOATS, PACKED, N, codes, special_codes

from workbench.isa.ptx.model import Imm, Instruction, Pair, Reg, Vector
from workbench.simulator.arith import (
    canonicalise_f32,
    canonicalise_f64,
    destinations,
    forms,
    lookup,
    quiet,
    sources,
)


def instruction(text):
    """Build the instruction of a form's text: letters are registers, numbers immediates."""
    name, _, rest = text.partition(" ")
    opcode, *modifiers = name.split(".")

    def operand(word):
        if "|" in word:
            return Pair(*[Reg(w) for w in word.split("|")])
        return Imm(int(word, 0)) if word[0].isdigit() else Reg(word)

    return Instruction(opcode, tuple(modifiers), tuple(operand(w) for w in rest.split(", ")), line=1)


def call(text, *arrays):
    item = instruction(text)
    semantics = lookup(item)
    assert semantics is not None, text
    with quiet():
        return semantics.function(*[np.atleast_2d(a) for a in arrays])


def tuple_of(result):
    return result if isinstance(result, tuple) else (result,)


def semantics_of(form):
    return form.specialise(0x6C) if form.immediate_required else form.semantics


def random_array(rng, dtype, shape):
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, size), dtype=np.uint8).view(dtype)[..., 0]


def test_shapes_broadcast_and_operands_stay():
    """Every form takes (1, 1), (C, 1), (1, T) and (C, T) arrays, leaves them alone, warns of nothing."""
    rng = np.random.default_rng(1)
    cases = ([(1, 1)] * 6, [(3, 1), (1, 5), (3, 5), (1, 1)], [(4, 5)] * 6, [(1, 5), (3, 1), (1, 1), (1, 5)])
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in forms():
            semantics = semantics_of(form)
            for shapes in cases:
                operands = [
                    random_array(rng, d, shapes[i % len(shapes)]) for i, d in enumerate(semantics.operands)
                ]
                for o in operands:
                    o.flags.writeable = False
                results = tuple_of(semantics.function(*operands))
                want = np.broadcast_shapes(*[o.shape for o in operands])
                assert len(results) == len(semantics.results), form.text
                for r, dtype in zip(results, semantics.results, strict=True):
                    assert r.dtype == np.dtype(dtype), (form.text, r.dtype)
                    assert r.ndim >= 2 and np.broadcast_shapes(r.shape, want) == want, form.text


def test_memory_order_does_not_matter():
    """Column-major, strided and broadcast operands give the results of contiguous ones."""
    rng = np.random.default_rng(2)

    def same(x, y):
        return np.array_equal(
            x.view(np.uint8) if x.dtype != bool else x, y.view(np.uint8) if y.dtype != bool else y
        )

    with quiet():
        for form in forms():
            semantics = semantics_of(form)
            operands = [random_array(rng, d, (6, 8)) for d in semantics.operands]
            operands[0] = np.repeat(operands[0][:1], 6, axis=0)
            plain = tuple_of(semantics.function(*operands))
            strided = []
            for i, o in enumerate(operands):
                if i == 0:
                    strided.append(np.broadcast_to(o[:1], o.shape))
                elif i == 1:
                    strided.append(np.asfortranarray(o))
                else:
                    wide = np.zeros((6, 16), o.dtype)
                    wide[:, ::2] = o
                    strided.append(wide[:, ::2])
            for x, y in zip(plain, tuple_of(semantics.function(*strided)), strict=True):
                x, y = (np.ascontiguousarray(np.broadcast_to(v, (6, 8))) for v in (x, y))
                if x.dtype.kind == "f":
                    assert np.array_equal(x, y, equal_nan=True), form.text
                else:
                    assert same(x, y), form.text


def sample(form, semantics, rng):
    """240 lanes of the oracle's operands, special values in some of the first, sorted by it."""
    operands = [c[rng.integers(0, N, 240)] for c in codes(form.operand_types[: len(semantics.operands)])]
    base, bits = PACKED.get(form.operand_types[0], (form.operand_types[0], 0))
    if base in FLOATS:
        special = special_codes(base)
        if bits:
            special = special | special[::-1] << np.uint64(bits)
        operands[0][: len(special)] = special.astype(operands[0].dtype)
    order = np.argsort(operands[0], kind="stable")
    if form.text.startswith("fns"):
        operands[1] = operands[1] & np.uint32(31)
    return [o[order].view(d)[None] for o, d in zip(operands, semantics.operands, strict=True)]


def test_lanes_do_not_depend_on_each_other():
    """Short cuts taken for whole arrays must be right for any array.

    The results of few lanes that are alike, or of one, are those that the same lanes have among many others.
    """
    rng = np.random.default_rng(4)
    with quiet():
        for form in forms():
            semantics = semantics_of(form)
            operands = sample(form, semantics, rng)
            whole = tuple_of(semantics.function(*operands))
            cuts = [(i, 12) for i in range(0, 240, 12)] + [(i, 1) for i in rng.integers(0, 239, 12).tolist()]
            if form.text.startswith("set"):  # thousands of forms from a few functions
                cuts = cuts[::8]
            for start, count in cuts:
                lanes = slice(start, start + count)
                part = tuple_of(semantics.function(*[o[:, lanes] for o in operands]))
                for x, y, t in zip(whole, part, form.result_types, strict=True):
                    x = np.broadcast_to(x, (1, 240))[:, lanes]
                    y = np.broadcast_to(y, x.shape)
                    if t == "f32x2":  # the payload of a NaN may depend on the CPU's vector width
                        x, y = (np.ascontiguousarray(v).view(np.float32) for v in (x, y))
                    equal = np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
                    assert equal, (form.text, [o[:, lanes].tolist() for o in operands], x, y)


REGISTERS = {"pred": "p", "b8": "q", "f32": "f", "f64": "g"}
REGISTERS |= dict.fromkeys(("u8", "s8", "b16", "u16", "s16", "f16", "bf16"), "h")
REGISTERS |= dict.fromkeys(("b64", "u64", "s64", "f32x2"), "d")


def as_ptx(form):
    name, _, rest = form.text.partition(" ")
    visible = form.result_types[: len(form.result_types) - form.semantics.carry_out]
    target = "|".join(f"%{REGISTERS.get(t, 'r')}{i}" for i, t in enumerate(visible))
    types = iter(form.operand_types)
    words = [
        w if w[0].isdigit() else f"%{REGISTERS.get(next(types), 'r')}{i + 2}"
        for i, w in enumerate(rest.split(", ")[1:])
    ]
    return f"{name} {', '.join([target, *words])};"


def find_ptxas():
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin/ptxas"
    return str(wheel) if wheel.exists() else shutil.which("ptxas")


@pytest.mark.skipif(find_ptxas() is None, reason="needs ptxas")
def test_every_form_assembles_for_gb300(tmp_path):
    """No form is an invention: ptxas takes all of them, with registers of the stated types."""
    lines = [as_ptx(f) for f in forms()]
    kinds = {"p": "pred", "q": "b8", "h": "b16", "r": "b32", "f": "f32", "g": "f64", "d": "b64"}
    head = [".version 9.0", ".target sm_103a", ".address_size 64", ".visible .entry k() {"]
    head += [f".reg .{t} %{k}<12>;" for k, t in kinds.items()]
    head[0] = ".version 9.4" if _accepts(tmp_path, "9.4") else ".version 9.1"
    source = tmp_path / "forms.ptx"
    source.write_text("\n".join([*head, *lines, "ret;", "}"]))
    done = subprocess.run(
        [find_ptxas(), "-arch=sm_103a", "-o", str(tmp_path / "out"), str(source)],
        capture_output=True,
        text=True,
    )
    bad = {int(n) for n in re.findall(r"line (\d+); error", done.stdout + done.stderr)}
    assert done.returncode == 0, [lines[n - len(head) - 1] for n in sorted(bad)][:20] or done.stderr[:2000]


def _accepts(tmp_path, version):
    source = tmp_path / "version.ptx"
    source.write_text(
        f".version {version}\n.target sm_103a\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
    )
    command = [find_ptxas(), "-arch=sm_103a", "-o", str(tmp_path / "v"), str(source)]
    return subprocess.run(command, capture_output=True).returncode == 0


# Look-up


def test_forms_are_found_by_their_text():
    for form in forms():
        semantics = lookup(instruction(form.text))
        assert semantics is not None, form.text
        assert semantics.operands == semantics_of(form).operands, form.text


def test_modifiers_in_any_order():
    texts = ("fma.ftz.rn.f32 d, a, b, c", "cvt.rn.satfinite.relu.f16x2.f32 d, a, b", "max.s32.relu d, a, b")
    for text in texts:
        assert lookup(instruction(text)) is not None, text


@pytest.mark.parametrize(
    "text",
    [
        "mov.b32 d, a",
        "add.f32 d, a",
        "add.q32 d, a, b",
        "fma.f32 d, a, b, c",
        "cvt.f32.s32 d, a",
        "setp.lt.f16 d|p, a, b",
        "fma.rn.oob.bf16x2 d, a, b, c",
    ],
)
def test_unknown_forms_are_none(text):
    assert lookup(instruction(text)) is None


def test_instruction_without_operands_is_none():
    assert lookup(Instruction("ret", (), (), 1)) is None


def test_immediates_are_folded():
    item = instruction("lop3.b32 d, a, b, c, 0xC0")
    assert sources(item) == (Reg("a"), Reg("b"), Reg("c"))
    item = instruction("lop3.or.b32 d|p, a, b, c, 0xC0, e")
    assert sources(item) == (Reg("a"), Reg("b"), Reg("c"), Reg("e"))
    assert destinations(item) == (Reg("d"), Reg("p"))
    assert sources(instruction("prmt.b32 d, a, b, 0x5410")) == (Reg("a"), Reg("b"))
    assert sources(instruction("prmt.b32 d, a, b, c")) == (Reg("a"), Reg("b"), Reg("c"))
    item = Instruction("x", (), (Vector((Reg("a"), Reg("b"))), Vector((Reg("c"), Reg("e"))), Reg("f")), 1)
    assert destinations(item) == (Reg("a"), Reg("b"))
    assert sources(item) == (Reg("c"), Reg("e"), Reg("f"))


def test_lop3_with_register_table_is_unknown():
    assert lookup(instruction("lop3.b32 d, a, b, c, e")) is None


def test_carry_is_hidden():
    semantics = lookup(instruction("addc.cc.u32 d, a, b"))
    assert semantics.carry_in and semantics.carry_out
    assert semantics.operands == ("uint32", "uint32", "bool") and semantics.results == ("uint32", "bool")


# NaN


def test_canonicalise():
    x = np.array([[1.0, np.nan, -np.inf]], np.float32)
    x.view(np.uint32)[0, 1] = 0xFFC00001
    y = canonicalise_f32(x)
    assert y.view(np.uint32).tolist() == [[0x3F800000, 0x7FFFFFFF, 0xFF800000]]
    assert x.view(np.uint32)[0, 1] == 0xFFC00001
    assert canonicalise_f32(x[:, :1]) is not None and np.shares_memory(canonicalise_f32(x[:, ::2]), x)
    z = canonicalise_f64(np.array([[np.nan, 2.0]]))
    assert z.view(np.uint64).tolist() == [[0x7FFFFFFFFFFFFFFF, 0x4000000000000000]]


# Third opinions


def test_narrow_fma_is_fma():
    """The short cut for narrow factors gives the exact result, overflow and underflow included."""
    a, b = ((c.astype(np.uint32) << np.uint32(16)).view(np.float32)[None] for c in codes(("bf16", "bf16")))
    (c,) = codes(("f32",))
    c = c.view(np.float32)[None]
    semantics = lookup(instruction("fma.rn.f32 d, a, b, c"))
    with quiet():
        exact, short = semantics.function(a, b, c), semantics.narrow(a, b, c)
        tame = np.where(np.abs(a) > 1, np.float32(1.25), a)
        also = semantics.function(tame, tame, tame), semantics.narrow(tame, tame, tame)
    assert np.array_equal(exact, short, equal_nan=True)
    assert np.array_equal(*also, equal_nan=True)


@pytest.mark.parametrize(("kind", "name"), [("f32", "fmaf"), ("f64", "fma")])
def test_fma_agrees_with_libm(kind, name):
    """C's fused multiply-add, on a sample of the operands (a call a lane)."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    real = ctypes.c_float if kind == "f32" else ctypes.c_double
    function = getattr(library, name)
    function.argtypes, function.restype = [real] * 3, real
    dtype = np.float32 if kind == "f32" else np.float64
    a, b, c = (x[::7].view(dtype) for x in codes((kind,) * 3))
    want = np.array([function(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], dtype)
    got = call(f"fma.rn.{kind} d, a, b, c", a, b, c)[0]
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | (np.isnan(got) & np.isnan(want))
    assert same.all()


def test_minifloats_agree_with_ml_dtypes():
    """Every code of every format, against another implementation."""
    types = {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "e2m3": ml_dtypes.float6_e2m3fn,
        "e3m2": ml_dtypes.float6_e3m2fn,
        "e2m1": ml_dtypes.float4_e2m1fn,
    }
    for name, dtype in types.items():
        bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(name, 8)
        code = np.arange(1 << bits, dtype=np.uint8)
        values = code.view(dtype).astype(np.float32)
        pack = code if bits == 4 else code.astype(np.uint16)
        got = call(f"cvt.rn.f16x2.{name}x2 d, a", pack)[0].astype(np.uint16).view(np.float16)
        assert np.array_equal(got.astype(np.float32), values, equal_nan=True), name
        finite = np.isfinite(values)
        back = call(f"cvt.rn.satfinite.{name}x2.f32 d, a, b", np.zeros_like(values), values)[0]
        assert np.array_equal(back[finite], code[finite]), name


def test_single_operands_take_every_code():
    for t in ("f16", "bf16", "b16"):
        assert len(np.unique(codes((t,))[0])) == 1 << 16
    for word in codes(("f16x2",)):
        assert len(np.unique(word & np.uint32(0xFFFF))) == len(np.unique(word >> np.uint32(16))) == 1 << 16
    assert len(np.unique(codes(("b8",))[0])) == 256


# Algebra

floats = st.floats(width=32, allow_nan=False)
words = st.integers(0, 2**32 - 1)


def f(x):
    return np.array([[x]], np.float32)


def u(x, dtype=np.uint32):
    return np.array([[x]], dtype)


@given(floats, floats)
def test_addition_commutes_and_brackets(a, b):
    down, up = call("add.rm.f32 d, a, b", f(a), f(b)), call("add.rp.f32 d, a, b", f(a), f(b))
    near, swapped = call("add.f32 d, a, b", f(a), f(b)), call("add.f32 d, a, b", f(b), f(a))
    zero = call("add.rz.f32 d, a, b", f(a), f(b))
    if np.isnan(near).any():
        assert np.isnan(down).all() and np.isnan(up).all()
        return
    assert near == swapped and down <= near <= up
    assert zero in (down, up) and abs(zero) == min(abs(down), abs(up))


@given(floats, floats)
def test_fma_by_one_is_addition(a, c):
    for mode in ("rn", "rz", "rm", "rp"):
        left = call(f"fma.{mode}.f32 d, a, b, c", f(a), f(1.0), f(c))
        right = call(f"add.{mode}.f32 d, a, b", f(a), f(c))
        assert np.array_equal(left, right, equal_nan=True) and (np.signbit(left) == np.signbit(right)).all()


@given(floats)
def test_negation_swaps_directed_rounding(a):
    for to in ("bf16", "f16"):
        if to == "bf16":
            down = call("cvt.rz.bf16.f32 d, a", f(a))
            assert down == call("cvt.rz.bf16.f32 d, a", f(-a)) ^ np.uint16(0x8000)
        up = call(f"cvt.rn.{to}.f32 d, a", f(a))
        assert up == call(f"cvt.rn.{to}.f32 d, a", f(-a)) ^ np.uint16(0x8000)


@given(st.integers(0, 2**16 - 1))
def test_sixteen_bits_survive_a_round_trip(code):
    for kind, infinity in (("bf16", 0x7F80), ("f16", 0x7C00)):
        back = call(f"cvt.rn.{kind}.f32 d, a", call(f"cvt.f32.{kind} d, a", u(code, np.uint16)))
        assert back == (0x7FFF if code & 0x7FFF > infinity else code)


@given(words, words, st.integers(0, 2**16 - 1))
def test_prmt_constant_is_prmt_register(a, b, selector):
    constant = call(f"prmt.b32 d, a, b, {selector}", u(a), u(b))
    assert constant == call("prmt.b32 d, a, b, c", u(a), u(b), u(selector))


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**128 - 1))
def test_carry_chain_adds_128_bits(x, y):
    total, carry = 0, u(False, bool)
    for i in range(4):
        parts = u(x >> (32 * i) & 0xFFFFFFFF), u(y >> (32 * i) & 0xFFFFFFFF)
        digit, carry = call("addc.cc.u32 d, a, b", *parts, carry)
        total |= int(digit[0, 0]) << (32 * i)
    assert total == (x + y) % 2**128 and bool(carry[0, 0]) == (x + y >= 2**128)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_product_halves_make_the_product(x, y):
    high, low = (call(f"mul.{p}.u64 d, a, b", u(x, np.uint64), u(y, np.uint64)) for p in ("hi", "lo"))
    assert (int(high[0, 0]) << 64 | int(low[0, 0])) == x * y


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1).filter(bool))
def test_quotient_and_remainder_rebuild_the_dividend(x, y):
    a, b = u(x, np.int32), u(y, np.int32)
    q, r = call("div.s32 d, a, b", a, b), call("rem.s32 d, a, b", a, b)
    assert call("mad.lo.s32 d, a, b, c", q, b, r) == a
    assert abs(int(r[0, 0])) < abs(y)


def test_all_opcodes_have_a_class():
    classes = defaultdict(set)
    for form in forms():
        classes[form.semantics.instruction_class].add(form.text.split(".")[0])
    assert set(classes) == {"int", "fp32", "fp16", "fp64", "convert", "sfu", "predicate"}
