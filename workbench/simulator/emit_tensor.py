"""Tensor copies, their prefetches, tensormap.replace and fence.proxy.async."""

from __future__ import annotations

from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Reg, TensorAddress
from workbench.simulator import proxies, tensor_copy, tensor_replace
from workbench.simulator.emit_memory import _address, _site
from workbench.simulator.emitter import Emitter
from workbench.simulator.tensor_reduce import OPERATIONS

NAMES = {**tensor_copy.NAMES, **tensor_replace.NAMES, **proxies.NAMES}
_RANKS = {f"{n}d": n for n in range(1, 6)}
_LEADER = 0xFE
"""Upper byte of the mask that makes a shared address of an odd CTA one of its even neighbour."""
_HANDED_ON = frozenset(("add", "sub", "mov", "and", "or", "cvt", "cvta", "shfl", "selp", "mad"))


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    m = item.modifiers
    if item.opcode == "fence" and m[:1] == ("proxy",) and len(m) > 1 and m[1].startswith("async"):
        which = {"global": "_global", "": ""}.get(m[2] if len(m) > 2 else "", "_shared")
        e.code.do(f"proxy_fence{which}(co, ck)")
        return True
    if item.opcode == "tensormap":
        return _replace(e, item) if m[:1] == ("replace",) else _copy_map(e, item)
    if item.opcode != "cp" or "tensor" not in m:
        return False
    rank = next((n for x, n in _RANKS.items() if x in m), 0)
    if not rank:
        e.fail("no rank")
    if m[:4] == ("async", "bulk", "prefetch", "tensor"):
        _only(e, m, {"L2", "global", "tile", "L2::cache_hint", "prefetch"})
        site, maps, _ = _map(e, item, item.operands[0], rank)
        e.code.do(f"tensor_prefetch({site}, {maps}, {rank}, co, ck)")
        return True
    if m[-1] == "bulk_group" or "bulk_group" in m:
        return _store(e, item, rank)
    return _load(e, item, rank)


def _only(e: Emitter, modifiers: tuple[str, ...], known: set[str]) -> None:
    for m in modifiers:
        if m not in known and m not in ("async", "bulk", "tensor", "reduce") and m not in _RANKS:
            e.fail(f"modifier .{m}")


def _map(e: Emitter, item: Instruction, operand: Operand, rank: int, lines: int = 1) -> tuple[str, str, str]:
    """Return site, generic address and coordinates of a tensor operand, as Python expressions."""
    if not isinstance(operand, TensorAddress) or operand.offsets:
        e.fail("no tile-mode tensor operand")
        raise AssertionError
    if lines > 1 and rank != 2:
        e.fail(f"rank {rank}")
    if len(operand.coordinates) != (rank if lines == 1 else 1 + lines):
        e.fail(f"{len(operand.coordinates)} coordinates")
    a, offset = _address(e, operand.base, "generic")
    if offset:
        a = e.code.let(f"{a} + {e.context.constant(offset, 's64')}")
    coordinates = [e.fetch(c, "s32") for c in operand.coordinates]
    return _site(e, item, "global", 16, 0), a, f"({', '.join(coordinates)},)"


def _place(e: Emitter, item: Instruction, operand: Operand, size: int) -> tuple[str, str]:
    a, offset = _address(e, operand, "shared")
    return _site(e, item, "cluster", size, offset), a


def _load(e: Emitter, item: Instruction, rank: int) -> bool:
    m = item.modifiers
    known = {"shared::cta", "shared::cluster", "global", "tile", "tile::gather4",
             "mbarrier::complete_tx::bytes", "multicast::cluster", "cta_group::1", "cta_group::2",
             "L2::cache_hint"}  # fmt: skip
    _only(e, m, known)
    if "global" not in m or "mbarrier::complete_tx::bytes" not in m:
        return False
    target, tensor, barrier, *rest = item.operands
    lines = 4 if "tile::gather4" in m else 1
    site, maps, coordinates = _map(e, item, tensor, rank, lines)
    to, at = _place(e, item, target, 16)
    signal, bar = _place(e, item, barrier, 8)
    if "L2::cache_hint" in m:
        rest = rest[:-1]
    mask = "None"
    if "multicast::cluster" in m:
        if len(rest) != 1:
            return False
        mask = e.fetch(rest[0], "u16")
    elif rest:
        return False
    pair = "cta_group::2" in m
    leader = pair and _points_to_leader(e, barrier)
    e.code.do(
        f"tensor_load({site}, {maps}, {coordinates}, {to}, {at}, {signal}, {bar}, {mask}, {pair}, {leader}, "
        f"{lines}, co, ck)"
    )
    return True


