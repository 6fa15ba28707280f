"""How long one warp alone takes: an in-order scoreboard over a kernel's code.

In SASS an instruction issues a cycle after the one before it, or later when an operand is not ready; its
result is ready after the latency of its class. PTX order is not the order of execution: ptxas moves loads up.
So PTX is walked as if each basic block were scheduled perfectly: an instruction issues when its operands are
ready, and the block ends when its instructions have been issued and its branch can be.

The code is walked once, both sides of a branch included. Loops are given by what one more pass through their
bodies takes. The walk needs latencies, but no execution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.isa.ptx import Instruction, Kernel, Label
from workbench.isa.ptx.cfg import is_branch
from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.sass.model import SassAddress, SassFunction, SassInstruction, SassLabel, SassReg
from workbench.simulator.classes import bytes_of, class_of

FREE_OPCODES = frozenset(("mov", "cvta"))
FREE = frozenset(("move",))
"""PTX classes that leave almost nothing in SASS (ptxas removes over nine moves in ten)."""


@dataclass(frozen=True)
class Step:
    """One instruction as the scoreboard sees it."""

    kind: str
    """Class, as in `Counters`, or `async_wait`, `pdl_wait`, `pdl_launch`."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    load_bytes: int = 0
    """Bytes a lane that a global load brings."""
    free: bool = False


@dataclass(frozen=True)
class Code:
    """A kernel's instructions and its loops as ranges of them, `[first, last]`."""

    steps: tuple[Step, ...]
    loops: tuple[tuple[int, int], ...]
    in_order: bool
    """True for SASS, whose order is that of execution."""

    @property
    def wait(self) -> int | None:
        """Index of the first `griddepcontrol.wait`."""
        return next((i for i, s in enumerate(self.steps) if s.kind == "pdl_wait"), None)

    @property
    def releases(self) -> bool:
        """True if the kernel lets its dependents start before it ends."""
        return any(s.kind == "pdl_launch" for s in self.steps)

    @property
    def issued(self) -> int:
        """Instructions that take an issue slot."""
        return sum(not s.free for s in self.steps)


@dataclass(frozen=True)
class Walk:
    """What one warp takes, alone on its scheduler."""

    cycles: float
    """One pass in program order."""
    issued: int
    """Instructions issued in that pass."""
    loop_cycles_per_instruction: float
    """Of one more pass through the loop bodies (of the whole code where there is no loop)."""
    peak_load_bytes: int
    """Most bytes a lane that global loads had under way at once."""
    peak_loads: int
    head_cycles: float = 0.0
    """How much shorter the pass is if all that precedes `griddepcontrol.wait` is done when it ends."""
    head_load_bytes: int = 0
    """Bytes a lane that global loads bring which precede the wait."""

    def cycles_for(self, instructions: float) -> float:
        """Cycles of a warp that issues `instructions`: fewer than one pass skip code, more go round loops."""
        if instructions <= self.issued:
            return self.cycles * instructions / max(self.issued, 1)
        return self.cycles + (instructions - self.issued) * self.loop_cycles_per_instruction


def walk(code: Code, latency: Mapping[str, float]) -> Walk:
    """Walk a kernel's code. `latency` gives cycles by class; other classes take `latency["alu"]`."""
    cycles, peak, loads = _run(code.steps, latency, code.in_order)
    extra, instructions = 0.0, 0
    for first, last in code.loops:
        body = code.steps[first : last + 1]
        extra += _run(body * 2, latency, code.in_order)[0] - _run(body, latency, code.in_order)[0]
        instructions += sum(not s.free for s in body)
    if not instructions:
        extra, instructions = cycles, code.issued
    head_cycles, head_bytes = 0.0, 0
    if code.wait is not None:
        head_cycles = cycles - _run(code.steps[code.wait + 1 :], latency, code.in_order)[0]
        head_bytes = sum(s.load_bytes for s in code.steps[: code.wait])
    per_instruction = extra / max(instructions, 1)
    return Walk(cycles, code.issued, per_instruction, peak, loads, max(head_cycles, 0.0), head_bytes)


