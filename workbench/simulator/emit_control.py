"""What blocks return to the scheduler, printf, and instructions without effect on values."""

from __future__ import annotations

from workbench.isa.ptx.model import Instruction, Symbol, Vector
from workbench.simulator.emitter import Emitter
from workbench.simulator.program import Action, Block
from workbench.simulator.values import Value


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    if item.opcode == "call":
        return _printf(e, item)
    if item.opcode == "griddepcontrol" and item.modifiers == ("launch_dependents",):
        e.code.do("ck.trigger(co)")
        return True
    return item.opcode == "brkpt"


def finish(e: Emitter, block: Block) -> None:
    """Compute what the block's control instruction needs."""
    item = block.instruction
    assert item is not None
    if block.action is Action.BRANCH:
        assert item.predicate is not None
        predicate = e.view(e.value(item.predicate.name), "b")
        e.result = e.code.let(f"~{predicate}") if item.negated else predicate
    elif block.action is Action.TABLE:
        e.result = e.fetch(item.operands[0], "u32")
    elif block.action is Action.BARRIER and item.opcode == "griddepcontrol":
        e.result = "None"
    elif block.action is Action.BARRIER and "cluster" in item.modifiers:
        if not {"cluster", "wait"} <= set(item.modifiers) <= {"cluster", "wait", "acquire", "aligned"}:
            e.fail()
        e.result = "None"
    elif block.action is Action.BARRIER:
        _barrier(e, item)


def _barrier(e: Emitter, item: Instruction) -> None:
    modifiers = [m for m in item.modifiers if m not in ("cta", "aligned")]
    kind = modifiers[0] if modifiers else ""
    operands = list(item.operands)
    predicate = "None"
    if kind == "red":
        if modifiers[1:] not in (["popc", "u32"], ["and", "pred"], ["or", "pred"]):
            e.fail()
        last = operands.pop()
        predicate = e.fetch(last, "b")
        operands.pop(0)
    elif kind not in ("sync", "arrive") or len(modifiers) != 1:
        e.fail()
    if not 1 <= len(operands) <= 2 or (kind == "arrive" and len(operands) != 2):
        e.fail("operands")
    number = e.fetch(operands[0], "u32")
    count = e.fetch(operands[1], "u32") if len(operands) == 2 else "None"
    e.result = f"{number}, {count}, {predicate}"


def _printf(e: Emitter, item: Instruction) -> bool:
    """`call (retval), vprintf, (format, arguments)`: collect the text."""
    lists = [o for o in item.operands if isinstance(o, Vector)]
    if not lists or not any(isinstance(o, Symbol) and o.name == "vprintf" for o in item.operands):
        return False
    names = [x.name for x in lists[-1].elements if isinstance(x, Symbol)]
    if len(names) != 2 or any(n not in e.call_values for n in names):
        return False
    form, arguments = (e.view(e.call_values[n], "s64") for n in names)
    e.code.do(f"ck.printf({form}, {arguments}, co)")
    if len(lists) > 1:
        for x in lists[0].elements:
            if isinstance(x, Symbol):
                e.call_values[x.name] = Value(32, {"u32": e.context.constant(0, "u32")})
    return True
