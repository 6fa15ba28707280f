"""Instruction classes of `Counters`, and what one pass through a block costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.isa.ptx.model import Instruction
from workbench.simulator import arith
from workbench.simulator.program import Block

_BY_OPCODE = {
    opcode: kind
    for kind, opcodes in {
        "move": ("mov", "cvta"),
        "int": ("selp", "mapa", "getctarank"),
        "predicate": ("setp", "isspacep"),
        "shuffle": ("shfl", "redux", "movmatrix"),
        "tensor": ("mma",),
        "load_shared": ("ldmatrix",),
        "store_shared": ("stmatrix",),
        "vote": ("vote", "match", "elect", "activemask"),
        "branch": ("bra", "brx", "ret", "exit", "trap"),
        "barrier": ("bar", "barrier", "mbarrier"),
        "atomic": ("atom", "red", "multimem"),
        "fence": ("fence", "membar"),
        "pdl": ("griddepcontrol",),
        "other": ("createpolicy", "call"),
    }.items()
    for opcode in opcodes
}


@dataclass(slots=True)
class Cost:
    """Counts of one lane or warp that runs a block once."""

    instructions: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    shared_bytes: int = 0
    async_bytes: int = 0
    atomics: int = 0


def class_of(item: Instruction) -> str:
    """Return the class of an instruction, as `Counters` names them."""
    if item.opcode in ("ld", "ldu", "st"):
        way = "store" if item.opcode == "st" else "load"
        m = item.modifiers
        if "const" in m or any(x.startswith("param") for x in m):
            return "load_const"
        space = "local" if "local" in m else "global"
        if not {"shared", "shared::cta", "shared::cluster"}.isdisjoint(m):
            space = "shared"
        return f"{way}_{space}"
    if item.opcode == "cp":
        return "async_copy"
    if item.opcode == "wgmma":
        return {"mma_async": "tensor", "fence": "fence"}.get(item.modifiers[0], "barrier")
    if item.opcode == "tcgen05":
        what = item.modifiers[0]
        return {"mma": "tensor", "cp": "async_copy"}.get(what, "fence" if "fence" in what else "other")
    if item.opcode in _BY_OPCODE:
        return _BY_OPCODE[item.opcode]
    semantics = arith.lookup(item)
    return semantics.instruction_class if semantics is not None else "other"


def bytes_of(item: Instruction) -> int:
    """Bytes that one lane moves with a load or store."""
    if item.opcode in ("ldmatrix", "stmatrix"):
        return _matrix_bytes(item)
    count = next((int(m[1:]) for m in item.modifiers if m in ("v2", "v4", "v8")), 1)
    return count * int(item.modifiers[-1].lstrip("busf")) // 8


def _matrix_bytes(item: Instruction) -> int:
    """Shared-memory bytes of a matrix instruction, as a lane's share."""
    count = next((int(m[1:]) for m in item.modifiers if m in ("x1", "x2", "x4")), 1)
    return count * (8 if "m16n16" in item.modifiers else 4)


def cost_of(block: Block) -> Cost:
    """Return what one pass through `block` costs."""
    cost = Cost()
    items = list(block.instructions)
    if block.instruction is not None and not _synthetic(block.instruction):
        items.append(block.instruction)
    for item in items:
        kind = class_of(item)
        cost.instructions += 1
        cost.classes[kind] = cost.classes.get(kind, 0) + 1
        if kind == "load_global":
            cost.global_load_bytes += bytes_of(item)
        elif kind == "store_global":
            cost.global_store_bytes += bytes_of(item)
        elif kind in ("load_shared", "store_shared"):
            cost.shared_bytes += bytes_of(item)
        elif kind == "atomic":
            cost.atomics += 1
        elif kind == "async_copy" and len(item.operands) >= 3 and "bulk" not in item.modifiers:
            size = item.operands[2]
            cost.async_bytes += getattr(size, "value", 0)
    return cost


def _synthetic(item: Instruction) -> bool:
    """A guard branch stands for the predicate of the instruction behind it, which is counted there."""
    return item.opcode == "bra" and not item.operands
