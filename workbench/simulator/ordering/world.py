"""Time and knowledge as all CTAs share them: what a clock is, how clocks join and change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.ordering.layers import Layout

if TYPE_CHECKING:
    from workbench.simulator.ordering.clocks import Clocks

Array = npt.NDArray[Any]
Clock = dict[int, Array]
"""By CTA number: time up to which each of its classes is known, (layers, classes). Under the number of a
launch, see `launch_of`, (layers, 1): what holds of all its CTAs."""
FOREVER = np.iinfo(np.int64).max - 1
"""Stamp of what is not complete: nobody can know it while its launch runs."""
ENDED = FOREVER + 1
"""Time up to which a launch is known that has completed."""
_REMEMBERED = 4096
"""Arrays whose changed forms are kept, so that threads go on sharing them."""


def launch_of(cta: int) -> int:
    """Return the number by which clocks know the launch of a CTA; see `LaunchState.first_cta`."""
    return -1 - (cta >> 32)


class Time:
    """Counts releases of a launch."""

    def __init__(self) -> None:
        self.now = self._number = 0

    def number(self) -> int:
        """Count one more access."""
        self._number += 1
        return self._number

    def tick(self) -> int:
        """Begin the next moment."""
        self.now += 1
        return self.now


class World:
    """The clocks of all chunks of a launch."""

    def __init__(self, time: Time | None = None) -> None:
        self.time = time or Time()
        self.owners: dict[int, Clocks] = {}
        """Clocks that hold each CTA."""
        self.layout: Layout | None = None
        self._changed: dict[tuple[Any, int], tuple[Array, Array]] = {}
        self.fenced: dict[int, Clock] = {}
        """What the threads that executed fence.sc at gpu or sys scope knew then, by rank."""
        self.work = 0
        """Entries of clocks that were compared: what keeping order costs besides the accesses."""
        self._joined: tuple[Clock, Clock, Clock] = ({}, {}, {})
        """What `join` did last: CTAs that knew the same often learn the same."""

    def fit(self, cta: int, vector: Array) -> Array:
        """Return a clock of a CTA, or of a launch, with an entry for each of today's classes."""
        return self.owners[cta].fit(vector) if cta >= 0 else vector

    def told(self, clock: Clock | None, cta: int) -> Array | None:
        """Return what a clock tells of a CTA, (layers, its classes); None if that is nothing."""
        if not clock:
            return None
        vector, whole = clock.get(cta), clock.get(launch_of(cta))
        if vector is not None:
            vector = self.fit(cta, vector)
        if whole is None:
            return vector
        return (
            np.broadcast_to(whole, (len(whole), self.owners[cta].count))
            if vector is None
            else np.maximum(vector, whole)
        )

    def meet(self, a: Clock, b: Clock) -> Clock:
        """Return the earlier of both for every class."""
        if a is b:
            return a
        both = sorted(a.keys() & b.keys())
        return {k: np.minimum(self.fit(k, a[k]), self.fit(k, b[k])) for k in both}

    def change(self, clock: Clock, what: Any, how: Callable[[Array], Array]) -> Clock:
        """Return a clock with every array changed by `how`, which `what` names; equal arrays stay shared."""
        out = clock
        for cta, vector in clock.items():
            key = what, id(vector)
            known = self._changed.get(key)
            if known is None:
                if len(self._changed) >= _REMEMBERED:
                    self._changed.clear()
                new = how(vector)
                # The array is kept too: its identity would pass to another one otherwise.
                self._changed[key] = known = vector, new
            if known[1] is not vector:
                if out is clock:
                    out = dict(clock)
                out[cta] = known[1]
        return out

    def join(self, a: Clock | None, b: Clock | None) -> Clock:
        """Return the later of both for every class."""
        if not b or a is b:
            return a or {}
        if not a:
            return b
        if self._joined[0] is a and self._joined[1] is b:
            return self._joined[2]
        self.work += len(b)
        out = a
        for cta, new in b.items():
            old = a.get(cta)
            if old is new:
                continue
            if old is None:
                merged = new
            else:
                old, new = self.fit(cta, old), self.fit(cta, new)
                if (new <= old).all():
                    continue
                merged = np.maximum(old, new)
            if out is a:
                out = dict(a)
            out[cta] = merged
        self._joined = a, b, out
        return out
