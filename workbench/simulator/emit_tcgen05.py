"""Translation of the tcgen05 instructions: operands and qualifiers; `tcgen05` does the work."""

from __future__ import annotations

from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Sink, Vector
from workbench.simulator.emit_memory import _address, _site
from workbench.simulator.emitter import Emitter
from workbench.simulator.tcgen05_descriptors import DEPTH
from workbench.simulator.tcgen05_work import MmaForm
from workbench.simulator.tmem import COPY_SHAPES, REPEATS, SHAPES, registers

_GROUPS = {"cta_group::1": 1, "cta_group::2": 2}


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    if item.opcode != "tcgen05":
        return False
    m = item.modifiers
    if m[0] == "fence" and m[1:] in (("before_thread_sync",), ("after_thread_sync",)):
        return True
    if m[0] == "fence::before_thread_sync" or m[0] == "fence::after_thread_sync":
        return True
    if m[0] in ("wait::ld", "wait::st") and m[1:] == ("sync", "aligned"):
        e.code.do(f"ck.tensor.wait({m[0][-2:]!r}, co)")
        return True
    handler = {
        "alloc": _allocate, "dealloc": _deallocate, "relinquish_alloc_permit": _relinquish, "ld": _load,
        "st": _store, "cp": _copy, "mma": _mma, "commit": _commit,
    }.get(m[0])  # fmt: skip
    return handler is not None and handler(e, item)


def _item(e: Emitter, item: Instruction) -> str:
    return e.context.global_name("I", item)


def _group(e: Emitter, item: Instruction) -> int:
    groups = [_GROUPS[x] for x in item.modifiers if x in _GROUPS]
    if len(groups) != 1:
        e.fail("CTA group")
    return groups[0]


def _only(e: Emitter, item: Instruction, *known: str) -> None:
    """Refuse modifiers after the first one that are not known."""
    for x in item.modifiers[1:]:
        if x not in known and x not in _GROUPS:
            e.fail(f"modifier .{x}")


def _cell(e: Emitter, operand: Operand) -> str:
    """Return the array of a tensor memory address."""
    if not isinstance(operand, Address) or operand.base is None:
        e.fail("tensor memory address")
        raise AssertionError
    a, offset = _address(e, operand, "tensor")
    return a if not offset else e.code.let(f"{a} + {e.context.constant(offset, 's64')}")


def _allocate(e: Emitter, item: Instruction) -> bool:
    _only(e, item, "sync", "aligned", "shared::cta", "b32")
    if "shared::cta" not in item.modifiers:
        e.fail("a generic address")
    a, offset = _address(e, item.operands[0], "shared")
    site = _site(e, item, "shared", 4, offset)
    count = e.fetch(item.operands[1], "u32")
    e.code.do(f"ck.tensor.allocate({site}, {a}, {count}, {_group(e, item)}, co)")
    return True


def _deallocate(e: Emitter, item: Instruction) -> bool:
    _only(e, item, "sync", "aligned", "b32")
    address, count = (e.fetch(o, "u32") for o in item.operands)
    e.code.do(f"ck.tensor.deallocate({_item(e, item)}, {address}, {count}, {_group(e, item)}, co)")
    return True


def _relinquish(e: Emitter, item: Instruction) -> bool:
    _only(e, item, "sync", "aligned")
    e.code.do("ck.tensor.relinquish(co)")
    return True


def _form(e: Emitter, item: Instruction, packing: str) -> tuple[str, int, bool]:
    """Return shape, repetitions and whether 16-bit halves are packed."""
    _only(e, item, "sync", "aligned", "b32", packing, *SHAPES, *(f"x{n}" for n in REPEATS))
    shapes = [x for x in item.modifiers if x in SHAPES]
    repeats = [int(x[1:]) for x in item.modifiers if x.startswith("x")]
    if len(shapes) != 1 or len(repeats) != 1 or registers(shapes[0], repeats[0]) > 128:
        e.fail("shape")
    return shapes[0], repeats[0], packing in item.modifiers


def _split(e: Emitter, shape: str, operands: tuple[Operand, ...]) -> int:
    if shape != "16x32bx2":
        return 0
    (offset,) = operands
    if not isinstance(offset, Imm):
        e.fail("offset of the second half")
        raise AssertionError
    return offset.value


def _elements(e: Emitter, operand: Operand, count: int) -> tuple[Operand, ...]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count:
        e.fail(f"{len(elements)} registers where {count} are due")
    return elements


def _load(e: Emitter, item: Instruction) -> bool:
    shape, repeat, packed = _form(e, item, "pack::16b")
    split = _split(e, shape, item.operands[2:])
    count = registers(shape, repeat)
    elements = _elements(e, item.operands[0], count)
    form = (shape, repeat, split, packed)
    address = _cell(e, item.operands[1])
    names = e.code.let_many(count, f"ck.tensor.load({_item(e, item)}, {form!r}, {address}, co)")
    for operand, name in zip(elements, names, strict=True):
        if not isinstance(operand, Sink):
            e.put(operand, "u32", name)
    return True


