"""What one thread executes, or who touches one address, step by step; and the state of a thread at a finding.

A traced run uses code of its own, generated with a call after every instruction; other runs know nothing of
it. The trace shows instructions in the order in which the simulator runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from workbench.errors import WorkbenchError
from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Instruction
from workbench.simulator.memory import BASE, Memory
from workbench.simulator.values import INTEGERS

if TYPE_CHECKING:
    from workbench.simulator.access import Site
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.emitter import Emitter
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
Place = int | tuple[int, int, int]
_TYPES = frozenset(f"{kind}{width}" for kind in "busf" for width in (8, 16, 32, 64)) | {"bf16", "pred"}
_TAIL = 12
"""Steps that a dump shows."""
_FORMS = "thread=CTA:THREAD (numbers, or x,y,z) or address=BUFFER+OFFSET"


@dataclass(frozen=True, slots=True)
class Trace:
    """What to trace: either `thread`, or `buffer` with `offset`, or `address`."""

    thread: tuple[Place, Place] | None = None
    """CTA in its grid and thread in its CTA, each a number or (x, y, z)."""
    buffer: str | None = None
    offset: int = 0
    """Byte in the buffer."""
    address: int | None = None
    """Device address in global memory."""
    rank: int = 0
    """Of the thread, where there are several."""
    limit: int = 1000
    """Steps that are kept; the first ones."""

    def __post_init__(self) -> None:
        """Refuse a trace of nothing or of several things."""
        if sum(x is not None for x in (self.thread, self.buffer, self.address)) != 1:
            raise WorkbenchError("trace one thing: a thread, an address, or a buffer with an offset")

    def concerns(self, rank: int) -> bool:
        """Whether what a rank does may belong into the trace."""
        return self.thread is None or self.rank == rank

    @staticmethod
    def parse(text: str) -> Trace:
        """Read `thread=CTA:THREAD` or `address=BUFFER+OFFSET` (or a number for the address).

        Raises:
            WorkbenchError: if it is neither.
        """
        kind, equals, what = (part.strip() for part in text.partition("="))
        try:
            if kind == "thread" and equals:
                cta, colon, thread = what.partition(":")
                if colon:
                    return Trace(thread=(_place(cta), _place(thread)))
            if kind == "address" and equals and what:
                if what[0].isdigit():
                    return Trace(address=int(what, 0))
                name, plus, offset = what.partition("+")
                if not plus or offset.strip():
                    return Trace(buffer=name.strip(), offset=int(offset, 0) if plus else 0)
        except ValueError:
            pass
        raise WorkbenchError(f"cannot trace {text!r}; say {_FORMS}")


def _place(text: str) -> Place:
    numbers = [int(x, 0) for x in text.split(",")]
    if min(numbers) < 0:
        raise ValueError(text)
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) != 3:
        raise ValueError(text)
    return (numbers[0], numbers[1], numbers[2])


class TraceStep(BaseModel):
    """One executed instruction."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    step: int
    """Counts the recorded steps of the run from 0."""
    kernel: str
    ptx_line: int
    text: str
    """The instruction as written."""
    source: str | None = None
    """`file:line` in the kernel's Python source."""
    thread: str = ""
    """`cta=(x,y,z) thread=(x,y,z)`; the first lane if several touch an address at once."""
    lanes: int = 1
    """Lanes of the instruction that touch the address; 0 if none does, but the bytes have changed by the time
    that it ends, because an asynchronous copy arrived."""
    executed: bool = True
    """False if the instruction's predicate is false for the thread."""
    reads: dict[str, str] = {}
    """Registers read and their values."""
    writes: dict[str, str] = {}
    """Registers written and their values."""
    before: str | None = None
    """Of an address: its four bytes before the access, as a hexadecimal little-endian number."""
    after: str | None = None
    """The same after it."""


class Dump(BaseModel):
    """A thread at the instruction of a finding."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    rule: str
    ptx_line: int
    text: str
    thread: str
    registers: dict[str, str]
    """Every register that the thread has written so far."""
    steps: tuple[TraceStep, ...]
    """The last instructions before."""


class TraceRecord(BaseModel):
    """What was traced in one run."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    steps: tuple[TraceStep, ...] = ()
    total: int = 0
    """Steps that there were; more than are kept if the limit was reached."""
    dumps: tuple[Dump, ...] = ()
    """The traced thread at the first occurrence of each finding that names it, if a thread is traced."""


