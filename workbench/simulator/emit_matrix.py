"""Matrix instructions of a warp: ldmatrix, stmatrix, movmatrix, mma.sync."""

from __future__ import annotations

from workbench.isa.ptx.model import Instruction, Operand, Vector
from workbench.simulator import ldmatrix, matrix, quad
from workbench.simulator.emit_memory import _address as address_of
from workbench.simulator.emit_memory import _site as site_of
from workbench.simulator.emitter import Emitter

NAMES = {
    "matrix_load": ldmatrix.load,
    "matrix_store": ldmatrix.store,
    "matrix_transpose": matrix.transpose,
    "matrix_multiply": matrix.multiply,
    "quad_multiply": quad.multiply,
}
_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    opcode = item.opcode
    if opcode == "mma":
        return _mma(e, item)
    if opcode in ("ldmatrix", "stmatrix"):
        return _move(e, item)
    if opcode == "movmatrix":
        if item.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
            return False
        d, a = item.operands
        here = e.context.global_name("I", item)
        e.put(d, "u32", e.code.let(f"matrix_transpose({e.fetch(a, 'u32')}, co, ck, {here})"))
        return True
    if opcode == "wmma":
        e.fail("wmma: its fragments have no documented layout")
    return False


def elements(operand: Operand) -> tuple[Operand, ...]:
    """Return the registers of a vector, or the one register."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _quad(e: Emitter, item: Instruction, form: quad.QuadMma) -> bool:
    d, a, b, c = (elements(o) for o in item.operands)
    if (len(d), len(a), len(b), len(c)) != (quad.registers(form.d), 2, 2, quad.registers(form.c)):
        e.fail("number of registers")
    kinds = ("u32", "u32", "u32" if form.c == "f16" else "f32")
    groups = [
        "(" + "".join(e.fetch(x, dtype) + ", " for x in part) + ")"
        for part, dtype in zip((a, b, c), kinds, strict=True)
    ]
    plan, here = e.context.global_name("M", form), e.context.global_name("I", item)
    names = e.code.let_many(len(d), f"quad_multiply({plan}, {', '.join(groups)}, co, ck, {here})")
    for operand, name in zip(d, names, strict=True):
        e.put(operand, "u32" if form.d == "f16" else "f32", name, dirty=form.d == "f32")
    return True


def _mma(e: Emitter, item: Instruction) -> bool:
    four = quad.form_of(item)
    if four is not None:
        return _quad(e, item, four)
    form = matrix.form_of(item)
    if isinstance(form, str):
        e.fail(form)
        raise AssertionError
    d, a, b, c = (elements(o) for o in item.operands)
    if (len(a), len(b), len(c)) != form.registers or len(d) != len(c):
        e.fail("number of registers")
    source = "f64" if form.a == "f64" else "u32"
    kind = {"f16": "u32", "s32": "s32"}.get(form.c, form.c)
    groups = [
        "(" + "".join(e.fetch(x, dtype) + ", " for x in part) + ")"
        for part, dtype in ((a, source), (b, source), (c, kind))
    ]
    plan, here = e.context.global_name("M", form), e.context.global_name("I", item)
    names = e.code.let_many(len(d), f"matrix_multiply({plan}, {', '.join(groups)}, co, ck, {here})")
    for operand, name in zip(d, names, strict=True):
        e.put(operand, kind, name, dirty=kind in ("f32", "f64"))
    return True


_FORMATS = {
    ("m8n8", ("b16",)): 16, ("m16n16", ("b8",)): 8, ("m16n8", ("b8",)): 8,
    ("m8n16", ("b8x16", "b6x16_p32")): 6, ("m8n16", ("b8x16", "b4x16_p64")): 4,
    ("m16n16", ("b8x16", "b6x16_p32")): 6, ("m16n16", ("b8x16", "b4x16_p64")): 4,
}  # fmt: skip
"""Bits of an element in shared memory by shape and types."""
_TRANSPOSED = {
    ("ldmatrix", "m8n8"): (False, True), ("stmatrix", "m8n8"): (False, True),
    ("ldmatrix", "m8n16"): (False,), ("ldmatrix", "m16n16"): (True,), ("stmatrix", "m16n8"): (True,),
}  # fmt: skip
"""Whether `.trans` may or must be there."""


def _form(e: Emitter, item: Instruction) -> tuple[ldmatrix.Move, str]:
    """Return the form of ldmatrix or stmatrix, and its state space; assemblers take any order of shape and
    number.
    """
    m = list(item.modifiers)
    if m[:2] != ["sync", "aligned"]:
        e.fail("not .sync.aligned")
    m = m[2:]
    shapes = [x for x in m if x in ("m8n8", "m8n16", "m16n16", "m16n8")]
    counts = [x for x in m if x in _COUNTS]
    spaces = [x for x in m if x in ("shared", "shared::cta")]
    transposed = "trans" in m
    types = tuple(x for x in m if x not in (*shapes, *counts, *spaces, "trans"))
    if len(shapes) != 1 or len(counts) != 1 or (shapes[0], types) not in _FORMATS:
        e.fail("this shape")
    shape = shapes[0]
    if transposed not in _TRANSPOSED.get((item.opcode, shape), ()):
        e.fail("this shape")
    if shape == "m16n16" and counts[0] == "x4":
        e.fail("four matrices of this shape")
    form = ldmatrix.Move(shape, _COUNTS[counts[0]], transposed, _FORMATS[shape, types])
    return form, "shared" if spaces else "generic"


def _move(e: Emitter, item: Instruction) -> bool:
    form, space = _form(e, item)
    loads = item.opcode == "ldmatrix"
    address, registers = (item.operands[1], item.operands[0]) if loads else item.operands
    if len(elements(registers)) != form.registers:
        e.fail("number of registers")
    a, offset = address_of(e, address, space)
    site = site_of(e, item, space, ldmatrix.ROW, offset)
    plan, here = e.context.global_name("M", form), e.context.global_name("I", item)
    if loads:
        call = f"matrix_load({site}, {a}, {plan}, co, ck, {here})"
        for operand, name in zip(elements(registers), e.code.let_many(form.registers, call), strict=True):
            e.put(operand, "u32", name)
        return True
    values = "".join(e.fetch(x, "u32") + ", " for x in elements(registers))
    e.code.do(f"matrix_store({site}, {a}, ({values}), {plan}, co, ck, {here})")
    return True
