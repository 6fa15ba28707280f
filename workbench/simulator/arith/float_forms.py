"""f32, f64, f16 and bf16 arithmetic instructions: their forms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from workbench.simulator.arith import approx, compare, fp32, fp64, half
from workbench.simulator.arith.builders import form, half_modified, in_mode, modified, packed16, packed32
from workbench.simulator.arith.semantics import Array, Form, Function

_MODES = ("rn", "rz", "rm", "rp")


def forms() -> Iterator[Form]:
    """Yield the forms of this module."""
    yield from _f32_sums()
    yield from _f32_others()
    yield from _f64()
    yield from _mixed()
    yield from _half()
    yield from _min_max()
    yield from _approximate()
    yield from _tests()


def _sub32(a: Array, b: Array, mode: str = "rn") -> Array:
    return fp32.add(a, -b, mode) if mode != "rn" else a - b


def _sub64(a: Array, b: Array, mode: str = "rn") -> Array:
    return fp64.add(a, -b, mode) if mode != "rn" else a - b


def _mods(**flags: bool) -> str:
    return "".join(f".{name}" for name, on in flags.items() if on)


_TWO = (False, True)


def _f32_sums() -> Iterator[Form]:
    table: tuple[tuple[str, Function, int], ...] = (
        ("add", fp32.add, 2),
        ("sub", _sub32, 2),
        ("mul", fp32.mul, 2),
        ("fma", fp32.fma, 3),
        ("mad", fp32.fma, 3),
    )
    for name, function, count in table:
        modes = _MODES if count == 3 else (*_MODES, "")
        for mode, ftz, sat in product(modes, _TWO, _TWO):
            rounded = in_mode(function, mode or "rn")
            more: dict[str, Any] = {"canonical": sat}
            if count == 3 and mode == "rn" and not ftz and not sat:
                more["narrow"] = fp32.fma_rn_narrow
            suffix = (f".{mode}" if mode else "") + _mods(ftz=ftz)
            whole = modified(rounded, ftz=ftz, sat=sat)
            yield form(f"{name}{suffix}{_mods(sat=sat)}.f32", whole, "f32 " * count, "f32", "fp32", **more)
            if not sat and name != "mad":
                pair = packed32(whole)
                yield form(f"{name}{suffix}.f32x2", pair, "f32x2 " * count, "f32x2", "fp32", canonical=False)


def _f32_others() -> Iterator[Form]:
    for mode, ftz in product(_MODES, _TWO):
        suffix = f"{mode}{_mods(ftz=ftz)}.f32"
        div = modified(in_mode(fp32.div, mode), ftz=ftz)
        yield form(f"div.{suffix}", div, "f32 f32", "f32", "fp32", canonical=False)
        yield form(f"rcp.{suffix}", _reciprocal32(div), "f32", "f32", "fp32", canonical=False)
        root = modified(in_mode(fp32.sqrt, mode), ftz=ftz)
        yield form(f"sqrt.{suffix}", root, "f32", "f32", "fp32", canonical=False)
    for ftz in _TWO:
        mods = _mods(ftz=ftz)
        yield form(f"abs{mods}.f32", modified(np.abs, ftz=ftz), "f32", "f32", "fp32", canonical=False)
        yield form(f"neg{mods}.f32", modified(np.negative, ftz=ftz), "f32", "f32", "fp32", canonical=False)
    for t in ("f32", "f64"):
        yield form(
            f"copysign.{t}", _copysign, f"{t} {t}", t, "fp32" if t == "f32" else "fp64", canonical=False
        )


def _reciprocal32(div: Function) -> Function:
    one = np.ones((1, 1), np.float32)
    return lambda a: div(one, a)


def _copysign(a: Array, b: Array) -> Array:
    return np.copysign(b, a)


def _f64() -> Iterator[Form]:
    more: dict[str, Any] = {"canonical": False}
    one = np.ones((1, 1))
    for mode in (*_MODES, ""):
        dotted, m = (f".{mode}" if mode else ""), mode or "rn"
        for name, function in (("add", fp64.add), ("sub", _sub64), ("mul", fp64.mul)):
            yield form(f"{name}{dotted}.f64", in_mode(function, m), "f64 f64", "f64", "fp64", **more)
        if not mode:
            continue
        for name in ("fma", "mad"):
            yield form(f"{name}.{mode}.f64", in_mode(fp64.fma, mode), "f64 f64 f64", "f64", "fp64", **more)
        div = in_mode(fp64.div, mode)
        yield form(f"div.{mode}.f64", div, "f64 f64", "f64", "fp64", **more)
        yield form(f"rcp.{mode}.f64", lambda a, div=div: div(one, a), "f64", "f64", "fp64", **more)
        yield form(f"sqrt.{mode}.f64", in_mode(fp64.sqrt, mode), "f64", "f64", "fp64", **more)
    yield form("abs.f64", np.abs, "f64", "f64", "fp64", **more)
    yield form("neg.f64", np.negative, "f64", "f64", "fp64", **more)
    yield form("min.f64", fp32.minimum, "f64 f64", "f64", "fp64", **more)
    yield form("max.f64", fp32.maximum, "f64 f64", "f64", "fp64", **more)


def _mixed() -> Iterator[Form]:
    for kind, mode, sat in product(("f16", "bf16"), (*_MODES, ""), _TWO):
        suffix = (f".{mode}" if mode else "") + _mods(sat=sat) + f".f32.{kind}"
        m = mode or "rn"

        def add(a: Array, c: Array, kind: str = kind, m: str = m) -> Array:
            return fp32.add(half.widen(a, kind), c, m)

        def sub(a: Array, c: Array, kind: str = kind, m: str = m) -> Array:
            return _sub32(half.widen(a, kind), c, m)

        def fma(a: Array, b: Array, c: Array, kind: str = kind, m: str = m) -> Array:
            x, y = half.widen(a, kind), half.widen(b, kind)
            return fp32.fma_rn_narrow(x, y, c) if m == "rn" else fp32.fma(x, y, c, m)

        for name, function in (("add", add), ("sub", sub)):
            whole = modified(function, sat=sat)
            yield form(f"{name}{suffix}", whole, f"{kind} f32", "f32", "fp32", canonical=sat)
        if mode:
            whole = modified(fma, sat=sat)
            yield form(f"fma{suffix}", whole, f"{kind} {kind} f32", "f32", "fp32", canonical=sat)


def _both(name: str, mods: str, kind: str, function: Function, count: int, **more: Any) -> Iterator[Form]:
    """Yield the scalar and the packed form of a 16-bit operation."""
    operands = f"{kind} " * count
    yield form(f"{name}{mods}.{kind}", function, operands, kind, "fp16", **more)
    pair = f"{kind}x2"
    yield form(f"{name}{mods}.{pair}", packed16(function), f"{pair} " * count, pair, "fp16", **more)


def _half() -> Iterator[Form]:
    table: dict[str, dict[str, Function]] = {
        "add": {"f16": half.add_f16, "bf16": half.add_bf16},
        "sub": {"f16": half.sub_f16, "bf16": half.sub_bf16},
        "mul": {"f16": half.mul_f16, "bf16": half.mul_bf16},
    }
    for name, functions in table.items():
        for rnd in ("", ".rn"):
            for ftz, sat in product(_TWO, _TWO):
                f16 = half_modified(functions["f16"], "f16", ftz=ftz, sat=sat)
                yield from _both(name, rnd + _mods(ftz=ftz, sat=sat), "f16", f16, 2)
            yield from _both(name, rnd, "bf16", functions["bf16"], 2)

    def fma_f16(a: Array, b: Array, c: Array) -> Array:
        return half.fma(a, b, c, "f16")

    def fma_bf16(a: Array, b: Array, c: Array) -> Array:
        return half.fma(a, b, c, "bf16")

    for ftz, (sat, relu) in product(_TWO, ((False, False), (True, False), (False, True))):
        f16 = half_modified(fma_f16, "f16", ftz=ftz, sat=sat, relu=relu)
        yield from _both("fma.rn", _mods(ftz=ftz, sat=sat, relu=relu), "f16", f16, 3)
    for relu in _TWO:
        bf16 = half_modified(fma_bf16, "bf16", relu=relu)
        yield from _both("fma.rn", _mods(relu=relu), "bf16", bf16, 3)
        bf16_rz = half_modified(lambda a, b, c: half.fma_rz(a, b, c, "bf16"), "bf16", relu=relu)
        yield from _both("fma.rz", _mods(relu=relu), "bf16", bf16_rz, 3)
    for kind, ftz in (("f16", False), ("f16", True), ("bf16", False)):
        for name, function in (("neg", half.negate), ("abs", half.absolute)):

            def one(a: Array, kind: str = kind, function: Function = function) -> Array:
                return half.canonicalise(function(a), kind)

            yield from _both(name, _mods(ftz=ftz), kind, half_modified(one, kind, ftz=ftz), 1)


def _three(function: Function, nan: bool, absolute: bool) -> Function:
    def three(a: Array, b: Array, c: Array) -> Array:
        if absolute:
            a, b, c = np.abs(a), np.abs(b), np.abs(c)
        out: Array = function(function(a, b, nan=nan), c, nan=nan)
        return out

    return three


def _min_max() -> Iterator[Form]:
    for name, f32, f16 in (
        ("min", fp32.minimum, half.minimum),
        ("max", fp32.maximum, half.maximum),
    ):
        for ftz, nan, extra in product(_TWO, _TWO, _TWO):
            mods = _mods(ftz=ftz, NaN=nan)
            two = modified(_two(f32, nan, extra), ftz=ftz)
            sign = ".xorsign.abs" if extra else ""
            yield form(f"{name}{mods}{sign}.f32", two, "f32 f32", "f32", "fp32", canonical=False)
            three = modified(_three(f32, nan, extra), ftz=ftz)
            size = ".abs" if extra else ""
            yield form(f"{name}{mods}{size}.f32", three, "f32 f32 f32", "f32", "fp32", canonical=False)
            for kind in ("f16", "bf16"):
                if ftz and kind == "bf16":
                    continue
                narrow = half_modified(_two_half(f16, kind, nan, extra), kind, ftz=ftz)
                yield from _both(name, mods + sign, kind, narrow, 2)


def _two(function: Function, nan: bool, xorsign: bool) -> Function:
    def two(a: Array, b: Array) -> Array:
        if not xorsign:
            plain: Array = function(a, b, nan=nan)
            return plain
        picked = function(np.abs(a), np.abs(b), nan=nan)
        out: Array = np.where(np.signbit(a) ^ np.signbit(b), -picked, picked)
        return out

    return two


def _two_half(function: Function, kind: str, nan: bool, xorsign: bool) -> Function:
    def two(a: Array, b: Array) -> Array:
        if not xorsign:
            return half.canonicalise(function(a, b, kind, nan=nan), kind)
        picked = function(half.absolute(a), half.absolute(b), kind, nan=nan)
        signed = picked | ((a ^ b) & np.uint16(0x8000))
        return np.where(half.is_nan(picked, kind), np.uint16(0x7FFF), signed)

    return two


def _approximate() -> Iterator[Form]:
    table: tuple[tuple[str, Function, dict[str, float]], ...] = (
        ("rcp.approx", approx.rcp, {"tolerance_ulp": 1}),
        ("sqrt.approx", approx.sqrt, {"tolerance_relative": 2.0**-23}),
        ("rsqrt.approx", approx.rsqrt, {"tolerance_relative": 2.0**-22.9}),
        ("sin.approx", approx.sin, {"tolerance_absolute": 2.0**-20.5}),
        ("cos.approx", approx.cos, {"tolerance_absolute": 2.0**-20.5}),
        ("lg2.approx", approx.lg2, {"tolerance_absolute": 2.0**-22, "tolerance_relative": 2.0**-22}),
        ("ex2.approx", approx.ex2, {"tolerance_ulp": 2}),
    )
    for ftz in _TWO:
        mods = _mods(ftz=ftz)
        for name, function, bound in table:
            whole = modified(function, ftz=ftz)
            more: dict[str, Any] = {"exact": False, "canonical": False, **bound}
            yield form(f"{name}{mods}.f32", whole, "f32", "f32", "sfu", **more)
        for name, function in (("div.approx", approx.div_approx), ("div.full", approx.div_full)):
            whole = modified(function, ftz=ftz)
            more = {"exact": False, "canonical": False, "tolerance_ulp": 2}
            yield form(f"{name}{mods}.f32", whole, "f32 f32", "f32", "fp32", **more)
    more = {"exact": False, "canonical": False}
    yield form("tanh.approx.f32", approx.tanh, "f32", "f32", "sfu", tolerance_relative=2.0**-11, **more)
    # The ISA states no bounds for these three; the ones here are our own.
    yield form(
        "rsqrt.approx.f64", approx.rsqrt_f64, "f64", "f64", "fp64", tolerance_relative=2.0**-51, **more
    )
    for name, function in (("rcp", approx.rcp_coarse_f64), ("rsqrt", approx.rsqrt_coarse_f64)):
        yield form(
            f"{name}.approx.ftz.f64", function, "f64", "f64", "sfu", exact=False, tolerance_relative=2.0**-19
        )
    for kind, ex2_mods, ex2_bound, tanh_bound in (
        ("f16", "", 2.0**-9.9, 2.0**-10.987),
        ("bf16", ".ftz", 2.0**-7, 2.0**-8),
    ):

        def ex2(a: Array, kind: str = kind) -> Array:
            return half.ex2(a if kind == "f16" else half.flush(a, kind), kind)

        def tanh(a: Array, kind: str = kind) -> Array:
            return half.tanh(a, kind)

        yield from _both("ex2.approx", ex2_mods, kind, ex2, 1, exact=False, tolerance_relative=ex2_bound)
        yield from _both("tanh.approx", "", kind, tanh, 1, exact=False, tolerance_absolute=tanh_bound)


def _tests() -> Iterator[Form]:
    for name, function in compare.TESTP.items():
        for t in ("f32", "f64"):
            yield form(f"testp.{name}.{t}", function, t, "pred", "predicate")
