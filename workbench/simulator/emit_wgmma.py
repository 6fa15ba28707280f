"""Translation of wgmma: accumulators leave their registers at issue and come back at `wgmma.wait_group`.

In PTX `wait_group` names no registers; here it gets all accumulators of the kernel as operands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Imm, Instruction, Kernel, Operand, Reg, Vector
from workbench.simulator.emitter import Context, Emitter
from workbench.simulator.program import UnsupportedInstruction
from workbench.simulator.wgmma import DEPTH, Form

_POISON = 0x7FF7DEAD
_FLOATS = frozenset(("f16", "bf16", "tf32", "e4m3", "e5m2"))


@dataclass
class Sets:
    """The register sets of a kernel's wgmma instructions; a set is known by its number."""

    names: list[tuple[str, ...]] = field(default_factory=list)
    forms: dict[int, Form] = field(default_factory=dict)
    """Of accumulators."""
    member: dict[str, set[int]] = field(default_factory=dict)
    marked: set[tuple[object, int, bool, bool]] = field(default_factory=set)

    def number(self, registers: tuple[str, ...]) -> int:
        """Return the number of a set."""
        if registers not in self.names:
            self.names.append(registers)
            for name in registers:
                self.member.setdefault(name, set()).add(len(self.names) - 1)
        return self.names.index(registers)


def with_accumulators(kernel: Kernel) -> Kernel:
    """Return the kernel with the accumulators as operands of each `wgmma.wait_group`."""
    products = [i for i in kernel.instructions if _is(i, "mma_async")]
    if not products:
        return kernel
    seen: dict[str, None] = {}
    for item in products:
        for name in _registers(item, item.operands[0]):
            seen[name] = None
    everything = Vector(tuple(Reg(n) for n in seen))
    body = tuple(
        replace(i, operands=(*i.operands, everything))
        if isinstance(i, Instruction) and _is(i, "wait_group")
        else i
        for i in kernel.body
    )
    return replace(kernel, body=body)


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    if item.opcode != "wgmma":
        return False
    m = item.modifiers
    if m == ("fence", "sync", "aligned"):
        e.code.do("ck.wgmma.fence(co)")
    elif m == ("commit_group", "sync", "aligned"):
        e.code.do("ck.wgmma.commit(co)")
    elif m == ("wait_group", "sync", "aligned"):
        _wait(e, item)
    elif m[:1] == ("mma_async",):
        _product(e, item)
    else:
        return False
    _sets(e.context).marked.clear()
    return True


def before(e: Emitter, item: Instruction) -> None:
    """Watch an instruction that uses registers of a wgmma."""
    sets = _sets(e.context)
    if not sets.names or item.opcode == "wgmma":
        return
    for write, registers in ((False, reads(item)), (True, writes(item))):
        for number in sorted({n for r in registers for n in sets.member.get(r.name, ())}):
            copy = e.context.compiled and item.opcode == "mov"
            if {(e, number, write, False), (e, number, write, copy)} & sets.marked:
                continue
            sets.marked.add((e, number, write, copy))
            here = e.context.global_name("I", item)
            flags = f"{number}, {write}, {number not in sets.forms}, {copy}"
            e.code.do(f"ck.wgmma.touch({flags}, co, {here})")


def _is(item: Instruction, kind: str) -> bool:
    return item.opcode == "wgmma" and item.modifiers[:1] == (kind,)


def _registers(item: Instruction, operand: Operand) -> tuple[str, ...]:
    if not isinstance(operand, Vector) or not all(isinstance(x, Reg) for x in operand.elements):
        raise UnsupportedInstruction(item, "an operand that should be registers")
    return tuple(x.name for x in operand.elements if isinstance(x, Reg))


def _sets(context: Context) -> Sets:
    if context.wgmma is None:
        sets = context.wgmma = Sets()
        owner: dict[str, int] = {}
        for item in context.kernel.instructions:
            if not _is(item, "mma_async"):
                continue
            names = _registers(item, item.operands[0])
            number = sets.number(names)
            form = form_of(item)
            known = sets.forms.setdefault(number, form)
            if (known.n, known.d) != (form.n, form.d) or any(
                owner.setdefault(n, number) != number for n in names
            ):
                raise UnsupportedInstruction(item, "accumulators that overlap with another shape's")
            if isinstance(item.operands[1], Vector):
                sets.number(_registers(item, item.operands[1]))
    result: Sets = context.wgmma
    return result


def _sign(item: Instruction, operand: Operand) -> bool:
    """Whether an imm-scale is -1."""
    if not isinstance(operand, Imm) or operand.value & 0xFFFFFFFF not in (1, 0xFFFFFFFF):
        raise UnsupportedInstruction(item, "imm-scale is 1 or -1")
    return operand.value & 0xFFFFFFFF != 1


