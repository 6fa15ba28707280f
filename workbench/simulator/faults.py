"""Findings of a run, grouped by rule and instruction."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.findings import Finding, Severity
from workbench.isa.ptx.model import Instruction

FIXES = {
    "out-of-bounds": "check the index against the shape, or guard the access with a predicate",
    "misaligned": "align the address to the access size, or use a narrower access",
    "uninitialized-read": "write the bytes first, and synchronise the writer with this reader",
    "read-only-write": "write to an output or scratch buffer; inputs must stay as they are",
    "race": "let one lane write each address, or use an atomic operation",
    "barrier-divergence": "let all threads that the barrier counts reach it, whole warps at a time",
    "deadlock": "make sure that what the waiting threads need can still happen",
    "not-co-resident": "launch no more CTAs than fit, or let the last to arrive go on instead of spinning",
    "time-limit": "look for a loop that does not end; or allow more time or instructions",
    "membermask": "name exactly the lanes that execute the instruction",
    "warp-divergence": "bring the named lanes together, or leave them out of the member mask",
    "inactive-lane": "shuffle among lanes that take part; run matrix instructions with whole warps",
    "multimem-order": "use multimem instructions on multicast addresses, ordinary ones on a rank's own",
    "mbarrier-phase": "initialise once, arrive as often as the count says, wait for the phase that was begun",
    "cluster-barrier": "pair arrive with wait; end with a cluster barrier if peers access shared memory",
    "proxy-fence-missing": "let the threads that wrote execute fence.proxy.async before the barrier",
    "tcgen05-order": "wait for the barrier of a later commit; after loads and stores, wait::ld and wait::st",
    "wgmma-order": "wgmma.fence before the first wgmma that uses registers; touch them after wait_group",
    "tmem-lifetime": "allocate, use only those columns, free them before the CTA exits; one cta_group",
    "buffer-reuse": "refill a stage only after the commit's mbarrier, or wait_group, of its last reader",
    "trap": "see why the kernel stopped itself",
}


@dataclass(slots=True)
class _Group:
    message: str
    thread: str | None
    address: int | None
    buffer: str | None
    count: int
    fix: str = ""
    severity: Severity = Severity.ERROR


class FindingLog:
    """Collects findings; one a rule and instruction (or pair of instructions), with a count."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._groups: dict[tuple[str, int, int], _Group] = {}
        self._instructions: dict[int, Instruction] = {}

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def add(
        self,
        rule: str,
        item: Instruction | None,
        message: str,
        *,
        thread: str | None = None,
        address: int | None = None,
        buffer: str | None = None,
        count: int = 1,
        other: Instruction | None = None,
        fix: str = "",
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Add an occurrence; the first one of a group says where."""
        line = item.line if item is not None else 0
        key = (rule, line, other.line if other is not None else 0)
        group = self._groups.get(key)
        if group is not None:
            group.count += count
            return
        if item is not None:
            self._instructions[line] = item
        self._groups[key] = _Group(message, thread, address, buffer, count, fix, severity)

    def merge(self, findings: tuple[Finding, ...]) -> None:
        """Add what another process found."""
        for f in findings:
            key = (f.rule, f.ptx_line or 0, 0)
            if key in self._groups:
                self._groups[key].count += f.count
            else:
                self._groups[key] = _Group(
                    f.message, f.thread, f.address, f.buffer, f.count, f.fix, f.severity
                )
                self._sources[f.ptx_line or 0] = f.source

    @property
    def _sources(self) -> dict[int, str | None]:
        if not hasattr(self, "_source_map"):
            self._source_map: dict[int, str | None] = {}
        return self._source_map

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings by place in the program."""
        out = []
        for (rule, line, _), g in sorted(self._groups.items(), key=lambda x: (x[0][1], x[0][0], x[0][2])):
            item = self._instructions.get(line)
            source = self._sources.get(line)
            if item is not None and item.loc is not None:
                source = f"{item.loc.file}:{item.loc.line}"
            out.append(
                Finding(
                    rule=rule,
                    severity=g.severity,
                    message=g.message,
                    fix=g.fix or FIXES.get(rule, ""),
                    kernel=self.kernel,
                    ptx_line=line or None,
                    source=source,
                    buffer=g.buffer,
                    thread=g.thread,
                    address=g.address,
                    count=g.count,
                )
            )
        return tuple(out)
