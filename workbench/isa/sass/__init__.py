"""SASS as data: what ptxas made of a kernel, through nvdisasm."""

from workbench.isa.sass.model import SassFunction, SassInstruction, SassModule
from workbench.isa.sass.parser import SassSyntaxError, parse_sass
from workbench.isa.sass.tool import disassemble, find_nvdisasm

__all__ = [
    "SassFunction",
    "SassInstruction",
    "SassModule",
    "SassSyntaxError",
    "disassemble",
    "find_nvdisasm",
    "parse_sass",
]
