"""Loads, stores, address conversions, prefetches, fences, asynchronous copies and atomics."""

from __future__ import annotations

from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Reg, Sink, Symbol, Vector
from workbench.simulator import atomics
from workbench.simulator.access import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Site
from workbench.simulator.emit_alu import pack
from workbench.simulator.emitter import Emitter
from workbench.simulator.values import INTEGERS, Value

SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "local": "local", "const": "global",
    "param": "param", "param::entry": "param", "shared::cluster": "cluster",
}  # fmt: skip
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_CACHE = frozenset(
    (
        "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "volatile", "relaxed", "acquire", "release",
        "weak", "cta",
        "cluster", "gpu", "sys", "mmio", "unified", "L1::evict_normal", "L1::evict_unchanged",
        "L1::evict_first",
        "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last",
        "L2::64B",
        "L2::128B", "L2::256B", "L2::cache_hint",
    )
)  # fmt: skip
_NO_EFFECT = frozenset(("fence", "membar", "prefetch", "prefetchu", "nanosleep", "discard",
                        "applypriority", "setmaxnreg", "pmevent"))  # fmt: skip


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    opcode = item.opcode
    if opcode in ("ld", "ldu"):
        return _load(e, item)
    if opcode == "st":
        return _store(e, item)
    if opcode in ("atom", "red"):
        return _atomic(e, item)
    if opcode == "cp":
        return _async_copy(e, item)
    if opcode == "cvta":
        return _convert_address(e, item)
    if opcode in ("fence", "membar") and item.modifiers[:1] not in (("proxy",), ("mbarrier_init",)):
        e.code.do(f"order_fence(co, ck, {e.context.global_name('I', item)})")
        return True
    if opcode == "isspacep":
        return _is_space(e, item)
    if opcode == "createpolicy":
        e.put(item.operands[0], "u64", e.context.constant(0, "u64"))
        return True
    return opcode in _NO_EFFECT


def _form(e: Emitter, item: Instruction) -> tuple[str, int, str]:
    """Return state space, number of elements and element type of a load or store."""
    space, count = "generic", 1
    for m in item.modifiers[:-1]:
        if m in SPACES:
            space = SPACES[m]
        elif m in _VECTORS:
            count = _VECTORS[m]
        elif m not in _CACHE:
            e.fail(f"modifier .{m}")
    kind = item.modifiers[-1]
    if kind[1:] not in ("8", "16", "32", "64"):
        e.fail(f"type .{kind}")
    return space, count, kind


def _address(e: Emitter, operand: Operand, space: str) -> tuple[str, int]:
    """Return the array (int64) and the constant offset of an address."""
    if not isinstance(operand, Address):
        e.fail("no address")
        raise AssertionError
    base = operand.base
    if base is None:
        return e.context.constant(0, "s64"), operand.offset
    if isinstance(base, Symbol):
        return e.symbol(base, "s64"), operand.offset
    value = e.value(base.name)
    if value.width == 64:
        return e.view(value, "s64"), operand.offset
    if "address" not in value.memo:
        value.memo["address"] = e.code.let(f"{e.view(value, 'u32')}.astype(s64)")
    return value.memo["address"], operand.offset


def _site(e: Emitter, item: Instruction, space: str, size: int, offset: int) -> str:
    site = Site(item, space, size, offset)
    e.context.sites.append(site)
    return e.context.global_name("X", site)


def _load(e: Emitter, item: Instruction) -> bool:
    space, count, kind = _form(e, item)
    width = int(kind[1:])
    size = count * width // 8
    if size > 32:
        e.fail("more than 32 bytes")
    destination, address = item.operands[0], item.operands[1]
    elements = destination.elements if isinstance(destination, Vector) else (destination,)
    if len(elements) != count:
        e.fail("vector length")
    if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
        _load_parameter(e, elements, address, kind)
        return True
    a, offset = _address(e, address, space)
    raw = e.code.let(f"load_{space}({_site(e, item, space, size, offset)}, {a}, co, ck)")
    for operand, value in zip(elements, _divide(e, raw, count, width, elements), strict=True):
        if isinstance(operand, Sink):
            continue
        if isinstance(operand, Reg) and e.context.width(operand.name) > width:
            e.put(operand, kind if kind[0] == "s" else INTEGERS[width],
                  e.view(value, kind if kind[0] == "s" else INTEGERS[width]))  # fmt: skip
        else:
            e.assign(operand, value)
    return True


