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
_ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/")


@dataclass(frozen=True)
class Listing:
    """The code that findings point into; what is absent is simply not quoted."""

    ptx: str | None = None
    cubin: bytes | None = None
    source: str | None = None
    """The kernel's Python source."""

    @staticmethod
    def of(artifact: Artifact) -> Listing:
        """The code of an artifact."""
        return Listing(artifact.ptx, artifact.cubin, artifact.source)

    @staticmethod
    def beside(path: Path) -> Listing:
        """The code in a PTX file or cubin, and in its sibling of the other kind."""
        ptx, cubin = path.with_suffix(".ptx"), path.with_suffix(".cubin")
        return Listing(
            ptx.read_text() if ptx.is_file() else None, cubin.read_bytes() if cubin.is_file() else None
        )

    @cached_property
    def sass(self) -> str | None:
        """The disassembled cubin, made when a finding first points into it; None without nvdisasm."""
        from workbench.isa.sass import disassemble

        if self.cubin is None:
            return None
        try:
            return disassemble(self.cubin)
        except MissingToolError:
            return None

    def quote(self, finding: Finding) -> Iterator[tuple[str, str]]:
        """Yield `(place, line of code)` for each place of the finding that can be shown."""
        if finding.source is not None:
            line = _line_number(finding.source)
            text = _line(self.source, line) if line is not None else ""
            yield finding.source, text
        if finding.ptx_line is not None:
            yield f"PTX line {finding.ptx_line}", _line(self.ptx, finding.ptx_line)
        if finding.sass_offset is not None:
            yield f"SASS 0x{finding.sass_offset:04x}", self._instruction(finding.kernel, finding.sass_offset)

    def _instruction(self, kernel: str | None, offset: int) -> str:
        """The disassembled instruction at a byte offset of a kernel's text."""
        if self.sass is None:
            return ""
        inside = kernel is None
        for line in self.sass.splitlines():
            stripped = line.strip()
            if section := _SECTION.match(stripped):
                inside = kernel in (None, section.group(1))
            match = _ADDRESS.search(stripped) if inside else None
            if match is not None and int(match.group(1), 16) == offset:
                return stripped[match.end() :].split("/*")[0].strip()
        return ""


def print_findings(findings: Iterable[Finding], console: Console, listing: Listing | None = None) -> None:
    """Print findings, the gravest first, with the code they are about where `listing` has it."""
    for finding in by_severity(findings):
        console.print(headline(finding), soft_wrap=True)
        for place, code in (listing or Listing()).quote(finding):
            console.print(Text.assemble("    ", (place, "dim"), f"  {code}" if code else ""), soft_wrap=True)
        if finding.thread is not None or finding.address is not None:
            console.print(Text(f"    {_witness(finding)}", style="dim"), soft_wrap=True)
        if finding.fix:
            console.print(Text.assemble("    fix: ", finding.fix), soft_wrap=True)


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


def _witness(finding: Finding) -> str:
    first = f"first seen at {finding.thread}" if finding.thread else "first seen"
    return first if finding.address is None else f"{first}, address 0x{finding.address:x}"


def _line_number(place: str) -> int | None:
    _, _, number = place.rpartition(":")
    return int(number) if number.isdigit() else None


def _line(text: str | None, number: int) -> str:
    lines = text.splitlines() if text is not None else []
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""
