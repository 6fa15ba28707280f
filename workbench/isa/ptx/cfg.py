"""The control-flow graph of a PTX kernel (ISA 9.7.12: bra, brx.idx, ret, exit, trap, predicated or not)."""

from __future__ import annotations

from workbench.isa.flow import Block, ControlFlowGraph
from workbench.isa.ptx.lexer import PtxSyntaxError
from workbench.isa.ptx.model import Instruction, Kernel, Label, Symbol

ENDS = frozenset(("ret", "exit", "trap"))
"""Opcodes after which the thread, or the whole kernel for `trap`, is done."""


def is_branch(instruction: Instruction) -> bool:
    """True for `bra` and `brx.idx`."""
    return instruction.opcode in ("bra", "brx")


def build(kernel: Kernel) -> ControlFlowGraph[Instruction]:
    """Build the graph over `kernel.instructions`.

    A predicated branch has its target and the next instruction as successors, a predicated `ret` or `exit`
    the next instruction; its block `leaves` as well. Falling off the end is a return.

    Raises:
        PtxSyntaxError: if a branch has no known target.
    """
    instructions: list[Instruction] = []
    starts: dict[int, list[str]] = {0: []}
    places: dict[str, int] = {}
    for item in kernel.body:
        if isinstance(item, Label):
            places[item.name] = len(instructions)
            starts.setdefault(len(instructions), []).append(item.name)
            continue
        instructions.append(item)
        if is_branch(item) or item.opcode in ENDS:
            starts.setdefault(len(instructions), [])
    if not instructions:  # ptxas ends a kernel without any by itself
        instructions.append(Instruction("ret", (), (), kernel.line))
    order = sorted(s for s in starts if s < len(instructions))
    blocks = tuple(
        Block(n, start, end, tuple(starts[start]))
        for n, (start, end) in enumerate(zip(order, [*order[1:], len(instructions)], strict=True))
    )
    block_at = {b.start: b.index for b in blocks}
    successors: list[tuple[int, ...]] = []
    leaves: list[bool] = []
    for block in blocks:
        last = instructions[block.end - 1]
        targets: list[int] = []
        leave = False
        following = block_at.get(block.end)
        if is_branch(last):
            for name in _targets(last, kernel, places):
                target = block_at.get(places[name])
                if target is None:
                    leave = True  # a label after the last instruction
                else:
                    targets.append(target)
        elif last.opcode in ENDS:
            leave = True
        if not (is_branch(last) or last.opcode in ENDS) or last.predicate is not None:
            if following is None:
                leave = True
            else:
                targets.append(following)
        successors.append(tuple(dict.fromkeys(targets)))
        leaves.append(leave)
    return ControlFlowGraph(tuple(instructions), blocks, tuple(successors), tuple(leaves))


def _targets(branch: Instruction, kernel: Kernel, labels: dict[str, int]) -> tuple[str, ...]:
    operand = branch.operands[-1] if branch.operands else None
    if isinstance(operand, Symbol):
        if branch.opcode == "brx" and operand.name in kernel.branch_targets:
            return kernel.branch_targets[operand.name]
        if branch.opcode == "bra" and operand.name in labels:
            return (operand.name,)
    raise PtxSyntaxError(branch.line, f"the target of {branch.text!r} is not a label of this kernel")
