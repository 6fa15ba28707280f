"""Watches which words of global memory kernels store to, and which they use to synchronise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import SHARED_WINDOW, Site
from workbench.simulator.cohort import Cohort
from workbench.simulator.memory import BASE, Memory
from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))


def strong(item: Instruction) -> bool:
    """Whether an access is atomic or strong: meant to meet others."""
    return item.opcode in ("atom", "red", "multimem") or not _STRONG.isdisjoint(item.modifiers)


@dataclass
class Watch:
    """An observer for `SimulationOptions.observer`. Bulk and tensor copies are not seen here.

    Attributes:
        memory: of the run.
        sync: words touched by atomics and strong accesses: flags, counters, data that is polled.
        written: words that the kernels stored to.
    """

    memory: Memory
    sync: Array = field(init=False)
    written: Array = field(init=False)

    def __post_init__(self) -> None:
        self.sync = np.zeros(self.memory.top // 4 + 16, bool)
        self.written = np.zeros(self.memory.top // 4 + 16, bool)

    def __call__(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> None:
        """Look at one access."""
        item = site.instruction
        deliberate, writes = strong(item), item.opcode in ("st", "red", "atom")
        if not deliberate and not writes:
            return
        if site.space == "generic":
            if bool((address + site.k >= SHARED_WINDOW).any()) and int(np.min(address + site.k)) < BASE:
                return
            site = site.inside("global")
        if site.space != "global":
            return
        words = (np.asarray(address + site.k) >> 2).ravel()
        if site.size > 4:
            words = (words[:, None] + np.arange(site.size // 4)).ravel()
        words = words[(words >= 0) & (words < len(self.sync))]
        if deliberate:
            self.sync[words] = True
        if writes:
            self.written[words] = True
