"""Which function executes which arithmetic instruction: the contract between the engine and the arithmetic.

The engine asks `lookup(instruction)`; None means "not arithmetic, or not known" (then it is an error that
names the instruction). A `Semantics` is used like this::

    values = [fetch(operand, dtype) for operand, dtype in zip(sources(instruction), semantics.operands)]
    if semantics.carry_in:
        values.append(carry)                     # bool, the last of semantics.operands
    results = semantics.function(*values)        # an array, or a tuple when len(semantics.results) > 1
    # results go to destinations(instruction) in order; with carry_out the last result is the new carry

Arrays
    Operands are arrays of mutually broadcastable shapes, never 0-d: at least (1, 1). The result has the
    broadcast shape of the operands or a shape that broadcasts to it. Functions never depend on the number of
    dimensions and never write to their operands; a result may *be* an operand or share its memory (`abs` of
    an unsigned value), so the engine too must treat values as immutable.
Operand types
    `operands[i]` is the dtype by which the register is viewed: 'uint32'/'int32' by the sign of the
    instruction's type ('uint32' for .b32), 'uint16'/'int16', 'uint64'/'int64', 'uint8'/'int8' in cvt,
    'float32', 'float64', and 'bool' for predicates. **f16, bf16, fp8, fp6, fp4, e8m0 and all packed types are
    raw bits**: f16 and bf16 'uint16', f16x2, bf16x2, u16x2, s16x2, tf32 and x4 packs of 8-bit types 'uint32',
    f32x2 'uint64', e4m3x2 and other x2 packs of 8-bit storage 'uint16', e2m1x2 'uint8'. A register wider than
    the type gives its low bits.
Results
    A result narrower than its register is extended by its own dtype: signed types by the sign, others by
    zeros.
Immediates
    are arrays of shape (1, 1) of the operand's dtype; a float immediate's bits are those of the operand's
    type. Immediates on which a function is specialised (lop3's table, prmt's selector) are left out by
    `sources(instruction)`.
Predicates
    `!p` is negated by the engine before the call.
Floating-point flags
    The engine holds `np.errstate(all="ignore")` around a run (see `quiet`); functions rely on it rather than
    paying for it at every call.
NaN
    `Semantics.canonical` says whether NaN results carry the bits that the ISA defines. f32 and f64 arithmetic
    leaves whatever the CPU makes and the engine calls `canonicalise_f32/f64` when bits are observed (stored,
    shuffled, moved to an integer); 16-bit and narrower formats are always canonical.
Subnormals
    without .ftz are kept; with .ftz inputs and rounded results are flushed to sign-preserving zero. The
    engine checks once that the process itself does not flush.
Where the ISA is silent
    NaN results are "unspecified": f32 and tf32 0x7fffffff, f16 and bf16 0x7fff. `.sat` and
    `.relu` make +0 of -0. Integer division by zero gives all ones, the remainder then is the dividend. e8m0
    drops the sign (as NVIDIA's host code does). `cvt.rs` to f16x2 and bf16x2 adds the random bits to as many
    bits below the last kept one, for subnormal results too (as published B200 measurements show).
Not known, hence None
    `fma.oob` (the pattern of OOB-NaN is not documented), s2f6x2, `cvt.rs` to x4 formats (the layout of its
    random bits is only in figures), `clmad`, the video instructions (`vadd`, ...), 128-bit types.

`forms()` lists every form the registry knows, for tests that compare all of them with an oracle.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from workbench.isa.ptx.model import Imm, Instruction, Operand, Pair, Vector
from workbench.simulator.arith.semantics import Form, Semantics, canonicalise_f32, canonicalise_f64

__all__ = [
    "Form",
    "Semantics",
    "canonicalise_f32",
    "canonicalise_f64",
    "destinations",
    "forms",
    "lookup",
    "quiet",
    "sources",
]

Key = tuple[str, int, int]
"""Instruction name in a normal order of modifiers, number of destinations, number of sources."""

_TYPE = re.compile(r"(b|s|u|f|bf|tf)\d+(x\d)?|pred|ue8m0x2|e\dm\dx\d")


def quiet() -> Any:
    """Return the NumPy error state under which the functions are to be called (a context manager)."""
    return np.errstate(all="ignore")


def destinations(instruction: Instruction) -> tuple[Operand, ...]:
    """Return the destination operands, `d|p` and vectors taken apart, without the carry flag."""
    first = instruction.operands[0]
    if isinstance(first, Pair):
        return (first.first, first.second)
    if isinstance(first, Vector):
        return first.elements
    return (first,)


def _all_sources(instruction: Instruction) -> tuple[Operand, ...]:
    flat: list[Operand] = []
    for operand in instruction.operands[1:]:
        flat.extend(operand.elements if isinstance(operand, Vector) else (operand,))
    return tuple(flat)


def sources(instruction: Instruction) -> tuple[Operand, ...]:
    """Return the source operands that go with `Semantics.operands`: vectors taken apart, folded immediates
    left out."""
    flat = _all_sources(instruction)
    form = _find(instruction, flat)
    if form is not None and form.immediate is not None and isinstance(flat[form.immediate], Imm):
        return flat[: form.immediate] + flat[form.immediate + 1 :]
    return flat


def lookup(instruction: Instruction) -> Semantics | None:
    """Return how to execute `instruction`, or None if it is no arithmetic or an unknown form."""
    if not instruction.operands:
        return None
    flat = _all_sources(instruction)
    form = _find(instruction, flat)
    if form is None:
        return None
    if form.specialise is not None and form.immediate is not None:
        constant = flat[form.immediate]
        if isinstance(constant, Imm):
            return form.specialise(constant.value)
        if form.immediate_required:
            return None
    return form.semantics


def forms() -> tuple[Form, ...]:
    """Return every known form."""
    return tuple(form for family in ("", "set", "setp", "cvt") for form in _table(family).values())


@cache
def _normal(name: str) -> str:
    """Sort the modifiers that are not types: the assembler takes them in any order."""
    opcode, *modifiers = name.split(".")
    types = [m for m in modifiers if _TYPE.fullmatch(m)]
    flags = sorted(m for m in modifiers if not _TYPE.fullmatch(m))
    return ".".join((opcode, *flags, *types))


def _key(text: str) -> Key:
    name, _, rest = text.partition(" ")
    first, *others = rest.split(",")
    return _normal(name), first.count("|") + 1, len(others)


def _find(instruction: Instruction, flat: tuple[Operand, ...]) -> Form | None:
    key = (_normal(instruction.name), len(destinations(instruction)), len(flat))
    return _table(instruction.opcode).get(key)


@cache
def _table(opcode: str) -> dict[Key, Form]:
    """Return the forms of an opcode's family; the large families are made only when asked for."""
    from workbench.simulator.arith import compare_forms, convert_forms, float_forms, integer_forms

    families = {
        "set": (compare_forms.set_forms,),
        "setp": (compare_forms.setp_forms,),
        "cvt": (convert_forms.forms,),
    }
    if opcode not in families and opcode:
        return _table("")
    table: dict[Key, Form] = {}
    for make in families.get(opcode, (integer_forms.forms, float_forms.forms)):
        for form in make():
            key = _key(form.text)
            if key in table:
                raise AssertionError(f"{form.text} is registered twice")
            table[key] = form
    return table
