"""nvdisasm's text to data."""

from __future__ import annotations

import re

from workbench.errors import WorkbenchError
from workbench.isa.ptx.model import Loc
from workbench.isa.sass.model import (
    SassAddress,
    SassConst,
    SassFunction,
    SassImm,
    SassInstruction,
    SassLabel,
    SassModule,
    SassOperand,
    SassOther,
    SassReg,
    SassSpecial,
)

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)", line (\d+))?')
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-fA-F]{4,})\*/\s+(?:\{\s*)?(?:@(!?)(U?P(?:\d+|T))\s+)?([A-Z][A-Z0-9_]*(?:\.[\w?&~]+)*)\s*([^;]*);"
)
_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.M)
_REGISTER = re.compile(
    r"(?P<sign>[-!~|+]*)(?P<name>U?R(?:\d+|Z)|U?P(?:\d+|T)|PR|B\d+|SRZ)\|?(?P<tail>(?:\.[A-Za-z0-9_]+)*)\|?\Z"
)
_CONST = re.compile(r"(?P<sign>[-!~|]*)(?:c|cx)\[(?P<bank>[^\]]+)\]\s*\[(?P<inner>[^\]]+)\]\|?(?:\.\w+)*\Z")
_HEX = re.compile(r"-?0x[0-9a-fA-F]+\Z|-?\d+\Z")
_LABEL_OPERAND = re.compile(r"`\(([^)]+)\)\Z")
_ADDRESS = re.compile(r"(?:desc\[[^\]]*\]|gdesc\[[^\]]*\]|\w+)?\[(?P<inner>[^\]]*)\](?:\.\w+)*\Z")
_TARGETS = re.compile(r'\(\*"BRANCH_TARGETS ([^"]+)"\*\)')


class SassSyntaxError(WorkbenchError):
    """Text that is not what nvdisasm prints."""


def parse_sass(text: str) -> SassModule:
    """Parse the output of `nvdisasm -g -c`.

    Raises:
        SassSyntaxError: if the text has no target or a code line that cannot be read.
    """
    target = _TARGET.search(text)
    if target is None:
        raise SassSyntaxError("the SASS text has no '.target' line; it must be nvdisasm's output")
    functions: list[SassFunction] = []
    name: str | None = None
    instructions: list[SassInstruction] = []
    labels: dict[str, int] = {}
    loc: Loc | None = None
    fresh = True  # the next line comment starts a new group; the first of a group is the innermost

    def close() -> None:
        if name is not None:
            functions.append(SassFunction(name, tuple(instructions), dict(labels)))

    for number, line in enumerate(text.splitlines(), 1):
        if (m := _INSTRUCTION.match(line)) is not None:
            if name is None:
                raise SassSyntaxError(f"SASS line {number}: an instruction outside of any function")
            instructions.append(_instruction(m, loc))
            fresh = True
        elif (m := _LINE.match(line)) is not None:
            if fresh:
                outer = Loc(m[3], int(m[4]), 0) if m[3] is not None else None
                loc = Loc(m[1], int(m[2]), 0, outer)
                fresh = False
        elif (m := _SECTION.match(line)) is not None:
            close()
            name, instructions, labels, loc, fresh = m[1], [], {}, None, True
        elif (m := _LABEL.match(line)) is not None:
            labels[m[1]] = len(instructions)
        elif re.match(r"^\s*/\*[0-9a-fA-F]{4,}\*/\s+\S", line):
            raise SassSyntaxError(f"SASS line {number}: cannot read {line.strip()[:80]!r}")
    close()
    return SassModule(target[1], tuple(functions))


def _instruction(m: re.Match[str], loc: Loc | None) -> SassInstruction:
    offset, bang, predicate, opcode, rest = m.groups()
    base, *modifiers = opcode.split(".")
    operands: list[SassOperand] = []
    if (targets := _TARGETS.search(rest)) is not None:
        rest = rest[: targets.start()]
        operands = [SassLabel(t.strip()) for t in targets[1].split(",")]
    parsed = [_operand(part) for part in _split(rest)]
    written = f"{'@' + bang + predicate + ' ' if predicate else ''}{opcode} {rest.strip()}".strip()
    return SassInstruction(
        offset=int(offset, 16),
        opcode=base,
        modifiers=tuple(modifiers),
        operands=(*parsed, *operands),
        predicate=predicate if predicate not in ("PT", "UPT") or bang else None,
        negated=bang == "!",
        loc=loc,
        text=written,
    )


def _split(text: str) -> list[str]:
    """Split at commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for n, c in enumerate(text):
        if c in "[({":
            depth += 1
        elif c in "])}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:n])
            start = n + 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def _number(text: str) -> int:
    """The value of what `_HEX` matches; a decimal number may begin with zeros."""
    return int(text, 16 if "0x" in text else 10)


def _operand(text: str) -> SassOperand:
    if (m := _REGISTER.match(text)) is not None:
        byte = re.search(r"\.B([1-3])\b", m["tail"])
        negated = any(c in m["sign"] for c in "-!~")
        return SassReg(m["name"], negated, ".64" in m["tail"], int(byte[1]) if byte else 0)
    if _HEX.match(text):
        return SassImm(_number(text))
    if (m := _LABEL_OPERAND.match(text)) is not None:
        return SassLabel(m[1])
    if text.startswith("SR_"):
        return SassSpecial(text)
    if (m := _CONST.match(text)) is not None:
        return _const(m)
    if (m := _ADDRESS.match(text)) is not None:
        return _address(m["inner"])
    return SassOther(text)


def _terms(text: str) -> tuple[list[SassReg], int]:
    """Registers and constant of a sum such as `R2.64+UR4+-0x10`."""
    registers: list[SassReg] = []
    offset = 0
    for part in text.replace("+-", "+ -").split("+"):
        part = part.strip().replace("- ", "-")
        if _HEX.match(part):
            offset += _number(part)
        elif (m := _REGISTER.match(part)) is not None:
            registers.append(SassReg(m["name"], "-" in m["sign"], ".64" in m["tail"]))
    return registers, offset


def _const(m: re.Match[str]) -> SassConst:
    registers, offset = _terms(m["inner"])
    bank = _number(m["bank"]) if _HEX.match(m["bank"]) else None
    return SassConst(bank, offset, registers[0] if registers else None, "-" in m["sign"])


def _address(inner: str) -> SassAddress:
    registers, offset = _terms(inner)
    return SassAddress(tuple(registers), offset)
