"""Which buffer an access touches, and which buffers other grids may be touching meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.artifact import KernelParam
from workbench.isa.values import ParameterBlock, Root, RootKind
from workbench.ops.model import Role
from workbench.verify.ordering.program import Access

_TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Layout:
    """Where each kernel parameter stands in the parameter block: (byte offset, size) by index.

    PTX and the cubin may differ: sm_90 aligns to the constant bank, not to the block.
    """

    places: tuple[tuple[int, int], ...]

    def find(self, offset: int) -> tuple[int, int] | None:
        """Parameter index and offset in it, of a byte of the block."""
        for n, (start, size) in enumerate(self.places):
            if start <= offset < start + size:
                return n, offset - start
        return None


@dataclass(frozen=True)
class Launch:
    """One launch as the ordering rules see it."""

    kernel: str
    block: tuple[int, int, int]
    params: Mapping[int, KernelParam]
    """By PTX parameter index; a contract may leave some out."""
    roles: Mapping[str, Role | None]
    """Role of every buffer; None if nobody said."""
    pdl: bool | None
    """Programmatic stream serialization; None if nobody said."""
    literal: frozenset[int] | None = None
    """Parameters whose bytes other than pointers are the true values; None for all of them."""
    known: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Of such a parameter the offsets of those bytes, where it is not all of them."""
    grid: tuple[int, int, int] | None = None
    """CTAs; None if nobody said."""
    cluster: tuple[int, int, int] | None = None
    """CTAs a cluster; None if nobody said."""
    cooperative: bool = False
    """Launched cooperatively: the launch fails unless all CTAs fit at once."""
    smem_bytes: int = 0
    """Dynamic shared memory, bytes a CTA."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the buffers, where known."""
    settled: frozenset[str] = frozenset()
    """Buffers that no other grid touches any more, whatever their roles."""
    beyond: Mapping[str, str] = field(default_factory=dict)
    """For a buffer that holds pointers or tensor maps, the name of what they lead to; it has a role too."""

    @property
    def buffers(self) -> frozenset[str]:
        """Buffers the parameters point to, and what pointers in those lead to."""
        found = {r.buffer for p in self.params.values() for r in p.relocations}
        return frozenset(found | {self.beyond[b] for b in found if b in self.beyond})

    @property
    def mutable(self) -> frozenset[str]:
        """Those of the buffers that may change: all but weights and metadata."""
        return frozenset(b for b in self.buffers if not immutable(self.roles.get(b)))

    def parameter_block(self, layout: Layout) -> ParameterBlock:
        """The parameters' literal bytes at their places."""
        size = max((start + n for start, n in layout.places), default=0)
        data = bytearray(size)
        literal: set[int] = set()
        for n, (start, length) in enumerate(layout.places):
            param = self.params.get(n)
            if param is None or (self.literal is not None and n not in self.literal):
                continue
            raw = bytes.fromhex(param.data)[:length]
            data[start : start + len(raw)] = raw
            pointers = {r.offset + k for r in param.relocations for k in range(8)}
            mine = self.known.get(n, range(len(raw)))
            literal.update(start + k for k in mine if k < len(raw) and k not in pointers)
        return ParameterBlock(bytes(data), frozenset(literal))

    def touched(self, access: Access, layout: Layout) -> frozenset[str]:
        """Buffers an access may touch; empty if that cannot be told."""
        if access.tensor_map:
            return self._mapped(access, layout)
        return self.pointed(access.roots, layout)

    def pointed(self, roots: frozenset[Root], layout: Layout) -> frozenset[str]:
        """Buffers an address with these roots may point into; empty if that cannot be told."""
        found: set[str] = set()
        for root in roots:
            if root.kind is RootKind.PARAM:
                found |= self._pointed(root, layout)
            elif root.kind is RootKind.LOADED and root.offset is not None and self.beyond:
                found |= {self.beyond[b] for b in self._pointed(root, layout) if b in self.beyond}
        return frozenset(found)

    def _pointed(self, root: Root, layout: Layout) -> set[str]:
        if root.offset is None:
            return set(self.buffers)
        place = layout.find(root.offset)
        if place is None or place[0] not in self.params:
            return set()
        index, offset = place
        return {r.buffer for r in self.params[index].relocations if r.offset <= offset < r.offset + 8}

    def _mapped(self, access: Access, layout: Layout) -> frozenset[str]:
        """Buffers of the tensor map an access goes through."""
        if access.map_offset is None:
            held = {self.beyond[b] for b in self.pointed(access.roots, layout) if b in self.beyond}
            if held:  # the map lies in a buffer
                return frozenset(held)
            maps = [p for p in self.params.values() if p.size >= _TENSOR_MAP_BYTES]
            return frozenset(r.buffer for p in maps for r in p.relocations)
        place = layout.find(access.map_offset)
        if place is None or place[0] not in self.params:
            return frozenset()
        index, offset = place
        return frozenset(
            r.buffer
            for r in self.params[index].relocations
            if offset <= r.offset < offset + _TENSOR_MAP_BYTES
        )