def _divide(e: Emitter, raw: str, count: int, width: int, elements: tuple[Operand, ...]) -> list[Value]:
    """Take a loaded item apart: one transposition into planes of 32 (or 16, 8) bits."""
    total = count * width
    if total in INTEGERS and (count == 1 or width >= 16):
        whole = Value(total, {INTEGERS[total]: raw})
        parts = [whole]
        while len(parts) < count:
            parts = [e.part(p, k) for p in parts for k in (0, 1)]
        return parts
    unit = min(width, 32)
    planes = total // unit
    names = e.code.let_many(planes, f"planes({raw}, {INTEGERS[unit]}, {planes})")
    values = [Value(unit, {INTEGERS[unit]: n}) for n in names]
    if width == 64:
        values = [Value(64, pair=(values[k], values[k + 1])) for k in range(0, planes, 2)]
    return values


def _load_parameter(e: Emitter, elements: tuple[Operand, ...], address: Address, kind: str) -> None:
    assert isinstance(address.base, Symbol)
    name = address.base.name
    width = int(kind[1:])
    if name not in e.context.symbols:
        if name not in e.call_values:
            e.fail(f"there is no parameter {name}")
        e.assign(elements[0], e.call_values[name])
        return
    start = e.context.symbols[name] + address.offset
    for k, operand in enumerate(elements):
        dtype = kind if kind[0] == "s" else INTEGERS[width]
        at = start + k * width // 8
        array = e.context.late("P", lambda launch, at=at, dtype=dtype: launch.parameter(at, dtype))  # type: ignore[misc]
        e.put(operand, dtype, array)


def _store(e: Emitter, item: Instruction) -> bool:
    space, count, kind = _form(e, item)
    width = int(kind[1:])
    size = count * width // 8
    address, source, *policy = item.operands
    if len(policy) != ("L2::cache_hint" in item.modifiers):
        e.fail("operands")
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != count or size > 32:
        e.fail("vector length")
    values = [e.operand(x, width) for x in elements]
    if space == "param":
        if not isinstance(address, Address) or not isinstance(address.base, Symbol) or count != 1:
            e.fail("store to a parameter")
        assert isinstance(address, Address) and isinstance(address.base, Symbol)
        e.call_values[address.base.name] = values[0]
        return True
    if size <= 8:
        raw = e.view(pack(e, values, size * 8), INTEGERS[size * 8])
    else:
        unit = min(width, 32)
        if width == 64:
            values = [e.part(v, k) for v in values for k in (0, 1)]
        arrays = [e.view(v, INTEGERS[unit]) for v in values]
        raw = e.code.let(f"interleave(({', '.join(arrays)},), {size})")
    a, offset = _address(e, address, space)
    e.code.do(f"store_{space}({_site(e, item, space, size, offset)}, {a}, {raw}, co, ck)")
    return True


# -- addresses -----------------------------------------------------------------------------------

_WINDOWS = {
    "shared": SHARED_WINDOW,
    "cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "global": 0,
}


def _convert_address(e: Emitter, item: Instruction) -> bool:
    space = SPACES.get(item.modifiers[1] if item.modifiers[0] == "to" else item.modifiers[0])
    if space is None or item.modifiers[-1] not in ("u64", "u32"):
        return False
    d, a = item.operands
    if _WINDOWS[space] == 0:
        value = e.operand(a, 64)
        e.assign(d, value)
        return True
    window = e.context.constant(_WINDOWS[space], "u64")
    sign = "-" if item.modifiers[0] == "to" else "+"
    e.put(d, "u64", e.code.let(f"{e.fetch(a, 'u64')} {sign} {window}"))
    return True


