"""Which rule a clash breaks, and how to say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.findings import Severity
from workbench.isa.ptx.model import Instruction
from workbench.simulator.ordering.clocks import FENCED
from workbench.simulator.ordering.objects import covers
from workbench.simulator.ordering.records import CTA, GPU, Record, Spans
from workbench.simulator.ordering.shadow import Clash, Region
from workbench.simulator.ordering.world import FOREVER

if TYPE_CHECKING:
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
RELAXED_CLUSTER, FREED = "relaxed cluster barrier", "freed"
MESSAGE, WAITED = "message", "waited"
"""Notes of a class: what barrier.cluster.arrive.relaxed and mbarriers of too narrow a scope would have handed
to it, what the senders of st.async knew, and the mbarriers for which it has waited."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule, why, and what to do."""

    rule: str
    why: str
    fix: str
    severity: Severity = Severity.ERROR


def judge(clash: Clash, region: Region) -> Verdict:
    """Say which rule a clash breaks; its first lane stands for all."""
    n, e = clash.later, clash.earlier
    apart = n.clocks.rank != e.clocks.rank
    if clash.unfenced:
        return Verdict(
            "proxy-fence-missing",
            "the writer is ordered before, but no fence.proxy.async lies on that path: the asynchronous "
            + ("write may be overtaken by it" if n.kind.write else "read may see what was there before"),
            "let each writing thread execute fence.proxy.async after its stores and before the barrier",
        )
    if n.kind.readonly or e.kind.readonly:
        return Verdict(
            "nc-load-of-mutable",
            "ld.global.nc lies outside the memory model: it may return what was there before the write, "
            "however the two are ordered",
            "load without .nc",
        )
    if n.kind.scope and e.kind.scope:
        narrow = min(n.kind.scope, e.kind.scope)
        return Verdict(
            "scope-too-narrow",
            f"the scope .{_name(narrow)} of one of them leaves out the thread of the other",
            "use .sys scope on both sides" if apart else "use .gpu scope (or .cluster, .sys) on both sides",
        )
    return _asynchronous(clash, region) or _missed(clash) or _plain(clash, region)


def excused(clash: Clash) -> Array:
    """Return which lanes of a clash are a write after a read that a relaxed or narrow synchronization orders.

    A load whose value has been used is over, whatever the scope of the arrival after it: CUTLASS frees
    buffers with .cta scope, cluster barriers at the end of a kernel are relaxed, and data that st.async
    carries
    came from loads that are over. A copy that refills a stage follows the copy before it if the matrix
    instruction that was
    committed in between did. Strong accesses may rest on the order of fence.sc, whose scopes then decide.
    """
    n, e = clash.later, clash.earlier
    out = np.zeros(len(clash.lanes), bool)
    strong = bool(n.kind.scope and e.kind.scope)
    if strong:
        keys: tuple[str, ...] = (FENCED,)
    elif e.kind.write:
        keys = (MESSAGE, FREED)  # one copy after another, by the readers between
    else:
        keys = (RELAXED_CLUSTER, FREED, MESSAGE)
    if (not n.kind.write and not strong) or clash.unfenced or n.kind.readonly or e.kind.readonly:
        return out
    if e.kind.write and not strong and not (e.kind.agent and n.kind.agent):
        return out
    rows, threads = n.by if isinstance(n, Spans) else n.lanes()
    rows, classes = rows[clash.lanes], n.clocks.class_of[threads[clash.lanes]]
    far, them = e.lanes()
    ctas, them = e.clocks.ctas[far[clash.others]], them[clash.others]
    stamps = e.stamp(clash.others)
    owner = e.clocks
    for r, c, cta in set(zip(rows.tolist(), classes.tolist(), ctas.tolist(), strict=True)):
        notes = n.clocks.notes.get((r, c), {})
        at = np.flatnonzero((rows == r) & (classes == c) & (ctas == cta))
        for key in keys:
            vector = owner.world.told(notes.get(key), cta)
            if vector is not None:
                out[at] |= vector[0][owner.class_of[them[at]]] > stamps[at]
    return out


def _name(scope: int) -> str:
    return {1: "cta", 2: "cluster", 3: "gpu", 4: "sys"}[scope]


