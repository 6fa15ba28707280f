"""Evidence for people: Markdown that fits a pull request, and tables for the terminal.

A bundle is a stranger's: its texts are stripped of what a terminal or a Markdown reader would act on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from workbench.report.evidence import (
    EvidenceCheckDocument,
    EvidenceFigure,
    EvidenceKernel,
    EvidenceMakeDocument,
    EvidencePoint,
    EvidenceRunDocument,
)
from workbench.report.markdown import table
from workbench.report.tables import settings, simple_table, verdict_text

if TYPE_CHECKING:
    from rich.console import Console

_SHORT = 12
_LONGEST = 300
_STATUS_STYLES = {"agree": "green", "differ": "bold red", "not repeated": "yellow"}


def bundle_markdown(kernels: Sequence[EvidenceKernel], workbench: str, notes: Sequence[str]) -> str:
    """What a bundle states, for its `README.md`: kernels, times with their premises, hashes, waivers."""
    parts = [
        "# Evidence",
        "Kernels with what is known about them and how. Nothing here need be believed: `workbench evidence "
        "check` tells whether a byte was changed, `workbench evidence run` compiles, verifies and audits "
        f"again. Made by workbench {code(workbench)}.",
        *_kernels(kernels),
        *_notes(notes),
    ]
    return "\n\n".join(parts) + "\n"


def make_markdown(document: EvidenceMakeDocument) -> str:
    """A new bundle, for a pull request."""
    parts = [
        "### Evidence",
        f"Bundle {code(_name(document.bundle))}, SHA-256 `{document.sha256}`, {document.nbytes} bytes"
        + (f", signature {code(_name(document.signature))}." if document.signature else ", not signed."),
        *_kernels(document.kernels),
        *_notes(document.notes),
        *_how(document.bundle, document.sha256),
    ]
    return "\n\n".join(parts) + "\n"


def check_markdown(document: EvidenceCheckDocument) -> str:
    """What a check found, for a pull request."""
    parts = [
        f"### Evidence checked: {document.verdict.value}",
        f"Bundle {code(_name(document.bundle))}, SHA-256 `{document.sha256}`; {plain(document.signature)}.",
    ]
    if document.problems:
        rows = [(code(p.where), plain(p.what), _offset(p.offset)) for p in document.problems]
        parts.append(table(("where", "what is wrong", "byte"), rows))
    parts += [*_kernels(document.kernels), *_notes(document.notes)]
    return "\n\n".join(parts) + "\n"


def run_markdown(document: EvidenceRunDocument) -> str:
    """What was repeated and how it came out, for a pull request."""
    results = [p for p in document.points if p.kind == "result"]
    premises = [p for p in document.points if p.kind == "premise"]
    loud = [p for p in results if p.status != "agree"]
    parts = [
        f"### Evidence repeated: {document.verdict.value}",
        f"Bundle {code(_name(document.bundle))}, SHA-256 `{document.sha256}`.",
        f"{_counts(document)} {plain(document.timing[:1].upper() + document.timing[1:])}.",
        *_kernels(document.kernels),
    ]
    if loud:
        parts.append(_points(loud))
    differing = [p for p in premises if p.status != "agree"]
    if differing:
        parts += ["Premises that differ here, or that are stated on one side alone:", _points(differing)]
    parts += [
        "<details><summary>every point</summary>",
        _points(document.points),
        "</details>",
        *_how(document.bundle, document.sha256),
    ]
    return "\n\n".join(parts) + "\n"


def print_make(document: EvidenceMakeDocument, console: Console) -> None:
    """A new bundle."""
    console.print(
        Text(f"{document.bundle}: {len(document.members)} members, {document.nbytes / 1024:.0f} KiB"),
        soft_wrap=True,
    )
    console.print(Text(f"sha256 {document.sha256}"), soft_wrap=True)
    _print_kernels(document.kernels, console)
    for note in document.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    signed = f"signature {document.signature}" if document.signature else "not signed"
    console.print(Text(signed), soft_wrap=True)


def print_check(document: EvidenceCheckDocument, console: Console) -> None:
    """Whether a bundle is as it was written."""
    console.print(
        Text(f"{document.bundle}: {document.members} members, sha256 {document.sha256}"), soft_wrap=True
    )
    for p in document.problems:
        at = f" (byte {p.offset})" if p.offset is not None else ""
        line = Text.assemble((f"{shown(p.where)}: ", "bold red"), f"{shown(p.what)}{at}")
        console.print(line, soft_wrap=True)
    _print_kernels(document.kernels, console)
    for note in document.notes:
        console.print(Text(f"note: {shown(note)}", style="yellow"), soft_wrap=True)
    console.print(Text(f"signature: {shown(document.signature)}"), soft_wrap=True)
    console.print(Text.assemble("bundle: ", verdict_text(document.verdict)))


def print_run(document: EvidenceRunDocument, console: Console) -> None:
    """Agreement point by point, a table a kernel."""
    for kernel in ("", *(k.key[:_SHORT] for k in document.kernels)):
        points = [p for p in document.points if p.kernel == kernel]
        if not points:
            continue
        title = next((_title(k) for k in document.kernels if k.key[:_SHORT] == kernel), "bundle")
        rows = simple_table("", "point", "stated", "found here", title=title)
        for p in points:
            found = Text(shown(p.found))
            if p.detail:
                found.append(f"{' ' if p.found else ''}({shown(p.detail)})", style="dim")
            style = _STATUS_STYLES[p.status] if p.kind == "result" or p.status == "agree" else "yellow"
            rows.add_row(Text(status_text(p), style=style), Text(shown(p.name)), Text(shown(p.stated)), found)
        console.print(rows)
    console.print(Text(_counts(document)), soft_wrap=True)
    console.print(Text(shown(document.timing)), soft_wrap=True)
    console.print(Text.assemble("evidence: ", verdict_text(document.verdict)))


def status_text(point: EvidencePoint) -> str:
    """A point's status as tables have it: what the bundle does not state could not have been repeated."""
    if point.kind == "result" or point.status == "agree":
        return point.status
    return "premise differs" if point.status == "differ" else "not stated"


