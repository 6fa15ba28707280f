"""Global memory in which strong vector stores arrive word by word (PTX ISA 8.2.2: in no order).

Data that are polled for instead of being guarded by a flag must be looked at word by word. Here one word of a
strong vector store is there at once; the others are when somebody has looked in vain, or has stored on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.access import GlobalSpace, Site
from workbench.simulator.adversary import Torn
from workbench.simulator.memory import Memory

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_STRONG = frozenset(("volatile", "relaxed", "release"))


class TornSpace(GlobalSpace):
    """Global memory of a launch; `torn` says which word of a vector comes first."""

    def __init__(self, memory: Memory, torn: Torn) -> None:
        super().__init__(memory)
        self._torn = torn
        self._late: tuple[Array, Array] | None = None
        """Word index and word."""
        self._looked = False

    def arrive(self) -> None:
        """Let the words that are under way arrive."""
        if self._late is not None:
            index, words = self._late
            self._late, self._looked = None, False
            self.data[4][index] = words

    def load(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> Array:
        """Read; see `GlobalSpace.load`. Whoever looks a second time finds all words."""
        if self._late is not None:
            low, high = int((address + site.k).min()) >> 2, int((address + site.k).max()) + site.size >> 2
            if low <= int(self._late[0].max()) and high >= int(self._late[0].min()):
                if self._looked:
                    self.arrive()
                    ck.progress += 1
                self._looked = True
        return super().load(site, address, co, ck)

    def prepare(self, site: Site, address: Array, co: Cohort, ck: Chunk, *, write: bool) -> Array:
        """Check an atomic access; see `GlobalSpace.prepare`."""
        self.arrive()
        return super().prepare(site, address, co, ck, write=write)

    def store(self, site: Site, address: Array, value: Array, co: Cohort, ck: Chunk) -> None:
        """Write; see `GlobalSpace.store`."""
        self.arrive()
        strong = not _STRONG.isdisjoint(site.instruction.modifiers)
        if site.size <= 4 or not strong or bool(((address + site.k) & site.mask).any()):
            super().store(site, address, value, co, ck)
            return
        count = site.size // 4
        first = ((address + site.k) >> 2).ravel()
        late = np.arange(1, count) if self._torn is Torn.FIRST else np.arange(count - 1)
        words = np.unique((first[:, None] + late).ravel())
        words = words[(words >= 0) & (words < len(self.data[4]))]
        old = self.data[4][words].copy()
        super().store(site, address, value, co, ck)
        self._late = words, self.data[4][words].copy()
        self.data[4][words] = old
