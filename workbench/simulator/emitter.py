"""Translation of one block: registers to values, values to NumPy statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.isa.ptx.model import (
    Imm,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
)
from workbench.simulator.program import Block, UnsupportedInstruction
from workbench.simulator.values import (
    BITS,
    FLOATS,
    INTEGERS,
    NUMPY,
    Fact,
    Statements,
    Value,
    f32_of_f64,
    significand_bits,
)


@dataclass
class Context:
    """What the blocks of one kernel share."""

    kernel: Kernel
    symbols: dict[str, int]
    """Address of each variable and parameter in its own state space."""
    pairs: frozenset[str]
    """64-bit registers kept as two 32-bit halves."""
    compiled: bool = False
    """Whether a compiler wrote the PTX, so that its copies of registers are no accesses of the kernel."""
    facts: dict[str, Fact] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    """Globals of the generated code."""
    bound: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Globals that only a launch knows; called with the launch."""
    sites: list[Any] = field(default_factory=list)
    wgmma: Any = None
    """Register sets of wgmma instructions."""
    _constants: dict[tuple[str, int], str] = field(default_factory=dict)
    _widths: dict[str, int] = field(default_factory=dict)

    def constant(self, value: int, dtype: str) -> str:
        """Return the name of a (1, 1) array with these bits."""
        width = BITS[dtype]
        value &= (1 << width) - 1
        key = (dtype, value)
        if key not in self._constants:
            name = f"K{len(self._constants)}"
            if dtype == "b":
                array = np.array([[bool(value)]])
            else:
                array = np.array([[value]], NUMPY[INTEGERS[width]]).view(NUMPY[dtype])
            array.flags.writeable = False
            self._constants[key] = name
            self.names[name] = array
        return self._constants[key]

    def global_name(self, prefix: str, value: Any) -> str:
        """Make `value` a global of the generated code and return its name."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def late(self, prefix: str, make: Callable[[Any], Any]) -> str:
        """Return the name of a global that `make(launch)` provides before the code runs."""
        name = f"{prefix}{len(self.bound)}"
        self.bound[name] = make
        return name

    def width(self, register: str) -> int:
        """Width of a register in bits, 1 for predicates."""
        width = self._widths.get(register)
        if width is None:
            kind = self.kernel.registers[register]
            width = self._widths[register] = 1 if kind == "pred" else int(kind.lstrip("bsuf"))
        return width

    def keys(self, register: str) -> tuple[str, ...]:
        """Names under which a cohort stores a register."""
        return (f"{register}.0", f"{register}.1") if register in self.pairs else (register,)

    def storage(self, register: str) -> str:
        """Dtype in which a cohort stores a register (each half of a pair)."""
        width = 32 if register in self.pairs else self.width(register)
        if width == 1:
            return "b"
        if width in FLOATS and self.facts.get(register, Fact()).floating:
            return FLOATS[width]
        return INTEGERS[width]


class Emitter:
    """Translates the instructions of one block. Emitters of instruction families use its primitives."""

    def __init__(self, context: Context, block: Block) -> None:
        self.context = context
        self.block = block
        self.code = Statements()
        self.values: dict[str, Value] = {}
        self.written: set[str] = set()
        self.joined: dict[str, Fact] = {}
        """Facts of every value written to a register in this block."""
        self.instruction: Instruction = None  # type: ignore[assignment]
        self.result = ""
        """Expression that the block returns to the scheduler."""
        self.call_values: dict[str, Value] = {}
        """Values of the `.param` variables of a call sequence."""
        self._carry = ""
        self._guard: tuple[Instruction | None, str] = (None, "")
        """The instruction under a predicate that is being translated, and the predicate's array."""
        self._specials: dict[str, str] = {}

    # -- reading ---------------------------------------------------------------------------------

    def value(self, register: str) -> Value:
        """Return the value of a register, taken from the cohort at its first use."""
        if register in self.values:
            return self.values[register]
        context = self.context
        if context.width(register) > 64:
            self.fail(f"{register}, a 128-bit register, across basic blocks")
        take = register not in self.block.live_out or register in self.block.defined
        method = "r.pop({0!r})" if take else "r[{0!r}]"
        storage = context.storage(register)
        fact = context.facts.get(register, Fact())
        arrays = [self.code.let(method.format(key)) for key in context.keys(register)]
        width = 32 if register in context.pairs else context.width(register)
        stored = [
            Value(
                width, {storage: array}, dirty=storage in ("f32", "f64"),
                bits=fact.bits, bits16=fact.bits16, finite16=fact.finite16,
            )
            for array in arrays
        ]  # fmt: skip
        value = stored[0] if len(stored) == 1 else Value(64, pair=(stored[0], stored[1]))
        self.values[register] = value
        return value

    def view(self, value: Value, dtype: str) -> str:
        """Return the array of a value as `dtype`; a narrower dtype gives the low bits, a wider one zeros on
        top.
        """
        views = value.views
        if dtype in views:
            return views[dtype]
        width = BITS[dtype]
        if dtype == "b" or value.width == 1:
            self.fail("a predicate used as a number, or the reverse")
        if width != value.width:
            key = f"as {dtype}"
            if key not in value.memo:
                value.memo[key] = self._resized(value, dtype)
            return value.memo[key]
        if not views:
            self._materialise(value)
            if dtype in views:
                return views[dtype]
        floating = FLOATS.get(width)
        if value.dirty and floating in views:
            clean = self.code.let(f"canonical_{floating}({views[floating]})")
            views.clear()
            views[floating] = clean
            value.dirty = False
        source = next(iter(views.values()))
        views[dtype] = self.code.let(f"{source}.view({dtype})")
        return views[dtype]

    def _resized(self, value: Value, dtype: str) -> str:
        width = BITS[dtype]
        if value.pair is not None and width <= value.pair[0].width:
            return self.view(value.pair[0], dtype)
        whole = self.view(value, INTEGERS[value.width])
        resized = self.code.let(f"{whole}.astype({INTEGERS[width]})")
        return resized if dtype == INTEGERS[width] else self.code.let(f"{resized}.view({dtype})")

    def _materialise(self, value: Value) -> None:
        whole = INTEGERS[value.width]
        if value.half is not None:
            parent, which = value.half
            source = self.view(parent, INTEGERS[parent.width])
            if which:
                source = f"({source} >> {self.context.constant(value.width, INTEGERS[parent.width])})"
            value.views[whole] = self.code.let(f"{source}.astype({whole})")
            return
        assert value.pair is not None, "a value without content"
        low, high = value.pair
        narrow = INTEGERS[low.width]
        a, b = self.view(low, narrow), self.view(high, narrow)
        shift = self.context.constant(low.width, whole)
        value.views[whole] = self.code.let(f"{a}.astype({whole}) | ({b}.astype({whole}) << {shift})")

    def part(self, value: Value, which: int) -> Value:
        """Return the low (0) or high (1) half of a value without computing anything."""
        if value.pair is not None:
            return value.pair[which]
        low = Value(value.width // 2, half=(value, 0), bits16=value.bits16, finite16=value.finite16)
        high = Value(value.width // 2, half=(value, 1), bits16=value.bits16, finite16=value.finite16)
        value.pair = (low, high)
        return value.pair[which]

    def operand(self, operand: Operand, width: int = 32) -> Value:
        """Return the value of a source operand; immediates and symbols take `width` bits."""
        if isinstance(operand, Reg):
            return self.value(operand.name)
        if isinstance(operand, Imm):
            bits = self._immediate_bits(operand, width)
            value = Value(width, {INTEGERS[width]: self.context.constant(bits, INTEGERS[width])})
            if width == 32:
                value.views["f32"] = self.context.constant(bits, "f32")
                value.bits = significand_bits(bits)
                value.number = bits & 0x7FFFFFFF <= 0x7F800000
            return value
        if isinstance(operand, Special):
            return self.special(operand, width)
        if isinstance(operand, Symbol):
            return Value(width, {INTEGERS[width]: self.symbol(operand, INTEGERS[width])})
        self.fail(f"operand {operand}")
        raise AssertionError

    def _immediate_bits(self, operand: Imm, width: int) -> int:
        if operand.kind == "f64" and width == 32:
            return f32_of_f64(operand.value)
        if operand.kind == "f32" and width == 64:
            number = np.array([operand.value], np.uint32).view(np.float32).astype(np.float64)
            return int(number.view(np.uint64)[0])
        return operand.value

    def fetch(self, operand: Operand, dtype: str) -> str:
        """Return the name of the array of a source operand as `dtype`."""
        if isinstance(operand, Negated):
            return self.code.let(f"~{self.fetch(operand.operand, 'b')}")
        if isinstance(operand, Imm):
            return self.context.constant(self._immediate_bits(operand, BITS[dtype]), dtype)
        return self.view(self.operand(operand, max(BITS[dtype], 8)), dtype)

    def symbol(self, symbol: Symbol, dtype: str) -> str:
        """Return the address of a variable or parameter as an array."""
        name = symbol.name
        if name in self.context.symbols:
            return self.context.constant(self.context.symbols[name] + symbol.offset, dtype)
        if dtype in ("u64", "s64"):
            return self.context.late(
                "S", lambda launch: np.array([[launch.global_address(name)]], NUMPY[dtype])
            )
        self.fail(f"there is no symbol {name}")
        raise AssertionError

    def special(self, operand: Special, width: int) -> Value:
        """Return a special register."""
        name = operand.name
        key = f"{name}:{width}"
        volatile = name in (
            "%clock",
            "%clock64",
            "%clock_hi",
            "%globaltimer",
            "%globaltimer_lo",
            "%globaltimer_hi",
        )
        if key not in self._specials or volatile:
            if not _known_special(name):
                self.fail(f"special register {name}")
            array = self.code.let(f"co.special({name!r})")
            self._specials[key] = array
        wide = name.endswith("64") or name == "%globaltimer"
        if name.startswith("%is_explicit"):
            return Value(1, {"b": self._specials[key]})
        return Value(64 if wide else 32, {"u64" if wide else "u32": self._specials[key]})

    # -- writing ---------------------------------------------------------------------------------

    def assign(self, operand: Operand, value: Value) -> None:
        """Write a value to a destination register, extended with zeros where the register is wider."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Reg):
            self.fail(f"destination {operand}")
            raise AssertionError
        name = operand.name
        width = self.context.width(name)
        if value.width != width:
            if 1 in (value.width, width):
                self.fail(f"destination {name} has {width} bits")
            value = Value(width, {INTEGERS[width]: self.view(value, INTEGERS[width])})
        predicate = self.instruction.predicate
        if predicate is not None:
            value = self._selected(predicate, name, value)
        self.values[name] = value
        self.written.add(name)
        fact = Fact.of(value)
        self.joined[name] = self.joined[name].join(fact) if name in self.joined else fact

    def _selected(self, predicate: Reg, name: str, value: Value) -> Value:
        old = self.value(name)
        both = Fact.of(value).join(Fact.of(old))
        dtype = "b" if value.width == 1 else INTEGERS[value.width]
        if value.width in FLOATS and both.floating:
            dtype = FLOATS[value.width]
        if self._guard[0] is not self.instruction:  # a destination may be the predicate itself
            self._guard = (self.instruction, self.view(self.value(predicate.name), "b"))
        p = self._guard[1]
        new, before = self.view(value, dtype), self.view(old, dtype)
        arguments = f"{p}, {before}, {new}" if self.instruction.negated else f"{p}, {new}, {before}"
        return Value(
            value.width, {dtype: self.code.let(f"select({arguments})")}, dirty=dtype in ("f32", "f64"),
            bits=both.bits, bits16=both.bits16, finite16=both.finite16,
        )  # fmt: skip

    def put(self, operand: Operand, dtype: str, array: str, **facts: Any) -> None:
        """Write an array to a destination; signed results are extended by their sign."""
        width = BITS[dtype]
        if isinstance(operand, Reg):
            register = self.context.width(operand.name)
            if width not in (register, 1) and register != 1:
                kind = dtype[0] if dtype[0] in "us" else "u"
                array = self.code.let(f"{array}.astype({kind}{register})")
                dtype, width = f"{kind}{register}", register
        self.assign(operand, Value(width, {dtype: array}, **facts))

    def destinations(self, operand: Operand) -> tuple[Operand, Operand | None]:
        """Take `d|p` apart."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    # -- end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Store live results in the cohort and return `result`."""
        block, context = self.block, self.context
        for name in sorted(self.written & block.live_out):
            value = self.values[name]
            if context.width(name) > 64:
                self.fail(f"{name}, a 128-bit register, across basic blocks")
            storage = context.storage(name)
            if name in context.pairs:
                for which, key in enumerate(context.keys(name)):
                    self.code.do(f"r[{key!r}] = {self.view(self.part(value, which), storage)}")
            else:
                self.code.do(f"r[{name!r}] = {self.view(value, storage)}")
        for name in sorted(block.exposed):
            if name not in block.live_out and name not in self.values:
                for key in context.keys(name):
                    self.code.do(f"r.pop({key!r}, None)")
        if self.result:
            self.code.do(f"return {self.result}")

    # -- carry -----------------------------------------------------------------------------------

    def carry(self) -> str:
        """Return the carry flag CC.CF; chains that cross blocks are not known."""
        if not self._carry:
            self.fail("the carry flag comes from another basic block")
        return self._carry

    def set_carry(self, array: str) -> None:
        """Remember the carry flag."""
        self._carry = array

    def fail(self, reason: str = "") -> None:
        """Refuse the current instruction."""
        raise UnsupportedInstruction(self.instruction, reason)


_SPECIALS = frozenset(
    (
        "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock64",
        "%clock_hi", "%globaltimer",
        "%globaltimer_lo", "%globaltimer_hi", "%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size",
        "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%cluster_ctarank",
        "%cluster_nctarank", "%is_explicit_cluster", "%reserved_smem_offset_begin",
        "%reserved_smem_offset_end",
        "%reserved_smem_offset_cap",
    )
)  # fmt: skip


def _known_special(name: str) -> bool:
    base, _, axis = name.partition(".")
    if axis:
        vectors = (
            "%tid",
            "%ntid",
            "%ctaid",
            "%nctaid",
            "%clusterid",
            "%nclusterid",
            "%cluster_ctaid",
            "%cluster_nctaid",
        )
        return axis in ("x", "y", "z") and base in vectors
    return name in _SPECIALS