def immutable(role: Role | None) -> bool:
    """True for weights and metadata; an unknown role may be anything."""
    return role is not None and role.is_immutable


@dataclass(frozen=True)
class Neighbours:
    """What other grids may do to the launch's buffers before its wait has returned.

    Empty for a launch that starts after an ordinary kernel boundary.
    """

    writes: Mapping[str, str] = field(default_factory=dict)
    """Buffers that may be written, each with the words for who writes it."""
    uses: Mapping[str, str] = field(default_factory=dict)
    """Buffers that may be read or written, each with the words for who does."""


EXTERNAL = "the preceding kernel in the stream"


@dataclass(frozen=True)
class Effects:
    """What one launch does to its buffers, and whether it lets its successor start early."""

    writes: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    drains: bool = False
    """True if all grids before this one are complete when the next one can start: each thread's trigger comes
    after the wait, or there is no trigger and some thread is sure to wait."""
    waits: bool = False
    """True if some thread is sure to wait before the grid completes."""


def neighbours(
    launches: Sequence[Launch], effects: Sequence[Effects], index: int, literal: bool = False
) -> Neighbours:
    """Who may run beside launch `index` before its wait.

    A PDL launch may start while its predecessor runs; if that was a PDL launch too and triggers before its
    own wait, the one before it may be running as well, and so on back to an ordinary launch. Before the first
    launch stands whatever is in the stream, the previous run of the same chain among it.

    Args:
        launches: the chain.
        effects: what each does.
        index: which of them.
        literal: an activation that no launch before it in the chain writes is written by its predecessor, as
            the role says, whatever that one does.
    """
    if not launches[index].pdl:
        return Neighbours()
    first = index
    while first > 0 and launches[first].pdl and (first == index or not effects[first].drains):
        first -= 1
    open_end = launches[first].pdl and (first == index or not effects[first].drains)
    writes: dict[str, str] = {}
    uses: dict[str, str] = {}
    if open_end:
        for launch in launches:
            for b in launch.mutable - launch.settled:
                writes[b] = uses[b] = EXTERNAL
    if literal:
        before = {b for e in effects[:index] for b in e.writes}
        for b in launches[index].buffers - before:
            if launches[index].roles.get(b) is Role.ACTIVATION and b not in launches[index].settled:
                writes.setdefault(b, EXTERNAL)
                uses.setdefault(b, EXTERNAL)
    for n in range(first, index):
        who = f"launch {n} ({launches[n].kernel})"
        for b in effects[n].writes:
            writes[b] = uses[b] = who
        for b in effects[n].reads:
            uses.setdefault(b, who)
    fixed = {b for launch in launches for b in launch.buffers - launch.mutable} | launches[index].settled
    return Neighbours(
        {b: w for b, w in writes.items() if b not in fixed},
        {b: w for b, w in uses.items() if b not in fixed},
    )