def ptx_code(kernel: Kernel) -> Code:
    """The code of a PTX kernel, in PTX order."""
    steps: list[Step] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for item in kernel.body:
        if isinstance(item, Label):
            labels[item.name] = len(steps)
            continue
        if is_branch(item):
            branches += [(len(steps), o.name) for o in item.operands if hasattr(o, "name")]
        steps.append(_ptx_step(item))
    return Code(tuple(steps), _loops(labels, branches), False)


def sass_code(function: SassFunction) -> Code:
    """The code of a SASS function, in the order in which it runs."""
    steps: list[Step] = []
    branches: list[tuple[int, str]] = []
    position: dict[int, int] = {}
    for index, item in enumerate(function.instructions):
        position[index] = len(steps)
        if item.opcode == "NOP":
            continue
        if item.opcode == "BRA":
            branches += [(len(steps), o.name) for o in item.operands if isinstance(o, SassLabel)]
        steps.append(_sass_step(item))
    position[len(function.instructions)] = len(steps)
    labels = {name: position[index] for name, index in function.labels.items()}
    return Code(tuple(steps), _loops(labels, branches), True)


def _run(steps: Sequence[Step], latency: Mapping[str, float], in_order: bool) -> tuple[float, int, int]:
    """Cycles until all results are there, and the peaks of load bytes and loads under way."""
    ready: dict[str, float] = {}
    loads: list[tuple[float, float, int]] = []
    copies: list[float] = []
    # `now` is the next issue slot; out of order, the start of the block plus what it has issued.
    now = end = 0.0
    block_start, issued = 0.0, 0
    for s in steps:
        floor = now if in_order else block_start
        start = max([floor, *(ready[r] for r in s.reads if r in ready)])
        if s.kind == "async_copy":
            copies.append(start + latency.get("async_wait", 0.0))
        elif s.kind == "async_wait" and copies:
            # Which copies are waited for is not known here: the oldest, as a pipelined loop does.
            start = max(start, copies.pop(0))
        done = start if s.free or s.kind == "async_wait" else start + latency.get(s.kind, latency["alu"])
        if s.kind in _BLOCKING:
            start = done = max(now, end if s.kind == "fence" else now, start) + latency.get(s.kind, 0.0)
        for r in s.writes:
            ready[r] = done
        if s.load_bytes:
            loads.append((start, done, s.load_bytes))
        if s.writes:
            end = max(end, done)
        if in_order:
            now = start if s.free else start + 1
            continue
        issued += not s.free
        now = block_start + issued
        if s.kind in _ENDS_BLOCK:
            block_start, issued = max(now, start), 0
            now = block_start
    return max(now, end), *_peaks(loads)


def _peaks(loads: Sequence[tuple[float, float, int]]) -> tuple[int, int]:
    """Most bytes and most loads under way at one time, from (start, end, bytes)."""
    events = sorted([(a, 1, n) for a, _, n in loads] + [(b, 0, n) for _, b, n in loads])
    size = count = most_bytes = most_loads = 0
    for _, opens, n in events:
        size, count = (size + n, count + 1) if opens else (size - n, count - 1)
        most_bytes, most_loads = max(most_bytes, size), max(most_loads, count)
    return most_bytes, most_loads


_BLOCKING = frozenset(("barrier", "fence"))
_ENDS_BLOCK = frozenset(("branch", "barrier", "fence", "async_wait", "pdl_wait"))


def _loops(labels: Mapping[str, int], branches: Sequence[tuple[int, str]]) -> tuple[tuple[int, int], ...]:
    """Innermost backward branches as ranges."""
    ranges = sorted({(labels[name], at) for at, name in branches if name in labels and labels[name] < at})
    return tuple(
        r for r in ranges if not any(r != o and r[0] <= o[0] and o[1] <= r[1] for o in ranges)
    )  # fmt: skip


def _ptx_step(item: Instruction) -> Step:
    kind = class_of(item)
    load = bytes_of(item) if kind == "load_global" else 0
    if item.opcode == "cp" and any("wait" in m for m in item.modifiers):
        kind = "async_wait"
    elif kind == "pdl":
        kind = "pdl_wait" if "wait" in item.modifiers else "pdl_launch"
    return Step(
        kind,
        tuple(r.name for r in reads(item)),
        tuple(r.name for r in writes(item)),
        load,
        kind in FREE,
    )


