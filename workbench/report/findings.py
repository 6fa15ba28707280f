"""Findings for people: each with its place and the lines of PTX, SASS or Python it is about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from workbench.errors import MissingToolError
from workbench.findings import Finding, Severity

if TYPE_CHECKING:
    from workbench.artifact import Artifact

STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.PERFORMANCE: "cyan",
    Severity.INFO: "dim",
}
_ORDER = list(STYLES)
_SECTION = re.compile(r"(?:\.section\s+)?\.text\.([\w.$]+?)(?:,|:|\s|$)")
_NAMED_LINE = re.compile(r"\bline (\d+)\b")
"""How a message names the other place."""
_SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".h", ".hpp", ".cpp")
_LARGEST_SOURCE = 4 << 20
Line = tuple[str, str, bool]
"""Label, text, and whether it is the place itself."""
_ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/")


@dataclass(frozen=True)
class Listing:
    """The code that findings point into; what is absent is simply not quoted."""

    ptx: str | None = None
    cubin: bytes | None = None
    source: str | None = None
    """The kernel's Python source."""
    source_name: str | None = None
    """What findings call that source; None if it is the only one they can mean."""
    folder: Path | None = None
    """Where source files that the code names by a relative path are looked for."""

    @staticmethod
    def of(artifact: Artifact, source_name: str = "candidate.py") -> Listing:
        """The code of an artifact; `source_name` is what findings call its source."""
        return Listing(artifact.ptx, artifact.cubin, artifact.source, source_name)

    @staticmethod
    def beside(path: Path) -> Listing:
        """The code in a PTX file or cubin, and in its sibling of the other kind."""
        ptx, cubin = path.with_suffix(".ptx"), path.with_suffix(".cubin")
        return Listing(
            ptx.read_text() if ptx.is_file() else None,
            cubin.read_bytes() if cubin.is_file() else None,
            folder=path.parent,
        )

    @cached_property
    def sass(self) -> str | None:
        """The disassembled cubin, made when a finding first points into it; None without nvdisasm."""
        from workbench.isa.sass import disassemble

        try:
            cubin = self.cubin if self.cubin is not None else self._assembled()
            return None if cubin is None else disassemble(cubin)
        except MissingToolError:
            return None

    def _assembled(self) -> bytes | None:
        """The cubin of the PTX, as the audit makes it where there is none."""
        from workbench.compile import DEFAULT_PTXAS_FLAGS, CompileError, Limits
        from workbench.compile.checks import read_ptx_header
        from workbench.compile.ptxas import assemble

        if self.ptx is None:
            return None
        try:
            return assemble(self.ptx, read_ptx_header(self.ptx).target, DEFAULT_PTXAS_FLAGS, Limits()).cubin
        except CompileError:
            return None

    def quote(self, finding: Finding) -> Iterator[tuple[str, str]]:
        """Yield `(place, line of code)` for each place of the finding that can be shown."""
        for place, lines in self.excerpts(finding, 0):
            yield place, lines[0][1] if lines else ""

    def excerpts(self, finding: Finding, around: int) -> Iterator[tuple[str, list[Line]]]:
        """Yield `(place, lines of code)` for each place of the finding, `around` lines on either side.

        The PTX lines that the message names are places too. Each line is a label, its text, and whether it is
        the place itself; there is none where the code is not at hand.
        """
        if finding.source is not None:
            yield finding.source, self._of_source(finding.source, around)
        if finding.ptx_line is not None:
            yield f"PTX line {finding.ptx_line}", _numbered(self.ptx, finding.ptx_line, around)
        if around and self.ptx is not None:
            named = {int(n) for n in _NAMED_LINE.findall(finding.message)} - {finding.ptx_line}
            for number in sorted(named):
                yield f"PTX line {number}", _numbered(self.ptx, number, around)
        if finding.sass_offset is not None:
            lines = self._of_sass(finding.kernel, finding.sass_offset, around)
            yield f"SASS 0x{finding.sass_offset:04x}", lines

    def _of_source(self, place: str, around: int) -> list[Line]:
        name, _, number = place.rpartition(":")
        if not number.isdigit():
            return []
        if self.source is not None and self.source_name in (None, name):
            return _numbered(self.source, int(number), around)
        path = (self.folder or Path()) / name
        try:
            if path.suffix not in _SOURCE_SUFFIXES or path.stat().st_size > _LARGEST_SOURCE:
                return []
            return _numbered(path.read_text(), int(number), around)
        except (OSError, ValueError):
            return []

    def _of_sass(self, kernel: str | None, offset: int, around: int) -> list[Line]:
        """The disassembled instructions around a byte offset of a kernel's text."""
        found: list[tuple[int, str]] = []
        inside = kernel is None
        for line in (self.sass or "").splitlines():
            stripped = line.strip()
            if section := _SECTION.match(stripped):
                inside = kernel in (None, section.group(1))
            match = _ADDRESS.search(stripped) if inside else None
            if match is not None:
                found.append((int(match.group(1), 16), stripped[match.end() :].split("/*")[0].strip()))
        at = next((n for n, (o, _) in enumerate(found) if o == offset), None)
        if at is None:
            return []
        return [(f"{o:04x}", text, o == offset) for o, text in found[max(0, at - around) : at + around + 1]]