@dataclass(frozen=True, slots=True)
class Point:
    """An instruction of traced code."""

    item: Instruction
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    source_type: str
    """PTX type of the operands: floating-point numbers are shown as such."""
    result_type: str
    skips: bool = False
    """The branch that stands for the predicate of the instruction behind it."""


def before(e: Emitter, item: Instruction) -> list[tuple[str, str]]:
    """Return (register, array) of what an instruction is about to read."""
    return _arrays(e, [r.name for r in reads(item)])


def after(e: Emitter, item: Instruction, read: list[tuple[str, str]]) -> None:
    """Append the call that records an instruction which has been translated."""
    written = _arrays(e, [r.name for r in writes(item) if r.name in e.values])
    types = [m for m in item.modifiers if m in _TYPES] or [""]
    point = Point(
        item, tuple(n for n, _ in read), tuple(n for n, _ in written), types[-1], types[0],
        skips=item.opcode == "bra" and not item.operands,
    )  # fmt: skip
    name = e.context.global_name("T", point)
    values = [", ".join(a for _, a in group) + ("," if group else "") for group in (read, written)]
    guard = "None"
    if item.predicate is not None:
        found = dict(read).get(item.predicate.name)
        guard = f"~{found}" if item.negated else str(found)
    e.code.do(f"ck.launch.tracer.executed({name}, {guard}, ({values[0]}), ({values[1]}), co, ck)")


