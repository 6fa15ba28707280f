"""A kernel lowered for execution: straight blocks of instructions with one control action at the end of each.

Blocks are numbered in program order. Memory and warp-synchronous instructions under a predicate become a
branch over a block of their own, so that they only ever see lanes that execute them; cheap register
instructions keep their predicate and are executed as a selection.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from workbench.errors import WorkbenchError
from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Instruction, Kernel, Label, Symbol

WARP_SYNCHRONOUS = frozenset(
    {"shfl", "vote", "match", "redux", "elect", "ldmatrix", "stmatrix", "mma", "movmatrix"}
)
_BARRIERS = frozenset({"bar", "barrier"})
_EXITS = frozenset({"exit", "ret", "trap"})
_SIDE_EFFECTS = WARP_SYNCHRONOUS | frozenset(
    (
        "ld", "ldu", "st", "atom", "red", "cp", "prefetch", "prefetchu", "call", "nanosleep", "fence",
        "membar",
        "griddepcontrol", "activemask", "multimem", "discard", "applypriority", "mbarrier", "tcgen05",
        "wgmma",
        "setmaxnreg", "brkpt", "pmevent", "barrier", "tensormap",
    )
)  # fmt: skip
_STRONG = frozenset({"volatile", "acquire", "relaxed", "mmio"})


class UnsupportedInstruction(WorkbenchError):  # noqa: N818
    """An instruction that the simulator lacks; `line` is its 1-based line in the PTX."""

    def __init__(self, instruction: Instruction, reason: str = "") -> None:
        self.instruction, self.line = instruction, instruction.line
        why = f" ({reason})" if reason else ""
        super().__init__(
            f"PTX line {instruction.line}: the simulator does not know "
            f"`{instruction.text or instruction.name}`{why}"
        )


class Action(Enum):
    """What happens at the end of a block."""

    JUMP = "jump"
    BRANCH = "branch"
    EXIT = "exit"
    TRAP = "trap"
    BARRIER = "barrier"
    TABLE = "table"


@dataclass(slots=True)
class Block:
    """Instructions without control flow, then one action."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)
    action: Action = Action.JUMP
    instruction: Instruction | None = None
    """The control instruction itself; for BRANCH its `predicate` and `negated` say when `target` is taken."""
    target: int = -1
    following: int = -1
    """Block that runs next when nothing jumps."""
    table: tuple[int, ...] = ()
    """Targets of `brx.idx`."""
    defined: frozenset[str] = frozenset()
    """Registers that some instruction writes, the control instruction included."""
    exposed: frozenset[str] = frozenset()
    """Registers that are read before the block writes them."""
    live_in: frozenset[str] = frozenset()
    live_out: frozenset[str] = frozenset()
    warp_synchronous: bool = False
    spins: bool = False
    """Ends with the back edge of a loop that polls memory: lanes that take it let others run."""
    polls_memory: bool = False
    """That loop polls more than mbarriers, so that other CTA groups may have to run."""

    @property
    def successors(self) -> tuple[int, ...]:
        """Blocks that may run next."""
        if self.action is Action.BRANCH:
            return (self.target, self.following)
        if self.action is Action.TABLE:
            return self.table
        if self.action in (Action.EXIT, Action.TRAP):
            return ()
        return (self.target if self.action is Action.JUMP and self.target >= 0 else self.following,)


def is_warp_synchronous(instruction: Instruction) -> bool:
    """Whether all lanes named by a member mask execute `instruction` together."""
    if instruction.opcode in ("bar", "barrier"):
        return "warp" in instruction.modifiers
    if instruction.opcode in ("tcgen05", "wgmma"):
        return "sync" in instruction.modifiers
    return instruction.opcode in WARP_SYNCHRONOUS


def _is_barrier(instruction: Instruction) -> bool:
    """Whether threads stop at an instruction until something else has happened; it ends its block."""
    if instruction.opcode == "griddepcontrol":
        return instruction.modifiers == ("wait",)
    return (
        instruction.opcode in _BARRIERS
        and "warp" not in instruction.modifiers
        and ("cluster" not in instruction.modifiers or "wait" in instruction.modifiers)
    )


