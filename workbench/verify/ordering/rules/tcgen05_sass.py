"""What the SASS keeps of a load from tensor memory that is handed back without tcgen05.wait::ld.

The wait itself has no opcode in SASS, so that the fault is found on the PTX; here its consequence is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.findings import Finding, Severity
from workbench.isa.sass.dataflow import reads, writes
from workbench.isa.sass.model import SassInstruction
from workbench.verify.ordering.rules.tcgen05 import RULE, Order
from workbench.verify.ordering.view import SassView, finding


def handed_back_in_sass(view: SassView) -> Iterator[Finding]:
    """For each unfinished load of the PTX, the LDTM, the arrival after it, and what stands between."""
    if view.ptx is None:
        return
    instructions = view.graph.instructions
    loads = [at for at, i in enumerate(instructions) if i.opcode == "LDTM"]
    if not loads:
        return
    order = Order(view.ptx, list(view.ptx.steps("tcgen05")))
    lines = [o.step.instruction.line for o in order.of("ld")]
    for f in order.unfinished_loads():
        if f.ptx_line not in lines:
            continue
        n = lines.index(f.ptx_line) if len(lines) == len(loads) else 0
        at = loads[n]
        meets = next((k for k in range(at + 1, len(instructions)) if _hands_on(instructions[k])), None)
        if meets is None:
            continue
        registers = set(writes(instructions[at]))
        between = range(at + 1, meets)
        used = next((k for k in between if registers & set(reads(instructions[k]))), None)
        kept = (
            "no instruction between the two needs what it loads, so that only a wait in the PTX would hold "
            "the arrival back"
            if used is None
            else f"{_text(instructions[used])} between them needs what it loads, and holds the arrival back"
        )
        yield finding(
            RULE,
            Severity.INFO,
            view,
            at,
            f"in the SASS {_text(instructions[at])} is followed by {_text(instructions[meets])}: {kept}",
            f.fix,
        )


def _hands_on(i: SassInstruction) -> bool:
    return (i.opcode == "SYNCS" and "ARRIVE" in i.modifiers) or i.opcode in ("BAR", "UCGABAR_ARV", "UTCBAR")


def _text(i: SassInstruction) -> str:
    return f"{i.name} at /*{i.offset:04x}*/"