def _arrays(e: Emitter, names: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for name in names:
        width = e.context.width(name)
        if width == 1 or width in INTEGERS:
            found.append((name, e.view(e.value(name), "b" if width == 1 else INTEGERS[width])))
    return found


class Tracer:
    """Collects a trace while a run goes on."""

    def __init__(self, trace: Trace, memory: Memory) -> None:
        self.trace, self.memory = trace, memory
        self.address = trace.address
        if trace.buffer is not None:
            allocation = memory.allocation(trace.buffer)
            if not 0 <= trace.offset < allocation.size:
                raise WorkbenchError(
                    f"{trace.buffer!r} has {allocation.size} bytes; there is no byte {trace.offset}"
                )
            self.address = memory.address(trace.buffer) + trace.offset
        if self.address is not None and memory.find(self.address - BASE) is None:
            raise WorkbenchError(f"no buffer is at address {self.address:#x}")
        self._steps: list[TraceStep] = []
        self._total = 0
        self._tail: deque[TraceStep] = deque(maxlen=_TAIL)
        self._registers: dict[str, str] = {}
        self._launch: object = None
        self._dumps: dict[tuple[str, int], Dump] = {}
        self._known = self._bytes() if self.address is not None else ""
        self._access: tuple[Array, str] | None = None
        """Lanes of the instruction in progress that touch the address, and its bytes before."""

    def record(self) -> TraceRecord:
        """Return what was traced."""
        return TraceRecord(steps=tuple(self._steps), total=self._total, dumps=tuple(self._dumps.values()))

    # -- called by the simulator -----------------------------------------------------------------

    def access(self, site: Site, address: Array, co: Cohort) -> None:
        """An access is about to take place."""
        if self.address is None or site.space != "global":
            return
        at = address + site.offset
        hit = (at < self.address + 4) & (at + site.size > self.address)
        if hit.any():
            mask = np.broadcast_to(hit, co.shape)
            if self._access is not None and self._access[0].shape == mask.shape:
                self._access = (self._access[0] | mask, self._access[1])
            else:
                self._access = (mask, self._bytes())

    def executed(
        self, point: Point, guard: Array | None, read: tuple[Array, ...], written: tuple[Array, ...],
        co: Cohort, ck: Chunk,
    ) -> None:  # fmt: skip
        """An instruction has been executed by all lanes of a cohort."""
        if self.address is not None:
            if self._access is not None:
                mask, old = self._access
                self._access = None
                if mask.shape == co.shape:
                    self._known = self._bytes()
                    lane = divmod(int(np.argmax(mask)), co.shape[1])
                    count = int(np.count_nonzero(mask))
                    self._add(point, guard, read, written, co, ck, lane, count, (old, self._bytes()))
            elif (now := self._bytes()) != self._known:
                changed, self._known = (self._known, now), now
                self._add(point, guard, read, written, co, ck, (0, 0), 0, changed)
            return
        where = self._lane(co, ck)
        if where is not None and (not point.skips or (guard is not None and bool(_at(guard, where)))):
            self._add(point, guard, read, written, co, ck, where, 1, None)

    def finding(self, rule: str, item: Instruction | None, co: Cohort, ck: Chunk, bad: Array) -> None:
        """A finding about the lanes `bad` is being reported."""
        if self.address is not None or item is None or (rule, item.line) in self._dumps:
            return
        where = self._lane(co, ck)
        if where is None or not np.broadcast_to(bad, co.shape)[where]:
            return
        self._dumps[rule, item.line] = Dump(
            rule=rule, ptx_line=item.line, text=item.text or item.name, thread=ck.thread_name(co, *where),
            registers=dict(self._registers), steps=tuple(self._tail),
        )  # fmt: skip

    # -- details ---------------------------------------------------------------------------------

    def _bytes(self) -> str:
        assert self.address is not None
        at = self.address - BASE
        return f"0x{int.from_bytes(self.memory.bytes[at : at + 4].tobytes(), 'little'):08x}"

    def _lane(self, co: Cohort, ck: Chunk) -> tuple[int, int] | None:
        assert self.trace.thread is not None
        cta = _linear(self.trace.thread[0], ck.launch.grid)
        thread = _linear(self.trace.thread[1], ck.launch.block)
        rows = np.flatnonzero(ck.ctas == cta)
        if not len(rows):
            return None
        if co.rectangular:
            r, c = np.flatnonzero(co.ctas == rows[0]), np.flatnonzero(co.threads == thread)
            return (int(r[0]), int(c[0])) if len(r) and len(c) else None
        c = np.flatnonzero((co.ctas == rows[0]) & (co.threads == thread))
        return (0, int(c[0])) if len(c) else None

    def _add(
        self, point: Point, guard: Array | None, read: tuple[Array, ...], written: tuple[Array, ...],
        co: Cohort, ck: Chunk, lane: tuple[int, int], lanes: int, content: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        if ck.launch is not self._launch:
            self._launch = ck.launch
            self._registers = {}
        item = point.item

        def shown(names: tuple[str, ...], arrays: tuple[Array, ...], kind: str) -> dict[str, str]:
            return {n: _shown(_at(a, lane), kind) for n, a in zip(names, arrays, strict=True)}

        step = TraceStep(
            step=self._total,
            kernel=ck.launch.program.kernel.name,
            ptx_line=item.line,
            text=item.text or item.name,
            source=f"{item.loc.file}:{item.loc.line}" if item.loc is not None else None,
            thread=ck.thread_name(co, *lane),
            lanes=lanes,
            executed=not point.skips and (guard is None or bool(_at(guard, lane))),
            reads=shown(point.reads, read, point.source_type),
            writes=shown(point.writes, written, point.result_type),
            before=content[0] if content is not None else None,
            after=content[1] if content is not None else None,
        )
        self._total += 1
        self._registers.update(step.writes)
        self._tail.append(step)
        if len(self._steps) < self.trace.limit:
            self._steps.append(step)


def _linear(place: Place, extent: tuple[int, int, int]) -> int:
    if isinstance(place, int):
        return place
    x, y, z = place
    if x >= extent[0] or y >= extent[1] or z >= extent[2]:
        return -1
    return x + extent[0] * (y + extent[1] * z)


def _at(array: Array, lane: tuple[int, int]) -> Any:
    r = lane[0] if array.shape[0] > 1 else 0
    c = lane[1] if array.shape[1] > 1 else 0
    return array[r, c]


def _shown(value: Any, number: str) -> str:
    if value.dtype == bool:
        return "true" if value else "false"
    digits = 2 * value.itemsize
    text = f"0x{int(value):0{digits}x}"
    if number == "f32" and value.itemsize == 4:
        return f"{text} {value.view(np.float32):.9g}"
    if number == "f64" and value.itemsize == 8:
        return f"{text} {value.view(np.float64):.17g}"
    return f"{text} {int(value)}"