def is_poll(instruction: Instruction) -> bool:
    """Whether `instruction` reads memory that others may be about to change."""
    if instruction.opcode == "atom":
        return True
    if instruction.opcode == "mbarrier":
        return instruction.modifiers[0] in ("test_wait", "try_wait")
    if instruction.opcode == "multimem":
        return "ld_reduce" in instruction.modifiers
    return instruction.opcode == "ld" and not _STRONG.isdisjoint(instruction.modifiers)


def _guarded(instruction: Instruction) -> bool:
    return instruction.predicate is not None and (
        instruction.opcode in _SIDE_EFFECTS
        or instruction.modifiers[:1] == ("try_cancel",)
        or _is_barrier(instruction)
        or is_warp_synchronous(instruction)
    )


def lower(kernel: Kernel) -> tuple[Block, ...]:
    """Split a kernel into blocks and compute liveness.

    Raises:
        UnsupportedInstruction: for a form of control flow that is not known.
    """
    blocks: list[Block] = [Block(0)]
    labels: dict[str, int] = {}
    pending: list[tuple[Block, str]] = []
    tables: list[tuple[Block, tuple[str, ...]]] = []

    def start() -> Block:
        if not blocks[-1].instructions and blocks[-1].instruction is None and blocks[-1].target < 0:
            return blocks[-1]
        block = Block(len(blocks))
        if blocks[-1].following < 0:
            blocks[-1].following = block.index
        blocks.append(block)
        return block

    body = list(kernel.body)
    position = 0
    while position < len(body):
        item = body[position]
        position += 1
        if isinstance(item, Label):
            labels[item.name] = start().index
            continue
        block = blocks[-1]
        opcode = item.opcode
        if opcode == "bra":
            label = item.operands[-1]
            if not isinstance(label, Symbol):
                raise UnsupportedInstruction(item, "branch target is no label")
            block.action = Action.BRANCH if item.predicate is not None else Action.JUMP
            block.instruction = item
            block.target = 0
            pending.append((block, label.name))
            start()
        elif opcode in _EXITS:
            if item.predicate is not None:
                _guard(block, item, len(blocks))
                block = Block(len(blocks))
                blocks.append(block)
            block.action = Action.TRAP if opcode == "trap" else Action.EXIT
            block.instruction = item
            start()
        elif _guarded(item):
            _guard(block, item, len(blocks))
            inner = Block(len(blocks))
            blocks.append(inner)
            group = [item]
            while position < len(body):
                more = body[position]
                if (
                    not isinstance(more, Instruction)
                    or (more.predicate, more.negated) != (item.predicate, item.negated)
                    or any(item.predicate in writes(g) for g in group)
                    or more.opcode in ("bra", "brx", *_EXITS)
                    or _is_barrier(more)
                    or group[-1].opcode == "griddepcontrol"
                    or _is_barrier(item)
                ):
                    break
                group.append(more)
                position += 1
            if _is_barrier(item):
                inner.action, inner.instruction = Action.BARRIER, item
            else:
                inner.instructions.extend(_bare(g) for g in group)
            start()
        elif _is_barrier(item):
            block.action, block.instruction = Action.BARRIER, item
            start()
        elif opcode == "brx":
            names = _table(kernel, item)
            if item.predicate is not None:
                _guard(block, item, len(blocks))
                block = Block(len(blocks))
                blocks.append(block)
            block.action, block.instruction = Action.TABLE, _bare(item)
            tables.append((block, names))
            start()
        elif opcode == "call" and not _is_printf(item):
            raise UnsupportedInstruction(item, "calls")
        else:
            if is_warp_synchronous(item) and any(_touches_others(i) for i in block.instructions):
                block = start()
            block.instructions.append(item)
            if opcode == "griddepcontrol":  # the dependent grid may start here
                start()
    last = blocks[-1]
    if last.instruction is None and last.target < 0 and last.following < 0:
        last.action = Action.EXIT
    for block, name in pending:
        if name not in labels:
            assert block.instruction is not None
            raise UnsupportedInstruction(block.instruction, f"there is no label {name}")
        block.target = labels[name]
    for block, names in tables:
        block.table = tuple(labels[n] for n in names)
    _finish(blocks)
    return tuple(blocks)


