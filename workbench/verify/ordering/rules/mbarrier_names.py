"""Names for mbarriers known only up to a stage: an array, by the constant part of its address."""

from __future__ import annotations

from workbench.isa.ptx.model import Address
from workbench.verify.ordering.sums import Sums
from workbench.verify.ordering.view import PtxView


class MbarrierNames:
    """Equal names mean one mbarrier or one array of them; no name means that nothing is known."""

    def __init__(self, view: PtxView) -> None:
        self._view = view
        self._sums = Sums(view.graph, view.values)

    def name(self, index: int) -> tuple[str, int] | None:
        """The name of the mbarrier that an instruction arrives at or waits for."""
        i = self._view.graph.instructions[index]
        address = next((o for o in i.operands if isinstance(o, Address)), None)
        if address is None:
            return None
        step = self._view.step(index)
        if step is not None:
            known = step.values[i.operands.index(address)].constant()
            if known is not None:
                return "mbarrier", known
        found = self._sums.part(address.base)
        return None if found is None else ("array", found + address.offset)
