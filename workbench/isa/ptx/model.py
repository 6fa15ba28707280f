"""PTX as data: modules, kernels, instructions and operands (PTX ISA, chapters 4 to 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register, made unique: registers of inner `{ }` scopes are renamed while parsing."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`, `%laneid`, `%clock64` (name with the percent sign)."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate. `value` is the integer, or for float literals (`0f`, `0d`, decimal) the bit pattern.

    `kind` is `i` for integers, `f32` for `0fXXXXXXXX`, `f64` for `0dXXXXXXXXXXXXXXXX` and decimal floats.
    """

    value: int
    kind: str = "i"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol used as a value: shared or global variable, kernel parameter, label or function."""

    name: str
    offset: int = 0
    """Constant added to the symbol's address, as in `mov.b64 %rd1, table+16;`."""


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`; `base` is a register, a symbol or None (absolute)."""

    base: Reg | Symbol | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """`[tensormap, {c0, c1, ...}]` of tensor copies; `offsets` are im2col offsets, if any."""

    base: Address
    coordinates: tuple[Operand, ...]
    offsets: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, c, d}`; an element may be the sink `_`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`: a result that is dropped."""


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a destination with a second (predicate) destination."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p` as a source operand."""

    operand: Operand


Operand = Reg | Special | Imm | Symbol | Address | TensorAddress | Vector | Sink | Pair | Negated


@dataclass(frozen=True, slots=True)
class Loc:
    """A source position from `.loc`: file path, line and column."""

    file: str
    line: int
    column: int
    inlined_at: Loc | None = None
    """Where the function that holds this line was inlined, if the text says so."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `@!p opcode.mod.mod operands;`."""

    opcode: str
    """First token, for instance `ld`, `fma`, `griddepcontrol`."""
    modifiers: tuple[str, ...]
    """The dotted parts after it, without dots: `ld.global.nc.v4.b32` has `global, nc, v4, b32`;
    `L2::cache_hint` and `shared::cluster` are one modifier each."""
    operands: tuple[Operand, ...]
    line: int
    """1-based line in the PTX text."""
    predicate: Reg | None = None
    negated: bool = False
    """True for `@!p`."""
    loc: Loc | None = None
    text: str = ""
    """The statement as written, white space folded."""
    used_bytes: int | None = None
    """Bit i says that byte i of what a load brings is used, by a `.pragma "used_bytes_mask"`; None: all."""

    @property
    def name(self) -> str:
        """Opcode with its modifiers, as written."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Label:
    """A label, made unique within the kernel."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A `.shared`, `.global`, `.const` or `.local` variable."""

    name: str
    space: str
    type: str
    """Element type, for instance `b8`, `f32`."""
    align: int
    elements: int | None
    """Number of elements; None for `.extern .shared name[]`."""
    initial: bytes | None = None
    extern: bool = False
    pointers: tuple[tuple[int, str, int], ...] = ()
    """Addresses in the initial value: (byte offset, symbol, addend); those bytes of `initial` are zero."""


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter."""

    name: str
    type: str
    """`u64`, `f32`, `b8`, ..."""
    elements: int
    """1, or the length of the `.b8 name[N]` array."""
    align: int
    offset: int
    """Byte offset in the parameter block (C packing)."""
    size: int
    pointer_space: str | None = None
    """State space of a `.ptr` annotation."""
    pointer_align: int | None = None


@dataclass(frozen=True)
class Kernel:
    """A `.entry`."""

    name: str
    params: tuple[Param, ...]
    registers: dict[str, str]
    """Unique register name to type (`pred`, `b32`, `f32`, `b64`, ...)."""
    variables: tuple[Variable, ...]
    """Variables declared inside the body (shared and local)."""
    body: tuple[Instruction | Label, ...]
    line: int
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    minnctapersm: int | None = None
    directives: dict[str, str] = field(default_factory=dict)
    """Other performance directives and pragmas, as written."""
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`.branchtargets` lists of `brx.idx` by name: unique labels in index order."""

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The body without labels."""
        return tuple(i for i in self.body if isinstance(i, Instruction))


@dataclass(frozen=True)
class Module:
    """A PTX module."""

    version: tuple[int, int]
    target: str
    address_size: int
    variables: tuple[Variable, ...]
    kernels: tuple[Kernel, ...]
    declared_functions: tuple[str, ...] = ()
    """`.func` declarations and definitions by name (vprintf and the like)."""
    compiled: bool = False
    """Whether NVVM or LLVM wrote it, as its first comment says; copies between registers are then theirs."""

    def kernel(self, name: str) -> Kernel:
        """Return an entry by name; raises KeyError if there is none."""
        for k in self.kernels:
            if k.name == name:
                return k
        raise KeyError(name)
