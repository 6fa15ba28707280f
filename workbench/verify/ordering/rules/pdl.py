"""The rules on programmatic dependent launch and read-only loads, over solved event programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.findings import Finding, Severity
from workbench.isa.values import RootKind
from workbench.ops.model import Role
from workbench.verify.ordering.analysis import Analysis, Site
from workbench.verify.ordering.binding import Neighbours
from workbench.verify.ordering.program import Kind, Mode, Place
from workbench.verify.ordering.solver import MAYBE, NONE, ORDERED, SELF


@dataclass(frozen=True)
class Verdicts:
    """What the rules say of one form of a kernel."""

    findings: tuple[Finding, ...]
    accesses: int
    unknown: int


def _names(buffers: Iterable[str]) -> str:
    return ", ".join(sorted(buffers))


class _Rules:
    def __init__(
        self, analysis: Analysis, neighbours: Neighbours, other: Analysis | None, polled: frozenset[str]
    ) -> None:
        self.a, self.launch, self.near, self.other = analysis, analysis.launch, neighbours, other
        self.rearmed = {b for b in polled if analysis.launch.roles.get(b) is Role.MAILBOX}
        self.sass = any(p.sass_offset is not None for p in analysis.program.places)
        self.findings: list[Finding] = []
        self.unknown = 0

    def finding(
        self, rule: str, severity: Severity, site: Place, buffer: str | None, message: str, fix: str
    ) -> None:
        self.findings.append(
            Finding(
                rule=rule,
                severity=severity,
                message=message,
                fix=fix,
                kernel=self.launch.kernel,
                ptx_line=site.ptx_line,
                sass_offset=site.sass_offset,
                source=site.source,
                buffer=buffer,
            )
        )

    # -- accesses before the wait ----------------------------------------------------------------

    def accesses(self) -> None:
        missing = bool(self.launch.pdl) and not self.a.waits
        dependent: dict[str, tuple[Site, str]] = {}
        written_here = self.a.effects.writes if self._writes_known() else frozenset()
        for s in self.a.sites:
            handled = self._read_only(s, written_here) if s.access.read_only else False
            if not self.launch.pdl or s.level >= ORDERED:
                if not self.launch.pdl and self.launch.pdl is None and s.level < ORDERED:
                    self._unstated(s)
                continue
            at_risk = self._at_risk(s)
            if at_risk is None and self._ordered_in_ptx(s, self.near.uses.keys()):
                continue
            if at_risk is None:
                self._undecided(s, "the buffer it touches cannot be told")
            elif at_risk:
                if self._unstated_roles(at_risk):
                    self._undecided(s, "nobody said what the buffer is for: give a contract")
                elif not missing and self._ordered_in_ptx(s, at_risk.keys()):
                    continue
                elif any(r.kind is RootKind.PARAM and r.offset is None for r in s.access.roots):
                    self._undecided(s, "which parameter its address comes from cannot be told")
                elif s.level == MAYBE or self._maybe_in_ptx(s, at_risk.keys()):
                    self._undecided(s, "whether a waiting thread orders it cannot be decided")
                elif missing:
                    for b, who in at_risk.items():
                        dependent.setdefault(b, (s, who))
                elif not handled:
                    self._before_wait(s, at_risk)
        if missing and dependent:
            self._missing(dependent)
        if self.sass and self.other is not None:
            return  # the PTX says what is called
        for call in self.a.program.all_events(Kind.CALL):
            if self.launch.pdl is not False and self.a.solution.lowest(call) < ORDERED:
                self.unknown += 1
                self.finding(
                    "undecided",
                    Severity.INFO,
                    self.a.program.places[call.index],
                    None,
                    "a function that is not looked at is called before the wait",
                    "inline the function, or call it after griddepcontrol.wait",
                )

    def _writes_known(self) -> bool:
        return all(s.buffers for s in self.a.sites if s.access.mode is not Mode.LOAD)

    def _unstated(self, s: Site) -> None:
        """Nobody said how the kernel is launched: an unordered access to anything mutable is undecided."""
        touched = s.buffers or self.launch.mutable
        if touched & self.launch.mutable or not self.launch.buffers:
            self._undecided(s, "nobody said whether the kernel is launched with PDL: give a contract")

    def _undecided(self, s: Site, why: str) -> None:
        self.unknown += 1
        name = _names(s.buffers) or None
        self.finding(
            "undecided",
            Severity.INFO,
            s.place,
            name,
            f"access to {name or 'memory'} before the wait: {why}",
            "order the access after griddepcontrol.wait in its own thread, or waive this by name",
        )

    def _unstated_roles(self, at_risk: dict[str, str]) -> bool:
        return all(self.launch.roles.get(b) is None for b in at_risk)

    def _at_risk(self, s: Site) -> dict[str, str] | None:
        """Buffers of the access that another grid may be touching, with who; None if that cannot be told."""
        near = self.near.writes if s.access.mode is Mode.LOAD else self.near.uses
        if not s.buffers:
            described = bool(self.launch.buffers)
            return {} if described and not (self.launch.buffers & near.keys()) else None
        found = {b: near[b] for b in s.buffers if b in near}
        if s.access.strong:  # flags are polled and counted by protocols of their own
            found = {
                b: w for b, w in found.items() if self.launch.roles.get(b) not in (Role.FLAG, Role.MAILBOX)
            }
        elif s.access.mode is Mode.STORE:  # only who polls a mailbox's data uses it, and makes it ready again
            found = {b: w for b, w in found.items() if b not in self.rearmed}
        return found

    def _before_wait(self, s: Site, at_risk: dict[str, str]) -> None:
        buffer, who = sorted(at_risk.items())[0]
        name = _names(at_risk)
        where = "in the compiled SASS, " if self.sass else ""
        if s.access.mode is Mode.LOAD:
            message = (
                f"{where}{name} is read before griddepcontrol.wait is certain to have returned for every "
                f"reading thread, while {who} may still be writing it"
            )
        else:
            message = (
                f"{where}{name} is written before griddepcontrol.wait is certain to have returned for "
                f"every writing thread, while {who} may still be using it"
            )
        if self.sass and self._moved(s):
            message += "; the PTX has the right order, so the assembler moved it"
        fix = (
            "execute griddepcontrol.wait in every thread before the access, or put a barrier between the "
            "waiting thread and this one"
        )
        self.finding("pdl-load-before-wait", Severity.ERROR, s.place, buffer, message, fix)

    def _missing(self, dependent: dict[str, tuple[Site, str]]) -> None:
        site = next(iter(dependent.values()))[0]
        compiled_out = self.sass and self.other is not None and bool(self.other.waits)
        what = (
            "the SASS has no ACQBULK although the PTX has griddepcontrol.wait"
            if compiled_out
            else "no thread executes griddepcontrol.wait"
        )
        who = _names({w for _, w in dependent.values()})
        self.finding(
            "pdl-wait-missing",
            Severity.ERROR,
            site.place,
            _names(dependent),
            f"the kernel is launched with programmatic stream serialization but {what}; "
            f"{_names(dependent)} may still be in use by {who}",
            "call griddepcontrol.wait before the first access to data of the preceding kernel, or launch "
            "without the PDL attribute",
        )

    # -- read-only loads -------------------------------------------------------------------------

    def _read_only(self, s: Site, written_here: frozenset[str]) -> bool:
        """Judge a load outside the memory model; True if an error was reported for it."""
        own = s.buffers & written_here
        what = "LDG.CONSTANT" if self.sass else "ld.global.nc"
        if own:
            self.finding(
                "nc-load-of-mutable",
                Severity.ERROR,
                s.place,
                _names(own),
                f"{_names(own)} is read with {what} (read-only data) but this kernel also writes it, so the "
                "load may move over the store and over any barrier between them",
                "load it with an ordinary ld.global (no .nc, no const __restrict__, no invariant=True)",
            )
            return True
        mail = {b for b in s.buffers if self.launch.roles.get(b) is Role.MAILBOX}
        if mail:
            self.finding(
                "nc-load-of-mutable",
                Severity.ERROR,
                s.place,
                _names(mail),
                f"{_names(mail)} is read with {what} (read-only data) but others write it while this kernel "
                "runs: such loads lie outside the memory model, and the assembler may move them above the "
                "poll and the barrier that order them",
                "load it with an ordinary ld.global (no .nc, no const __restrict__, no invariant=True)",
            )
            return True
        if not self.launch.pdl:
            return False
        near = {b: self.near.writes[b] for b in s.buffers if b in self.near.writes}
        if not near or self._unstated_roles(near):
            return False
        name, who = _names(near), sorted(near.values())[0]
        if s.level == SELF:
            self.finding(
                "nc-load-of-mutable",
                Severity.WARNING,
                s.place,
                name,
                f"{name} is read with {what} after the wait of the same thread; nothing promises that order, "
                "as such loads lie outside the memory model, and ptxas was seen to lift one above a wait",
                "load activations with an ordinary ld.global",
            )
            return False
        moved = self.sass and self._moved(s)
        if s.level == ORDERED:
            message = (
                f"{name} is read with {what} by threads that did not themselves wait for {who}; such loads "
                "lie outside the memory model: the assembler may move them above the barrier that orders them"
            )
        elif moved:
            message = (
                f"the assembler moved the read-only load of {name} above the barrier that orders it after "
                f"the wait: threads that did not wait read it while {who} may still be writing it"
            )
        elif self.sass and self.other is None and s.level == NONE and self.a.waits:
            message = (
                f"{name} is read with {what} before the wait that the kernel has: whether it was written "
                "there or moved there by the assembler, which may move such loads above any barrier, "
                f"{who} may still be writing it"
            )
        else:
            return False
        self.finding(
            "nc-load-of-mutable",
            Severity.ERROR,
            s.place,
            name,
            message,
            "load it with an ordinary ld.global (no .nc, no const __restrict__, no invariant=True), or wait "
            "in every thread that loads",
        )
        return s.level == ORDERED or moved

    def _ordered_in_ptx(self, s: Site, at_risk: Iterable[str]) -> bool:
        """True if this is SASS, which keeps such an access where it was written, and the PTX says what that
        does not tell: which barrier orders it, that a loop waits in its first round, or what is accessed.

        In the PTX every access of this kind to what is at risk is then ordered.
        """
        if not self.sass or s.access.read_only or self.other is None:
            return False
        names = set(at_risk)
        anything = any(r.kind is RootKind.PARAM and r.offset is None for r in s.access.roots)
        vague = anything or not s.buffers or not s.buffers <= names  # roots of a register's other uses
        if s.level != MAYBE and not self.other.program.first and not vague:
            return False
        same = [o for o in self.other.sites if o.access.mode is s.access.mode and not o.access.strong]
        if vague and not all(o.buffers for o in same):
            return False
        mine = [o for o in same if o.buffers & names]
        return (vague or bool(mine)) and all(o.level >= ORDERED for o in mine)

    def _maybe_in_ptx(self, s: Site, at_risk: Iterable[str]) -> bool:
        """True if this is SASS and the PTX cannot tell either: a flag of another kernel may order it."""
        if not self.sass or self.other is None:
            return False
        names = set(at_risk)
        same = [o for o in self.other.sites if o.access.mode is s.access.mode and o.buffers & names]
        levels = {o.level for o in same if not o.access.strong}
        return MAYBE in levels and min(levels) == MAYBE

    def _moved(self, s: Site) -> bool:
        """True if the other form has every load of these buffers from this line ordered."""
        if self.other is None:
            return False
        same = [o for o in self.other.sites if o.buffers & s.buffers and o.access.mode is s.access.mode]
        at = [o for o in same if o.place.source == s.place.source] if s.place.source else []
        same = at or same
        return bool(same) and all(o.level >= ORDERED for o in same)


def judge(
    analysis: Analysis,
    neighbours: Neighbours,
    other: Analysis | None = None,
    polled: frozenset[str] = frozenset(),
) -> Verdicts:
    """Apply the rules to one form of a kernel.

    Args:
        analysis: the PTX or the SASS.
        neighbours: what other grids may be doing before the wait.
        other: the other form, where both are there; it tells what the assembler moved.
        polled: buffers whose data is polled until it is there.
    """
    rules = _Rules(analysis, neighbours, other, polled)
    rules.accesses()
    return Verdicts(tuple(rules.findings), len(analysis.sites), rules.unknown)


def sunk_prefetches(ptx: Analysis, sass: Analysis) -> tuple[Finding, ...]:
    """Loads that stand before the wait in the PTX and after ACQBULK in the SASS, one finding a buffer.

    Compared by bytes, as the assembler may split or join loads.
    """
    found: list[Finding] = []
    early = ptx.early_loads
    for buffer in sorted({b for s in early for b in s.buffers}):
        mine = [s for s in early if buffer in s.buffers]
        before = sum(s.access.nbytes for s in mine)
        kept = sum(s.access.nbytes for s in sass.early_loads if buffer in s.buffers)
        late = [
            s for s in sass.sites if buffer in s.buffers and s.access.mode is Mode.LOAD and s.level >= ORDERED
        ]
        late_before = sum(
            s.access.nbytes
            for s in ptx.sites
            if buffer in s.buffers and s.access.mode is Mode.LOAD and s.level >= ORDERED
        )
        if kept >= before or sum(s.access.nbytes for s in late) <= late_before:
            continue
        lines = {s.place.source for s in mine if s.place.source}
        first = next((s for s in late if s.place.source in lines), late[0])
        found.append(
            Finding(
                rule="prefetch-sunk",
                severity=Severity.PERFORMANCE,
                message=(
                    f"the PTX loads {before} bytes a thread of {buffer} before griddepcontrol.wait, the SASS "
                    f"only {kept}: the assembler moved the rest below the wait, where it no longer overlaps "
                    "the preceding kernel"
                ),
                fix=(
                    "drop .nc (invariant=True) from the prefetch, use the value before the wait, or prefetch "
                    "into L2 with prefetch.global.L2"
                ),
                kernel=ptx.launch.kernel,
                ptx_line=mine[0].place.ptx_line,
                sass_offset=first.place.sass_offset,
                source=mine[0].place.source,
                buffer=buffer,
                count=len(mine),
            )
        )
    return tuple(found)
