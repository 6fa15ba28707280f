"""Integer, bit and selection instructions: their forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from workbench.simulator.arith import bits, compare, convert, integer
from workbench.simulator.arith.builders import form, packed16
from workbench.simulator.arith.semantics import Array, Form, Function, Semantics

_ALL = ("u16", "u32", "u64", "s16", "s32", "s64")
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def forms() -> Iterator[Form]:
    """Yield the forms of this module."""
    yield from _arithmetic()
    yield from _multiplication()
    yield from _extended()
    yield from _bits()
    yield from _logic()
    yield from _selection()


def _f(name: str, function: Function, operands: str, result: str) -> Form:
    return form(name, function, operands, result, "int")


def _arithmetic() -> Iterator[Form]:
    for t in _ALL:
        for name, two in (
            ("add", integer.add),
            ("sub", integer.sub),
            ("div", integer.div),
            ("rem", integer.rem),
            ("min", integer.minimum),
            ("max", integer.maximum),
        ):
            yield _f(f"{name}.{t}", two, f"{t} {t}", t)
        yield _f(f"sad.{t}", integer.sad, f"{t} {t} {t}", t)
        if t.startswith("s"):
            yield _f(f"abs.{t}", integer.absolute, t, t)
            yield _f(f"neg.{t}", integer.negate, t, t)
    yield _f("add.sat.s32", integer.add_sat, "s32 s32", "s32")
    yield _f("sub.sat.s32", integer.sub_sat, "s32 s32", "s32")
    for name, two in (("min", integer.minimum), ("max", integer.maximum)):
        yield _f(f"{name}.relu.s32", _relu(two), "s32 s32", "s32")
        yield _f(f"{name}.relu.s16x2", packed16(_relu(two), np.int16), "s16x2 s16x2", "s16x2")
    for name, two in (("add", integer.add), ("min", integer.minimum), ("max", integer.maximum)):
        yield _f(f"{name}.u16x2", packed16(two, np.uint16), "u16x2 u16x2", "u16x2")
        yield _f(f"{name}.s16x2", packed16(two, np.int16), "s16x2 s16x2", "s16x2")


def _relu(function: Function) -> Function:
    return lambda a, b: integer.relu(function(a, b))


def _multiplication() -> Iterator[Form]:
    for t in _ALL:
        yield _f(f"mul.lo.{t}", integer.mul_lo, f"{t} {t}", t)
        yield _f(f"mul.hi.{t}", integer.mul_hi, f"{t} {t}", t)
        yield _f(f"mad.lo.{t}", integer.mad_lo, f"{t} {t} {t}", t)
        yield _f(f"mad.hi.{t}", integer.mad_hi, f"{t} {t} {t}", t)
        if t in _WIDE:
            w = _WIDE[t]
            yield _f(f"mul.wide.{t}", integer.mul_wide, f"{t} {t}", w)
            yield _f(f"mad.wide.{t}", integer.mad_wide, f"{t} {t} {w}", w)
    yield _f("mad.hi.sat.s32", integer.mad_hi_sat, "s32 s32 s32", "s32")
    for t in ("u32", "s32"):
        yield _f(f"mul24.lo.{t}", integer.mul24_lo, f"{t} {t}", t)
        yield _f(f"mul24.hi.{t}", integer.mul24_hi, f"{t} {t}", t)
        yield _f(f"mad24.lo.{t}", integer.mad24_lo, f"{t} {t} {t}", t)
        yield _f(f"mad24.hi.{t}", integer.mad24_hi, f"{t} {t} {t}", t)
    yield _f("mad24.hi.sat.s32", integer.mad24_hi_sat, "s32 s32 s32", "s32")
    for x in ("u32", "s32"):
        for y in ("u32", "s32"):
            c = "u32" if (x, y) == ("u32", "u32") else "s32"
            yield _f(f"dp4a.{x}.{y}", integer.dp4a, f"{x} {y} {c}", c)
            yield _f(f"dp2a.lo.{x}.{y}", integer.dp2a_lo, f"{x} {y} {c}", c)
            yield _f(f"dp2a.hi.{x}.{y}", integer.dp2a_hi, f"{x} {y} {c}", c)


def _extended() -> Iterator[Form]:
    rows: tuple[tuple[str, Function, int, bool, bool], ...] = (
        ("add.cc", integer.add_cc, 2, False, True),
        ("addc", integer.addc, 2, True, False),
        ("addc.cc", integer.addc_cc, 2, True, True),
        ("sub.cc", integer.sub_cc, 2, False, True),
        ("subc", integer.subc, 2, True, False),
        ("subc.cc", integer.subc_cc, 2, True, True),
        ("mad.lo.cc", integer.mad_lo_cc, 3, False, True),
        ("madc.lo", integer.madc_lo, 3, True, False),
        ("madc.lo.cc", integer.madc_lo_cc, 3, True, True),
        ("mad.hi.cc", integer.mad_hi_cc, 3, False, True),
        ("madc.hi", integer.madc_hi, 3, True, False),
        ("madc.hi.cc", integer.madc_hi_cc, 3, True, True),
    )
    for t in ("u32", "s32", "u64", "s64"):
        for name, function, count, carry_in, carry_out in rows:
            operands = f"{t} " * count + ("pred" if carry_in else "")
            results = f"{t} pred" if carry_out else t
            flags = {"carry_in": carry_in, "carry_out": carry_out}
            yield form(f"{name}.{t}", function, operands, results, "int", **flags)


def _bits() -> Iterator[Form]:
    for t in ("b32", "b64"):
        yield _f(f"popc.{t}", bits.popc, t, "u32")
        yield _f(f"clz.{t}", bits.clz, t, "u32")
        yield _f(f"brev.{t}", bits.brev, t, t)
        yield _f(f"bfi.{t}", bits.bfi, f"{t} {t} u32 u32", t)
    for t in ("u32", "u64", "s32", "s64"):
        yield _f(f"bfind.{t}", bits.bfind, t, "u32")
        yield _f(f"bfind.shiftamt.{t}", bits.bfind_shiftamt, t, "u32")
        yield _f(f"bfe.{t}", bits.bfe, f"{t} u32 u32", t)
    yield _f("fns.b32", bits.fns, "b32 b32 s32", "b32")
    for mode, mask, extend in (
        ("clamp", bits.bmsk_clamp, bits.szext_clamp),
        ("wrap", bits.bmsk_wrap, bits.szext_wrap),
    ):
        yield _f(f"bmsk.{mode}.b32", mask, "u32 u32", "b32")
        yield _f(f"szext.{mode}.u32", extend, "u32 u32", "u32")
        yield _f(f"szext.{mode}.s32", extend, "s32 u32", "s32")


def _logic() -> Iterator[Form]:
    for name, two in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        yield form(f"{name}.pred", two, "pred pred", "pred", "predicate")
        for t in ("b16", "b32", "b64"):
            yield _f(f"{name}.{t}", two, f"{t} {t}", t)
    yield form("not.pred", np.logical_not, "pred", "pred", "predicate")
    for t in ("b16", "b32", "b64"):
        yield _f(f"not.{t}", np.invert, t, t)
        yield _f(f"cnot.{t}", bits.cnot, t, t)
        yield _f(f"shl.{t}", bits.shl_narrow if t == "b16" else bits.shl, f"{t} u32", t)
    for t in ("b16", "b32", "b64", *_ALL):
        yield _f(f"shr.{t}", bits.shr, f"{t} u32", t)
    for direction, mode, function in (
        ("l", "wrap", bits.shf_l_wrap),
        ("l", "clamp", bits.shf_l_clamp),
        ("r", "wrap", bits.shf_r_wrap),
        ("r", "clamp", bits.shf_r_clamp),
    ):
        yield _f(f"shf.{direction}.{mode}.b32", function, "b32 b32 u32", "b32")
    yield from _lop3()
    generic = _f("prmt.b32", bits.prmt, "b32 b32 b32", "b32")
    yield replace(generic, specialise=_prmt, immediate=2)
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield _f(f"prmt.b32.{mode}", bits.prmt_mode(mode), "b32 b32 b32", "b32")


def _prmt(selector: int) -> Semantics:
    return form("prmt.b32", bits.prmt_immediate(selector), "b32 b32", "b32", "int").semantics


def _lop3() -> Iterator[Form]:
    def plain(table: int) -> Semantics:
        return form("lop3.b32", bits.lop3(table & 0xFF), "b32 b32 b32", "b32", "int").semantics

    base = form("lop3.b32", bits.lop3(0x96), "b32 b32 b32", "b32", "int")
    yield replace(
        base, text="lop3.b32 d, a, b, c, 0x96", specialise=plain, immediate=3, immediate_required=True
    )
    for operator in ("or", "and"):

        def joined(table: int, operator: str = operator) -> Semantics:
            function = bits.lop3_bool(table & 0xFF, operator)
            return form(f"lop3.{operator}.b32", function, "b32 b32 b32 pred", "b32 pred", "int").semantics

        base = form(
            f"lop3.{operator}.b32", bits.lop3_bool(0x96, operator), "b32 b32 b32 pred", "b32 pred", "int"
        )
        yield replace(
            base,
            text=f"lop3.{operator}.b32 d|p, a, b, c, 0x96, e",
            specialise=joined,
            immediate=3,
            immediate_required=True,
        )


def _selection() -> Iterator[Form]:
    bitsize = {"16": "b16", "32": "b32", "64": "b64"}
    for t in ("b16", "b32", "b64", *_ALL, "f32", "f64"):
        raw = bitsize[t[1:]]
        yield _f(f"selp.{t}", compare.selp, f"{raw} {raw} pred", raw)
        yield _f(f"slct.{t}.s32", compare.slct, f"{raw} {raw} s32", raw)
        yield _f(f"slct.{t}.f32", compare.slct, f"{raw} {raw} f32", raw)
        yield _f(f"slct.ftz.{t}.f32", _slct_ftz, f"{raw} {raw} f32", raw)


def _slct_ftz(a: Array, b: Array, c: Array) -> Array:
    return compare.slct(a, b, convert.flush_if(c, True))
