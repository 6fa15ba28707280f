"""Parses, lowers and audits every module of the corpus and writes the table of `docs/external.md`.

`python audit_corpus.py` prints the table; `--write` puts it between the marks of the document;
`--saved` takes the rows of the last run; `--bare` audits without the contracts of `audit_contracts.py`.
The audits run in two processes.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import corpus
from audit_contracts import write_contract

from workbench.errors import WorkbenchError
from workbench.isa.ptx import Module, PtxSyntaxError, parse
from workbench.simulator.codegen import compile_kernel
from workbench.simulator.program import UnsupportedInstruction
from workbench.verify.ordering import audit_file

PROCESSES = 2
DOCUMENT = Path(__file__).parents[2] / "docs" / "external.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


@dataclass
class Row:
    """What was found out about one module."""

    name: str
    family: str
    parses: str = "yes"
    lowers: str = "yes"
    instructions: int = 0
    verdict: str = ""
    findings: dict[str, int] = field(default_factory=dict)
    """Number of findings by `severity rule`."""
    messages: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    """Why something was left undecided, with how many findings."""
    accesses: int = 0
    unknown: int = 0
    seconds: float = 0.0


def unknown_instructions(module: Module) -> list[str]:
    """What the simulator says of the first instruction that it lacks, of each kernel; empty if none."""
    reasons = []
    for kernel in module.kernels:
        try:
            compile_kernel(module, kernel)
        except UnsupportedInstruction as error:
            reasons.append(error.instruction.name)
        except WorkbenchError as error:
            reasons.append(str(error)[:80])
    return reasons


def lower(row: Row) -> Row:
    """Parse a module and lower it to simulator code."""
    try:
        module = parse((corpus.folder() / row.name / "kernel.ptx").read_text())
    except PtxSyntaxError as error:
        row.parses = row.lowers = str(error)[:100]
        return row
    row.instructions = sum(1 for k in module.kernels for _ in k.instructions)
    row.lowers = "; ".join(unknown_instructions(module)) or "yes"
    return row


def audit(row: Row, contract: bool = True) -> Row:
    """Audit a module: its PTX and its cubin, under its contract; a crash is a verdict of its own."""
    start = time.monotonic()
    path = corpus.folder() / row.name / "kernel.ptx"
    try:
        document = audit_file(path, write_contract(row.name) if contract else None)
    except Exception as error:
        row.verdict = "crash"
        row.messages = [f"{type(error).__name__}: {error}"]
        return row
    row.verdict = document.verdict.value
    for target in document.targets:
        row.accesses += target.coverage.accesses
        row.unknown += target.coverage.unknown
        for f in target.findings:
            at = f"line {f.ptx_line}" if f.ptx_line is not None else f"offset {f.sass_offset:#x}"
            row.messages.append(f"{f.severity.value} {f.rule} {at}: {f.message}")
        row.findings.update(collections.Counter(f"{f.severity.value} {f.rule}" for f in target.findings))
        row.reasons.update(
            collections.Counter(_reason(f.message) for f in target.findings if f.rule == "undecided")
        )
    row.seconds = round(time.monotonic() - start, 2)
    return row


def _reason(message: str) -> str:
    """The reason without the names in it."""
    return re.sub(r"^access to .* before the wait: ", "before the wait: ", message)


def audited(rows: Iterable[Row], contract: bool = True) -> tuple[list[Row], float]:
    """All audits, in two processes, the largest modules first; and the seconds that took."""
    rows = list(rows)
    size = {r.name: (corpus.folder() / r.name / "kernel.ptx").stat().st_size for r in rows}
    start = time.monotonic()
    with multiprocessing.Pool(PROCESSES) as pool:
        jobs = [(r, contract) for r in sorted(rows, key=lambda r: -size[r.name])]
        done = {r.name: r for r in pool.starmap(audit, jobs, chunksize=1)}
    return [done[r.name] for r in rows], time.monotonic() - start


def modules(index: dict[str, dict[str, object]]) -> list[Row]:
    """A row for every module that compiled."""
    return [Row(m, str(e["family"])) for e in index.values() for m in e["modules"]]  # type: ignore[attr-defined]


def share(rows: Iterable[Row]) -> float:
    """The part of all accesses, of PTX and SASS together, that was left undecided."""
    rows = list(rows)
    return sum(r.unknown for r in rows) / max(1, sum(r.accesses for r in rows))


def table(rows: list[Row], failed: dict[str, str]) -> str:
    """The document's table: one line a family, then what does not lower, then what does not compile."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    total = len(rows)
    lines = [
        f"{total} modules; {sum(r.parses == 'yes' for r in rows)} parse, "
        f"{sum(r.lowers == 'yes' for r in rows)} lower to simulator code. "
        f"{sum(r.verdict == 'pass' for r in rows)} pass the audit, "
        f"{sum(r.verdict == 'unknown' for r in rows)} are unknown, "
        f"{sum(r.verdict == 'fail' for r in rows)} fail. Of {sum(r.accesses for r in rows)} accesses to "
        f"global memory (PTX and SASS together) {sum(r.unknown for r in rows)} are undecided: "
        f"{share(rows):.1%}.", "",
        "| family | modules | parse | lower | audit pass / unknown / fail | findings |",
        "|---|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for family, members in families.items():
        verdicts = collections.Counter(r.verdict for r in members)
        findings: collections.Counter[str] = collections.Counter()
        for r in members:
            findings.update(r.findings)
        lines.append(
            f"| {family} | {len(members)} | {sum(r.parses == 'yes' for r in members)} "
            f"| {sum(r.lowers == 'yes' for r in members)} "
            f"| {verdicts['pass']} / {verdicts['unknown']} / {verdicts['fail']} "
            f"| {', '.join(f'{k} {n}' for k, n in sorted(findings.items())) or 'none'} |"
        )
    stuck = collections.defaultdict(list)
    for r in rows:
        if r.lowers != "yes":
            stuck[re.sub(r"\s+", " ", r.lowers)].append(r.name)
    lines += ["", "Not lowered, by the first instruction that is not known:", ""]
    lines += [f"- `{k}`: {', '.join(v)}" for k, v in sorted(stuck.items())] or ["none"]
    lines += ["", "Left undecided, by the reason, with the number of findings:", ""]
    why: collections.Counter[str] = collections.Counter()
    for r in rows:
        why.update(r.reasons)
    lines += [f"- {n}: {text}" for text, n in sorted(why.items(), key=lambda x: (-x[1], x[0]))] or ["none"]
    lines += ["", "Errors and warnings:", ""]
    loud = [(r.name, m) for r in rows for m in r.messages if m.startswith(("error", "warning"))]
    lines += [f"- `{name}`: {m}" for name, m in loud] or ["none"]
    lines += ["", "Not compiled:", ""]
    reasons = collections.defaultdict(list)
    for name, said in failed.items():
        reasons[said].append(name)
    lines += [f"- {', '.join(names)}: {said}" for said, names in reasons.items()] or ["none"]
    return "\n".join(lines)


def main() -> None:
    index = corpus.build(report=lambda _: None)
    failed = {name: entry["error"] for name, entry in index.items() if entry["error"]}
    saved = corpus.folder() / "report.json"
    if "--saved" in sys.argv:
        rows = [Row(**row) for row in json.loads(saved.read_text())]
    else:
        rows, seconds = audited(modules(index), "--bare" not in sys.argv)
        with multiprocessing.Pool(PROCESSES) as pool:
            rows = pool.map(lower, rows, chunksize=4)
        print(f"audited in {seconds:.1f} s in {PROCESSES} processes, the disassembly included")
        saved.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    text = table(rows, failed)
    print(text)
    if "--write" in sys.argv:
        document = DOCUMENT.read_text()
        head, tail = document.split(BEGIN)[0], document.split(END)[1]
        DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


if __name__ == "__main__":
    main()
