"""SASS as data: what nvdisasm prints, as functions of instructions with parsed operands."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.isa.ptx.model import Loc


@dataclass(frozen=True, slots=True)
class SassReg:
    """A register operand: `R`, `UR`, `P`, `UP` or `B` with its number, or a zero/true register."""

    name: str
    """`R4`, `UR6`, `P0`, `UP1`, `B0`, `RZ`, `URZ`, `PT`, `UPT`, `PR`."""
    negated: bool = False
    """`-R4`, `~R4` or `!P0`."""
    wide: bool = False
    """`R4.64`: the pair R4, R5."""
    byte: int = 0
    """`R4.B2`: the byte that is read."""

    @property
    def predicate(self) -> bool:
        """True for P and UP registers and the constants PT, UPT."""
        return self.name.startswith(("P", "UP"))

    @property
    def constant(self) -> bool:
        """True for RZ, URZ, PT and UPT."""
        return self.name in ("RZ", "URZ", "PT", "UPT", "SRZ")


@dataclass(frozen=True, slots=True)
class SassImm:
    """An integer immediate."""

    value: int


@dataclass(frozen=True, slots=True)
class SassSpecial:
    """A special register, `SR_TID.X`."""

    name: str


@dataclass(frozen=True, slots=True)
class SassConst:
    """`c[bank][index + offset]`."""

    bank: int | None
    offset: int
    index: SassReg | None = None
    negated: bool = False


@dataclass(frozen=True, slots=True)
class SassAddress:
    """`desc[UR8][R2.64+UR4+0x10]` or `[UR6+0x8]`: the sum of registers and a constant."""

    registers: tuple[SassReg, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SassLabel:
    """A code label."""

    name: str


@dataclass(frozen=True, slots=True)
class SassOther:
    """An operand that nothing here needs to understand (float constants, scoreboards)."""

    text: str


SassOperand = SassReg | SassImm | SassSpecial | SassConst | SassAddress | SassLabel | SassOther


@dataclass(frozen=True, slots=True)
class SassInstruction:
    """One instruction: `@!P0 LDG.E.128.CONSTANT R4, desc[UR8][R2.64+0x10] ;`."""

    offset: int
    """Byte offset in the function."""
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[SassOperand, ...]
    predicate: str | None
    """Guard register; None if the instruction is always executed."""
    negated: bool
    loc: Loc | None
    """Source line, where the cubin has line information (column 0)."""
    text: str

    @property
    def name(self) -> str:
        """Opcode with its modifiers."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True)
class SassFunction:
    """The code of one `.text` section."""

    name: str
    instructions: tuple[SassInstruction, ...]
    labels: dict[str, int]
    """Label to the index of the instruction it stands before."""

    def at(self, offset: int) -> SassInstruction:
        """The instruction at a byte offset; raises KeyError if there is none."""
        for i in self.instructions:
            if i.offset == offset:
                return i
        raise KeyError(offset)


@dataclass(frozen=True)
class SassModule:
    """The functions of a cubin."""

    target: str
    functions: tuple[SassFunction, ...]

    def function(self, name: str) -> SassFunction:
        """Return a function by name; raises KeyError if there is none."""
        for f in self.functions:
            if f.name == name:
                return f
        raise KeyError(name)

    @property
    def parameter_base(self) -> int:
        """Where kernel parameters start in constant bank 0, bytes.

        Raises:
            KeyError: if the target's layout is not known.
        """
        digits = "".join(c for c in self.target.removeprefix("sm_") if c.isdigit())
        return _PARAMETER_BASE[int(digits) // 10]


# EIATTR_PARAM_CBANK of cubins of each generation.
_PARAMETER_BASE = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 11: 0x380, 12: 0x380}
