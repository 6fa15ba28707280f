"""PTX data back to text; `parse(print_module(m))` is `m` but for lines and the statements' own text."""

from __future__ import annotations

import json

from workbench.isa.ptx.model import (
    Address,
    Imm,
    Instruction,
    Kernel,
    Label,
    Loc,
    Module,
    Negated,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
)
from workbench.isa.ptx.variables import TYPE_BYTES


def print_module(module: Module) -> str:
    """Write a module as PTX text."""
    files: dict[str, int] = {}
    for kernel in module.kernels:
        for instruction in kernel.instructions:
            loc = instruction.loc
            while loc is not None:
                files.setdefault(loc.file, len(files) + 1)
                loc = loc.inlined_at
    lines = [
        f".version {module.version[0]}.{module.version[1]}",
        f".target {module.target}",
        f".address_size {module.address_size}",
        *(f".extern .func {name};" for name in module.declared_functions),
        *(_variable(v) for v in module.variables),
        *(f'.file {index} "{name}"' for name, index in files.items()),
    ]
    for kernel in module.kernels:
        lines += _kernel(kernel, files)
    return "\n".join(lines) + "\n"


def print_operand(operand: Operand) -> str:
    """Write one operand."""
    match operand:
        case Reg(name) | Special(name):
            return name
        case Symbol(name, offset):
            return f"{name}+{offset}" if offset > 0 else f"{name}{offset}" if offset else name
        case Imm(value, kind):
            if kind == "i":
                return str(value)
            return f"0f{value:08X}" if kind == "f32" else f"0d{value:016X}"
        case Address(base, offset):
            if base is None:
                return f"[{offset}]"
            return f"[{base.name}+{offset}]" if offset else f"[{base.name}]"
        case TensorAddress(base, coordinates, offsets):
            tail = f", {_braces(offsets)}" if offsets else ""
            return f"[{print_operand(base)[1:-1]}, {_braces(coordinates)}{tail}]"
        case Vector(elements):
            return _braces(elements)
        case Pair(first, second):
            return f"{print_operand(first)}|{print_operand(second)}"
        case Negated(inner):
            return f"!{print_operand(inner)}"
        case Sink():
            return "_"


def _braces(elements: tuple[Operand, ...]) -> str:
    return "{" + ", ".join(map(print_operand, elements)) + "}"


def print_instruction(instruction: Instruction) -> str:
    """Write one instruction with its predicate and semicolon."""
    guard = ""
    if instruction.predicate is not None:
        guard = f"@{'!' if instruction.negated else ''}{instruction.predicate.name} "
    operands = [print_operand(o) for o in instruction.operands]
    if instruction.opcode == "call":
        operands = [
            f"({o[1:-1]})" if isinstance(operand, Vector) else o
            for operand, o in zip(instruction.operands, operands, strict=True)
        ]
    return f"{guard}{instruction.name} {', '.join(operands)}".rstrip() + ";"


def _location(loc: Loc, files: dict[str, int]) -> str:
    text = f".loc {files[loc.file]} {loc.line} {loc.column}"
    if (at := loc.inlined_at) is not None:
        text += f", function_name $F, inlined_at {files[at.file]} {at.line} {at.column}"
    return text


def _variable(v: Variable) -> str:
    text = f"{'.extern ' if v.extern else ''}.{v.space} .align {v.align} .{v.type} {v.name}"
    text += "[]" if v.elements is None else f"[{v.elements}]"
    if v.initial is None:
        return text + ";"
    size = TYPE_BYTES[v.type]
    pointers = {offset: (name, addend) for offset, name, addend in v.pointers}
    values = []
    for at in range(0, len(v.initial), size):
        if at in pointers:
            name, addend = pointers[at]
            values.append(f"{name}+{addend}" if addend > 0 else f"{name}{addend or ''}")
        elif v.type in ("f32", "f64"):
            prefix = "0f" if v.type == "f32" else "0d"
            values.append(f"{prefix}{int.from_bytes(v.initial[at : at + size], 'little'):0{2 * size}X}")
        else:
            values.append(str(int.from_bytes(v.initial[at : at + size], "little")))
    return f"{text} = {{{', '.join(values)}}};"


def _param(p: Param) -> str:
    pointer = ""
    if p.pointer_space is not None:
        space = "" if p.pointer_space == "generic" else f" .{p.pointer_space}"
        pointer = f" .ptr{space}" + (f" .align {p.pointer_align}" if p.pointer_align else "")
    return f"    .param .align {p.align} .{p.type}{pointer} {p.name}[{p.elements}]"


def _kernel(kernel: Kernel, files: dict[str, int]) -> list[str]:
    lines = [f".visible .entry {kernel.name}(", ",\n".join(map(_param, kernel.params)), ")"]
    for name, shape in (("reqntid", kernel.reqntid), ("maxntid", kernel.maxntid)):
        if shape is not None:
            lines.append(f".{name} {shape[0]}, {shape[1]}, {shape[2]}")
    if kernel.minnctapersm is not None:
        lines.append(f".minnctapersm {kernel.minnctapersm}")
    for name, text in kernel.directives.items():
        if name == "pragma":
            lines += [f".pragma {json.dumps(p)};" for p in text.split("; ")]
        elif name != "body_pragma":
            lines.append(f".{name} {text}".rstrip())
    lines.append("{")
    if "body_pragma" in kernel.directives:
        lines += [f"    .pragma {json.dumps(p)};" for p in kernel.directives["body_pragma"].split("; ")]
    lines += [f"    .reg .{type_} {name};" for name, type_ in kernel.registers.items()]
    lines += [f"    {_variable(v)}" for v in kernel.variables]
    lines += [f"    {name}: .branchtargets {', '.join(to)};" for name, to in kernel.branch_targets.items()]
    at: Loc | None = None
    for item in kernel.body:
        if isinstance(item, Label):
            lines.append(f"{item.name}:")
            continue
        if item.loc is not None and item.loc != at:
            at = item.loc
            lines.append(f"    {_location(at, files)}")
        if item.used_bytes is not None:
            lines.append(f'    .pragma "used_bytes_mask {item.used_bytes:#x}";')
        lines.append(f"    {print_instruction(item)}")
    lines.append("}")
    return lines
