"""Warp-synchronous instructions: shuffles, votes, match, redux, elect."""

from __future__ import annotations

from workbench.isa.ptx.model import Imm, Instruction, Operand
from workbench.simulator.emitter import Emitter


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    m = item.modifiers
    opcode = item.opcode
    if (
        opcode == "shfl"
        and len(m) == 3
        and m[0] == "sync"
        and m[2] == "b32"
        and m[1] in ("up", "down", "bfly", "idx")
    ):
        return _shuffle(e, item)
    if opcode == "vote" and m[0] == "sync":
        d, p, mask = item.operands
        arguments = f"{e.fetch(p, 'b')}, {_mask(e, mask)}, co, ck, {_here(e)}"
        if m[1:] == ("ballot", "b32"):
            e.put(d, "u32", e.code.let(f"vote_ballot({arguments})"))
            return True
        if m[1] in ("all", "any", "uni") and m[2:] == ("pred",):
            e.put(d, "b", e.code.let(f"vote_{m[1]}({arguments})"))
            return True
    if opcode == "match" and len(m) == 3 and m[0] in ("any", "all") and m[1] == "sync":
        kind = m[-1]
        d, a, mask = item.operands
        first, second = e.destinations(d)
        names = e.code.let_many(
            2,
            f"match_{m[0]}({e.fetch(a, 'u' + kind[1:])}, {_mask(e, mask)}, co, ck, {_here(e)})",
        )
        e.put(first, "u32", names[0])
        if second is not None:
            e.put(second, "b", names[1])
        return True
    if opcode == "redux" and m[0] == "sync":
        d, a, mask = item.operands
        kind = m[-1]
        op = m[1]
        if kind == "f32" and op in ("min", "max") and set(m[2:-1]) <= {"abs", "NaN"}:
            extra = f", absolute={'abs' in m}, nan={'NaN' in m}"
            value = e.fetch(a, "f32")
        elif (
            kind in ("u32", "s32", "b32") and op in ("add", "min", "max", "and", "or", "xor") and len(m) == 3
        ):
            extra = ""
            value = e.fetch(a, "s32" if kind == "s32" else "u32")
        else:
            return False
        array = e.code.let(f"redux({op!r}, {value}, {_mask(e, mask)}, co, ck, {_here(e)}{extra})")
        e.put(d, "f32" if kind == "f32" else "s32" if kind == "s32" else "u32", array, number=kind == "f32")
        return True
    if opcode == "elect" and m == ("sync",):
        d, mask = item.operands
        first, second = e.destinations(d)
        names = e.code.let_many(2, f"elect({_mask(e, mask)}, co, ck, {_here(e)})")
        e.put(first, "u32", names[0])
        if second is not None:
            e.put(second, "b", names[1])
        return True
    if opcode == "activemask":
        e.put(item.operands[0], "u32", e.code.let("active_mask(co)"))
        return True
    if opcode in ("bar", "barrier") and m[:2] == ("warp", "sync"):
        e.code.do(f"warp_barrier({_mask(e, item.operands[0])}, co, ck, {_here(e)})")
        return True
    return False


def _here(e: Emitter) -> str:
    return e.context.global_name("I", e.instruction)


def _mask(e: Emitter, operand: Operand) -> str:
    """Return the member mask: None when it names the whole warp."""
    if isinstance(operand, Imm) and operand.value & 0xFFFFFFFF == 0xFFFFFFFF:
        return "None"
    return e.fetch(operand, "u32")


def _shuffle(e: Emitter, item: Instruction) -> bool:
    d, a, b, c, *mask = item.operands
    first, second = e.destinations(d)
    value = e.operand(a)
    floating = value.dirty and "f32" in value.views
    source = e.view(value, "f32") if floating else e.view(value, "u32")
    member = _mask(e, mask[0]) if mask else "None"
    call = f"shuffle({item.modifiers[1]!r}, {source}, {e.fetch(b, 'u32')}, {e.fetch(c, 'u32')}, {member}, "
    call += f"{second is not None}, co, ck, {_here(e)})"
    names = e.code.let_many(2, call)
    e.put(first, "f32" if floating else "u32", names[0], dirty=floating, bits=value.bits, number=value.number,
          bits16=value.bits16, finite16=value.finite16)  # fmt: skip
    if second is not None:
        e.put(second, "b", names[1])
    return True
