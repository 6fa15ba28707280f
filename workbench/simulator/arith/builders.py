"""Helpers to write down instruction forms: operand types, wrappers for .ftz, .sat, .relu and packed types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.simulator.arith import fp32, half
from workbench.simulator.arith.rounding import flush_f32
from workbench.simulator.arith.semantics import Array, Form, Function, Semantics

DTYPES = {
    "pred": "bool",
    "b8": "uint8",
    "u8": "uint8",
    "s8": "int8",
    "b16": "uint16",
    "u16": "uint16",
    "s16": "int16",
    "b32": "uint32",
    "u32": "uint32",
    "s32": "int32",
    "b64": "uint64",
    "u64": "uint64",
    "s64": "int64",
    "f32": "float32",
    "f64": "float64",
    "f16": "uint16",
    "bf16": "uint16",
    "f16x2": "uint32",
    "bf16x2": "uint32",
    "u16x2": "uint32",
    "s16x2": "uint32",
    "f32x2": "uint64",
    "tf32": "uint32",
}
"""NumPy dtype by which an operand of a PTX type is viewed."""

_LETTERS = "abcefghijk"


def form(
    name: str, function: Function, operands: str, results: str, instruction_class: str, **more: Any
) -> Form:
    """Make a form; `operands` and `results` are PTX types separated by spaces.

    Two results are written `d|p`. Other keywords go to `Semantics`.
    """
    sources, targets = operands.split(), results.split()
    hidden_in, hidden_out = more.get("carry_in", False), more.get("carry_out", False)
    visible = len(targets) - hidden_out
    text = f"{name} {'d|p' if visible == 2 else 'd'}"
    for letter in _LETTERS[: len(sources) - hidden_in]:
        text += f", {letter}"
    semantics = Semantics(
        function=function,
        operands=tuple(DTYPES[s] for s in sources),
        results=tuple(DTYPES[t] for t in targets),
        instruction_class=instruction_class,
        **more,
    )
    return Form(text, semantics, tuple(sources), tuple(targets))


def with_ftz(function: Function) -> Function:
    """Flush float32 operands and the float32 result."""

    def flushed(*operands: Array) -> Array:
        return flush_f32(function(*[flush_f32(x) for x in operands]))

    return flushed


def with_sat(function: Function) -> Function:
    """Clamp the float32 result to [0, 1]."""

    def saturated(*operands: Array) -> Array:
        return fp32.saturate(function(*operands))

    return saturated


def modified(function: Function, *, ftz: bool = False, sat: bool = False) -> Function:
    """Apply .ftz and .sat of f32 instructions."""
    if ftz:
        function = with_ftz(function)
    return with_sat(function) if sat else function


def in_mode(function: Callable[..., Array], mode: str) -> Function:
    """Fix the rounding mode of a function whose last parameter it is."""
    if mode == "rn":
        return function

    def rounded(*operands: Array) -> Array:
        return function(*operands, mode)

    return rounded


def half_modified(
    function: Function, kind: str, *, ftz: bool = False, sat: bool = False, relu: bool = False
) -> Function:
    """Apply .ftz, .sat and .relu of f16 and bf16 instructions."""
    if not (ftz or sat or relu):
        return function

    def wrapped(*operands: Array) -> Array:
        result = function(*[half.flush(x, kind) for x in operands] if ftz else operands)
        if ftz:
            result = half.flush(result, kind)
        if sat:
            result = half.saturate(result, kind)
        return half.relu(result, kind) if relu else result

    return wrapped


_SIXTEEN, _THIRTY_TWO = np.uint32(16), np.uint64(32)


def packed16(function: Function, dtype: Any = np.uint16) -> Function:
    """Lift a function of 16-bit lanes to 32-bit words of two; equal shapes go through one call."""

    def both(*words: Array) -> Array:
        shape = words[0].shape
        if all(w.shape == shape for w in words):
            lanes = [np.ascontiguousarray(w)[..., None].view(dtype) for w in words]
            result = np.ascontiguousarray(function(*lanes))
            return result.view(np.uint32)[..., 0]
        low = function(*[w.astype(np.uint16).view(dtype) for w in words])
        high = function(*[(w >> _SIXTEEN).astype(np.uint16).view(dtype) for w in words])
        out: Array = (high.view(np.uint16).astype(np.uint32) << _SIXTEEN) | low.view(np.uint16)
        return out

    return both


def packed32(function: Function) -> Function:
    """Lift a function of float32 to 64-bit words of two."""

    def both(*words: Array) -> Array:
        shape = words[0].shape
        if all(w.shape == shape for w in words):
            lanes = [np.ascontiguousarray(w)[..., None].view(np.float32) for w in words]
            result = np.ascontiguousarray(function(*lanes))
            return result.view(np.uint64)[..., 0]
        low = function(*[w.astype(np.uint32).view(np.float32) for w in words])
        high = function(*[(w >> _THIRTY_TWO).astype(np.uint32).view(np.float32) for w in words])
        out: Array = (high.view(np.uint32).astype(np.uint64) << _THIRTY_TWO) | low.view(np.uint32)
        return out

    return both