def print_findings(findings: Iterable[Finding], console: Console, listing: Listing | None = None) -> None:
    """Print findings, the gravest first, with the code they are about where `listing` has it."""
    for finding in by_severity(findings):
        console.print(headline(finding), soft_wrap=True)
        for place, code in (listing or Listing()).quote(finding):
            console.print(Text.assemble("    ", (place, "dim"), f"  {code}" if code else ""), soft_wrap=True)
        if (seen := witness(finding)) is not None:
            console.print(Text(f"    {seen}", style="dim"), soft_wrap=True)
        if finding.fix:
            console.print(Text.assemble("    fix: ", finding.fix), soft_wrap=True)


def print_places(finding: Finding, console: Console, listing: Listing, around: int) -> None:
    """Print the code at each place of a finding, with `around` lines on either side."""
    for place, lines in listing.excerpts(finding, around):
        if len(lines) < 2:
            text = f"  {lines[0][1]}" if lines else ""
            console.print(Text.assemble("    ", (place, "dim"), text), soft_wrap=True)
            continue
        console.print(Text.assemble("    ", (place, "dim")), soft_wrap=True)
        width = max(len(label) for label, _, _ in lines)
        for label, text, here in lines:
            line = f"    {'>' if here else ' '} {label:>{width}}  {text}"
            console.print(Text(line, style="" if here else "dim"), soft_wrap=True)


def headline(finding: Finding) -> Text:
    """Severity, rule and message of a finding on one line."""
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    about = f" [{finding.buffer}]" if finding.buffer else ""
    return Text.assemble(
        (f"{finding.severity.value}", STYLES[finding.severity]),
        " ",
        (finding.rule, "bold"),
        f"{about}: {finding.message}{times}",
    )


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in order of severity, otherwise as they came."""
    return sorted(findings, key=lambda f: _ORDER.index(f.severity))


def witness(finding: Finding) -> str | None:
    """The thread and the address that first showed a finding; None if nothing ran."""
    if finding.thread is None and finding.address is None:
        return None
    first = f"first seen at {finding.thread}" if finding.thread else "first seen"
    return first if finding.address is None else f"{first}, address 0x{finding.address:x}"


def _numbered(text: str | None, number: int, around: int) -> list[Line]:
    """The line of this number and its neighbours; empty if there is no such line."""
    lines = text.splitlines() if text is not None else []
    if not 0 < number <= len(lines):
        return []
    shown = range(max(1, number - around), min(len(lines), number + around) + 1)
    if not around:
        return [(str(number), lines[number - 1].strip(), True)]
    taken = [lines[n - 1].expandtabs(4).rstrip() for n in shown]
    margin = min((len(t) - len(t.lstrip()) for t in taken if t.strip()), default=0)
    return [(str(n), t[margin:], n == number) for n, t in zip(shown, taken, strict=True)]
