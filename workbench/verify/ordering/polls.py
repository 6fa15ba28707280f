"""What a kernel's polling loops wait for, read off its code."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.isa.ptx.dataflow import reads, writes
from workbench.isa.ptx.model import Imm, Instruction, Kernel
from workbench.simulator.program import Action, Block, lower

_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")


def _loops(kernel: Kernel) -> list[tuple[Block, list[Block]]]:
    """The last block of each loop that polls more than mbarriers, with all blocks of the loop."""
    blocks = lower(kernel)
    found = []
    for block in blocks:
        starts = [s for s in block.successors if s <= block.index]
        if block.spins and block.polls_memory and starts:
            found.append((block, list(blocks[min(starts) : block.index + 1])))
    return found


def polls_memory(kernel: Kernel) -> bool:
    """Whether a kernel has a loop that polls memory other than mbarriers."""
    return bool(_loops(kernel))


def draws_tickets(kernel: Kernel) -> bool:
    """Whether atomics on global memory give values back."""
    return any(
        i.opcode == "atom" and not any(m.startswith("shared") for m in i.modifiers)
        for i in kernel.instructions
    )


def meets_others(kernel: Kernel) -> bool:
    """Whether CTAs may depend on each other: they poll memory or use atomics on it."""
    return polls_memory(kernel) or any(
        i.modifiers[:1] == ("reduce",) if i.opcode == "cp" else i.opcode in ("atom", "red", "multimem")
        for i in kernel.instructions
        if not any(m.startswith("shared") for m in i.modifiers)
    )


def first_poll(kernels: Mapping[str, Kernel]) -> tuple[str | None, Instruction | None]:
    """The first load of a polling loop of any of the kernels, or the first atomic, and whose it is."""
    for name, kernel in kernels.items():
        for _, region in _loops(kernel):
            for block in region:
                for item in block.instructions:
                    if item.opcode in ("ld", "ldu", "atom"):
                        return name, item
    for name, kernel in kernels.items():
        for item in kernel.instructions:
            if item.opcode == "atom" and not any(m.startswith("shared") for m in item.modifiers):
                return name, item
    return None, None


def accumulates_floats(kernel: Kernel) -> bool:
    """Whether results may depend on the order of atomic additions."""
    return any(
        i.opcode in ("atom", "red") and "add" in i.modifiers and not set(_FLOATS).isdisjoint(i.modifiers)
        for i in kernel.instructions
    )


def sentinels(kernel: Kernel) -> set[int]:
    """Words that polling loops take for "not there yet": a loop goes on while what it loaded equals them.

    Zero is left out: a flag that is zero until it is set is no sentinel among data.
    """
    found: set[int] = set()
    for last, region in _loops(kernel):
        inside = range(region[0].index, last.index + 1)
        definitions: dict[str, list[Instruction]] = {}
        for block in region:
            for item in block.instructions:
                for r in writes(item):
                    definitions.setdefault(r.name, []).append(item)
        for block in region:
            branch = block.instruction
            if block.action is not Action.BRANCH or branch is None or branch.predicate is None:
                continue
            if all(s in inside for s in block.successors):
                continue
            again = (block.target in inside) != branch.negated
            found |= _compared(branch.predicate.name, again, definitions, set())
    return found


def _compared(
    name: str, goes_on: bool, definitions: Mapping[str, list[Instruction]], seen: set[str]
) -> set[int]:
    """Constants that a predicate compares with, where equality means that the loop goes on."""
    if name in seen:
        return set()
    seen.add(name)
    found: set[int] = set()
    for item in definitions.get(name, ()):
        if item.opcode == "setp":
            equal = {"eq": True, "ne": False, "equ": True, "neu": False}.get(item.modifiers[0])
            constants = [o for o in item.operands if isinstance(o, Imm)]
            if equal == goes_on and constants and isinstance(constants[0].value, int):
                word = constants[0].value & 0xFFFFFFFF
                if word:
                    found.add(word)
            continue
        flip = item.opcode == "not"
        for r in reads(item):
            found |= _compared(r.name, goes_on != flip, definitions, seen)
    return found
