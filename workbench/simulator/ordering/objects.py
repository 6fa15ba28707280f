"""Clocks of things that order threads: barriers, phases of mbarriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.simulator.ordering.clocks import Clocks
from workbench.simulator.ordering.world import Clock, World

Array = npt.NDArray[Any]


def covers(world: World, clock: Clock | None, cta: int, thread: int, stamp: int, layer: int = 0) -> bool:
    """Whether a clock knows what a thread did at `stamp`."""
    vector = world.told(clock, cta)
    return vector is not None and int(vector[layer, world.owners[cta].class_of[thread]]) > stamp


class Objects:
    """Clocks of things that order threads: barriers, phases of mbarriers. Each belongs to a CTA, its home."""

    def __init__(self, clocks: Clocks, count: int) -> None:
        self.clocks = clocks
        self._local = np.zeros((clocks.layers, count, clocks.count), np.int64)
        self.foreign: dict[int, Clock] = {}

    @property
    def local(self) -> Array:
        """What each knows of its home, (layers, objects, classes)."""
        if self._local.shape[-1] != self.clocks.count:
            self._local = self.clocks.fit(self._local)
        return self._local

    def extend(self, count: int) -> None:
        """Have at least `count` objects."""
        have = self._local.shape[1]
        if count > have:
            more = np.zeros((self.clocks.layers, count - have, self._local.shape[-1]), np.int64)
            self._local = np.concatenate([self._local, more], axis=1)

    def put(self, targets: Array, homes: Array, rows: Array, classes: Array, vector: Array) -> None:
        """Add what classes release, see `Clocks.release`; all (pairs,)."""
        clocks, local = self.clocks, self.local
        near = homes == rows
        if near.any():
            at = np.flatnonzero(near)
            at = at[np.argsort(targets[at], kind="stable")]
            which, starts = np.unique(targets[at], return_index=True)
            joined = np.maximum.reduceat(vector[:, at], starts, axis=1)
            local[:, which] = np.maximum(local[:, which], joined)
        foreign = clocks.foreign
        if near.all() and not foreign:
            return
        for i, (t, h, r, c) in enumerate(
            zip(targets.tolist(), homes.tolist(), rows.tolist(), classes.tolist(), strict=True)
        ):
            clock = foreign.get((r, c))
            if h != r:
                clock = clocks.world.join(clock, {int(clocks.ctas[r]): vector[:, i].copy()})
            if clock:
                self.add(t, h, clock)

    def add(self, target: int, home: int, clock: Clock) -> None:
        """Add a clock to one object."""
        clocks = self.clocks
        own = int(clocks.ctas[home])
        if own in clock:
            local = self.local
            local[:, target] = np.maximum(local[:, target], clocks.fit(clock[own]))
            clock = {k: v for k, v in clock.items() if k != own}
        if clock:
            self.foreign[target] = clocks.world.join(self.foreign.get(target), clock)

    def take(self, targets: Array, homes: Array, rows: Array, classes: Array, *, near: bool = False) -> None:
        """Have classes know what the objects do (with `near` of their own CTA only); pairs are distinct."""
        clocks, local = self.clocks, self.local
        home = homes == rows
        if home.any():
            clocks.learn(rows[home], classes[home], local[:, targets[home]])
        if near or (home.all() and not self.foreign):
            return
        for t, h, r, c in zip(targets.tolist(), homes.tolist(), rows.tolist(), classes.tolist(), strict=True):
            if h != r:
                clocks.learn_clock(r, c, {int(clocks.ctas[h]): local[:, t].copy()})
            clocks.learn_clock(r, c, self.foreign.get(t))

    def whole(self, target: int, home: int) -> Clock:
        """Return all that one object knows."""
        own = {int(self.clocks.ctas[home]): self.local[:, target].copy()}
        return self.clocks.world.join(self.foreign.get(target), own)

    def clear(self, targets: Array) -> None:
        """Forget what objects know."""
        self.local[:, targets] = 0
        if self.foreign:
            for t in targets.tolist():
                self.foreign.pop(t, None)

    def move(self, targets: Array, to: Objects) -> None:
        """Hand what objects know to the same objects of `to`, whose knowledge ends, and forget it here."""
        to.local[:, targets] = self.local[:, targets]
        if self.foreign or to.foreign:
            for t in targets.tolist():
                clock = self.foreign.get(t)
                if clock:
                    to.foreign[t] = clock
                else:
                    to.foreign.pop(t, None)
        self.clear(targets)