def shown(text: str) -> str:
    """One line without control characters, for a terminal."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def plain(text: str) -> str:
    """One line that Markdown shows as it is: no markup, no HTML."""
    line = shown(text).replace("&", "&amp;").replace("<", "&lt;").replace("@", "@&#8203;")
    return "".join(f"\\{c}" if c in "\\`*_[]#!~" else c for c in line)


def code(text: str) -> str:
    """A code span."""
    line = shown(text).replace("`", "'")
    return f"`{line}`" if line else ""


def _kernels(kernels: Sequence[EvidenceKernel]) -> list[str]:
    rows = [
        (
            f"{code(k.op)} {code(k.workload)}",
            code(k.arch),
            code(f"{k.template} {settings(k.knobs)}".strip()),
            _verified(k),
            _times(k.figures, "predicted"),
            _times(k.figures, "measured") or "not measured",
            code(k.key[:_SHORT]),
        )
        for k in kernels
    ]
    parts = [table(("kernel", "arch", "template", "verification", "predicted", "measured", "key"), rows)]
    accepted = [(k, w) for k in kernels for w in k.waivers]
    if accepted:
        said = [(code(k.key[:_SHORT]), code(w.finding), code(w.person), code(w.reason)) for k, w in accepted]
        parts.append(table(("kernel", "waived finding", "person", "reason"), said))
    parts.append("<details><summary>premises and hashes</summary>")
    for k in kernels:
        parts.append(f"{code(k.key)}: {plain(k.toolchain)}.")
        parts.append(table(("", "SHA-256"), [(name, code(h)) for name, h in k.hashes.items()]))
        if k.rests_on:
            parts.append(table(("the checks rest on", ""), [(n, code(v)) for n, v in k.rests_on.items()]))
        else:
            parts.append("What the checks rest on was not recorded when the kernel was exported.")
        for f in k.figures:
            parts.append(
                f"{f.us:.3f} us {f.kind}" + (f", median of {f.samples} samples" if f.samples else "") + ":"
            )
            parts.append(table(("premise", "value"), _premises(f.premises)))
    parts.append("</details>")
    return parts


def _verified(k: EvidenceKernel) -> str:
    waived = f", waived: {code(', '.join(k.waived))}" if k.waived else ""
    return f"{k.checks} checks: {k.verdict.value}{waived}"


def _premises(premises: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in premises.items():
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            yield from ((code(name), plain(v)) for v in value)
        else:
            yield code(name), code(str(value)) if value is not None else "not stated"


def _notes(notes: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {plain(n)}" for n in notes)] if notes else []


def _points(points: Iterable[EvidencePoint]) -> str:
    rows = [
        (
            code(p.kernel),
            plain(p.name),
            status_text(p),
            plain(p.stated),
            plain(f"{p.found} {p.detail}".strip()),
        )
        for p in points
    ]
    return table(("kernel", "point", "status", "stated", "found here"), rows)


def _how(bundle: str, digest: str) -> list[str]:
    name = _name(bundle)
    return [
        "Repeat it in a clone of the workbench:",
        f"```\nworkbench evidence check {name} --sha256 {digest}\nworkbench evidence run {name}\n```",
    ]


def _counts(document: EvidenceRunDocument) -> str:
    agree, differ = document.count("agree"), document.count("differ")
    left = document.count("not repeated")
    text = f"{agree} results agree, {differ} differ, {left} not repeated"
    same, odd = document.count("agree", "premise"), document.count("differ", "premise")
    unstated = document.count("not repeated", "premise")
    return f"{text}; {same} premises agree, {odd} differ, {unstated} not stated."


def _print_kernels(kernels: Sequence[EvidenceKernel], console: Console) -> None:
    if not kernels:
        return
    rows = simple_table("kernel", "arch", "checks", "verdict", "predicted", "measured", "key")
    for k in kernels:
        waived = f" (waived: {', '.join(k.waived)})" if k.waived else ""
        rows.add_row(
            Text(shown(f"{k.op} {k.workload}")), Text(shown(k.arch)), str(k.checks),
            Text.assemble(verdict_text(k.verdict), shown(waived)), _times(k.figures, "predicted"),
            _times(k.figures, "measured") or "not measured", Text(shown(k.key[:_SHORT])),
        )  # fmt: skip
    console.print(rows)


def _times(figures: Sequence[EvidenceFigure], kind: str) -> str:
    found = [f for f in figures if f.kind == kind]
    where = {f.us: str(f.premises.get("device") or f.premises.get("machine") or "") for f in found}
    return ", ".join(f"{us:.2f} us ({shown(name)[:40]})" for us, name in where.items())


def _title(k: EvidenceKernel) -> str:
    return shown(f"{k.op} {k.workload} {k.arch} {k.key[:_SHORT]}")


def _name(path: str) -> str:
    name = shown(path.rpartition("/")[2])
    return name if name and all(c.isalnum() or c in "._-+" for c in name) else "BUNDLE"


def _offset(offset: int | None) -> str:
    return "" if offset is None else str(offset)
