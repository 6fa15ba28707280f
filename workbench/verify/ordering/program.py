"""A kernel as the ordering rules see it: blocks of events, the same for PTX and SASS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from workbench.isa.ptx.model import Loc
from workbench.isa.values import Lanes, Root, Threads
from workbench.verify.ordering.quorum import Mbarriers


class Kind(StrEnum):
    """What an event is."""

    ACCESS = "access"
    WAIT = "wait"
    """griddepcontrol.wait, ACQBULK."""
    TRIGGER = "trigger"
    """griddepcontrol.launch_dependents, PREEXIT."""
    BARRIER = "barrier"
    """Arrives and waits at a CTA barrier."""
    BARRIER_ARRIVE = "barrier-arrive"
    WARP_BARRIER = "warp-barrier"
    CLUSTER_ARRIVE = "cluster-arrive"
    CLUSTER_WAIT = "cluster-wait"
    MBARRIER_ARRIVE = "mbarrier-arrive"
    MBARRIER_WAIT = "mbarrier-wait"
    RELEASE = "release"
    """A release operation or fence that another thread may observe through memory."""
    ACQUIRE = "acquire"
    CALL = "call"
    """A call of a function whose body is not looked at."""
    REDEFINE = "redefine"
    """A predicate register gets a new value."""


Condition = tuple[str, bool]
"""A predicate register and the truth value that is meant."""


class Mode(StrEnum):
    """How an access touches memory."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"


@dataclass(frozen=True, slots=True)
class Access:
    """One global-memory access instruction."""

    mode: Mode
    roots: frozenset[Root]
    nbytes: int
    """Bytes a thread moves; 0 if not stated (bulk copies)."""
    read_only: bool = False
    """`.nc`, `ld.proxy::readonly`, `LDG.CONSTANT`: outside the memory model."""
    strong: bool = False
    """Relaxed, acquire, release, volatile or atomic."""
    tensor_map: bool = False
    """The address is a tensor map's; the map, not the address, names the buffer."""
    map_offset: int | None = None
    """Byte offset of the tensor map in the parameter block, if known."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something that matters for ordering, at one instruction."""

    kind: Kind
    index: int
    """Instruction index in the kernel."""
    guard: Lanes | None = None
    """Threads that execute it (0 or 1 each); None if it has no guard."""
    guarded: bool = False
    """True if it has a guard whose value is not known (`guard` is then None)."""
    access: Access | None = None
    key: int | None = None
    """Barrier number, or the mbarrier's shared address; None if unknown."""
    count: int | None = None
    """Threads a CTA barrier counts; None for all, -1 if unknown."""
    whole_warp: bool = False
    """The instruction holds the whole warp, also the lanes whose guard is false (SASS issues in order)."""
    condition: Condition | None = None
    """The guard, where its value is not known; for REDEFINE the register that changes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instruction stands."""

    ptx_line: int | None = None
    sass_offset: int | None = None
    loc: Loc | None = None
    text: str = ""

    @property
    def source(self) -> str | None:
        """`file:line` of the kernel's source."""
        return None if self.loc is None else f"{self.loc.file}:{self.loc.line}"


@dataclass(frozen=True)
class Program:
    """Events of one kernel by block, with the edges between blocks and who can take them."""

    threads: Threads
    events: tuple[tuple[Event, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    leaves: tuple[bool, ...]
    places: tuple[Place, ...]
    """One per instruction."""
    edges: Mapping[tuple[int, int], Lanes] = field(default_factory=dict)
    """Threads that can take an edge, where that is known."""
    leaving: Mapping[int, Lanes] = field(default_factory=dict)
    """Threads that can end in a block, where that is known (all that reach it, otherwise)."""
    conditions: Mapping[tuple[int, int], Condition] = field(default_factory=dict)
    """What holds in the threads that take an edge, where who takes it is not known."""
    first: Mapping[tuple[int, int], Lanes] = field(default_factory=dict)
    """Threads that can take an edge in the first round of the loops around it, where those are fewer."""
    loops: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The loops around such edges: header to blocks."""
    mbarriers: Mbarriers | None = None
    """Names and counts of the mbarriers, where they were looked for."""

    def all_events(self, *kinds: Kind) -> list[Event]:
        """Events of the given kinds in program order."""
        return [e for block in self.events for e in block if e.kind in kinds]