def _store(e: Emitter, item: Instruction) -> bool:
    shape, repeat, packed = _form(e, item, "unpack::16b")
    split = _split(e, shape, item.operands[1:-1])
    values = [e.fetch(o, "u32") for o in _elements(e, item.operands[-1], registers(shape, repeat))]
    form = (shape, repeat, split, packed)
    address = _cell(e, item.operands[0])
    e.code.do(f"ck.tensor.store({_item(e, item)}, {form!r}, {address}, ({', '.join(values)},), co)")
    return True


def _copy(e: Emitter, item: Instruction) -> bool:
    casts = ("warpx4", "warpx2::02_13", "warpx2::01_23")
    _only(e, item, *COPY_SHAPES, *casts)
    shapes = [x for x in item.modifiers if x in COPY_SHAPES]
    multicast = "".join(x for x in item.modifiers if x in casts)
    wanted = {"32x128b": "warpx4", "64x128b": "warpx2"}
    if len(shapes) != 1 or multicast.split("::")[0] != wanted.get(shapes[0], ""):
        e.fail("shape")
    form = (shapes[0], multicast, _group(e, item))
    address, descriptor = _cell(e, item.operands[0]), e.fetch(item.operands[1], "u64")
    e.code.do(f"ck.tensor.copy({_item(e, item)}, {form!r}, {address}, {descriptor}, co)")
    return True


_FACTORS = {
    ("mxf8f6f4", ""): 1, ("mxf8f6f4", "scale_vec::1X"): 1, ("mxf8f6f4", "block32"): 1, ("mxf4", ""): 2,
    ("mxf4", "scale_vec::2X"): 2, ("mxf4", "block32"): 2, ("mxf4nvf4", "scale_vec::2X"): 2,
    ("mxf4nvf4", "block32"): 2, ("mxf4nvf4", "scale_vec::4X"): 4, ("mxf4nvf4", "block16"): 4,
}  # fmt: skip
"""Scale factors a row of one instruction, by kind and qualifier."""
_COLLECTORS = tuple(f"collector::a::{x}" for x in ("fill", "use", "lastuse", "discard"))
_BUFFERS = tuple(f"collector::b{n}::{x}" for n in range(4) for x in ("fill", "use", "lastuse", "discard"))
_SIZES = ("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")


def _mma(e: Emitter, item: Instruction) -> bool:
    kinds = tuple(f"kind::{k}" for k in DEPTH)
    stationary = item.modifiers[1] == "ws"
    if stationary:
        _only(e, item, "ws", *kinds, *_BUFFERS)
    else:
        _only(e, item, "block_scale", *kinds, *_COLLECTORS, *_SIZES)
    kind = "".join(x[6:] for x in item.modifiers if x in kinds)
    scaled = "block_scale" in item.modifiers
    if not kind or scaled != kind.startswith("mx") or (stationary and _group(e, item) != 1):
        e.fail("kind")
    factors = 0
    if scaled:
        size = "".join(x for x in item.modifiers if x in _SIZES)
        if (kind, size) not in _FACTORS:
            e.fail("scale vector size")
        factors = _FACTORS[kind, size]
    d, a, b, descriptor, *rest = item.operands
    in_tensor_memory = isinstance(a, Address)
    parts = {
        "d": _cell(e, d),
        "a": _cell(e, a) if in_tensor_memory else e.fetch(a, "u64"),
        "b": e.fetch(b, "u64"),
        "descriptor": e.fetch(descriptor, "u32"),
    }
    if scaled:
        parts["scale_a"], parts["scale_b"] = _cell(e, rest[0]), _cell(e, rest[1])
        rest = rest[2:]
    group = _group(e, item)
    if rest and isinstance(rest[0], Vector) and not stationary:
        masks = [e.fetch(x, "u32") for x in _elements(e, rest[0], 4 * group)]
        parts["masks"] = f"({', '.join(masks)},)"
        rest = rest[1:]
    parts["accumulate"] = e.fetch(rest[0], "b")
    if stationary and len(rest) > 1:
        e.fail("columns of B that are zero")
    if len(rest) == 2:
        shift = rest[1]
        if not isinstance(shift, Imm) or kind not in ("f16", "tf32") or not 0 <= shift.value <= 15:
            e.fail("scale of D")
            raise AssertionError
        parts["shift"] = str(shift.value)
    elif len(rest) > 2:
        e.fail("operands")
    form = e.context.global_name("F", MmaForm(kind, group, factors, in_tensor_memory, stationary))
    values = ", ".join(f"{k!r}: {v}" for k, v in parts.items())
    e.code.do(f"ck.tensor.mma({_item(e, item)}, {form}, {{{values}}}, co)")
    return True


def _commit(e: Emitter, item: Instruction) -> bool:
    _only(e, item, "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64")
    space = "cluster" if "shared::cluster" in item.modifiers else "generic"
    _group(e, item)
    a, offset = _address(e, item.operands[0], space)
    site = _site(e, item, space, 8, offset)
    mask = e.fetch(item.operands[1], "u16") if "multicast::cluster" in item.modifiers else "None"
    e.code.do(f"ck.tensor.commit({site}, {a}, {mask}, co)")
    return True