def _flag(item: Instruction, operand: Operand) -> bool:
    if not isinstance(operand, Imm) or operand.value not in (0, 1):
        raise UnsupportedInstruction(item, "imm-trans is 0 or 1")
    return operand.value == 1


def form_of(item: Instruction) -> Form:
    """Return the form of `wgmma.mma_async`.

    Raises:
        UnsupportedInstruction: for sparse and single-bit matrices and for what does not exist.
    """

    def fail(reason: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(item, reason)

    m = list(item.modifiers[3:])
    if item.modifiers[1] != "sync" or m[:1] in (["sp"], ["aligned"]):
        raise fail("sparse matrices")
    shape = m.pop(0)
    saturate = m[:1] == ["satfinite"]
    if saturate:
        m.pop(0)
    if "popc" in m:
        raise fail("single-bit matrices")
    if len(m) != 3 or m[1] not in DEPTH or m[2] not in DEPTH:
        raise fail("these types")
    d, a, b = m
    floating = a in _FLOATS
    same = a == b or {a, b} <= {"e4m3", "e5m2"} or {a, b} <= {"s8", "u8"}
    allowed = ("s32",) if not floating else ("f32",) if a in ("bf16", "tf32") else ("f16", "f32")
    if not same or d not in allowed or (saturate and floating):
        raise fail("these types")
    if not shape.startswith("m64n") or not shape.endswith(f"k{DEPTH[a]}"):
        raise fail(f"shape .{shape}")
    n = int(shape[4:].split("k")[0])
    if n % 8 or not 8 <= n <= 256:
        raise fail(f"shape .{shape}")
    in_registers = isinstance(item.operands[1], Vector)
    rest = item.operands[4:]
    transposes = (1 if in_registers else 2) if a in ("f16", "bf16") else 0
    if len(rest) != (2 + transposes if floating else 0):
        raise fail("operands")
    negate = floating and _sign(item, rest[0]) != _sign(item, rest[1])
    flags = [_flag(item, x) for x in rest[2:]]
    if in_registers:
        flags.insert(0, False)
    form = Form(n, a, b, d, saturate, negate, *flags)
    if len(_registers(item, item.operands[0])) != form.registers:
        raise fail("number of registers")
    if in_registers and len(_registers(item, item.operands[1])) != 4:
        raise fail("number of registers")
    return form


def _product(e: Emitter, item: Instruction) -> None:
    form = form_of(item)
    sets = _sets(e.context)
    d, a, b, scale = item.operands[:4]
    names = _registers(item, d)
    accumulator = sets.number(names)
    kind = {"f16": "u32", "s32": "s32", "f32": "f32"}[form.d]
    old = "".join(e.fetch(Reg(n), kind) + ", " for n in names)
    if isinstance(a, Vector):
        left = sets.number(_registers(item, a))
        source = "(" + "".join(e.fetch(x, "u32") + ", " for x in a.elements) + ")"
    else:
        left, source = -1, e.fetch(a, "u64")
    add = e.fetch(Imm(int(scale.value != 0)) if isinstance(scale, Imm) else scale, "b")
    plan, here = e.context.global_name("M", form), e.context.global_name("I", item)
    operands = f"({old}), {source}, {e.fetch(b, 'u64')}, {add}"
    e.code.do(f"ck.wgmma.issue({plan}, {accumulator}, {left}, {operands}, co, {here})")
    for n in names:
        e.put(Reg(n), kind, e.context.constant(_POISON, kind), dirty=kind == "f32")


def _wait(e: Emitter, item: Instruction) -> None:
    count = item.operands[0]
    if not isinstance(count, Imm):
        e.fail("number of groups")
        raise AssertionError
    sets = _sets(e.context)
    accumulators = [(number, sets.forms[number]) for number in sorted(sets.forms)]
    names, values = [], []
    for number, form in accumulators:
        kind = {"f16": "u32", "s32": "s32", "f32": "f32"}[form.d]
        for n in sets.names[number]:
            names.append((n, kind))
            values.append(e.fetch(Reg(n), kind))
    plan = e.context.global_name("M", tuple(accumulators))
    call = f"ck.wgmma.wait({count.value}, {plan}, ({''.join(v + ', ' for v in values)}), co)"
    if not names:
        e.code.do(call)
        return
    for (n, kind), name in zip(names, e.code.let_many(len(names), call), strict=True):
        e.put(Reg(n), kind, name, dirty=kind == "f32")