def _table(kernel: Kernel, item: Instruction) -> tuple[str, ...]:
    name = item.operands[-1]
    if (
        item.modifiers[:1] != ("idx",)
        or not isinstance(name, Symbol)
        or name.name not in kernel.branch_targets
    ):
        raise UnsupportedInstruction(item, "its table of targets")
    return kernel.branch_targets[name.name]


def _guard(block: Block, item: Instruction, index: int) -> None:
    """End `block` with a branch that leaves out block `index` for the lanes that do not execute `item`."""
    block.action = Action.BRANCH
    block.instruction = Instruction(
        "bra", (), (), item.line, item.predicate, not item.negated, item.loc, text=item.text
    )
    block.target = index + 1
    block.following = index


def _bare(item: Instruction) -> Instruction:
    return replace(item, predicate=None, negated=False)


def _is_printf(item: Instruction) -> bool:
    return any(isinstance(o, Symbol) and o.name == "vprintf" for o in item.operands)


_SEEN_BY_OTHERS = frozenset(
    ("st", "atom", "red", "cp", "nanosleep", "multimem", "mbarrier", "barrier", "tcgen05")
)


def _touches_others(item: Instruction) -> bool:
    return item.opcode in _SEEN_BY_OTHERS or is_poll(item)


def _polls_weakly(region: list[Block]) -> bool:
    """Whether a loop ends only when an ordinary load of one and the same address gives another value."""
    definitions: dict[str, list[Instruction]] = {}
    for block in region:
        for item in block.instructions:
            for r in writes(item):
                definitions.setdefault(r.name, []).append(item)

    def polled(name: str, path: tuple[str, ...]) -> bool | None:
        """True if the value comes from such loads alone, None if it does not change, False otherwise."""
        if name in path:
            return False
        found: bool | None = None
        for item in definitions.get(name, ()):
            sources = [r.name for r in reads(item)]
            if item.opcode in ("ld", "ldu") and "param" not in item.modifiers:
                if not definitions.keys().isdisjoint(sources):
                    return False
                found = True
                continue
            for source in sources:
                value = polled(source, (*path, name))
                if value is False:
                    return False
                found = found or value
        return found

    inside = range(region[0].index, region[-1].index + 1)
    return any(
        b.action is Action.BRANCH
        and b.instruction is not None
        and b.instruction.predicate is not None
        and any(s not in inside for s in b.successors)
        and polled(b.instruction.predicate.name, ()) is True
        for b in region
    )


def _finish(blocks: list[Block]) -> None:
    gen: list[set[str]] = []
    kill: list[set[str]] = []
    for block in blocks:
        used: set[str] = set()
        defined: set[str] = set()
        items = block.instructions + ([block.instruction] if block.instruction is not None else [])
        for item in items:
            written = {r.name for r in writes(item)}
            names = {r.name for r in reads(item)}
            if item.predicate is not None:
                names.add(item.predicate.name)
                if item.opcode != "bra":  # a selection keeps the old value where the predicate is false
                    names |= written
            used |= names - defined
            defined |= written
        gen.append(used)
        kill.append(defined)
        block.exposed, block.defined = frozenset(used), frozenset(defined)
        block.warp_synchronous = any(is_warp_synchronous(i) for i in block.instructions)
    live_in: list[set[str]] = [set(g) for g in gen]
    live_out: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            k = block.index
            out: set[str] = set()
            for s in block.successors:
                if s < len(blocks):
                    out |= live_in[s]
            new = gen[k] | (out - kill[k])
            if out != live_out[k] or new != live_in[k]:
                live_out[k], live_in[k], changed = out, new, True
    for block in blocks:
        block.live_in, block.live_out = frozenset(live_in[block.index]), frozenset(live_out[block.index])
        for s in block.successors:
            if s <= block.index:
                region = blocks[s : block.index + 1]
                polls = {i.opcode for b in region for i in b.instructions if is_poll(i)}
                if not polls and _polls_weakly(region):
                    polls = {"ld"}
                block.spins |= bool(polls)
                block.polls_memory |= bool(polls - {"mbarrier"})