_SASS_CLASSES = {
    "fp32": "FADD FMUL FFMA FFMA2 FADD2 FMUL2 FHFMA FHADD FMNMX FMNMX3 FSEL FSETP FSET FCHK FSWZADD",
    "fp16": "HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 HSET2",
    "fp64": "DADD DMUL DFMA DSETP DMNMX",
    "int": "IADD3 IADD VIADD IMAD LEA LOP3 SHF SHL SHR SEL PRMT ISETP VIMNMX VIMNMX3 IABS POPC FLO BREV SGXT "
    "BMSK IDP LOP ULEA UIADD3 UIMAD ULOP3 USHF USEL UPRMT UISETP UFLO UPOPC UIADD UVIADD UVIMNMX USHL USHR "
    "UBMSK USGXT",
    "convert": "F2FP F2F I2F F2I I2FP F2IP FRND I2I UI2F UF2F UF2FP",
    "sfu": "MUFU",
    "move": "MOV UMOV CS2R MOV32I R2UR S2R S2UR R2P P2R UP2UR PLOP3 UPLOP3 CS2UR VOTEU",
    "shuffle": "SHFL REDUX CREDUX",
    "vote": "VOTE MATCH ELECT",
    "branch": "BRA EXIT RET CALL BSSY BSYNC BRX JMP WARPSYNC YIELD BREAK",
    "barrier": "BAR SYNCS",
    "load_global": "LDG LD",
    "store_global": "STG ST",
    "load_shared": "LDS LDSM",
    "store_shared": "STS STSM",
    "load_local": "LDL",
    "store_local": "STL",
    "load_const": "LDC LDCU ULDC",
    "atomic": "ATOM ATOMG ATOMS RED REDG REDAS",
    "async_copy": "LDGSTS UBLKCP UTMALDG UTMASTG UBLKPF UTMAPF LDGDEPBAR",
    "async_wait": "DEPBAR",
    "tensor": "HMMA IMMA QMMA OMMA DMMA HGMMA QGMMA IGMMA UTCHMMA UTCQMMA UTCOMMA",
    "fence": "MEMBAR FENCE ERRBAR CCTL CCTLL",
    "pdl_wait": "ACQBULK",
    "pdl_launch": "PREEXIT",
}
_SASS_CLASS = {opcode: kind for kind, opcodes in _SASS_CLASSES.items() for opcode in opcodes.split()}
_NO_RESULT = frozenset(
    ("store_global", "store_shared", "store_local", "branch", "fence", "pdl_wait", "pdl_launch")
)


def _sass_step(item: SassInstruction) -> Step:
    kind = _SASS_CLASS.get(item.opcode, "other")
    size = 16 if "128" in item.modifiers else 8 if "64" in item.modifiers else 4
    if any(m in item.modifiers for m in ("U8", "S8")):
        size = 1
    elif any(m in item.modifiers for m in ("U16", "S16")):
        size = 2
    elif "256" in item.modifiers:
        size = 32
    wide = -(-size // 4) if kind.startswith("load") else 2 if "WIDE" in item.modifiers else 1
    results = 0 if kind in _NO_RESULT or item.opcode in ("BAR", "RED", "REDG") else 1
    if results and item.opcode.endswith(("SETP", "SETP2")):
        results = 2
    written = [r for o in item.operands[:results] for r in _names(o, wide)]
    read = [r for o in item.operands[results:] for r in _names(o, 1)]
    if item.predicate is not None:
        read.append(item.predicate)
    load = size if kind == "load_global" else 0
    return Step(kind, tuple(read), tuple(written), load)


def _names(operand: object, wide: int) -> Iterator[str]:
    match operand:
        case SassReg() if not operand.constant:
            prefix = operand.name.rstrip("0123456789")
            digits = operand.name[len(prefix) :]
            if not digits:
                return
            for i in range(max(wide, 2 if operand.wide else 1)):
                yield f"{prefix}{int(digits) + i}"
        case SassAddress():
            for r in operand.registers:
                yield from _names(r, 1)
