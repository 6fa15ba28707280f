"""Schedules that try to break a kernel: who runs first, who runs last, what arrives early or late.

A kernel that is right gives the same result under all of them. The plain schedule (`PLAIN` and seed 0)
runs lanes in lockstep and launches one after the other, which is fast and hides most mistakes of ordering.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Unit(StrEnum):
    """Threads that are held back, or sent ahead, together."""

    WARP = "warp"
    """A warp of every CTA; `index` is its number in the CTA."""
    CTA = "cta"
    """One CTA; `index` is its number in the grid, counted from the end if negative."""
    CLUSTER = "cluster"
    """One cluster; `index` is its number in launch order, counted from the end if negative."""


@dataclass(frozen=True, slots=True)
class Starved:
    """Threads that run only when no other thread of their group of CTAs can go on."""

    unit: Unit
    index: int
    ahead: bool = False
    """The other way round: all other threads are held back, these run first."""

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.unit} {self.index} {'first' if self.ahead else 'last'}"

    def rows_and_threads(
        self, ctas: npt.NDArray[np.int64], threads: int, cluster: int
    ) -> npt.NDArray[np.bool_]:
        """Return which threads are held back, (CTAs, threads).

        Args:
            ctas: numbers of the CTAs of a chunk, cluster after cluster.
            threads: threads of a CTA.
            cluster: CTAs of a cluster.
        """
        held = np.zeros((len(ctas), threads), bool)
        if self.unit is Unit.WARP:
            warps = -(-threads // 32)
            first = (self.index % warps) * 32
            held[:, first : first + 32] = True
        elif self.unit is Unit.CTA:
            held[self.index % len(ctas)] = True
        else:
            first = (self.index % max(1, len(ctas) // cluster)) * cluster
            held[first : first + cluster] = True
        return ~held if self.ahead else held


class Torn(StrEnum):
    """Which word of a strong vector store is there at once."""

    FIRST = "first"
    LAST = "last"


class Pick(StrEnum):
    """Which of the lanes that could go on do so."""

    LOWEST = "lowest"
    """Those at the lowest place of the program: lanes meet again as soon as they can."""
    HIGHEST = "highest"
    """Those at the highest place: whoever is ahead stays ahead."""


@dataclass(frozen=True, slots=True)
class Adversary:
    """How a schedule departs from the plain one; a seed adds chance."""

    pick: Pick = Pick.LOWEST
    starved: Starved | None = None
    overlap: bool = False
    """A launch with programmatic stream serialization starts as soon as its predecessor allows, and runs as
    far as it can before the predecessor goes on."""
    early: bool = False
    """Bulk and tensor copies complete at once, not at the last legal moment."""
    resident: int | None = None
    """CTAs that have room at a time; the others start, in order, as resident ones exit."""

    torn: Torn | None = None
    """Strong vector stores to global memory arrive word by word."""

    def __str__(self) -> str:
        """Say it in words."""
        words = ["lockstep" if self.pick is Pick.LOWEST else "whoever is ahead first"]
        if self.starved is not None:
            words = [str(self.starved)]
        if self.early:
            words.append("copies early")
        if self.resident is not None:
            words.append(f"{self.resident} CTAs resident")
        if self.torn is not None:
            words.append(f"vectors arrive {self.torn} word first")
        return ", ".join(words)


PLAIN = Adversary()
"""Lockstep, one launch after the other."""
