"""The control-flow graph of a SASS function."""

from __future__ import annotations

from workbench.isa.flow import Block, ControlFlowGraph
from workbench.isa.sass.model import SassFunction, SassInstruction, SassLabel, SassReg

_JUMPS = frozenset(("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL"))
_ENDS = frozenset(("EXIT", "RET", "KILL"))


def _always(instruction: SassInstruction) -> bool:
    """True if a jump is taken whenever it is reached: no guard and no condition operand."""
    if instruction.predicate is not None:
        return False
    return not any(isinstance(o, SassReg) and (o.predicate or "DIV" in instruction.modifiers)
                   for o in instruction.operands)  # fmt: skip


def build(function: SassFunction) -> ControlFlowGraph[SassInstruction]:
    """Build the graph over `function.instructions`.

    `CALL` has its target and the next instruction as successors: the callee's code is reached, and the state
    after the call is the state before it (what the callee clobbers is the data flow's concern). An indirect
    branch without a target list has every label as a successor.
    """
    code = function.instructions
    starts: dict[int, list[str]] = {0: []}
    for label, at in function.labels.items():
        starts.setdefault(at, []).append(label)
    for n, i in enumerate(code):
        if i.opcode in _JUMPS or i.opcode in _ENDS:
            starts.setdefault(n + 1, [])
    order = sorted(s for s in starts if s < len(code))
    blocks = tuple(
        Block(n, start, end, tuple(starts[start]))
        for n, (start, end) in enumerate(zip(order, [*order[1:], len(code)][: len(order)], strict=True))
    )
    block_at = {b.start: b.index for b in blocks}
    successors: list[tuple[int, ...]] = []
    leaves: list[bool] = []
    for block in blocks:
        last = code[block.end - 1]
        targets: list[int] = []
        leave = last.opcode in ("EXIT", "KILL")
        if last.opcode in _JUMPS:
            names = [o.name for o in last.operands if isinstance(o, SassLabel)]
            places = [function.labels[n] for n in names if n in function.labels]
            if not names and last.opcode != "CALL":
                places = list(function.labels.values())
            targets += [block_at[p] for p in places if p in block_at]
        ends = last.opcode in _ENDS and last.predicate is None
        jumps = last.opcode in _JUMPS and last.opcode != "CALL" and _always(last)
        if not ends and not jumps:
            if block.end in block_at:
                targets.append(block_at[block.end])
            else:
                leave = True
        successors.append(tuple(dict.fromkeys(targets)))
        leaves.append(leave)
    return ControlFlowGraph(code, blocks, tuple(successors), tuple(leaves))
