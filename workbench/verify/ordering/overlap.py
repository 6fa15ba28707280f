"""Watches the global accesses of launches that overlap: which of them meet that no wait has ordered.

In an overlapped run (`workbench.simulator.stream`) a dependent launch does everything that it may do before
its predecessor goes on. An access that it makes while an earlier launch is incomplete, and that the earlier
launch then meets at the same word, one of them writing, is therefore not ordered by any griddepcontrol.wait.
Bulk and tensor copies are not seen here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import SHARED_WINDOW, Site
from workbench.simulator.cohort import Cohort
from workbench.simulator.launch import LaunchState
from workbench.simulator.memory import BASE, Memory
from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))


def strong(item: Instruction) -> bool:
    """Whether an access is atomic or strong: meant to meet others."""
    return item.opcode in ("atom", "red", "multimem") or not _STRONG.isdisjoint(item.modifiers)


def has_wait(launch: LaunchState) -> bool:
    """Whether a kernel has a griddepcontrol.wait at all."""
    items = launch.program.kernel.instructions
    return any(i.opcode == "griddepcontrol" and i.modifiers == ("wait",) for i in items)


@dataclass
class _Ahead:
    """What a launch has done while an earlier one was incomplete: PTX line by word, 0 for nothing."""

    launch: LaunchState
    reads: Array
    writes: Array
    covered: Array
    """Set where the launch before had completed, so that a wait would have returned."""


@dataclass
class Watch:
    """An observer for `SimulationOptions.observer`.

    Attributes:
        memory: of the run.
        sync: words touched by atomics and strong accesses: flags, counters, data that is polled.
        written: words that the kernels stored to.
    """

    memory: Memory
    sync: Array = field(init=False)
    written: Array = field(init=False)
    found: dict[tuple[str, int, str], Finding] = field(default_factory=dict)
    _ahead: dict[int, _Ahead] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sync = np.zeros(self.memory.top // 4 + 16, bool)
        self.written = np.zeros(self.memory.top // 4 + 16, bool)

    def begin(self) -> None:
        """Forget what earlier runs did but for the kinds of words."""
        self._ahead.clear()
        self.found.clear()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Accesses that met."""
        return tuple(self.found.values())

    def __call__(self, site: Site, address: Array, co: Cohort, ck: Chunk) -> None:
        """Look at one access."""
        if site.space == "generic":
            if bool((address + site.k >= SHARED_WINDOW).any()) and int(np.min(address + site.k)) < BASE:
                return
            site = site.inside("global")
        if site.space != "global":
            return
        words = (np.asarray(address + site.k) >> 2).ravel()
        if site.size > 4:
            words = (words[:, None] + np.arange(site.size // 4)).ravel()
        words = words[(words >= 0) & (words < len(self.sync))]
        item = site.instruction
        deliberate = strong(item)
        if deliberate:
            self.sync[words] = True
        reads = item.opcode in ("ld", "ldu", "atom") or (item.opcode == "cp" and site.space == "global")
        writes = item.opcode in ("st", "red", "atom")
        if writes:
            self.written[words] = True
        self._meet(ck.launch, item, words, reads, writes, deliberate)
        if not deliberate and _incomplete(ck.launch):
            self._note(ck.launch, item, words, reads, writes)

    def _note(self, launch: LaunchState, item: Instruction, words: Array, reads: bool, writes: bool) -> None:
        if launch.number not in self._ahead:
            size = len(self.sync)
            self._ahead[launch.number] = _Ahead(
                launch, np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, bool)
            )
        ahead = self._ahead[launch.number]
        covered = launch.may_pass_wait
        for table, wanted in ((ahead.reads, reads), (ahead.writes, writes)):
            if wanted:
                fresh = words[table[words] == 0]
                table[fresh] = item.line
                ahead.covered[fresh] = covered

    def _meet(
        self,
        launch: LaunchState,
        item: Instruction,
        words: Array,
        reads: bool,
        writes: bool,
        deliberate: bool,
    ) -> None:
        for number, ahead in self._ahead.items():
            if number <= launch.number:
                continue
            for table, verb, clash in (
                (ahead.reads, "reads", writes),
                (ahead.writes, "writes", reads or writes),
            ):
                if not clash:
                    continue
                lines = table[words]
                for line in np.unique(lines[lines > 0]):
                    word = int(words[int(np.argmax(lines == line))])
                    self._report(launch, item, ahead, int(line), verb, word, "writes" if writes else "reads")

    def _report(
        self,
        earlier: LaunchState,
        item: Instruction,
        ahead: _Ahead,
        line: int,
        verb: str,
        word: int,
        other: str,
    ) -> None:
        later = ahead.launch
        a = self.memory.find(4 * word)
        buffer = a.name if a is not None else None
        place = f"{buffer!r}" if buffer is not None else "memory"
        mine, theirs = later.program.kernel.name, earlier.program.kernel.name
        meeting = f"{mine} (launch {later.number}) {verb} {place}, which {theirs} (launch {earlier.number}) "
        meeting += f"{other} at line {item.line}"
        if ahead.covered[word] and later.number > earlier.number + 1:
            middle = later.before
            assert middle is not None
            rule, at, kernel = "pdl-chain-not-transitive", line, middle.program.kernel.name
            text = (
                f"no thread of {kernel} (launch {middle.number}) waits for its predecessor, so it may "
                f"complete before launch {earlier.number}: after its own wait, {meeting} later"
            )
            fix = "let at least one thread of every launch in a PDL chain execute griddepcontrol.wait"
            at = 0
        elif has_wait(later):
            rule, at, kernel = "pdl-load-before-wait", line, mine
            text = f"{meeting}, and no griddepcontrol.wait comes before the access in this schedule"
            fix = "move the access after griddepcontrol.wait, or order it after a thread that waits"
        else:
            rule, at, kernel = "pdl-early-trigger", item.line, theirs
            text = (
                f"{meeting} only after launch_dependents let launch {later.number} start, which never waits"
            )
            fix = "let the dependent execute griddepcontrol.wait, or trigger after the last store it needs"
        key = (rule, at, kernel)
        if key in self.found:
            old = self.found[key]
            self.found[key] = old.model_copy(update={"count": old.count + 1})
            return
        self.found[key] = Finding(
            rule=rule, severity=Severity.ERROR, message=text, fix=fix, kernel=kernel, ptx_line=at or None,
            buffer=buffer,
        )  # fmt: skip


def _incomplete(launch: LaunchState) -> bool:
    """Whether some launch before this one is incomplete."""
    before = launch.before
    while before is not None:
        if not before.complete:
            return True
        before = before.before
    return False