def _points_to_leader(e: Emitter, operand: Operand) -> bool:
    """Whether the address was made by clearing bit 24, which on the hardware holds the CTA's rank.

    The addresses of a CTA's own shared memory do not hold its rank here, so the mask alone has no effect;
    what the code means is found by following the register back to the mask.
    """
    if not isinstance(operand, Address) or not isinstance(operand.base, Reg):
        return False
    todo, seen, masked, plain = [operand.base], {operand.base}, False, False
    while todo:
        register = todo.pop()
        for other in e.context.kernel.instructions:
            if register not in writes(other):
                continue
            masks = [o.value & 0xFFFF_FFFF for o in other.operands[1:] if isinstance(o, Imm)]
            if other.opcode == "and" and any(mask >> 24 == _LEADER for mask in masks):
                masked = True
                continue
            sources = [r for r in reads(other) if r != other.predicate] if other.opcode in _HANDED_ON else []
            plain |= not sources
            todo.extend(r for r in sources if r not in seen)
            seen.update(sources)
    if masked and plain and not _only_offsets(e, seen):
        e.fail("an mbarrier that may or may not be the leader's")
    return masked


def _only_offsets(e: Emitter, registers: set[Reg]) -> bool:
    """Whether every one of `registers` is written in one place, so that no path chooses between addresses."""
    count = dict.fromkeys(registers, 0)
    for item in e.context.kernel.instructions:
        for r in writes(item):
            if r in count:
                count[r] += 1
    return all(n <= 1 for n in count.values())


def _store(e: Emitter, item: Instruction, rank: int) -> bool:
    m = item.modifiers
    reduction = ""
    if m[0] == "reduce":
        reduction = next((x for x in m if x in OPERATIONS), "")
        if not reduction:
            e.fail("no operation")
    _only(
        e, m, {"global", "shared::cta", "tile", "tile::scatter4", "bulk_group", "L2::cache_hint", reduction}
    )
    if m.index("global") > m.index("shared::cta"):
        return False
    tensor, source, *rest = item.operands
    if len(rest) != ("L2::cache_hint" in m):
        return False
    lines = 4 if "tile::scatter4" in m else 1
    site, maps, coordinates = _map(e, item, tensor, rank, lines)
    origin, at = _place(e, item, source, 16)
    e.code.do(f"tensor_store({site}, {maps}, {coordinates}, {origin}, {at}, {reduction!r}, {lines}, co, ck)")
    return True


def _replace(e: Emitter, item: Instruction) -> bool:
    m = item.modifiers
    if len(m) not in (5, 6) or m[1] != "tile" or "b1024" not in m or m[2] not in tensor_replace.FIELDS:
        return False
    space = m[3] if len(m) == 6 else "generic"
    if space not in ("global", "shared::cta", "generic"):
        return False
    address, *rest = item.operands
    ordinal = rest.pop(0) if len(rest) == 2 else Imm(0)
    if not isinstance(ordinal, Imm) or not isinstance(address, Address) or len(rest) != 1:
        return False
    a, offset = _address(e, address, "global")
    value = e.fetch(rest[0], "u64" if m[-1] == "b64" else "u32")
    site = _site(e, item, {"shared::cta": "shared"}.get(space, space), 16, offset)
    e.code.do(f"tensormap_replace({site}, {a}, {m[2]!r}, {ordinal.value}, {value}, co, ck)")
    return True


def _copy_map(e: Emitter, item: Instruction) -> bool:
    m = item.modifiers
    if m[:3] != ("cp_fenceproxy", "global", "shared::cta") or len(item.operands) != 3:
        return False
    size = item.operands[2]
    if not isinstance(size, Imm) or size.value != 128:
        return False
    to, to_offset = _address(e, item.operands[0], "global")
    start, from_offset = _address(e, item.operands[1], "shared")
    write = _site(e, item, "global", 16, to_offset)
    read = _site(e, item, "shared", 16, from_offset)
    e.code.do(f"tensormap_copy({write}, {to}, {read}, {start}, co, ck)")
    return True