def _is_space(e: Emitter, item: Instruction) -> bool:
    space = SPACES.get(item.modifiers[0])
    if space is None:
        return False
    d, a = item.operands
    e.put(d, "b", e.code.let(f"in_space({e.fetch(a, 's64')}, {space!r})"))
    return True


# -- atomics and asynchronous copies -------------------------------------------------------------

_ORDER = frozenset(("relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz",
                    "L2::cache_hint"))  # fmt: skip
_ATOMIC_OPS = frozenset(("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"))
_ATOMIC_TYPES = frozenset(
    ("b16", "b32", "b64", "u32", "u64", "s32", "s64", "f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
)


def _atomic(e: Emitter, item: Instruction) -> bool:
    space, op, count = "generic", "", 1
    for m in item.modifiers[:-1]:
        if m in SPACES:
            space = SPACES[m]
        elif m in _ATOMIC_OPS:
            op = m
        elif m in _VECTORS:
            count = _VECTORS[m]
        elif m not in _ORDER:
            e.fail(f"modifier .{m}")
    kind = item.modifiers[-1]
    if kind not in _ATOMIC_TYPES or not op or not atomics.supported(op, kind):
        e.fail(f"operation .{op} on .{kind}")
    operands = list(item.operands)
    destination: Operand = operands.pop(0) if item.opcode == "atom" else Sink()
    address = operands.pop(0)
    if "L2::cache_hint" in item.modifiers:
        operands.pop()
    width = 32 if kind.endswith("x2") else int(kind.lstrip("busf"))
    dtype = kind if kind[0] in "s" or kind in ("f32", "f64") else INTEGERS[width]
    a, offset = _address(e, address, space)
    size = count * width // 8
    site = _site(e, item, space, size, offset)
    sources = [o.elements if isinstance(o, Vector) else (o,) for o in operands]
    arrays = [[e.fetch(x, dtype) for x in group] for group in sources]
    wanted = not isinstance(destination, Sink)
    elements = destination.elements if isinstance(destination, Vector) else (destination,)
    rows = ", ".join(f"({', '.join(group)},)" for group in arrays)
    call = f"atomic({site}, {space!r}, {op!r}, {kind!r}, {a}, ({rows},), {wanted}, co, ck)"
    if not wanted:
        e.code.do(call)
        return True
    names = e.code.let_many(count, call)
    for operand, name in zip(elements, names, strict=True):
        e.put(operand, INTEGERS[width], name)
    return True


def _async_copy(e: Emitter, item: Instruction) -> bool:
    m = item.modifiers
    if m[:3] == ("async", "bulk", "prefetch"):
        return True
    if m == ("async", "commit_group"):
        e.code.do("ck.copies.commit(co)")
        return True
    if m == ("async", "wait_all"):
        e.code.do("ck.copies.wait(co, -1)")
        return True
    if m == ("async", "wait_group"):
        count = item.operands[0]
        if not isinstance(count, Imm):
            return False
        e.code.do(f"ck.copies.wait(co, {count.value})")
        return True
    if m[0] != "async" or "global" not in m or not ({"ca", "cg"} & set(m)):
        return False
    if any(
        x not in ("async", "ca", "cg", "shared", "shared::cta", "global") and not x.startswith("L2::")
        for x in m
    ):
        return False
    destination, source, size, *rest = item.operands
    if "L2::cache_hint" in m:
        rest = rest[:-1]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        return False
    to, to_offset = _address(e, destination, "shared")
    start, from_offset = _address(e, source, "global")
    write = _site(e, item, "shared", size.value, to_offset)
    read = _site(e, item, "global", size.value, from_offset)
    amount = "None"
    if rest:
        extra = rest[0]
        if isinstance(extra, Reg) and e.context.width(extra.name) == 1:  # ignore-src: true copies nothing
            amount = e.code.let(f"select({e.fetch(extra, 'b')}, {e.context.constant(0, 'u32')}, "
                                f"{e.context.constant(size.value, 'u32')})")  # fmt: skip
        else:
            amount = e.fetch(extra, "u32")
    e.code.do(f"ck.copies.issue(co, {write}, {to}, {read}, {start}, {amount})")
    return True
