"""Executions of a test: which there are, how they end, what races they have; whether its condition holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from workbench.memory_model.axioms import Consistent, consistent
from workbench.memory_model.candidate import Candidate
from workbench.memory_model.condition import HUNG, Condition, Hung, Term, evaluate, terms
from workbench.memory_model.events import Event, Kind, Run
from workbench.memory_model.matching import Meeting, meetings
from workbench.memory_model.program import Litmus, Quantifier
from workbench.memory_model.relations import bits
from workbench.memory_model.runs import Budget, Memory, Runs, UndecidedError, all_runs

LIMIT = 100_000
"""Candidate executions whose work is spent on a test before it is given up."""


@dataclass(frozen=True)
class Outcome:
    """How an execution ends."""

    registers: tuple[tuple[tuple[str, int], ...], ...]
    """By thread: its registers by name; where it hangs, those that are set by then."""
    memory: tuple[tuple[str, tuple[int, ...]], ...]
    """Final elements of the locations that were asked for."""
    hung: tuple[bool, ...]
    """By thread: whether it hangs."""

    def register(self, thread: int, name: str) -> int | None:
        """Final value of a register; None if its thread hangs before it is set."""
        return dict(self.registers[thread]).get(name, None if self.hung[thread] else 0)


@dataclass(frozen=True)
class Access:
    """One access of an execution."""

    thread: int
    line: int
    """Of the instruction in the test's text."""
    writes: bool
    location: str
    value: int


@dataclass(frozen=True)
class Race:
    """Two conflicting accesses that are neither morally strong nor ordered by causality (PTX ISA 8.7.1)."""

    first: Access
    second: Access


@dataclass(frozen=True)
class Execution:
    """A consistent execution."""

    outcome: Outcome
    reads_from: tuple[tuple[Access, Access | None], ...]
    """Each read with the write it reads, None for the initial value."""
    races: tuple[Race, ...]


@dataclass(frozen=True)
class Decision:
    """Whether the condition holds under its quantifier; None, with the reason, if that was not decided."""

    holds: bool | None
    reason: str = ""


_Wanted = Callable[[Callable[[Term], "int | Hung | None"]], bool]
"""Says, of what is known of a final state so far, whether it may still be one that is wanted."""


def decide(test: Litmus, limit: int = LIMIT) -> Decision:
    """Decide a test's condition: `exists` reachable, `~exists` unreachable, `forall` always.

    Args:
        test: the test.
        limit: candidates to look at before giving up.
    """
    looked_for = test.quantifier is not Quantifier.ALWAYS

    def wanted(known: Callable[[Term], int | Hung | None]) -> bool:
        if test.filter is not None and evaluate(test.filter, known) is False:
            return False
        return evaluate(test.condition, known) is not (not looked_for)

    conditions = [test.condition, *([test.filter] if test.filter is not None else [])]
    try:
        explorer = _Explorer(test, conditions, limit)
        found = next(explorer.search(wanted), None) is not None
        if not found and not explorer.runs.complete:
            return Decision(None, "a loop goes on longer than is followed, and nothing before that decides")
    except UndecidedError as e:
        return Decision(None, str(e))
    return Decision(found if test.quantifier is Quantifier.EXISTS else not found)


def executions(test: Litmus, locations: tuple[str, ...] = (), limit: int = LIMIT) -> Iterator[Execution]:
    """Every consistent execution, whatever the condition; raises UndecidedError where there are too many.

    Args:
        test: the test; its filter and condition are not looked at.
        locations: those whose final elements outcomes are to have.
        limit: candidates to look at before giving up.
    """
    explorer = _Explorer(test, [], limit, locations)
    for candidate, finals, found in explorer.search(lambda _: True):
        yield explorer.execution(candidate, finals, found)
    if not explorer.runs.complete:
        raise UndecidedError("a loop goes on longer than is followed")


def outcomes(test: Litmus, locations: tuple[str, ...] = (), limit: int = LIMIT) -> frozenset[Outcome]:
    """How the executions of a test may end; arguments and errors as `executions`."""
    explorer = _Explorer(test, [], limit, locations)
    found = {explorer.outcome(c, finals) for c, finals, _ in explorer.search(lambda _: True)}
    if not explorer.runs.complete:
        raise UndecidedError("a loop goes on longer than is followed")
    return frozenset(found)


