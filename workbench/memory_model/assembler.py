"""One instruction of a litmus test: its text to the dataclass that says what it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from workbench.memory_model.program import (
    Address,
    Arithmetic,
    Atomic,
    Barrier,
    Branch,
    ClusterBarrier,
    CommitGroup,
    Copy,
    CopyArrive,
    Fence,
    GridControl,
    Instruction,
    Load,
    Location,
    Mbarrier,
    MbarrierArrive,
    MbarrierWait,
    Operand,
    Order,
    Proxy,
    ProxyFence,
    Register,
    Scope,
    Store,
    WaitGroup,
)
from workbench.memory_model.text import Cursor, Source, shown

LOADS = {
    "ld": Proxy.GENERIC,
    "suld": Proxy.SURFACE,
    "tld": Proxy.TEXTURE,
    "cold": Proxy.CONSTANT,
    "asyncld": Proxy.ASYNC,
    "tmld": Proxy.TENSORMAP,
}
"""Loads by the proxy they go through."""
STORES = {"st": Proxy.GENERIC, "sust": Proxy.SURFACE, "asyncst": Proxy.ASYNC}
ARITHMETIC = ("add", "sub", "mul", "and", "or", "xor", "min", "max")
ATOMICS = ("add", "sub", "and", "or", "xor", "min", "max", "exch", "cas")
BRANCHES = ("beq", "bne", "blt", "ble", "bgt", "bge")
PROXY_FENCES = ("alias", "async", "surface", "texture", "constant")
_SCOPES = {s.name.lower(): s for s in Scope}
_MEMBAR = {"cta": Scope.CTA, "gl": Scope.GPU, "sys": Scope.SYS}
_VECTORS = {"v2": 2, "v4": 4}
_OPCODE = re.compile(r"\s*([A-Za-z_][\w.:]*)")


class Assembler:
    """Reads the instruction that stands at `start` to `end` of the source."""

    def __init__(
        self,
        source: Source,
        start: int,
        end: int,
        locations: Mapping[str, Location],
        mbarriers: Mapping[str, Mbarrier],
    ) -> None:
        match = _OPCODE.match(source.text, start, end)
        if match is None:
            source.fail(start + 1, f"expected an instruction, found {shown(source.text[start:end])}")
        self.opcode = match.group(1)
        self.at = match.start(1)
        self.line = source.line(self.at)
        self.source, self.locations, self.mbarriers = source, locations, mbarriers
        self.parts = self.opcode.split(".")
        self.cursor = Cursor(source, match.end(), end)

    def instruction(self) -> Instruction:
        """The instruction; raises LitmusError."""
        head = self.parts[0]
        readers: dict[str, Callable[[], Instruction]] = {
            "mov": self._move,
            "goto": self._jump,
            "bra": self._jump,
            "atom": self._atomic,
            "red": self._atomic,
            "fence": self._fence,
            "membar": self._membar,
            "bar": self._barrier,
            "barrier": self._cluster_barrier,
            "mbarrier": self._mbarrier,
            "cp": self._copy,
            "griddepcontrol": self._grid_control,
        }
        if self.opcode == "st.async":
            result: Instruction = self._remote_store()
        elif head in LOADS:
            result = self._load(LOADS[head])
        elif head in STORES:
            result = self._store(STORES[head])
        elif head in readers:
            result = readers[head]()
        elif self.opcode in ARITHMETIC:
            result = self._arithmetic()
        elif self.opcode in BRANCHES:
            result = self._branch()
        else:
            self._unknown()
        self.cursor.end()
        return result

    def _unknown(self) -> Instruction:
        self.source.fail(self.at, f"unknown instruction {shown(self.opcode)}")

    # -- operands -------------------------------------------------------------------------------------

    def _comma(self) -> None:
        if not self.cursor.accept(","):
            self.cursor.fail(f"{self.opcode} needs another operand, found {self.cursor.found()}")

    def _register(self) -> Register:
        at = self.cursor.offset
        name = self.cursor.word("a register")
        if name in self.locations or name in self.mbarriers:
            self.source.fail(at, f"{name} is a location; a register is needed here")
        return Register(name)

    def _operand(self) -> Operand:
        return self.cursor.integer() if self.cursor.at_integer() else self._register()

    def _address(self, elements: int = 1) -> Address:
        at = self.cursor.offset
        name = self.cursor.word("a location")
        if name not in self.locations:
            self.source.fail(at, f"location {name} is not declared")
        index: Operand | None = None
        if self.cursor.accept("["):
            index = self._operand()
            self.cursor.expect("]")
        location = self.locations[name]
        while location.aliases is not None:
            location = self.locations[location.aliases]
        if index is not None and not location.array:
            self.source.fail(at, f"{name} is not an array")
        if index is None and location.array and elements == 1:
            self.source.fail(at, f"{name} is an array; say which element, for instance {name}[0]")
        first = index if isinstance(index, int) else 0
        if first + elements > len(location.initial):
            self.source.fail(at, f"{name} has {len(location.initial)} elements; this reaches past them")
        return Address(name, index)

    def _barrier_name(self) -> str:
        at = self.cursor.offset
        name = self.cursor.word("an mbarrier")
        if name not in self.mbarriers:
            self.source.fail(at, f"{name} is not declared as an mbarrier (`{name} @ mbarrier COUNT;`)")
        return name

    def _list(self, one: Callable[[], Operand], count: int) -> tuple[Operand, ...]:
        if count == 1 and self.cursor.peek() != "{":
            return (one(),)
        self.cursor.expect("{")
        values = [one()]
        while self.cursor.accept(","):
            values.append(one())
        self.cursor.expect("}")
        if len(values) != count:
            self.cursor.fail(f"{self.opcode} takes {count} values, {len(values)} are given")
        return tuple(values)

    # -- qualifiers -----------------------------------------------------------------------------------

    def _qualifiers(
        self, parts: list[str], orders: tuple[Order, ...]
    ) -> tuple[Order | None, Scope | None, list[str]]:
        """Order, scope and the rest of an opcode's parts; each may come once."""
        order: Order | None = None
        scope: Scope | None = None
        rest = []
        allowed = {o.value: o for o in orders}
        for part in parts:
            if part in allowed and order is None:
                order = allowed[part]
            elif part in _SCOPES and scope is None:
                scope = _SCOPES[part]
            else:
                rest.append(part)
        return order, scope, rest

    def _access(self, orders: tuple[Order, ...]) -> tuple[Order, Scope | None, int]:
        """Order, scope and number of elements of a load or store."""
        parts = self.parts[1:]
        volatile = "volatile" in parts
        if volatile:
            parts.remove("volatile")
        order, scope, rest = self._qualifiers(parts, orders)
        elements = 1
        if rest and rest[-1] in _VECTORS:
            elements = _VECTORS[rest.pop()]
        if rest or (volatile and (order or scope)):
            self._unknown()
        if volatile:
            return Order.RELAXED, Scope.SYS, elements
        if order in (None, Order.WEAK):
            if scope is not None:
                self.source.fail(self.at, f"{self.opcode}: a weak access has no scope")
            return Order.WEAK, None, elements
        assert order is not None
        if scope is None:
            self.source.fail(self.at, f"{self.opcode} needs a scope: cta, cluster, gpu or sys")
        return order, scope, elements

    # -- instructions ---------------------------------------------------------------------------------

    def _load(self, proxy: Proxy) -> Instruction:
        generic = proxy is Proxy.GENERIC
        orders = (Order.WEAK, Order.RELAXED, Order.ACQUIRE) if generic else (Order.WEAK,)
        order, scope, elements = self._access(orders)
        targets = tuple(r for r in self._list(self._register, elements) if isinstance(r, Register))
        self._comma()
        constant = self.cursor.at_integer() or (
            self.cursor.peek() not in self.locations and self.opcode == "ld"
        )
        if constant and self.opcode == "ld":
            # `ld r0, 1` of the older tests puts a constant into a register.
            return Arithmetic("mov", targets[0], (self._operand(),), line=self.line)
        return Load(targets, self._address(elements), order, scope, proxy, line=self.line)

    def _store(self, proxy: Proxy) -> Instruction:
        generic = proxy is Proxy.GENERIC
        orders = (Order.WEAK, Order.RELAXED, Order.RELEASE) if generic else (Order.WEAK,)
        order, scope, elements = self._access(orders)
        address = self._address(elements)
        self._comma()
        return Store(address, self._list(self._operand, elements), order, scope, proxy, line=self.line)

    def _atomic(self) -> Instruction:
        orders = (Order.RELAXED, Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL)
        order, scope, rest = self._qualifiers(self.parts[1:], orders)
        if len(rest) != 1 or rest[0] not in ATOMICS:
            self._unknown()
        operation = rest[0]
        target = None
        if self.parts[0] == "atom":
            target = self._register()
            self._comma()
        elif operation in ("exch", "cas") or order is Order.ACQUIRE:
            self._unknown()
        address = self._address()
        self._comma()
        operands = [self._operand()]
        if operation == "cas":
            self._comma()
            operands.append(self._operand())
        return Atomic(
            operation,
            target,
            address,
            tuple(operands),
            order or Order.RELAXED,
            Scope.GPU if scope is None else scope,
            line=self.line,
        )

    def _fence(self) -> Instruction:
        if self.parts[1:2] == ["proxy"]:
            return self._proxy_fence(".".join(self.parts[2:]))
        orders = (Order.ACQUIRE, Order.RELEASE, Order.ACQ_REL, Order.SC)
        order, scope, rest = self._qualifiers(self.parts[1:], orders)
        if rest or scope is None:
            self._unknown()
        assert scope is not None
        return Fence(order or Order.ACQ_REL, scope, line=self.line)

    def _proxy_fence(self, kind: str) -> Instruction:
        if kind in PROXY_FENCES:
            return ProxyFence(kind, line=self.line)
        match = re.fullmatch(r"tensormap::generic\.(release|acquire)\.(cta|cluster|gpu|sys)", kind)
        if match is None:
            self._unknown()
        assert match is not None
        return ProxyFence("tensormap", Order(match.group(1)), _SCOPES[match.group(2)], line=self.line)

    def _membar(self) -> Instruction:
        if len(self.parts) != 2 or self.parts[1] not in _MEMBAR:
            self._unknown()
        return Fence(Order.SC, _MEMBAR[self.parts[1]], line=self.line)

    def _barrier(self) -> Instruction:
        if self.opcode == "bar.warp.sync":
            return Barrier("warp", True, 0, line=self.line)
        if self.opcode not in ("bar.cta.sync", "bar.cta.arrive", "bar.sync", "bar.arrive"):
            self._unknown()
        operands: list[Operand] = [self._operand()]
        while len(operands) < 3 and self.cursor.accept(","):
            operands.append(self._operand())
        blocks = self.parts[-1] == "sync"
        logical = operands[1] if len(operands) > 1 else None
        quorum = operands[2] if len(operands) > 2 else None
        return Barrier("cta", blocks, operands[0], logical, quorum, line=self.line)

    def _cluster_barrier(self) -> Instruction:
        kinds = {
            "arrive": (False, Order.RELEASE),
            "arrive.release": (False, Order.RELEASE),
            "arrive.relaxed": (False, Order.RELAXED),
            "wait": (True, Order.ACQUIRE),
            "wait.acquire": (True, Order.ACQUIRE),
        }
        kind = self.opcode.removeprefix("barrier.cluster.")
        if kind not in kinds:
            self._unknown()
        waits, order = kinds[kind]
        return ClusterBarrier(waits, order, line=self.line)

    def _mbarrier(self) -> Instruction:
        what = self.parts[1] if len(self.parts) > 1 else ""
        if what == "try_wait":
            order, scope, rest = self._qualifiers(self.parts[2:], (Order.ACQUIRE, Order.RELAXED))
            if rest != ["parity"]:
                self._unknown()
            name = self._barrier_name()
            self._comma()
            parity = self._operand()
            chosen = Scope.CTA if scope is None else scope
            return MbarrierWait(name, parity, order or Order.ACQUIRE, chosen, line=self.line)
        if what == "expect_tx" and len(self.parts) == 2:
            name = self._barrier_name()
            self._comma()
            expect = self.cursor.integer()
            return MbarrierArrive(name, Order.RELAXED, Scope.CTA, 0, expect, line=self.line)
        if what != "arrive":
            self._unknown()
        order, scope, rest = self._qualifiers(self.parts[2:], (Order.RELEASE, Order.RELAXED))
        if rest not in ([], ["expect_tx"]):
            self._unknown()
        name = self._barrier_name()
        count, expect = 1, 0
        if rest:
            self._comma()
            expect = self.cursor.integer()
        elif self.cursor.accept(","):
            count = self.cursor.integer()
            if not 1 <= count < 1 << 20:
                self.source.fail(self.at, "an arrival counts 1 to 1048575")
        if expect >= 1 << 20:
            self.source.fail(self.at, "at most 1048575 transactions are expected")
        chosen = Scope.CTA if scope is None else scope
        return MbarrierArrive(name, order or Order.RELEASE, chosen, count, expect, line=self.line)

    def _copy(self) -> Instruction:
        bulk = self.parts[1:3] == ["async", "bulk"]
        kind = self.opcode.removeprefix("cp.async.bulk" if bulk else "cp.async")
        if kind == ".commit_group":
            return CommitGroup(bulk, line=self.line)
        if kind in (".wait_group", ".wait_group.read") and (bulk or kind == ".wait_group"):
            pending = self.cursor.integer("the number of groups that may stay pending")
            return WaitGroup(bulk, pending, kind.endswith(".read"), line=self.line)
        if kind == ".wait_all" and not bulk:
            return WaitGroup(False, -1, line=self.line)
        if kind == ".mbarrier.arrive.noinc" and not bulk:
            return CopyArrive(self._barrier_name(), line=self.line)
        if kind:
            self._unknown()
        target = self._address()
        self._comma()
        source = self._address()
        barrier = None
        if bulk and self.cursor.accept(","):
            barrier = self._barrier_name()
        return Copy("bulk" if bulk else "cp.async", target, source, barrier, line=self.line)

    def _remote_store(self) -> Instruction:
        target = self._address()
        self._comma()
        value = self._operand()
        self._comma()
        return Copy("st.async", target, value, self._barrier_name(), line=self.line)

    def _grid_control(self) -> Instruction:
        if self.parts[1:] not in (["wait"], ["launch_dependents"]):
            self._unknown()
        return GridControl(self.parts[1] == "wait", line=self.line)

    def _move(self) -> Instruction:
        if self.opcode != "mov":
            self._unknown()
        target = self._register()
        self._comma()
        return Arithmetic("mov", target, (self._operand(),), line=self.line)

    def _arithmetic(self) -> Instruction:
        target = self._register()
        self._comma()
        first = self._operand()
        self._comma()
        return Arithmetic(self.opcode, target, (first, self._operand()), line=self.line)

    def _branch(self) -> Instruction:
        first = self._operand()
        self._comma()
        second = self._operand()
        self._comma()
        return Branch(self.opcode, (first, second), self.cursor.word("a label"), line=self.line)

    def _jump(self) -> Instruction:
        if len(self.parts) != 1:
            self._unknown()
        return Branch(None, (), self.cursor.word("a label"), line=self.line)
