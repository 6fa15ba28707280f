"""An ordering audit for people: a table of kernels, then each finding with the code on both of its sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from workbench.findings import Finding, Severity
from workbench.report.findings import Listing, by_severity, headline, print_places, witness
from workbench.report.tables import kernel_name, simple_table, verdict_text

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.verify.ordering import AuditDocument, AuditTarget

PAGES = "docs/rules"
"""Folder of the rule pages."""
_CONTEXT = 2
"""Lines of code around a place."""
_MOST_PLACES = 12
_MOST_NAMES = 3


def print_audit(document: AuditDocument, console: Console, listings: Sequence[Listing] = ()) -> None:
    """Print ordering audits, one a kernel.

    Args:
        document: the audit.
        console: where to.
        listings: the code of each target; what is absent is not quoted.
    """
    table = simple_table(
        "kernel", "arch", "verdict", "accesses", "proved", "unknown", right=("accesses", "proved", "unknown")
    )
    several = len({t.target for t in document.targets}) > 1
    for t in document.targets:
        c = t.coverage
        name = f"{t.target}: {kernel_name(t.kernel)}" if several else kernel_name(t.kernel)
        row = (str(c.accesses), str(c.proved), str(c.unknown))
        table.add_row(Text(name), t.arch, verdict_text(t.verdict), *row)
    console.print(table)
    for n, t in enumerate(document.targets):
        if t.findings:
            console.print(Text(f"{t.target}: {kernel_name(t.kernel)}", style="bold"), soft_wrap=True)
            _print_findings(t, console, listings[n] if n < len(listings) else Listing())
    _print_premises(document.targets, console)
    for u in document.unreadable:
        console.print(Text.assemble(("not audited ", "bold red"), u.message), soft_wrap=True)
    console.print(Text.assemble("verdict: ", verdict_text(document.verdict)))


def _print_findings(target: AuditTarget, console: Console, listing: Listing) -> None:
    fields = [f.model_dump() for f in target.findings]
    for group in _grouped([Finding(kernel=target.kernel, **f) for f in fields]):
        first = group[0]
        count = sum(f.count for f in group)
        console.print(headline(first.model_copy(update={"count": count})), soft_wrap=True)
        around = 0 if first.severity is Severity.INFO else _CONTEXT
        print_places(first, console, listing, around)
        if len(group) > 1:
            places = [_place(f) for f in group[1:]]
            more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
            text = f"    the same at {', '.join(places[:_MOST_PLACES])}{more}"
            console.print(Text(text, style="dim"), soft_wrap=True)
        if (seen := witness(first)) is not None:
            console.print(Text(f"    {seen}", style="dim"), soft_wrap=True)
        if first.fix:
            console.print(Text.assemble("    fix: ", first.fix), soft_wrap=True)
        if first.severity is not Severity.INFO:
            console.print(Text(f"    more: {PAGES}/{first.rule}.md", style="dim"), soft_wrap=True)


def _grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that say the same of different places, together; the gravest first."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for f in by_severity(findings):
        groups.setdefault((f.rule, f.severity, f.buffer, f.message, f.fix), []).append(f)
    return list(groups.values())


def _place(finding: Finding) -> str:
    parts = [
        finding.source,
        f"PTX line {finding.ptx_line}" if finding.ptx_line is not None else None,
        f"SASS 0x{finding.sass_offset:04x}" if finding.sass_offset is not None else None,
    ]
    return " / ".join(p for p in parts if p) or "an unknown place"


def _print_premises(targets: Sequence[AuditTarget], console: Console) -> None:
    """What made the code and what the verdicts rest on, each thing once, with the kernels if not all."""
    several = len({t.target for t in targets}) > 1
    for start, lines in (
        ("made by: ", [(t, [t.toolchain] if t.toolchain else []) for t in targets]),
        ("assumes: ", [(t, list(t.assumptions)) for t in targets]),
    ):
        holders: dict[str, list[str]] = {}
        for t, said in lines:
            name = kernel_name(t.kernel)
            for line in said:
                holders.setdefault(line, []).append(f"{t.target}: {name}" if several else name)
        for n, (line, names) in enumerate(holders.items()):
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            whose = "" if len(names) == len(targets) else f" ({', '.join(names[:_MOST_NAMES])}{more})"
            indent = start if not n else " " * len(start)
            console.print(Text(f"{indent}{line}{whose}", style="dim"), soft_wrap=True)
