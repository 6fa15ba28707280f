"""Values of a kernel's registers in one concrete run: the first CTA, the first time round every loop.

What holds for all CTAs and iterations is often unknown where one instance is plain: the address that CTA 0
writes in its first iteration. A rule that needs one case in which two accesses meet asks here.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from workbench.isa.ptx.first import FirstValues
from workbench.isa.ptx.model import Kernel, Module
from workbench.isa.ptx.values import PtxValues
from workbench.isa.values import Lanes, ParameterBlock, Value
from workbench.verify.ordering.view import CtaThreads, PtxView

_POINTER = 1 << 44
"""Distance of the made-up addresses of buffers."""


def first_operands(view: PtxView, indices: Collection[int]) -> dict[int, tuple[Value, ...]]:
    """Operands of these instructions before their first execution in CTA 0.

    Pointers among the parameters have made-up addresses far from each other, so that only distances mean
    something. Instructions that no path reaches are left out.
    """
    wanted = frozenset(indices)
    if not wanted:
        return {}
    values: PtxValues | None = view.__dict__.get("_first_values")
    if values is None:  # kept with the view: several rules ask
        values = view.__dict__["_first_values"] = _evaluate(view.module, view.kernel, view)
    found: dict[int, tuple[Value, ...]] = {}
    for b in sorted({view.graph.block_of[at] for at in wanted} & set(view.graph.reverse_postorder)):
        for at in values.walk(b):
            if at in wanted:
                found[at] = tuple(values.operand(o) for o in view.graph.instructions[at].operands)
    return found


def _evaluate(module: Module, kernel: Kernel, view: PtxView) -> PtxValues:
    layout = view.analysis.layout
    block = view.launch.parameter_block(layout)
    data, literal = bytearray(block.data), set(block.literal)
    numbers: dict[str, int] = {}
    for n, (start, length) in enumerate(layout.places):
        param = view.launch.params.get(n)
        for r in param.relocations if param is not None else ():
            if r.offset + 8 > length:
                continue
            base = _POINTER * (1 + numbers.setdefault(r.buffer, len(numbers)))
            at = start + r.offset
            data[at : at + 8] = base.to_bytes(8, "little")
            literal.update(range(at, at + 8))
    threads = CtaThreads(view.threads.block, grid=view.launch.grid)
    return FirstValues(module, kernel, view.graph, threads, ParameterBlock(bytes(data), frozenset(literal)))


def meet(a: Lanes, a_who: Lanes, a_size: int, b: Lanes, b_who: Lanes, b_size: int) -> bool:
    """Whether some thread's bytes of one access are among those of another; addresses a thread."""
    x, y = np.unique(a[a_who != 0]), np.unique(b[b_who != 0])
    if not x.size or not y.size:
        return False
    below = np.searchsorted(x, y + np.uint64(b_size))  # starts of `a` before the end of each of `b`
    gone = np.searchsorted(x + np.uint64(a_size), y, side="right")
    return bool((below > gone).any())