def _asynchronous(clash: Clash, region: Region) -> Verdict | None:
    n, e = clash.later, clash.earlier
    under_way = bool((e.stamp(clash.others[:1]) == FOREVER).all())
    if e.kind.agent == "cp.async" and e.kind.write:  # noqa: SIM102
        if not n.kind.write or under_way:
            why = (
                "the copy may still be under way: no cp.async.wait_group of its thread covers it yet"
                if under_way
                else "wait_group makes a copy visible to its own thread, and no barrier follows for others"
            )
            fix = "wait for the group (count the groups that may remain), then synchronise the threads"
            return Verdict("cp-async-group", why, fix)
    if e.kind.agent == "copy" and e.kind.write and e.note is None and not _group_waited(e, clash):
        return Verdict(
            "cp-async-group",
            "the bulk copy may still be writing there: its thread has not waited for its group",
            "cp.async.bulk.commit_group and wait_group (not .read) in that thread, then a barrier",
        )
    if under_way and e.kind.write:
        if _waited(clash):
            return Verdict(
                "mbarrier-phase",
                "the thread has waited for the mbarrier, but for a phase that does not cover this copy",
                "wait for the phase in which the copy completes: flip the parity once a use",
            )
        return Verdict(
            "race", "the copy may still be under way: nobody has waited for its mbarrier or group",
            "wait for the mbarrier (or the bulk group) of the copy first",
        )  # fmt: skip
    refill = e.kind.agent or (n.kind.agent and region.filled(int(clash.granules[0])))
    if not e.kind.write and n.kind.write and n.kind.space == "shared" and refill and not _missed(clash):
        if e.kind.agent and under_way:
            why = "the asynchronous operation may still be reading"
        else:
            why = "nothing orders that reader before the write that refills the bytes"
        return Verdict(
            "buffer-reuse",
            why,
            "have the readers arrive (or wait_group) and the writer wait before it refills",
        )
    return None


def _group_waited(e: Record, clash: Clash) -> bool:
    """Whether the thread that issued a bulk copy knows that it is complete."""
    if not isinstance(e, Spans):
        return False
    k = clash.others[:1]
    rows, threads = e.by
    far, agents = e.lanes()
    known = e.clocks.knows(rows[k], threads[k], e.clocks.ctas[far[k]], agents[k], e.stamp(k))
    return bool(known[0])


def _thread(r: Record, lane: int) -> tuple[int, int]:
    rows, threads = r.by if isinstance(r, Spans) else r.lanes()
    return int(rows[lane]), int(threads[lane])


def _waited(clash: Clash) -> bool:
    n = clash.later
    row, thread = _thread(n, int(clash.lanes[0]))
    notes = n.clocks.notes.get((row, int(n.clocks.class_of[thread])), {})
    slots = clash.earlier.note
    if slots is None:
        return False
    return int(slots[int(clash.others[0])]) in notes.get(WAITED, frozenset())


def _missed(clash: Clash) -> Verdict | None:
    """Find the synchronization that was meant to order the two and does not."""
    n, e = clash.later, clash.earlier
    row, thread = _thread(n, int(clash.lanes[0]))
    clocks, world = n.clocks, n.clocks.world
    other_rows, others = e.lanes()
    k = int(clash.others[0])
    cta, them, stamp = int(e.clocks.ctas[other_rows[k]]), int(others[k]), int(e.stamp(clash.others[:1])[0])
    if stamp == FOREVER:
        return None
    notes = clocks.notes.get((row, int(clocks.class_of[thread])), {})
    layout = clocks.layout

    def known(layer: int) -> bool:
        rows, threads, ctas, others, stamps = (np.array([x]) for x in (row, thread, cta, them, stamp))
        return layout.flags and bool(clocks.knows(rows, threads, ctas, others, stamps, layer)[0])

    if known(layout.narrow) or covers(world, notes.get(FREED), cta, them, stamp):
        return Verdict(
            "scope-too-narrow",
            "the flag, fence or mbarrier between them has a scope that leaves out the other thread",
            "use .cluster scope within a cluster, .gpu between CTAs, .sys between GPUs, on both sides",
        )
    if known(layout.unfenced):
        return Verdict(
            "flag-without-acquire",
            "a flag that the writer released was read by a relaxed or volatile load with no acquire and "
            "no fence before the data",
            "use ld.acquire for the flag, or fence.acq_rel after the loop that polls it",
        )
    if known(layout.loose):
        return Verdict(
            "flag-without-release",
            "a flag was stored after the data, but relaxed and with no fence in between: it may be seen "
            "before the data",
            "use st.release (or red.release) for the flag, or a fence before it, after the writers' barrier",
        )
    if covers(world, notes.get(RELAXED_CLUSTER), cta, them, stamp):
        return Verdict(
            "cluster-barrier",
            "barrier.cluster.arrive.relaxed orders no memory accesses",
            "use barrier.cluster.arrive.release with barrier.cluster.wait.acquire",
        )
    if _elected(clash, cta, them) and not (
        n.kind.space == "global"
        and cta != int(clocks.ctas[row])
        and len(np.unique(others[clash.others] >> 5)) > 1
    ):
        return Verdict(
            "elected-arrive",
            "another lane of its warp released after it, but a release covers what its own thread did only",
            "bar.warp.sync before the elected lane arrives (or stores the flag), or let every lane arrive",
            # Loads of a warp that runs together are over when it comes to the arrival: CUTLASS frees the
            # stages of its pipelines so.
            Severity.ERROR if e.kind.write or e.kind.agent else Severity.WARNING,
        )
    if (
        e.kind.write
        and n.kind.space == "global"
        and cta != int(clocks.ctas[row])
        and _mates_known(clash, cta, them)
    ):
        return Verdict(
            "flag-without-release",
            "another thread of its CTA has set the flag since, and a release covers what its own thread did "
            "and what a barrier brought to it",
            "bar.sync between the stores of all threads and the release of the thread that sets the flag",
        )
    return None


