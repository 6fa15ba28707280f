"""What the engine needs to know to execute one arithmetic PTX instruction on arrays of lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Function = Callable[..., Any]
"""Takes one array per operand, returns one array, or a tuple of arrays if there are several results."""


@dataclass(frozen=True, slots=True)
class Semantics:
    """One instruction form: its element function and the NumPy types that go in and come out.

    `operands[i]` and `results[i]` are NumPy dtype names. The module docstring of
    `workbench.simulator.arith.registry` is the contract between this and the engine.
    """

    function: Function
    operands: tuple[str, ...]
    results: tuple[str, ...]
    instruction_class: str
    """Class of `workbench.simulator.counters.Counters.warp_instructions`: `int`, `fp32`, `fp16`, `fp64`,
    `convert`, `sfu` or `predicate`."""
    exact: bool = True
    """The result is the one the PTX ISA defines, bit for bit (NaN payloads apart, see `canonical`)."""
    tolerance_ulp: float | None = None
    """For `exact=False`: units in the last place of the result by which the ISA lets hardware differ from the
    true value (the function here is within it too). None where the bound is relative or absolute: see
    `tolerance_relative` and `tolerance_absolute`."""
    tolerance_relative: float | None = None
    tolerance_absolute: float | None = None
    canonical: bool = True
    """NaN results already have the bits the ISA says. False: a NaN may carry any payload and sign, and
    whoever observes bits calls `canonicalise_f32` or `canonicalise_f64` first."""
    carry_in: bool = False
    """The last operand is the carry flag CC.CF ('bool'), which is not among the instruction's operands."""
    carry_out: bool = False
    """The last result is the new CC.CF ('bool'), which is not among the instruction's destinations."""
    narrow: Function | None = None
    """A faster function with the same results, for callers that know that the significands of the two factors
    have at most 24 bits together (bf16, f16, fp8, fp6, fp4 values held in f32)."""

    def with_function(self, function: Function) -> Semantics:
        """Return a copy that calls `function`."""
        return replace(self, function=function)


@dataclass(frozen=True, slots=True)
class Form:
    """A registered instruction form."""

    text: str
    """An example as PTX, without semicolon: `setp.lt.and.f32 d|p, a, b, c`. A number stands where PTX wants
    an immediate on which the function is specialised."""
    semantics: Semantics
    operand_types: tuple[str, ...]
    """PTX types of the operands (`b32`, `s16`, `bf16x2`, ...), in the order of `Semantics.operands`."""
    result_types: tuple[str, ...]
    specialise: Callable[[int], Semantics] | None = None
    """For forms with an operand that is or may be an immediate: the semantics for a value of it. That operand
    then is not among `Semantics.operands`."""
    immediate: int | None = None
    """Index of that operand among the sources."""
    immediate_required: bool = False
    """That operand can only be an immediate (lop3); else registers are served by `semantics`."""


def canonicalise_f32(array: Array) -> Array:
    """Return `array` (float32, any shape) with every NaN replaced by the PTX canonical NaN 0x7fffffff.

    The ISA (9.7.3) says "an unspecified NaN"; the CUDA programming guide (Floating-Point Standard) names this
    one for GPUs. The input itself is returned when it holds no NaN.
    """
    nan = np.isnan(array)
    if not nan.any():
        return array
    bits = array.view(np.uint32).copy()
    bits[nan] = 0x7FFFFFFF
    return bits.view(np.float32)


def canonicalise_f64(array: Array) -> Array:
    """Return `array` (float64) with every NaN replaced by 0x7fffffffffffffff; the input itself if there is
    none.

    The ISA leaves the NaN of double-precision instructions open; one fixed pattern keeps runs reproducible.
    """
    nan = np.isnan(array)
    if not nan.any():
        return array
    bits = array.view(np.uint64).copy()
    bits[nan] = 0x7FFFFFFFFFFFFFFF
    return bits.view(np.float64)