def allows(
    test: Litmus,
    registers: Mapping[tuple[int, str], int],
    memory: Mapping[str, tuple[int, ...]] | None = None,
    limit: int = LIMIT,
) -> bool:
    """True if some execution of the test ends with these values.

    Args:
        test: the test; its filter and condition are not looked at.
        registers: values by thread number and register; those not named may be anything.
        memory: final elements of locations; those not named may be anything.
        limit: candidates to look at before giving up.

    Raises:
        UndecidedError: if there are too many executions to say no.
    """
    asked = {Term(name, thread): value for (thread, name), value in registers.items()}
    for name, values in (memory or {}).items():
        for index, value in enumerate(values):
            asked[Term(name, None, index)] = value

    def wanted(known: Callable[[Term], int | Hung | None]) -> bool:
        return all(known(term) in (None, value) for term, value in asked.items())

    explorer = _Explorer(test, [], limit, tuple(memory or {}))
    found = next(explorer.search(wanted), None) is not None
    if not found and not explorer.runs.complete:
        raise UndecidedError("a loop goes on longer than is followed")
    return found


def races(test: Litmus, limit: int = LIMIT) -> frozenset[Race]:
    """Data races of all executions; raises UndecidedError where there are too many."""
    explorer = _Explorer(test, [], limit)
    explorer.deadlocks = True
    found: set[Race] = set()
    for candidate, _, execution in explorer.search(lambda _: True):
        found.update(explorer.races(candidate, execution))
    if not explorer.runs.complete:
        raise UndecidedError("a loop goes on longer than is followed")
    return frozenset(found)


def _registers(run: Run, meeting: Meeting, thread: int) -> tuple[tuple[str, int], ...]:
    """Registers of a thread when it ends or hangs."""
    return run.events[meeting.stops[thread]].registers if meeting.hung[thread] else run.registers