def _elected(clash: Clash, cta: int, them: int) -> bool:
    """Whether the later thread knows what a warp mate of the earlier one did after the earlier access."""
    n = clash.later
    row, thread = _thread(n, int(clash.lanes[0]))
    if int(n.clocks.ctas[row]) == cta and thread & ~31 == them & ~31:
        return False
    return _mates_known(clash, cta, them, them & ~31, 32)


def _mates_known(clash: Clash, cta: int, them: int, first: int = 0, many: int = 1 << 10) -> bool:
    """Whether the later thread knows what others of these threads did after the earlier access."""
    n, e = clash.later, clash.earlier
    if them >= e.clocks.threads:
        return False
    row, thread = _thread(n, int(clash.lanes[0]))
    mates = np.arange(first, min(first + many, e.clocks.threads))
    mates = mates[mates != them]
    count = len(mates)
    known = n.clocks.knows(
        np.full(count, row), np.full(count, thread), np.full(count, cta), mates, np.full(count, e.time)
    )
    return bool(known.any())


def _plain(clash: Clash, region: Region) -> Verdict:
    n, e = clash.later, clash.earlier
    if n.kind.scope or e.kind.scope:
        weak = n if not n.kind.scope else e
        if weak.kind.write and not (n if weak is e else e).kind.write and not weak.kind.agent:
            return Verdict(
                "flag-without-release",
                "one is an ordinary store that another thread polls or reads with a strong load",
                "store it with st.release (or st.relaxed after a fence), so that both accesses are strong",
            )
    if e.kind.scope and e.kind.write and not n.kind.scope and not n.kind.write and not n.kind.agent:
        return Verdict(
            "flag-without-acquire",
            "it is an ordinary load of what another thread stores with a strong store",
            "load it with ld.acquire (or ld.relaxed and a fence), so that both accesses are strong",
        )
    if n.kind.write and not e.kind.write and n.kind.space == "shared" and n.kind.item.line in region.refilled:
        return Verdict(
            "buffer-reuse",
            "nothing orders the reader before the write that refills the bytes",
            "a barrier (or an mbarrier that the readers arrive at) before the buffer is written again",
        )
    lane, k = int(clash.lanes[0]), int(clash.others[0])
    a, b = _thread(n, lane), (int(e.lanes()[0][k]), int(e.lanes()[1][k]))
    same_cta = n.clocks is e.clocks and a[0] == b[0]
    if same_cta and a[1] >> 5 == b[1] >> 5:
        return Verdict(
            "race", "lanes of one warp are not ordered with each other by running together",
            "bar.warp.sync between the two",
        )  # fmt: skip
    if same_cta:
        return Verdict("race", "no barrier or flag lies between them", "a barrier between the two")
    if n.clocks.rank != e.clocks.rank:
        return Verdict(
            "race", "no flag with release and acquire at .sys scope lies between the two ranks",
            "release and acquire at .sys scope through a flag that one rank stores and the other polls",
        )  # fmt: skip
    return Verdict(
        "race", "no flag with release and acquire lies between the two CTAs",
        "release and acquire through a flag, a cluster barrier, or separate launches",
    )  # fmt: skip


def sentence(clash: Clash, region: Region, verdict: Verdict, chunk: Chunk) -> str:
    """Say what happens: both accesses, then what is missing."""
    n, e = clash.later, clash.earlier
    row, _ = _thread(n, int(clash.lanes[0]))
    k = int(clash.others[0])
    other_row, other = int(e.lanes()[0][k]), int(e.lanes()[1][k])
    byte = int(clash.granules[0]) * region.unit
    if region.name is None:
        place = f"byte {byte % chunk.space_shared.stride} of shared memory"
    else:
        place = f"byte {byte} of {region.name!r}"
    cta = int(e.clocks.ctas[other_row])
    who = "an asynchronous operation" if other >= e.clocks.threads else f"thread {other}"
    if cta != int(n.clocks.ctas[row]):
        who += f" of CTA {cta & 0xFFFFFFFF}"
    if e.clocks.rank != n.clocks.rank:
        who += f" of rank {e.clocks.rank}"
    return (
        f"{verb(n)} {place}, which line {e.kind.item.line} ({_opcode(e.kind.item)}) {verb(e)} in {who} "
        f"with nothing to order the two: {verdict.why}"
    )


def _opcode(item: Instruction) -> str:
    return ".".join((item.opcode, *item.modifiers[:3]))


def verb(r: Record) -> str:
    """What an access does to its place."""
    if r.kind.atomic:
        return "updates"
    return "writes" if r.kind.write else "reads"


__all__ = ["CTA", "GPU", "Verdict", "judge", "sentence", "verb"]
