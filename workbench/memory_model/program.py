"""What a litmus test says: threads and where they run, locations and aliases, instructions, a condition.

Operands are registers (`Register`) or integers. Values are unsigned 64-bit integers. Every instruction knows
its line in the text; lines do not count when two tests are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from workbench.memory_model.condition import Condition

MASK = (1 << 64) - 1
"""Values are taken modulo 2**64."""


class Scope(IntEnum):
    """Scopes, narrow to wide (PTX ISA 8.5)."""

    CTA = 0
    CLUSTER = 1
    GPU = 2
    SYS = 3


class Order(Enum):
    """Semantics of an access or a fence (PTX ISA 8.4)."""

    WEAK = "weak"
    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"
    SC = "sc"

    @property
    def acquires(self) -> bool:
        """True if the operation may end an acquire pattern."""
        return self in (Order.ACQUIRE, Order.ACQ_REL, Order.SC)

    @property
    def releases(self) -> bool:
        """True if the operation may begin a release pattern."""
        return self in (Order.RELEASE, Order.ACQ_REL, Order.SC)


class Proxy(IntEnum):
    """The path by which memory is reached (PTX ISA 8.6)."""

    GENERIC = 0
    SURFACE = 1
    TEXTURE = 2
    CONSTANT = 3
    ASYNC = 4
    TENSORMAP = 5


@dataclass(frozen=True)
class Register:
    """A register of the thread that names it."""

    name: str


Operand = Register | int


@dataclass(frozen=True)
class Address:
    """A location, or an element of an array: `x`, `x[2]`, `x[r1]`."""

    name: str
    index: Operand | None = None


@dataclass(frozen=True)
class Instruction:
    """Base of the instructions."""

    line: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True)
class Label(Instruction):
    """A place that branches name."""

    name: str


@dataclass(frozen=True)
class Branch(Instruction):
    """Jump to `target` if `test` holds between the operands; `test` is None for `goto`."""

    test: str | None
    operands: tuple[Operand, ...]
    target: str


@dataclass(frozen=True)
class Arithmetic(Instruction):
    """`operation` of the operands into a register; `mov` has one operand."""

    operation: str
    target: Register
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Load(Instruction):
    """A read of as many consecutive elements as there are targets."""

    targets: tuple[Register, ...]
    address: Address
    order: Order
    scope: Scope | None
    proxy: Proxy = Proxy.GENERIC


@dataclass(frozen=True)
class Store(Instruction):
    """A write of as many consecutive elements as there are values."""

    address: Address
    values: tuple[Operand, ...]
    order: Order
    scope: Scope | None
    proxy: Proxy = Proxy.GENERIC


@dataclass(frozen=True)
class Atomic(Instruction):
    """A read-modify-write; `target` is None for `red`, which never acquires."""

    operation: str
    target: Register | None
    address: Address
    operands: tuple[Operand, ...]
    order: Order
    scope: Scope


@dataclass(frozen=True)
class Fence(Instruction):
    """`fence.ORDER.SCOPE`."""

    order: Order
    scope: Scope


@dataclass(frozen=True)
class ProxyFence(Instruction):
    """`fence.proxy.KIND`: `alias`, a proxy's name, or one of the two one-way tensormap fences.

    `order` and `scope` are set for the tensormap fences alone.
    """

    kind: str
    order: Order | None = None
    scope: Scope | None = None


@dataclass(frozen=True)
class Barrier(Instruction):
    """`bar.cta.sync` or `bar.cta.arrive` (`blocks` false): instance, logical id, quorum; or `bar.warp.sync`.

    Without a quorum the barrier waits for the threads of its CTA (or warp) that execute it at all.
    """

    level: str
    blocks: bool
    instance: Operand
    logical: Operand | None = None
    quorum: Operand | None = None


@dataclass(frozen=True)
class ClusterBarrier(Instruction):
    """`barrier.cluster.arrive` (release or relaxed) or `barrier.cluster.wait` (acquire)."""

    waits: bool
    order: Order


@dataclass(frozen=True)
class MbarrierArrive(Instruction):
    """`mbarrier.arrive`, with `expect` transactions announced first, or `mbarrier.expect_tx` (`count` 0)."""

    barrier: str
    order: Order
    scope: Scope
    count: int = 1
    expect: int = 0


@dataclass(frozen=True)
class MbarrierWait(Instruction):
    """`mbarrier.try_wait.parity` in a loop until the phase of that parity is complete."""

    barrier: str
    parity: Operand
    order: Order
    scope: Scope


@dataclass(frozen=True)
class Copy(Instruction):
    """An asynchronous copy of one element.

    `kind`: `cp.async` (generic proxy), `bulk` (async proxy) or `st.async` (generic proxy, a value as source).
    `barrier` is the mbarrier on which its completion counts one transaction.
    """

    kind: str
    target: Address
    source: Address | Operand
    barrier: str | None = None


@dataclass(frozen=True)
class CopyArrive(Instruction):
    """`cp.async.mbarrier.arrive.noinc`: an arrival once the thread's earlier `cp.async` are complete."""

    barrier: str


@dataclass(frozen=True)
class CommitGroup(Instruction):
    """Close a group of the thread's `cp.async` (or bulk) copies."""

    bulk: bool


@dataclass(frozen=True)
class WaitGroup(Instruction):
    """Wait until at most `pending` of the latest groups are incomplete; `read`: until sources are read."""

    bulk: bool
    pending: int
    read: bool = False


@dataclass(frozen=True)
class GridControl(Instruction):
    """`griddepcontrol.wait` or `griddepcontrol.launch_dependents`."""

    waits: bool


@dataclass(frozen=True)
class Place:
    """Where a thread runs. `cluster` is None where clusters play no role; `warp` likewise."""

    cta: int
    gpu: int
    cluster: int | None = None
    grid: int = 0
    warp: int | None = None


@dataclass(frozen=True)
class Thread:
    """One column."""

    name: str
    place: Place
    code: tuple[Instruction, ...]


@dataclass(frozen=True)
class Location:
    """A declared location: its initial elements, or what it is an alias of and through which proxy."""

    name: str
    initial: tuple[int, ...] = (0,)
    aliases: str | None = None
    proxy: Proxy = Proxy.GENERIC
    array: bool = False


@dataclass(frozen=True)
class Mbarrier:
    """A declared mbarrier, initialised for `count` arrivals before any thread starts."""

    name: str
    count: int


@dataclass(frozen=True)
class GridEdge:
    """`later` is launched after `earlier`, in stream order (`programmatic` false) or as its dependent."""

    later: int
    earlier: int
    programmatic: bool


class Quantifier(Enum):
    """What the condition is asked of."""

    EXISTS = "exists"
    NEVER = "~exists"
    ALWAYS = "forall"


@dataclass(frozen=True)
class Litmus:
    """A whole test. `registers` holds the initial values that are given; the others are 0."""

    name: str
    locations: tuple[Location, ...]
    threads: tuple[Thread, ...]
    quantifier: Quantifier
    condition: Condition
    registers: tuple[tuple[int, str, int], ...] = ()
    mbarriers: tuple[Mbarrier, ...] = ()
    grids: tuple[GridEdge, ...] = ()
    filter: Condition | None = None
    comments: tuple[str, ...] = field(default=(), compare=False)