class _Explorer:
    """Looks through the candidates of a test."""

    def __init__(
        self, test: Litmus, conditions: list[Condition], limit: int, locations: tuple[str, ...] = ()
    ) -> None:
        self.test, self.budget = test, Budget(limit)
        self.runs: Runs = all_runs(test, self.budget)
        self.memory: Memory = self.runs.memory
        asked = {t.name for c in conditions for t in terms(c) if t.thread is None} | set(locations)
        self.asked = tuple(sorted(asked))
        self.cells = sorted({self.memory.cells[n, i] for n in asked for i in range(self.memory.lengths[n])})
        self.meets = any(e.sync is not None for runs in self.runs.threads for r in runs for e in r.events)
        self.deadlocks = False
        """Whether to look at what precedes a deadlock too; it is no execution that a condition speaks of."""
        self.names = {cell: key for key, cell in reversed(self.memory.cells.items())}

    def search(self, wanted: _Wanted) -> Iterator[tuple[Candidate, dict[int, int], Consistent]]:
        """Consistent executions whose final state is wanted, with the last writes of the cells asked for."""
        for runs in self._choices((), wanted):
            if not self._served(runs):
                continue
            if self.meets:
                ways = meetings(self.test, runs, self.budget)
            else:
                count = tuple(len(r.events) for r in runs)
                ways = iter((Meeting(frozenset(), count, (False,) * len(runs)),))
            for meeting in ways:
                if meeting.deadlock and not self.deadlocks:
                    continue
                candidate = Candidate(self.test, self.memory, runs, meeting)
                yield from self._executions(candidate, wanted)

    def _choices(self, chosen: tuple[Run, ...], wanted: _Wanted) -> Iterator[tuple[Run, ...]]:
        if chosen and not wanted(self._known(chosen, None, {})):
            return
        if len(chosen) == len(self.runs.threads):
            yield chosen
            return
        for run in self.runs.threads[len(chosen)]:
            self.budget.spend(1)
            yield from self._choices((*chosen, run), wanted)

    def _served(self, runs: tuple[Run, ...]) -> bool:
        """True if every value that is read is written by someone or there from the start."""
        written = set().union(*(r.writes for r in runs))
        return all(
            need in written or self.memory.initial[need[0]] == need[1] for r in runs for need in r.reads
        )

    def _known(
        self, runs: tuple[Run, ...], meeting: Meeting | None, finals: Mapping[int, int] | None
    ) -> Callable[[Term], int | Hung | None]:
        """Values of terms as far as they are known.

        Before the operations have met, a thread that may hang has no known registers.
        """

        def known(term: Term) -> int | Hung | None:
            if term.thread is None:
                cell = self.memory.cells[term.name, term.index or 0]
                return None if finals is None else finals.get(cell)
            if term.thread >= len(runs):
                return None
            if meeting is None and self.meets:
                return None
            if meeting is not None and meeting.hung[term.thread]:
                return dict(_registers(runs[term.thread], meeting, term.thread)).get(term.name, HUNG)
            return dict(runs[term.thread].registers).get(term.name, 0)

        return known

    def _executions(
        self, c: Candidate, wanted: _Wanted
    ) -> Iterator[tuple[Candidate, dict[int, int], Consistent]]:
        choices = []
        for cell in self.cells:
            writes = c.writes.get(cell)
            if writes is None:
                choices.append([(cell, -1)])
            else:
                choices.append([(cell, w) for w in writes if len(writes) == 1 or w != c.initial[cell]])
        lasts = []
        for choice in product(*choices):
            finals = {
                cell: self.memory.initial[cell] if write < 0 else c.events[write].value
                for cell, write in choice
            }
            if wanted(self._known(c.runs, c.meeting, finals)):
                lasts.append(({cell: write for cell, write in choice if write >= 0}, finals))
        if not lasts:
            return
        for reads_from in self._reads_from(c):
            for last, finals in lasts:
                for found in consistent(c, reads_from, last, self.budget):
                    yield c, finals, found

    def _reads_from(self, c: Candidate) -> Iterator[dict[int, int]]:
        """Every way to give each read a write of its value that its thread does not execute later."""
        options = []
        for read in c.reads:
            event = c.events[read]
            writes = [
                w
                for w in c.writes[event.cell]
                if c.events[w].value == event.value and not c.po[read] >> w & 1 and c.updates.get(read) != w
            ]
            if not writes:
                return
            options.append(writes)
        for choice in product(*options):
            yield dict(zip(c.reads, choice, strict=True))

    # -- what an execution looks like -------------------------------------------------------------------

    def outcome(self, c: Candidate, finals: Mapping[int, int]) -> Outcome:
        """How an execution ends."""
        registers = tuple(_registers(run, c.meeting, number) for number, run in enumerate(c.runs))
        memory = tuple(
            (name, tuple(finals[self.memory.cells[name, i]] for i in range(self.memory.lengths[name])))
            for name in self.asked
        )
        return Outcome(registers, memory, c.meeting.hung)

    def execution(self, c: Candidate, finals: Mapping[int, int], found: Consistent) -> Execution:
        """An execution as others see it."""
        reads = tuple(
            (self._access(c, read), self._access(c, write) if c.thread[write] >= 0 else None)
            for read, write in found.reads_from.items()
        )
        return Execution(self.outcome(c, finals), reads, tuple(sorted(self.races(c, found), key=repr)))

    def races(self, c: Candidate, found: Consistent) -> set[Race]:
        """Data races of an execution."""
        result = set()
        for mask in c.accesses.values():
            members = [i for i in bits(mask) if c.thread[i] >= 0]
            for n, i in enumerate(members):
                for j in members[n + 1 :]:
                    if self._races(c, found, i, j):
                        result.add(Race(self._access(c, i), self._access(c, j)))
        return result

    def _races(self, c: Candidate, found: Consistent, i: int, j: int) -> bool:
        a, b = c.events[i], c.events[j]
        if a.kind is not Kind.WRITE and b.kind is not Kind.WRITE:
            return False
        if c.strong[i] >> j & 1 or found.cause[i] >> j & 1 or found.cause[j] >> i & 1:
            return False
        return not self._together(c, i, j, a, b)

    def _together(self, c: Candidate, i: int, j: int, a: Event, b: Event) -> bool:
        """True for two accesses of one instruction (a vector, or a copy onto itself)."""
        return c.thread[i] == c.thread[j] and a.line == b.line and a.before == b.before

    def _access(self, c: Candidate, i: int) -> Access:
        event = c.events[i]
        name, index = self.names[event.cell]
        if self.memory.lengths[name] > 1:
            name = f"{name}[{index}]"
        return Access(c.thread[i], event.line, event.kind is Kind.WRITE, name, event.value)
