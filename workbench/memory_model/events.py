"""Events of a thread's run, and the run itself.

Event numbers within a run start at 0; sets of events are bit masks over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from workbench.memory_model.program import Proxy, Scope


class Kind(IntEnum):
    """What an event does."""

    READ = 0
    WRITE = 1
    FENCE = 2
    PROXY_FENCE = 3
    SYNC = 4
    """A barrier, mbarrier, cluster or grid operation; it has its place in program order and no memory."""


ALIAS_FENCE = -1
"""`via` of fence.proxy.alias."""
EVERY_PROXY = -2
"""`via` of the end of a grid, which orders all proxies but the tensormap proxy."""


@dataclass(frozen=True, slots=True)
class Sync:
    """A synchronizing operation, all values known.

    `what`: `barrier`, `mbarrier.arrive`, `mbarrier.wait`, `copied`, `copies-arrive`, `cluster.arrive`,
    `cluster.wait`, `grid.wait`, `grid.launch`, `grid.start`, `grid.end`.
    """

    what: str
    key: tuple[object, ...] = ()
    """What it acts on: identifies the barrier or mbarrier."""
    blocks: bool = False
    quorum: int = 0
    """Barrier: number of arrivals that release it, 0 for those that use it at all. Arrival: its count."""
    expect: int = 0
    parity: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `cell` and `view` number the physical and the virtual location; -1 without memory."""

    kind: Kind
    line: int
    before: int
    """Events of the run that precede it in program order."""
    cell: int = -1
    view: int = -1
    value: int = 0
    via: int = Proxy.GENERIC
    """Proxy of an access; what a proxy fence orders: a proxy, ALIAS_FENCE or EVERY_PROXY."""
    strong: bool = False
    acquires: bool = False
    releases: bool = False
    sequential: bool = False
    """True for fence.sc."""
    scope: Scope | None = None
    atomic: int = -1
    """For the write of a read-modify-write: its read."""
    needs: int = 0
    """Reads on which the value, the address or the execution of a write depends."""
    detached: bool = False
    """Part of an asynchronous operation: later events of the thread do not follow it in program order."""
    after: int = 0
    """Detached events that it follows by completion (a wait for a group, the end of a copy)."""
    sync: Sync | None = None
    registers: tuple[tuple[str, int], ...] = ()
    """Where the thread may hang here: the registers that are set by then."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one thread does if its reads return the values they return here."""

    events: tuple[Event, ...]
    registers: tuple[tuple[str, int], ...]
    """Final values of the registers that the thread touches or the test initialises."""
    reads: frozenset[tuple[int, int]] = field(default=frozenset())
    """Cells and values that its reads need."""
    writes: frozenset[tuple[int, int]] = field(default=frozenset())
    """Cells and values that it writes."""
