"""Parses, lowers and audits every module of the corpus and writes the table of `docs/external.md`.

`python audit_corpus.py` prints the table; `--write` puts it between the marks of the document;
`--saved` takes the rows of the last run.
"""

from __future__ import annotations

import collections
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import corpus

from workbench.errors import WorkbenchError
from workbench.isa.ptx import Module, PtxSyntaxError, parse
from workbench.simulator.codegen import compile_kernel
from workbench.simulator.program import UnsupportedInstruction
from workbench.verify.ordering import audit_file

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


def examine(name: str, family: str, audit: bool = True) -> Row:
    """Parse, lower and audit one module."""
    start = time.monotonic()
    row = Row(name, family)
    path = corpus.folder() / name / "kernel.ptx"
    try:
        module = parse(path.read_text())
    except PtxSyntaxError as error:
        row.parses = row.lowers = str(error)[:100]
        return row
    row.instructions = sum(1 for k in module.kernels for _ in k.instructions)
    row.lowers = "; ".join(unknown_instructions(module)) or "yes"
    if audit:
        document = audit_file(path, corpus.folder() / name / "contract.toml" if
                              (corpus.folder() / name / "contract.toml").is_file() else None)  # fmt: skip
        row.verdict = document.verdict.value
        for target in document.targets:
            row.accesses += target.coverage.accesses
            row.unknown += target.coverage.unknown
            row.messages.extend(
                f"{f.severity.value} {f.rule} line {f.ptx_line}: {f.message}" for f in target.findings
            )
            row.findings.update(collections.Counter(f"{f.severity.value} {f.rule}" for f in target.findings))
    row.seconds = round(time.monotonic() - start, 2)
    return row


def table(rows: list[Row], failed: dict[str, str]) -> str:
    """The document's table: one line a family, then what does not lower, then what does not compile."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    total = len(rows)
    lines = [
        f"{total} modules; {sum(r.parses == 'yes' for r in rows)} parse, "
        f"{sum(r.lowers == 'yes' for r in rows)} lower to simulator code.", "",
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
    lines += ["", "Not compiled:", ""]
    reasons = collections.defaultdict(list)
    for name, why in failed.items():
        reasons[why].append(name)
    lines += [f"- {', '.join(names)}: {why}" for why, names in reasons.items()] or ["none"]
    return "\n".join(lines)


def main() -> None:
    index = corpus.build(report=lambda _: None)
    failed = {name: entry["error"] for name, entry in index.items() if entry["error"]}
    saved = corpus.folder() / "report.json"
    if "--saved" in sys.argv:
        rows = [Row(**row) for row in json.loads(saved.read_text())]
    else:
        rows = [
            examine(module, entry["family"], "--no-audit" not in sys.argv)
            for entry in index.values()
            for module in entry["modules"]
        ]
        saved.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    text = table(rows, failed)
    print(text)
    if "--write" in sys.argv:
        document = DOCUMENT.read_text()
        head, tail = document.split(BEGIN)[0], document.split(END)[1]
        DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


if __name__ == "__main__":
    main()
