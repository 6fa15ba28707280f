"""`cvt`: its forms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from workbench.simulator.arith import convert, fp32, half, minifloat
from workbench.simulator.arith.builders import form
from workbench.simulator.arith.rounding import f64_to_f32, flush_f32
from workbench.simulator.arith.semantics import Array, Form, Function

_INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
_NUMPY = {"u": "uint", "s": "int"}
_MODES = ("rn", "rz", "rm", "rp")
_TWO = (False, True)


def forms() -> Iterator[Form]:
    """Yield the forms of this module."""
    yield from _int_int()
    yield from _int_float()
    yield from _float_int()
    yield from _float_float()
    yield from _integral()
    yield from _packs16()
    yield from _tf32()
    yield from _minifloats()
    yield from _scales()
    yield from _integer_packs()


def _numpy(t: str) -> str:
    return _NUMPY[t[0]] + t[1:]


def _cvt(mods: str, to: str, source: str, function: Function, **more: Any) -> Form:
    return form(f"cvt{mods}.{to}.{source}", function, source, to, "convert", **more)


def _range(t: str) -> tuple[int, int]:
    width = int(t[1:])
    return (0, (1 << width) - 1) if t[0] == "u" else (-(1 << (width - 1)), (1 << (width - 1)) - 1)


def _int_int() -> Iterator[Form]:
    for source, to in product(_INTEGERS, _INTEGERS):
        name = _numpy(to)
        yield _cvt("", to, source, lambda x, name=name: convert.int_to_int(x, name))
        (low, high), (to_low, to_high) = _range(source), _range(to)
        if low < to_low or high > to_high:
            yield _cvt(".sat", to, source, lambda x, name=name: convert.int_to_int(x, name, sat=True))


def _finish(function: Function, to: str, sat: bool, ftz: bool = False) -> Function:
    """Apply .ftz and .sat to the result of a conversion to a float."""
    if ftz and to == "f32":
        inner = function
        function = lambda x: flush_f32(inner(x))  # noqa: E731
    if not sat:
        return function
    if to in ("f32", "f64"):
        return lambda x: fp32.saturate(function(x))
    return lambda x: half.saturate(function(x), to)


def _int_float() -> Iterator[Form]:
    for source, to, mode, sat, ftz in product(_INTEGERS, ("f16", "bf16", "f32", "f64"), _MODES, _TWO, _TWO):
        if (ftz and to != "f32") or (to == "bf16" and (sat or source in ("u8", "s8"))):
            continue

        def function(x: Array, to: str = to, mode: str = mode) -> Array:
            return convert.int_to_float(x, to, mode)

        mods = f".{mode}" + ".ftz" * ftz + ".sat" * sat
        yield _cvt(mods, to, source, _finish(function, to, sat))


def _float_int() -> Iterator[Form]:
    for source, to, mode, sat, ftz in product(
        ("f16", "bf16", "f32", "f64"), _INTEGERS, convert.INTEGER_ROUNDING, _TWO, _TWO
    ):
        if (ftz and source != "f32") or (source == "bf16" and (sat or to in ("u8", "s8"))):
            continue
        name = _numpy(to)

        def function(
            x: Array, source: str = source, name: str = name, mode: str = mode, ftz: bool = ftz
        ) -> Array:
            if source in ("f16", "bf16"):
                return convert.half_to_int(x, source, name, mode)
            return convert.float_to_int(convert.flush_if(x, ftz), name, mode)

        mods = f".{mode}" + ".ftz" * ftz + ".sat" * sat
        yield _cvt(mods, to, source, function)


def _float_float() -> Iterator[Form]:
    for source, to, sat, ftz in product(
        ("f16", "bf16", "f32", "f64"), ("f16", "bf16", "f32", "f64"), _TWO, _TWO
    ):
        if ftz and "f32" not in (source, to):
            continue
        if sat and "bf16" in (source, to):
            continue
        rank = {"f16": 1, "bf16": 1, "f32": 2, "f64": 3}
        exact = source == to or rank[to] > rank[source]
        for mode in ("",) if exact else _MODES:
            mods = (f".{mode}" if mode else "") + ".ftz" * ftz + ".sat" * sat
            function = _finish(_between(source, to, mode, ftz), to, sat, ftz)
            yield _cvt(mods, to, source, function, canonical=sat or to in ("f16", "bf16"))
        if source == "f32" and to in ("f16", "bf16") and not sat and not ftz:
            yield from _f32_to_half(to)


def _between(source: str, to: str, mode: str, ftz: bool) -> Function:
    if source in ("f16", "bf16"):
        if to == source:
            return lambda x: half.canonicalise(x, to)
        if to in ("f16", "bf16"):
            return lambda x: convert.f32_to_half(half.widen(x, source), to, mode)
        if to == "f32":
            return lambda x: half.widen(x, source)
        return lambda x: half.widen(x, source).astype(np.float64)
    if source == "f32":
        if to in ("f16", "bf16"):
            return lambda x: convert.f32_to_half(convert.flush_if(x, ftz), to, mode)
        if to == "f32":
            return lambda x: convert.flush_if(x, ftz)
        return lambda x: convert.flush_if(x, ftz).astype(np.float64)
    if to in ("f16", "bf16"):
        return lambda x: convert.f64_to_half(x, to, mode)
    return (lambda x: f64_to_f32(x, mode)) if to == "f32" else (lambda x: x)


def _f32_to_half(to: str) -> Iterator[Form]:
    for mode, relu, satfinite in product(("rn", "rz"), _TWO, _TWO):
        if relu or satfinite:
            mods = f".{mode}" + ".relu" * relu + ".satfinite" * satfinite
            yield _cvt(mods, to, "f32", _to_half(to, mode, relu, satfinite))


def _to_half(to: str, mode: str, relu: bool, satfinite: bool) -> Function:
    def function(x: Array) -> Array:
        code = convert.f32_to_half(x, to, mode, satfinite=satfinite)
        return half.relu(code, to) if relu else code

    return function


def _integral() -> Iterator[Form]:
    for kind, mode, sat, ftz in product(("f16", "bf16", "f32", "f64"), convert.INTEGER_ROUNDING, _TWO, _TWO):
        if (ftz and kind != "f32") or (sat and kind == "bf16"):
            continue

        def function(x: Array, kind: str = kind, mode: str = mode, ftz: bool = ftz) -> Array:
            if kind in ("f16", "bf16"):
                return convert.round_integral_half(x, kind, mode)
            return convert.round_integral(convert.flush_if(x, ftz), mode)

        mods = f".{mode}" + ".ftz" * ftz + ".sat" * sat
        yield _cvt(mods, kind, kind, _finish(function, kind, sat), canonical=sat or kind in ("f16", "bf16"))


def _join16(high: Array, low: Array) -> Array:
    return (high.astype(np.uint32) << np.uint32(16)) | low


def _packs16() -> Iterator[Form]:
    for kind, mode, relu, satfinite in product(("f16", "bf16"), ("rn", "rz"), _TWO, _TWO):
        one = _to_half(kind, mode, relu, satfinite)

        def function(a: Array, b: Array, one: Function = one) -> Array:
            return _join16(one(a), one(b))

        name = f"cvt.{mode}" + ".relu" * relu + ".satfinite" * satfinite + f".{kind}x2.f32"
        yield form(name, function, "f32 f32", f"{kind}x2", "convert")
    for kind, relu, satfinite in product(("f16", "bf16"), _TWO, _TWO):

        def stochastic(
            a: Array, b: Array, r: Array, kind: str = kind, relu: bool = relu, satfinite: bool = satfinite
        ) -> Array:
            mask = np.uint32(0x1FFF if kind == "f16" else 0xFFFF)
            halves = []
            for x, random in ((a, (r >> np.uint32(16)) & mask), (b, r & mask)):
                code = convert.f32_stochastic(x, random, kind, satfinite=satfinite)
                halves.append(half.relu(code, kind) if relu else code)
            return _join16(*halves)

        name = "cvt.rs" + ".relu" * relu + ".satfinite" * satfinite + f".{kind}x2.f32"
        yield form(name, stochastic, "f32 f32 b32", f"{kind}x2", "convert")


def _tf32() -> Iterator[Form]:
    for mode, relu, satfinite in product(("rn", "rz", "rna"), _TWO, _TWO):
        if mode == "rna" and relu:
            continue

        def function(x: Array, mode: str = mode, relu: bool = relu, satfinite: bool = satfinite) -> Array:
            return convert.f32_to_tf32(x, mode, satfinite=satfinite, relu=relu)

        mods = f".{mode}" + ".satfinite" * satfinite + ".relu" * relu
        yield _cvt(mods, "tf32", "f32", function)


def _minifloats() -> Iterator[Form]:
    for name, relu in product(minifloat.FORMATS, _TWO):
        fmt = minifloat.FORMATS[name]
        store = "b8" if fmt.bits == 4 else "b16"
        down = "cvt.rn.satfinite" + ".relu" * relu + f".{name}x2"
        yield form(f"{down}.f32", minifloat.pack_f32(fmt, relu), "f32 f32", store, "convert")
        for kind in ("f16", "bf16"):
            pair = f"{kind}x2"
            yield form(f"{down}.{pair}", minifloat.pack_half(fmt, kind, relu), pair, store, "convert")
        up = "cvt.rn" + ".relu" * relu
        yield form(f"{up}.f16x2.{name}x2", minifloat.unpack(name, "f16", relu), store, "f16x2", "convert")
        for satfinite in _TWO:
            # All values of these formats are bf16 values, so saturation changes nothing but infinities.
            mods = "cvt.rn" + ".satfinite" * satfinite + ".relu" * relu
            function: Function = minifloat.unpack(name, "bf16", relu, satfinite)
            yield form(f"{mods}.bf16x2.{name}x2", function, store, "bf16x2", "convert")
            function = minifloat.unpack_scaled(name, relu, satfinite)
            yield form(
                f"{mods}.scaled::n2::ue8m0.bf16x2.{name}x2", function, f"{store} b16", "bf16x2", "convert"
            )


def _scales() -> Iterator[Form]:
    for mode, satfinite in product(("rz", "rp"), _TWO):
        mods = f"cvt.{mode}" + ".satfinite" * satfinite + ".ue8m0x2"
        yield form(f"{mods}.f32", minifloat.pack_e8m0_f32(mode, satfinite), "f32 f32", "b16", "convert")
        yield form(f"{mods}.bf16x2", minifloat.pack_e8m0_bf16(mode, satfinite), "bf16x2", "b16", "convert")
    yield form("cvt.rn.bf16x2.ue8m0x2", minifloat.e8m0x2_to_bf16x2, "b16", "bf16x2", "convert")


def _integer_packs() -> Iterator[Form]:
    for kind, signed in (("u16", False), ("s16", True)):

        def two(a: Array, b: Array, signed: bool = signed) -> Array:
            return convert.pack_saturated(a, b, 16, signed)

        yield form(f"cvt.pack.sat.{kind}.s32", two, "s32 s32", "b32", "convert")
    for width in (2, 4, 8):
        for kind, signed in ((f"u{width}", False), (f"s{width}", True)):

            def three(a: Array, b: Array, c: Array, width: int = width, signed: bool = signed) -> Array:
                out: Array = convert.pack_saturated(a, b, width, signed) | (c << np.uint32(2 * width))
                return out

            yield form(f"cvt.pack.sat.{kind}.s32.b32", three, "s32 s32 b32", "b32", "convert")
