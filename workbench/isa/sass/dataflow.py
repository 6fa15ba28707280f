"""Which registers a SASS instruction writes and reads.

NVIDIA publishes no operand semantics for SASS; these rules were read off disassembled kernels of sm_90a and
sm_103a. They are made for following addresses and predicates: results of matrix instructions are taken as
a block of registers whose content is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from workbench.isa.flow import ControlFlowGraph
from workbench.isa.sass.model import SassAddress, SassConst, SassImm, SassInstruction, SassOperand, SassReg

_NO_RESULT = """
BRA BRX BRXU JMP JMX JMXU CALL EXIT RET KILL BSSY BSYNC BREAK BAR BMOV WARPSYNC YIELD NANOSLEEP NOP
BPT MEMBAR ERRBAR CGAERRBAR CCTL CCTLL CCTLT FENCE DEPBAR LDGDEPBAR ARRIVES LDGSTS ACQBULK PREEXIT
ST STG STS STL STAS STSM STTM RED REDG REDAS UBLKCP UBLKPF UBLKRED UTMALDG UTMASTG UTMAREDG UTMAPF
UTMACCTL UTMACMDFLUSH UTCBAR UTCHMMA UTCQMMA UTCOMMA UTCIMMA UTCCP UTCSHIFT USETMAXREG USETSHMSZ
WARPGROUP WARPGROUPSET ACQSHMINIT UVIRTCOUNT USTGMC R2P PMTRIG ACQBLK
"""
NO_RESULT = frozenset(_NO_RESULT.split())
"""Opcodes without a result register."""
_PREDICATE_THEN_REGISTER = frozenset(
    ("SHFL", "ATOM", "ATOMG", "ATOMS", "UTCATOMSWS", "ELECT", "R2UR", "MATCH")
)
_PREDICATE_ONLY = frozenset(("SYNCS", "FCHK", "VOTE", "VOTEU", "UTMATRYCANCEL"))
_MATRIX = frozenset(("HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "BMMA"))
_SHAPE = re.compile(r"64x(\d+)x\d+\Z")
_NAME = re.compile(r"(U?R)(\d+)\Z")


def span(register: str, count: int) -> list[str]:
    """`count` registers from `register` on; none for RZ."""
    if count == 1 and register[-1:].isdigit():
        return [register]
    m = _NAME.match(register)
    if m is None:
        return [] if register in ("RZ", "URZ", "SRZ", "PT", "UPT", "PR") else [register]
    return [f"{m[1]}{int(m[2]) + n}" for n in range(count)]


def result_width(i: SassInstruction) -> int:
    """Registers that the main result takes."""
    m = i.modifiers
    if i.opcode == "LDTM":
        repeat = next((int(x[1:]) for x in m if re.fullmatch(r"x\d+", x)), 1)
        return repeat * (4 if "16dp256bit" in m else 2 if "16dp128bit" in m else 1)
    if i.opcode in ("HGMMA", "IGMMA", "QGMMA"):
        shape = next((s for x in m if (s := _SHAPE.match(x))), None)
        return int(shape[1]) // 2 if shape else 128
    if i.opcode in _MATRIX:
        return 4
    if i.opcode in (
        "LDSM",
        "LDS",
        "LDG",
        "LD",
        "LDL",
        "LDC",
        "LDCU",
        "ULDC",
        "ATOMG",
        "ATOM",
        "ATOMS",
        "LDGMC",
    ):
        if i.opcode == "LDSM":
            return int(m[-1]) if m and m[-1] in ("2", "4") else 1
        if "ENL2" in m:
            return 4
        return 8 if "256" in m else 4 if "128" in m else 2 if "64" in m else 1
    if "WIDE" in m or "64" in m or i.opcode in ("DADD", "DMUL", "DFMA", "FFMA2", "FADD2", "FMUL2"):
        return 2
    if i.opcode == "CS2R":
        return 1 if "32" in m else 2
    if i.opcode in ("I2F", "F2F", "I2I", "F2I") and any(x in ("F64", "S64", "U64") for x in m[:2]):
        return 2
    return 1


def result_operands(i: SassInstruction) -> int:
    """How many of the leading operands are results."""
    if i.opcode in NO_RESULT or not i.operands or not isinstance(i.operands[0], SassReg):
        return 0
    predicates = 0
    for operand in i.operands:
        if not (isinstance(operand, SassReg) and operand.predicate and not operand.negated):
            break
        predicates += 1
    first = i.operands[0]
    if first.predicate:
        if i.opcode in _PREDICATE_THEN_REGISTER:
            return min(predicates, 1) + 1
        if i.opcode in _PREDICATE_ONLY:
            return 1
        if i.opcode in ("LOP3", "ULOP3", "LEA", "ULEA"):
            return 2
        return min(predicates, 2)
    if i.opcode in ("LDG", "LD") and "ENL2" in i.modifiers:
        return 2
    if i.opcode in ("SEL", "USEL", "FSEL", "P2R", "MOV", "UMOV", "S2R", "S2UR", "R2UR", "CS2R"):
        return 1
    extra = 0
    for operand in i.operands[1:]:
        if not (isinstance(operand, SassReg) and operand.predicate and not operand.negated):
            break
        extra += 1
    return 1 + min(extra, 1 if i.opcode in ("VOTE", "VOTEU") else 2)


def writes(i: SassInstruction) -> tuple[str, ...]:
    """Names of the registers the instruction writes."""
    found: list[str] = []
    width = result_width(i)
    for operand in i.operands[: result_operands(i)]:
        if isinstance(operand, SassReg):
            found += span(operand.name, 1 if operand.predicate else width)
    if i.opcode == "R2P":
        mask = i.operands[-1]
        bits = mask.value if isinstance(mask, SassImm) else 0x7F
        found += [f"P{n}" for n in range(7) if bits >> n & 1]
    return tuple(dict.fromkeys(found))


def sources(i: SassInstruction) -> tuple[SassOperand, ...]:
    """The operands that are read."""
    return i.operands[result_operands(i) :]


@dataclass(frozen=True, slots=True)
class Shape:
    """What an instruction writes and reads, as `writes`, `sources` and `result_operands` tell it."""

    writes: tuple[str, ...]
    sources: tuple[SassOperand, ...]
    results: int


def shapes(graph: ControlFlowGraph[SassInstruction]) -> tuple[Shape, ...]:
    """The shape of each instruction of a graph, found once a graph."""
    found: tuple[Shape, ...] | None = graph.__dict__.get("_shapes")
    if found is None:
        counts = [(i, result_operands(i)) for i in graph.instructions]
        found = tuple(
            Shape(writes(i) if n or i.opcode == "R2P" else (), i.operands[n:], n) for i, n in counts
        )
        graph.__dict__["_shapes"] = found
    return found


def operand_registers(operand: SassOperand) -> list[str]:
    """Names of the registers an operand reads; `R2.64` reads two."""
    match operand:
        case SassReg():
            return span(operand.name, 2 if operand.wide else 1)
        case SassAddress(registers, _):
            return [n for r in registers for n in span(r.name, 2 if r.wide else 1)]
        case SassConst(_, _, index):
            return [] if index is None else span(index.name, 1)
        case _:
            return []


def reads(i: SassInstruction) -> tuple[str, ...]:
    """Names of the registers the instruction reads, its guard last."""
    found = [n for o in sources(i) for n in operand_registers(o)]
    if i.predicate is not None and i.predicate not in ("PT", "UPT"):
        found.append(i.predicate)
    return tuple(dict.fromkeys(found))
