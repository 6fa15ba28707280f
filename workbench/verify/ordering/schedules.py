"""The schedules a kernel is run under by the dynamic audit, in order of what they tend to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.simulator import Adversary, KernelLaunch, Pick, Starved, Unit


@dataclass(frozen=True)
class Schedule:
    """One way to run a launch list; the same schedule gives the same run."""

    adversary: Adversary
    seed: int = 0

    def __str__(self) -> str:
        """As findings print it."""
        words = str(self.adversary)
        if self.seed:
            words = words.replace("lockstep", "random order")
        return f"seed {self.seed}, {words}"


PLAIN = Schedule(Adversary(overlap=True))


def schedules(launches: Sequence[KernelLaunch]) -> list[Schedule]:
    """Return the schedules for a launch list, the plain one first."""
    warps = max(-(-_product(x.block) // 32) for x in launches)
    ctas = max(_product(x.grid) for x in launches)
    clusters = max(_product(x.grid) // _product(x.cluster) for x in launches)
    clustered = any(_product(x.cluster) > 1 for x in launches)
    starved: list[Starved] = []
    if warps > 1:
        starved += [Starved(Unit.WARP, 0), Starved(Unit.WARP, 0, ahead=True), Starved(Unit.WARP, warps - 1)]
    if ctas > 1:
        starved += [Starved(Unit.CTA, 0), Starved(Unit.CTA, -1), Starved(Unit.CTA, 0, ahead=True)]
    if clustered and clusters > 1:
        starved.append(Starved(Unit.CLUSTER, 0))
    if 2 < warps <= 8:
        starved += [Starved(Unit.WARP, w) for w in range(1, warps - 1)]
    found = [PLAIN, Schedule(Adversary(Pick.HIGHEST, overlap=True))]
    found += [Schedule(Adversary(starved=s, overlap=True)) for s in starved]
    found += [
        Schedule(Adversary(overlap=True), 1),
        Schedule(Adversary(overlap=True, early=True), 2),
        Schedule(Adversary(overlap=True), 3),
    ]
    return found


def ahead(launches: Sequence[KernelLaunch]) -> Schedule:
    """The schedule in which the first CTA, or the first warp of the only one, runs before all others."""
    several = any(_product(x.grid) > 1 for x in launches)
    return Schedule(
        Adversary(starved=Starved(Unit.CTA if several else Unit.WARP, 0, ahead=True), overlap=True)
    )


def _product(extent: tuple[int, int, int]) -> int:
    return extent[0] * extent[1] * extent[2]
