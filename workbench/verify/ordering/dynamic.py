"""The dynamic half of the audit: runs launches under schedules that try to break them, and says what broke.

The contents of buffers are ours (`contents`), so a finding counts only if it shows with every kind of
contents; what shows with some of them alone follows from invented data and is not judged. Every schedule runs
the list twice, the second time on the flags, mailboxes and scratch that the first left, as graph replays do.
The budget is counted in work, not in seconds, so that the same file gives the same verdict everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.errors import WorkbenchError
from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Kernel, Label, Module, Symbol
from workbench.ops.model import Role
from workbench.simulator import (
    Torn,
    UnsupportedInstruction,
)
from workbench.simulator.simulate import forget
from workbench.verify.ordering.contents import Fill, SimulatedBuffer
from workbench.verify.ordering.polls import (
    accumulates_floats,
    draws_tickets,
    first_poll,
    meets_others,
    polls_memory,
)
from workbench.verify.ordering.runs import (
    LANE_INSTRUCTION,
    LATER,
    BudgetSpentError,
    DynamicLaunch,
    Place,
    Run,
    Runs,
    place_of,
)
from workbench.verify.ordering.schedules import PLAIN, Schedule, ahead, schedules

BUDGET = 5.0
"""Seconds that the runs of one launch list take, as `_cost` estimates them from their work. No clock is read:
the same file gives the same findings on any machine, however busy."""
_MOST_MEMORY = 1 << 31
_MOST_SHARED = 1 << 28
"""Bytes of shared memory of all CTAs that are simulated."""
_MOST_CTAS = 128
"""CTAs that are run of a grid that is too large to be run whole."""
_ONE_RUN = 40
"""Part of the budget that a run may be estimated to take before CTAs are left out."""
_LOOP = 8
"""Turns that a loop is taken to make when work is estimated."""
_POLL = 2
"""The same where a loop polls, for those mostly wait."""
_HANGS = frozenset(("deadlock", "mbarrier-phase"))


@dataclass(frozen=True)
class DynamicAudit:
    """What the runs showed."""

    findings: tuple[Finding, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    """Those that were run."""
    skipped: str | None = None
    """Why nothing, or nothing to the end, was run."""
    not_judged: tuple[str, ...] = ()
    """What showed with some contents of the buffers and not with others."""
    spent: bool = False
    """The budget ended before all schedules had run."""
    ctas: int | None = None
    """So many CTAs, the first and the last, were run; None for all."""


def audit_dynamic(
    module: Module,
    launches: Sequence[DynamicLaunch],
    buffers: Sequence[SimulatedBuffer],
    budget: float = BUDGET,
) -> DynamicAudit:
    """Run a launch list; see the module's text.

    Args:
        module: has all kernels.
        launches: one after the other in a stream.
        buffers: all that the launches' parameters point to.
        budget: seconds, as estimated from the work done.

    Raises:
        WorkbenchError: if the parameters do not fit the kernels.
    """
    total = sum(b.nbytes for b in buffers)
    if total > _MOST_MEMORY:
        return DynamicAudit(
            skipped=f"its buffers have {total >> 20} MiB, and it is run on at most {_MOST_MEMORY >> 20}"
        )
    if any(i.opcode == "multimem" for x in launches for i in module.kernel(x.kernel).instructions):
        return DynamicAudit(skipped="multimem instructions need a multicast address, which nobody gave")
    work = sum(_work(module.kernel(x.kernel), x) for x in launches) * LANE_INSTRUCTION
    shared = sum(x.shared_bytes * math.prod(x.grid) for x in launches)
    some: int | None = None
    if len(launches) == 1 and not meets_others(module.kernel(launches[0].kernel)):
        share = min(budget / _ONE_RUN / (work or 1), _MOST_SHARED / (shared or 1))
        ctas = min(int(math.prod(launches[0].grid) * share), _MOST_CTAS)
        ctas = max(ctas, 4 * math.prod(launches[0].cluster))
        some = ctas if share < 1 and ctas < math.prod(launches[0].grid) else None
    elif work > budget / 2:
        return DynamicAudit(
            skipped=f"it takes more than {work / LANE_INSTRUCTION / 1e6:.0f} million lane-instructions, too "
            "many for one audit"
        )
    elif shared > _MOST_SHARED:
        return DynamicAudit(skipped="it has too many CTAs for the shared memory that they use")
    try:
        return _Session(module, launches, tuple(buffers), budget, some).audit()
    except UnsupportedInstruction as e:
        return DynamicAudit(skipped=str(e))
    finally:
        forget(module)


def _work(kernel: Kernel, launch: DynamicLaunch) -> float:
    """Lane-instructions of a launch, estimated from its code."""
    lines: dict[str, int] = {}
    loops = False
    for n, item in enumerate(kernel.body):
        if isinstance(item, Label):
            lines[item.name] = n
        elif item.opcode == "bra":
            loops |= any(isinstance(o, Symbol) and o.name in lines for o in item.operands)
    lanes = math.prod(launch.grid) * math.prod(launch.block)
    turns = (_POLL if polls_memory(kernel) else _LOOP) if loops else 1
    return float(lanes * len(kernel.instructions) * turns)


class _Session(Runs):
    """All that is tried on a launch list."""

    # -- what is run -----------------------------------------------------------------------------

    def audit(self) -> DynamicAudit:
        """Run all schedules that the budget allows."""
        done: list[Schedule] = []
        found: dict[Place, Finding] = {}
        plain, spent = None, False
        try:
            found |= self._few_resident()
            plain = self._choose_fill()
            if plain is not None:
                found |= self._confirmed(plain.findings, PLAIN, False)
        except BudgetSpentError:
            pass
        if plain is None:
            text = "it needs more work than one audit does"
            return DynamicAudit(tuple(found.values()), skipped=text, spent=True)
        done.append(PLAIN)
        try:
            if not plain.completed:
                return self._result(found, done, False)
            if plain.findings:  # confirming them has run it on other contents
                self.run(PLAIN, self.fill)
            found |= self._second_pass(PLAIN, found)
            found |= self._later_passes(found)
            found |= self._with_sentinels()
            found |= self._word_by_word()
            for schedule in schedules(self.launches)[1:]:
                run = self.run(schedule, self.fill)
                if run.limited:
                    spent = True
                    break
                done.append(schedule)
                places = {(kernel, line) for _, kernel, line in found}
                new = {k: f for k, f in run.findings.items() if (k[1], k[2]) not in places}
                found |= self._confirmed(self._raced(new), schedule, False)
                if run.completed and not run.findings:
                    found |= self._second_pass(schedule, found)
        except BudgetSpentError:
            spent = True
        return self._result(found, done, spent)

    def _result(self, found: dict[Place, Finding], done: list[Schedule], spent: bool) -> DynamicAudit:
        return DynamicAudit(
            (*found.values(), *self.warned.values()),
            tuple(done),
            None,
            tuple(self.not_judged),
            spent,
            self.some,
        )

    def _choose_fill(self) -> Run | None:
        """Run the plain schedule with the contents that give the kernel most to do; None if none ends."""
        best: Run | None = None
        for fill in (f for f in Fill if f is not Fill.POINTERS):
            run = self.run(PLAIN, fill)
            if run.limited:
                if fill is Fill.NUMBERS:
                    continue  # zeros make loops short
                break
            if best is None or len(run.findings) < len(best.findings) or (run.completed > best.completed):
                best, self.fill = run, fill
            if run.completed and not run.findings:
                break
        return best

    def _confirmed(
        self, findings: dict[Place, Finding], schedule: Schedule, again: bool
    ) -> dict[Place, Finding]:
        """Keep the findings that show whatever the inputs hold."""
        kept = dict(findings)
        for fill in Fill:
            if not kept:
                break
            if fill is self.fill:
                continue
            try:
                run = self.run(schedule, fill)
                if again:
                    run = self.run(schedule, fill, 1000, again=True) if run.completed else Run()
            except BudgetSpentError:
                for f in kept.values():
                    self.not_judged.setdefault(f"{f.rule} at PTX line {f.ptx_line} of {f.kernel}")
                raise
            shown = {(kernel, line) for _, kernel, line in run.findings}
            for key, f in list(kept.items()):
                if (f.kernel, f.ptx_line) not in shown:
                    del kept[key]
                    self.not_judged.setdefault(f"{f.rule} at PTX line {f.ptx_line} of {f.kernel}")
        return kept

    def _raced(self, findings: dict[Place, Finding]) -> dict[Place, Finding]:
        """What is read unwritten under some schedules only was read before its writer came."""
        out: dict[Place, Finding] = {}
        for key, f in findings.items():
            if f.rule == "uninitialized-read":
                f = f.model_copy(
                    update={
                        "rule": "race",
                        "message": f"nothing makes the writer come before this reader: {f.message}",
                        "fix": "order the write before the read: a barrier, or release and acquire of a flag",
                    }
                )
                key = place_of(f)
            out[key] = f
        return out

    # -- the second pass -------------------------------------------------------------------------

    def _second_pass(self, schedule: Schedule, found: dict[Place, Finding]) -> dict[Place, Finding]:
        """Run the list again on the state it left, which is that of a run just done under `schedule`."""
        run = self.run(schedule, self.fill, 1000, again=True)
        if run.limited:
            return {}
        new = {k: f for k, f in run.findings.items() if k not in found}
        for shown in (_HANGS, frozenset(("uninitialized-read",))):  # the others follow from these
            if any(f.rule in shown for f in new.values()):
                new = {k: f for k, f in new.items() if f.rule in shown}
        stale = {(f.kernel, f.ptx_line): f for f in new.values()}
        if not stale and any(f.rule in _FIX_STALE for f in found.values()):
            return {}
        if not stale:
            return self._changed_results(schedule) if run.completed else {}
        rule = "sentinel-alias" if self.sentinels else "stale-epoch"
        renamed: dict[Place, Finding] = {}
        for f in stale.values():
            what = (
                "the second launch on the flags and mailboxes that the first left hangs"
                if f.rule in _HANGS
                else "the second launch passes its waits on what the first left"
            )
            f = f.model_copy(
                update={"rule": rule, "message": f"{what}: {f.message}", "fix": _FIX_STALE[rule]}
            )
            renamed[place_of(f)] = f
        return self._confirmed(renamed, schedule, True)

    def _later_passes(self, found: dict[Place, Finding]) -> dict[Place, Finding]:
        """Run the list a third and a fourth time, where mailboxes may come round again.

        Each must do what the same launch does on memory that no earlier one has touched.
        """
        if any(f.rule in _FIX_STALE for f in found.values()) or any(
            accumulates_floats(k) for k in self.kernels.values()
        ):
            return {}
        if not any(polls_memory(k) for k in self.kernels.values()):
            return {}
        wanted: dict[int, dict[str, bytes]] = {}
        for number in range(2, LATER + 1):
            run = self.run(PLAIN, self.fill, 1000 * number, number=number)
            if not run.completed or run.findings:
                return {}  # it needs the launches before it, or is wrong anyhow
            wanted[number] = self._outputs()
        self.run(PLAIN, self.fill)
        hasty = ahead(self.launches)
        for number in range(1, LATER + 1):
            run = self.run(hasty, self.fill, 1000 * number, again=True, number=number)
            hung = next((f for f in run.findings.values() if f.rule in _HANGS), None)
            if hung is not None or not run.completed:
                return {} if hung is None else {place_of(f): f for f in [self._stale(hung, number + 1)]}
            if number in wanted and wanted[number] != (got := self._outputs()):
                return self._other_values(wanted[number], got, hasty, number + 1)
        return {}

    def _stale(self, f: Finding, number: int) -> Finding:
        rule = "sentinel-alias" if self.sentinels else "stale-epoch"
        what = f"launch {number} of the list on the flags and mailboxes that those before it left hangs"
        return f.model_copy(update={"rule": rule, "message": f"{what}: {f.message}", "fix": _FIX_STALE[rule]})

    def _outputs(self) -> dict[str, bytes]:
        return {
            b.name: self.memory.view(b.name).tobytes()
            for b in self.buffers
            if b.role in (Role.OUTPUT, Role.STATE)
        }

    def _draws_tickets(self) -> bool:
        """Whether CTAs decide by counters what they do, and none counts in a result."""
        if not any(draws_tickets(k) for k in self.kernels.values()):
            return False
        results = [
            self.memory.allocation(b.name) for b in self.buffers if b.role in (Role.OUTPUT, Role.STATE)
        ]
        return not any(self.watch.sync[a.start // 4 : -(-a.end // 4)].any() for a in results)

    def _changed_results(self, schedule: Schedule) -> dict[Place, Finding]:
        """Compare the outputs of a second pass with those of a first pass over the same inputs."""
        if not any(polls_memory(k) for k in self.kernels.values()) and not self._draws_tickets():
            return {}
        if self.advances or any(accumulates_floats(k) for k in self.kernels.values()):
            return {}
        got = self._outputs()
        for reference in dict.fromkeys((PLAIN, schedule)):
            if reference not in self.references:
                run = self.run(reference, self.fill, 1000)
                fine = run.completed and not run.findings
                self.references[reference] = self._outputs() if fine else None
            wanted = self.references[reference]
            if wanted is None or wanted == got:
                return {}
        if wanted is None or wanted != self.references[PLAIN]:
            return {}  # a first pass already depends on the schedule: that is no matter of epochs
        return self._other_values(wanted, got, schedule, 2)

    def _other_values(
        self, wanted: Mapping[str, bytes], got: Mapping[str, bytes], schedule: Schedule, number: int
    ) -> dict[Place, Finding]:
        """Say that a later launch gives other results than it does on fresh memory."""
        name = next(n for n in wanted if wanted[n] != got[n])
        kernel, item = first_poll(self.kernels)
        rule = "sentinel-alias" if self.sentinels else "stale-epoch"
        f = Finding(
            rule=rule,
            severity=Severity.ERROR,
            message=(
                f"launch {number} of the list, on what those before it left, gives {name!r} other values "
                "than on fresh memory with the same inputs: it takes data or flags of an earlier launch for "
                f"its own (schedule: {schedule})"
            ),
            fix=_FIX_STALE[rule],
            kernel=kernel,
            ptx_line=item.line if item is not None else None,
            buffer=name,
        )
        return {place_of(f): f}

    # -- special runs ----------------------------------------------------------------------------

    def _few_resident(self) -> dict[Place, Finding]:
        """Run with as many CTAs at a time as the device holds, if a launch has more and its CTAs poll."""
        found: dict[Place, Finding] = {}
        rooms = [
            x.capacity
            for x in self.given
            if x.capacity
            and x.capacity < x.grid[0] * x.grid[1] * x.grid[2]
            and polls_memory(self.kernels[x.kernel])
        ]
        for room in sorted(set(rooms)):
            schedule = Schedule(replace(PLAIN.adversary, resident=room))
            run = self.run(schedule, self.fill)
            stuck = {k: f for k, f in run.findings.items() if f.rule == "not-co-resident"}
            found |= self._confirmed(stuck, schedule, False)
        return found

    def _with_sentinels(self) -> dict[Place, Finding]:
        """Run with inputs that contain the value that polls take for "not there yet"."""
        found: dict[Place, Finding] = {}
        for word in self.sentinels:
            inputs = [b for b in self.buffers if b.role is Role.ACTIVATION]
            original = self.buffers
            self.buffers = tuple(replace(b, fill=word) if b in inputs else b for b in original)
            self.arriving, arriving = (
                [b for b in self.buffers if b.name in {a.name for a in self.arriving}],
                self.arriving,
            )
            try:
                run = self.run(PLAIN, self.fill)
            finally:
                self.buffers, self.arriving = original, arriving
            for f in run.findings.values():
                if f.rule == "deadlock":
                    f = f.model_copy(
                        update={
                            "rule": "sentinel-alias",
                            "message": (
                                f"data with the bits {word:#010x} are taken for data not there yet: with "
                                f"them in an input {f.message}"
                            ),
                            "fix": "let the producer replace the sentinel's bits in its data, or use a flag",
                        }
                    )
                    found[place_of(f)] = f
        return found

    def _word_by_word(self) -> dict[Place, Finding]:
        """Run with vector stores that arrive in pieces, if some poll looks for a sentinel."""
        if not self.sentinels or any(accumulates_floats(k) for k in self.kernels.values()):
            return {}
        if not self.run(PLAIN, self.fill).completed:
            return {}
        wanted = self._outputs()
        kernel, item = first_poll(self.kernels)
        for torn in Torn:
            schedule = Schedule(replace(PLAIN.adversary, torn=torn))
            run = self.run(schedule, self.fill)
            if not run.completed or self._outputs() == wanted:
                continue
            f = Finding(
                rule="sentinel-alias",
                severity=Severity.ERROR,
                message=(
                    "the poll is satisfied by some words of a vector while others still hold the sentinel: "
                    f"words of a vector store arrive in no order (schedule: {schedule})"
                ),
                fix="test every word of what was polled before any of it is used",
                kernel=kernel,
                ptx_line=item.line if item is not None else None,
            )
            return {place_of(f): f}
        return {}


_FIX_STALE = {
    "stale-epoch": (
        "count epochs in the flag's value, or reset the flags before the next launch, after their last reader"
    ),
    "sentinel-alias": "write the sentinel back after the data were read, before the mailbox is used again",
}


def dynamic_or_reason(
    build: Callable[[], tuple[Sequence[DynamicLaunch], Sequence[SimulatedBuffer]] | str],
    module: Module,
    budget: float = BUDGET,
) -> DynamicAudit:
    """Run what `build` describes; it returns words where something needed is not known."""
    try:
        made = build()
        if isinstance(made, str):
            return DynamicAudit(skipped=made)
        return audit_dynamic(module, *made, budget=budget)
    except WorkbenchError as e:
        return DynamicAudit(skipped=str(e))
