"""PTX as data: parse it, print it, and ask about its control and data flow."""

from workbench.isa.ptx.lexer import PtxSyntaxError
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
from workbench.isa.ptx.parser import parse
from workbench.isa.ptx.printer import print_module

__all__ = [
    "Address",
    "Imm",
    "Instruction",
    "Kernel",
    "Label",
    "Loc",
    "Module",
    "Negated",
    "Operand",
    "Pair",
    "Param",
    "PtxSyntaxError",
    "Reg",
    "Sink",
    "Special",
    "Symbol",
    "TensorAddress",
    "Variable",
    "Vector",
    "parse",
    "print_module",
]
