"""multimem.ld_reduce, multimem.st and multimem.red (PTX ISA 9.7.9.13)."""

from __future__ import annotations

from workbench.isa.ptx.model import Instruction, Reg, Sink, Vector
from workbench.simulator import atomics, emit_memory
from workbench.simulator.emit_alu import pack
from workbench.simulator.emitter import Emitter
from workbench.simulator.values import INTEGERS

_ORDER = frozenset(("weak", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "global"))
_OPERATIONS = frozenset(("add", "min", "max", "and", "or", "xor"))
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_WIDTHS = {"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64}
KINDS = frozenset((*_WIDTHS, "b32", "b64", "u32", "u64", "s32", "s64"))
FORMS = ("ld_reduce", "st", "red")


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    if item.opcode != "multimem" or not item.modifiers or item.modifiers[0] not in FORMS:
        return False
    form, kind = item.modifiers[0], item.modifiers[-1]
    op, count, wide = "", 1, False
    for m in item.modifiers[1:-1]:
        if m in _OPERATIONS:
            op = m
        elif m in _VECTORS:
            count = _VECTORS[m]
        elif m == "acc::f32":
            wide = True
        elif m not in _ORDER:
            e.fail(f"modifier .{m}")
    if kind not in KINDS:
        e.fail(f"type .{kind}")
    width = _WIDTHS.get(kind) or int(kind[1:])
    size = count * width // 8
    if size > 16:
        e.fail("more than 16 bytes")
    if form == "st":
        if op or wide:
            e.fail("an operation on a store")
        return _store(e, item, count, width, size)
    if not op or not atomics.supported(op, kind):
        e.fail(f"operation .{op} on .{kind}")
    if wide and (op != "add" or kind not in ("f16", "bf16", "f16x2", "bf16x2")):
        e.fail("accumulation in f32")
    if form == "red":
        return _reduce(e, item, op, kind, count, width, size)
    destination, address = item.operands
    elements = destination.elements if isinstance(destination, Vector) else (destination,)
    if len(elements) != count:
        e.fail("vector length")
    a, offset = emit_memory._address(e, address, "global")
    site = emit_memory._site(e, item, "global", size, offset)
    call = f"multimem_load({site}, {op!r}, {kind!r}, {count}, {wide}, {a}, co, ck)"
    names = e.code.let_many(count, call)
    for operand, name in zip(elements, names, strict=True):
        if isinstance(operand, Reg) and not isinstance(operand, Sink):
            e.put(operand, INTEGERS[width], name)
    return True


def _sources(e: Emitter, item: Instruction, count: int) -> tuple[str, ...]:
    source = item.operands[1]
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != count:
        e.fail("vector length")
    width = (_WIDTHS.get(item.modifiers[-1])) or int(item.modifiers[-1][1:])
    return tuple(e.fetch(x, INTEGERS[width]) for x in elements)


def _store(e: Emitter, item: Instruction, count: int, width: int, size: int) -> bool:
    address, source = item.operands
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != count:
        e.fail("vector length")
    if size <= 8:
        values = [e.operand(x, width) for x in elements]
        raw = e.view(pack(e, values, size * 8), INTEGERS[size * 8])
    else:
        arrays = _sources(e, item, count)
        raw = e.code.let(f"interleave(({', '.join(arrays)},), {size})")
    a, offset = emit_memory._address(e, address, "global")
    site = emit_memory._site(e, item, "global", size, offset)
    e.code.do(f"multimem_store({site}, {a}, {raw}, co, ck)")
    return True


def _reduce(e: Emitter, item: Instruction, op: str, kind: str, count: int, width: int, size: int) -> bool:
    a, offset = emit_memory._address(e, item.operands[0], "global")
    arrays = _sources(e, item, count)
    site = emit_memory._site(e, item, "global", size, offset)
    e.code.do(f"multimem_reduce({site}, {op!r}, {kind!r}, {a}, ({', '.join(arrays)},), co, ck)")
    return True
