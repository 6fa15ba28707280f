"""`setp` and `set`: their forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from workbench.simulator.arith import compare, half
from workbench.simulator.arith.builders import form
from workbench.simulator.arith.rounding import flush_f32
from workbench.simulator.arith.semantics import Array, Form, Function

_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
_BITS = ("b16", "b32", "b64")
_JOINS = ("", "and", "or", "xor")
_TRUE: dict[str, np.generic] = {
    "u16": np.uint16(0xFFFF),
    "s16": np.int16(-1),
    "u32": np.uint32(0xFFFFFFFF),
    "s32": np.int32(-1),
    "f32": np.float32(1),
    "f16": np.uint16(0x3C00),
    "bf16": np.uint16(0x3F80),
}


def setp_forms() -> Iterator[Form]:
    """Yield the forms of `setp`."""
    for source, operator, ftz, join, mods in _variants(_comparisons()):
        yield from _setp(mods, source, _comparison(source, operator, ftz), join)
    for kind, operator, ftz, join, mods in _variants(_packed_comparisons()):
        yield _setp_packed(f"setp{mods}.{kind}x2", kind, _comparison(kind, operator, ftz), join)


def set_forms() -> Iterator[Form]:
    """Yield the forms of `set`."""
    for source, operator, ftz, join, mods in _variants(_comparisons()):
        test = _comparison(source, operator, ftz)
        for target in _set_targets(source, ftz):
            yield _set(f"set{mods}.{target}.{source}", source, target, test, join)
    for kind, operator, ftz, join, mods in _variants(_packed_comparisons()):
        test = _comparison(kind, operator, ftz)
        for target in (f"{kind}x2", "u32", "s32"):
            yield _set_packed(f"set{mods}.{target}.{kind}x2", kind, target, test, join)


def _variants(rows: Iterator[tuple[str, str, bool]]) -> Iterator[tuple[str, str, bool, str, str]]:
    for source, operator, ftz in rows:
        for join in _JOINS:
            mods = f".{operator}{'.' + join if join else ''}{'.ftz' if ftz else ''}"
            yield source, operator, ftz, join, mods


def _comparisons() -> Iterator[tuple[str, str, bool]]:
    for t in _BITS:
        for operator in ("eq", "ne"):
            yield t, operator, False
    for t in _INTEGERS:
        for operator in compare.INTEGER:
            yield t, operator, False
        if t.startswith("u"):
            for operator in compare.UNSIGNED_ALIASES:
                yield t, operator, False
    for t in ("f32", "f64", "f16", "bf16"):
        for operator in compare.FLOAT:
            yield t, operator, False
            if t in ("f32", "f16"):
                yield t, operator, True


def _packed_comparisons() -> Iterator[tuple[str, str, bool]]:
    for operator in compare.FLOAT:
        yield "f16", operator, False
        yield "f16", operator, True
        yield "bf16", operator, False


def _set_targets(source: str, ftz: bool) -> tuple[str, ...]:
    if source in ("f16", "bf16"):
        return ("u16", "s16", "u32", "s32", source)
    half_targets = () if ftz else ("f16", "bf16")
    return ("u32", "s32", "f32", *half_targets)


def _comparison(source: str, operator: str, ftz: bool) -> Callable[[Array, Array], Array]:
    if source in ("f16", "bf16"):
        ordered = compare.FLOAT[operator]

        def halves(a: Array, b: Array) -> Array:
            if ftz:
                a, b = half.flush(a, source), half.flush(b, source)
            return ordered(half.widen(a, source), half.widen(b, source))

        return halves
    if source.startswith("f"):
        test = compare.FLOAT[operator]
        return (lambda a, b: test(flush_f32(a), flush_f32(b))) if ftz else test
    return compare.INTEGER[compare.UNSIGNED_ALIASES.get(operator, operator)]


def _setp(name: str, source: str, test: Function, join: str) -> Iterator[Form]:
    two = f"{source} {source}"
    if not join:
        yield form(f"setp{name}.{source}", test, two, "pred", "predicate")
        if source not in ("f16", "bf16"):
            yield form(f"setp{name}.{source}", _with_complement(test), two, "pred pred", "predicate")
        return
    combine = compare.BOOLEAN[join]

    def one(a: Array, b: Array, c: Array) -> Array:
        return combine(test(a, b), c)

    def both(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        result = test(a, b)
        return combine(result, c), combine(~result, c)

    yield form(f"setp{name}.{source}", one, f"{two} pred", "pred", "predicate")
    if source not in ("f16", "bf16"):
        yield form(f"setp{name}.{source}", both, f"{two} pred", "pred pred", "predicate")


def _with_complement(test: Function) -> Function:
    def both(a: Array, b: Array) -> tuple[Array, Array]:
        result = test(a, b)
        return result, ~result

    return both


def _joined(test: Function, join: str) -> Function:
    if not join:
        return test
    combine = compare.BOOLEAN[join]
    return lambda a, b, c: combine(test(a, b), c)


def _value(holds: Array, target: str) -> Array:
    """Return the value that `set` writes for true and false."""
    true = _TRUE[target]
    out: Array = holds.astype(true.dtype) * true
    return out


def _set(name: str, source: str, target: str, test: Function, join: str) -> Form:
    whole = _joined(test, join)

    def function(*operands: Array) -> Array:
        return _value(whole(*operands), target)

    operands = f"{source} {source}" + (" pred" if join else "")
    return form(name, function, operands, target, "predicate")


def _split(word: Array) -> tuple[Array, Array]:
    return word.astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)


def _setp_packed(name: str, kind: str, test: Function, join: str) -> Form:
    whole = _joined(test, join)

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        (a_low, a_high), (b_low, b_high) = _split(a), _split(b)
        return whole(a_low, b_low, *c), whole(a_high, b_high, *c)

    pair = f"{kind}x2"
    return form(name, function, f"{pair} {pair}" + (" pred" if join else ""), "pred pred", "predicate")


def _set_packed(name: str, kind: str, target: str, test: Function, join: str) -> Form:
    whole = _joined(test, join)
    element = kind if target.endswith("x2") else "u16"

    def function(a: Array, b: Array, *c: Array) -> Array:
        (a_low, a_high), (b_low, b_high) = _split(a), _split(b)
        low, high = _value(whole(a_low, b_low, *c), element), _value(whole(a_high, b_high, *c), element)
        word = (high.astype(np.uint32) << np.uint32(16)) | low
        return word.view(np.int32) if target == "s32" else word

    pair = f"{kind}x2"
    return form(name, function, f"{pair} {pair}" + (" pred" if join else ""), target, "predicate")
