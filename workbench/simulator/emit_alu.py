"""Arithmetic, conversions, moves and packing.

The registry of `workbench.simulator.arith` knows every arithmetic instruction; the hot ones are written out
here as NumPy operators, and those that only rearrange bits are not computed at all until someone looks.
"""

from __future__ import annotations

from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Pair, Reg, Sink, Symbol, Vector
from workbench.simulator import arith
from workbench.simulator.emitter import Emitter
from workbench.simulator.values import BITS, F32_BITS, INTEGERS, SHORT, Value, product_bits

_INTEGER_TYPES = frozenset(("u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"))
_OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_FLOAT_COMPARE = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neu": "!="}
_LOGIC = frozenset(("and", "or", "xor", "not"))


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it is no arithmetic or move."""
    handler = _HANDLERS.get(item.opcode)
    if handler is not None and handler(e, item):
        return True
    return _registered(e, item)


def _unsigned(kind: str) -> str:
    return "u" + kind[1:]


def _registered(e: Emitter, item: Instruction) -> bool:
    semantics = arith.lookup(item)
    if semantics is None:
        return False
    arguments = []
    expected = list(semantics.operands)
    for operand, dtype in zip(arith.sources(item), expected, strict=False):
        arguments.append(e.fetch(operand, SHORT[dtype]))
    if semantics.carry_in:
        arguments.append(e.carry())
    function = e.context.global_name("F", semantics.function)
    results = list(semantics.results)
    call = f"{function}({', '.join(arguments)})"
    names = [e.code.let(call)] if len(results) == 1 else e.code.let_many(len(results), call)
    if semantics.carry_out:
        e.set_carry(names.pop())
        results.pop()
    narrow16 = 2 if "e2m1x2" in item.modifiers and item.modifiers[0] != "e2m1x2" else None
    for operand, array, dtype in zip(arith.destinations(item), names, results, strict=True):
        short = SHORT[dtype]
        facts: dict[str, object] = {}
        if short in ("f32", "f64"):
            facts["dirty"] = not semantics.canonical
            facts["number"] = semantics.canonical
            if item.opcode == "cvt":
                facts["bits"] = _integer_bits(item.modifiers[-1])
        elif short == "u64" and not semantics.canonical:  # f32x2
            array = e.code.let(f"canonical_f32({array}.view(f32)).view(u64)")
        elif narrow16 and short == "u32":
            facts["bits16"], facts["finite16"], facts["bits_bf16"] = narrow16, True, narrow16
        elif item.modifiers[1:] == ("bf16x2", "ue8m0x2"):
            facts["bits_bf16"] = 1
        e.put(operand, short, array, **facts)
    return True


def _integer_bits(kind: str) -> int:
    return {"u8": 8, "s8": 8, "u16": 16, "s16": 16, "bf16": 8, "f16": 11}.get(kind, F32_BITS)


# -- integers ------------------------------------------------------------------------------------


def _simple(e: Emitter, item: Instruction) -> bool:
    """add, sub, and, or, xor without carry, saturation or rounding modifiers."""
    kind = item.modifiers[-1]
    d, a, b = item.operands
    sign = _OPERATORS[item.opcode]
    if item.opcode in _LOGIC and kind == "pred":
        e.put(d, "b", e.code.let(f"{e.fetch(a, 'b')} {sign} {e.fetch(b, 'b')}"))
        return True
    if len(item.modifiers) != 1 or kind not in _INTEGER_TYPES:
        return _float(e, item)
    u = _unsigned(kind)
    bits = F32_BITS
    if item.opcode == "and" and u == "u32" and isinstance(b, Imm):
        mask = b.value & 0xFFFFFFFF
        value = e.operand(a)
        if mask == 0xFFFF0000 and (value.half is None):
            e.assign(d, _high16_as_f32(e, value))
            return True
        bits = _mask_bits(mask)
    if item.opcode == "or" and u == "u32":
        bits = max(e.operand(a).bits, e.operand(b).bits)
    e.put(d, u, e.code.let(f"{e.fetch(a, u)} {sign} {e.fetch(b, u)}"), bits=bits)
    return True


def _mask_bits(mask: int) -> int:
    fraction = mask & 0x7FFFFF
    return 1 if fraction == 0 else F32_BITS - ((fraction & -fraction).bit_length() - 1)


def _high16_as_f32(e: Emitter, value: Value) -> Value:
    name = e.code.let(f"{e.view(value, 'u32')} & {e.context.constant(0xFFFF0000, 'u32')}")
    return Value(32, {"u32": name}, bits=value.bits_bf16)


def _not(e: Emitter, item: Instruction) -> bool:
    d, a = item.operands
    dtype = "b" if item.modifiers[-1] == "pred" else _unsigned(item.modifiers[-1])
    e.put(d, dtype, e.code.let(f"~{e.fetch(a, dtype)}"))
    return True


def _shift(e: Emitter, item: Instruction) -> bool:
    kind = item.modifiers[-1]
    d, a, b = item.operands
    if len(item.modifiers) != 1 or not isinstance(b, Imm):
        return False
    dtype = kind if kind[0] == "s" else _unsigned(kind)
    width = BITS[dtype]
    amount = b.value & 0xFFFFFFFF
    if amount >= width:
        return False
    if item.opcode == "shr" and dtype == "u32" and amount == 16:
        high = e.part(e.operand(a), 1)
        e.assign(d, Value(32, {"u32": e.code.let(f"{e.fetch(a, dtype)} >> {e.context.constant(16, dtype)}")},
                          pair=(high, e.operand(Imm(0), 16))))  # fmt: skip
        return True
    if item.opcode == "shl":
        bits = max(1, F32_BITS - amount)
        value = e.operand(a, width)
        if width == 32 and amount == 16:
            shifted = e.code.let(f"{e.view(value, 'u32')} << {e.context.constant(16, 'u32')}")
            e.assign(d, Value(32, {"u32": shifted}, bits=value.bits_bf16))
            return True
        e.put(d, dtype, e.code.let(f"{e.fetch(a, dtype)} << {e.context.constant(amount, dtype)}"), bits=bits)
    else:
        e.put(d, dtype, e.code.let(f"{e.fetch(a, dtype)} >> {e.context.constant(amount, dtype)}"))
    return True


def _mul(e: Emitter, item: Instruction) -> bool:
    modifiers = item.modifiers
    if modifiers[0] == "lo" and len(modifiers) == 2:
        u = _unsigned(modifiers[1])
        product = f"{e.fetch(item.operands[1], u)} * {e.fetch(item.operands[2], u)}"
        if item.opcode == "mad":
            product += f" + {e.fetch(item.operands[3], u)}"
        e.put(item.operands[0], u, e.code.let(product))
        return True
    if modifiers[0] == "wide" and len(modifiers) == 2:
        kind = modifiers[1]
        wide = kind[0] + str(2 * BITS[kind])
        a, b = (e.fetch(o, kind) for o in item.operands[1:3])
        if isinstance(item.operands[2], Imm):
            value = item.operands[2].value & ((1 << BITS[kind]) - 1)
            if kind[0] == "s" and value >> (BITS[kind] - 1):
                value -= 1 << BITS[kind]
            product = f"{a}.astype({wide}) * {e.context.constant(value, wide)}"
        else:
            product = f"{a}.astype({wide}) * {b}.astype({wide})"
        if item.opcode == "mad":
            product += f" + {e.fetch(item.operands[3], wide)}"
        e.put(item.operands[0], wide, e.code.let(product))
        return True
    return _float(e, item) if item.opcode == "mul" else False


def _setp(e: Emitter, item: Instruction) -> bool:
    if len(item.modifiers) != 2 or isinstance(item.operands[0], Pair):
        return False
    comparison, kind = item.modifiers
    if kind == "f32" and comparison in _FLOAT_COMPARE:
        sign, dtype = _FLOAT_COMPARE[comparison], "f32"
    elif kind in _INTEGER_TYPES and comparison in _COMPARE:
        sign, dtype = _COMPARE[comparison], kind if kind[0] == "s" else _unsigned(kind)
    else:
        return False
    d, a, b = item.operands
    e.put(d, "b", e.code.let(f"{e.fetch(a, dtype)} {sign} {e.fetch(b, dtype)}"))
    return True


def _selp(e: Emitter, item: Instruction) -> bool:
    kind = item.modifiers[-1]
    if kind[1:] not in ("16", "32", "64"):
        return False
    d, a, b, p = item.operands
    width = int(kind[1:])
    if width == 32:
        x, y = e.operand(a), e.operand(b)
        floating = all(v.dirty or v.number for v in (x, y)) and (x.dirty or y.dirty)
        dtype = "f32" if floating else "u32"
        array = e.code.let(f"select({e.fetch(p, 'b')}, {e.view(x, dtype)}, {e.view(y, dtype)})")
        e.put(d, dtype, array, dirty=floating, bits=max(x.bits, y.bits))
        return True
    u = INTEGERS[width]
    e.put(d, u, e.code.let(f"select({e.fetch(p, 'b')}, {e.fetch(a, u)}, {e.fetch(b, u)})"))
    return True


# -- floats --------------------------------------------------------------------------------------


def _float(e: Emitter, item: Instruction) -> bool:
    """add, sub, mul in round-to-nearest f32 and packed f32x2."""
    modifiers = [m for m in item.modifiers if m != "rn"]
    if modifiers == ["f32"]:
        d, a, b = item.operands
        e.assign(d, _float_value(e, item.opcode, e.operand(a), e.operand(b)))
        return True
    if modifiers == ["f32x2"]:
        d, a, b = item.operands
        x, y = e.operand(a, 64), e.operand(b, 64)
        halves = [_float_value(e, item.opcode, e.part(x, k), e.part(y, k)) for k in (0, 1)]
        e.assign(d, Value(64, pair=(halves[0], halves[1])))
        return True
    return False


def _float_value(e: Emitter, opcode: str, x: Value, y: Value) -> Value:
    bits = min(F32_BITS, product_bits(x.bits, y.bits)) if opcode == "mul" else F32_BITS
    sign = {"add": "+", "sub": "-", "mul": "*"}[opcode]
    return Value(
        32, {"f32": e.code.let(f"{e.view(x, 'f32')} {sign} {e.view(y, 'f32')}")}, dirty=True, bits=bits
    )


def _fma(e: Emitter, item: Instruction) -> bool:
    modifiers = item.modifiers
    if modifiers == ("rn", "f32"):
        d, a, b, c = item.operands
        e.assign(d, _fma_value(e, e.operand(a), e.operand(b), e.operand(c)))
        return True
    if modifiers == ("rn", "f32x2"):
        d, *sources = item.operands
        x, y, z = (e.operand(o, 64) for o in sources)
        halves = [_fma_value(e, e.part(x, k), e.part(y, k), e.part(z, k)) for k in (0, 1)]
        e.assign(d, Value(64, pair=(halves[0], halves[1])))
        return True
    if modifiers in (("rn", "f32", "bf16"), ("rn", "f32", "f16")):
        d, a, b, c = item.operands
        x, y = (half_to_f32(e, e.operand(o, 16), modifiers[2]) for o in (a, b))
        e.assign(d, _fma_value(e, x, y, e.operand(c)))
        return True
    return False


def _fma_value(e: Emitter, x: Value, y: Value, z: Value) -> Value:
    a, b, c = e.view(x, "f32"), e.view(y, "f32"), e.view(z, "f32")
    if product_bits(x.bits, y.bits) <= F32_BITS:
        # The product is exact, so one rounding is left; `FP` says if it over- or underflowed.
        t = e.code.let(f"{a} * {b}")
        d = e.code.let(f"{t} + {c} if FP.clean else FP.redo({a}, {b}, {c})")
    else:
        d = e.code.let(f"fma_f32({a}, {b}, {c})")
    return Value(32, {"f32": d}, dirty=True)


def half_to_f32(e: Emitter, value: Value, kind: str) -> Value:
    """Return a bf16 or f16 register as f32."""
    key = f"{kind}>f32"
    if value.half is not None and value.half[0].width == 32:
        parent, which = value.half
        memo = parent.memo
        key += str(which)
        if key not in memo:
            memo[key] = _part_to_f32(e, parent, which, kind)
        name = memo[key]
    else:
        memo = value.memo
        if key not in memo:
            raw = e.view(value, "u16")
            if kind == "bf16":
                memo[key] = e.code.let(f"({raw}.astype(u32) << {e.context.constant(16, 'u32')}).view(f32)")
            else:
                memo[key] = e.code.let(f"f16_to_f32({raw})")
        name = memo[key]
    whole = value.half[0] if value.half is not None else value
    return Value(32, {"f32": name}, bits=whole.bits_bf16 if kind == "bf16" else value.bits16, dirty=True)


def _part_to_f32(e: Emitter, parent: Value, which: int, kind: str) -> str:
    whole = e.view(parent, "u32")
    if kind == "bf16":
        if which:
            return e.code.let(f"({whole} & {e.context.constant(0xFFFF0000, 'u32')}).view(f32)")
        return e.code.let(f"({whole} << {e.context.constant(16, 'u32')}).view(f32)")
    if parent.finite16:
        # sign and exponent move down by three; the exponents' biases differ by 112
        signed = e.view(parent, "s32")
        if not which:
            signed = f"({signed} << {e.context.constant(16, 's32')})"
        moved = f"(({signed} >> {e.context.constant(3, 's32')}) & {e.context.constant(0x8FFFE000, 's32')})"
        scale = e.context.constant(0x77800000, "f32")
        return e.code.let(f"{moved}.view(f32) * {scale}")
    return e.code.let(f"f16_to_f32({e.view(e.part(parent, which), 'u16')})")


def _cvt(e: Emitter, item: Instruction) -> bool:
    modifiers = item.modifiers
    d, a, *more = item.operands
    if modifiers in (("f32", "bf16"), ("f32", "f16")):
        value = half_to_f32(e, e.operand(a, 16), modifiers[1])
        e.assign(d, value)
        return True
    if len(modifiers) == 2 and not more and all(m in _INTEGER_TYPES or m in ("u8", "s8") for m in modifiers):
        to, source = modifiers
        if BITS[_unsigned(to)] < BITS[_unsigned(source)] and BITS[_unsigned(to)] >= 16:
            value = e.operand(a, BITS[_unsigned(source)])
            narrow = BITS[_unsigned(to)]
            if value.width == 2 * narrow and isinstance(d, Reg) and e.context.width(d.name) == narrow:
                e.assign(d, e.part(value, 0))
                return True
    return False


# -- moves ---------------------------------------------------------------------------------------


def _mov(e: Emitter, item: Instruction) -> bool:
    kind = item.modifiers[-1]
    d, a = item.operands
    if kind == "pred":
        e.put(d, "b", e.fetch(a, "b"))
        return True
    width = int(kind.lstrip("busf"))
    if width == 128:
        return False
    if isinstance(d, Vector):
        _unpack(e, d.elements, e.operand(a, width))
        return True
    if isinstance(a, Vector):
        e.assign(d, pack(e, [e.operand(x, width // len(a.elements)) for x in a.elements], width))
        return True
    if isinstance(a, Address):
        if not isinstance(a.base, Symbol):
            return False
        base = e.symbol(a.base, INTEGERS[width])
        e.put(d, INTEGERS[width], e.code.let(f"{base} + {e.context.constant(a.offset, INTEGERS[width])}"))
        return True
    value = e.operand(a, width)
    if value.width != width:
        value = Value(width, {INTEGERS[width]: e.view(value, INTEGERS[width])})
    e.assign(d, value)
    return True


def pack(e: Emitter, parts: list[Value], width: int) -> Value:
    """Join equal parts, low first, into one value."""
    parts = [
        p if p.width == width // len(parts) else Value(width // len(parts), {INTEGERS[width // len(parts)]:
            e.view(p, INTEGERS[width // len(parts)])})
        for p in parts
    ]  # fmt: skip
    while len(parts) > 1:
        parts = [_join(parts[k], parts[k + 1]) for k in range(0, len(parts), 2)]
    return parts[0]


def _join(low: Value, high: Value) -> Value:
    if low.half and high.half and low.half[0] is high.half[0] and (low.half[1], high.half[1]) == (0, 1):
        return low.half[0]
    return Value(
        2 * low.width,
        pair=(low, high),
        bits16=max(low.bits16, high.bits16),
        finite16=low.finite16 and high.finite16,
    )


def _unpack(e: Emitter, elements: tuple[Operand, ...], value: Value) -> None:
    parts = [value]
    while len(parts) < len(elements):
        parts = [e.part(p, k) for p in parts for k in (0, 1)]
    for operand, part in zip(elements, parts, strict=True):
        if not isinstance(operand, Sink):
            e.assign(operand, part)


_HANDLERS = {
    "add": _simple, "sub": _simple, "and": _simple, "or": _simple, "xor": _simple, "not": _not,
    "shl": _shift, "shr": _shift, "mul": _mul, "mad": _mul, "setp": _setp, "selp": _selp,
    "fma": _fma, "cvt": _cvt, "mov": _mov,
}  # fmt: skip
