"""Tables for people, one function a document; each prints to the console it is given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.report import conversations
from workbench.report.documents import (
    DoctorDocument,
    ImportedRecordsDocument,
    OpDocument,
    OpsDocument,
    RecordsDocument,
    RunsDocument,
)
from workbench.report.findings import Listing, print_findings
from workbench.verify.report import Check, Report, Verdict

if TYPE_CHECKING:
    from workbench.agent.run import Candidate, RunResult
    from workbench.tune import ReplayReport

VERDICT_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.UNKNOWN: "yellow"}
_ENTRY = re.compile(r"kernel_cutlass_(\w+?)_candidate_[0-9a-f]{12}(?:([A-Za-z]\w*?)_object_at)?")
_PLAIN_ENTRY = re.compile(r"kernel_cutlass_(\w+?)_(?:tensor|ptr|(?:\w+_)?\d+$)")
_STATUS_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}


def simple_table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """A table without frames, which also reads well in a log; the columns named in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_doctor(document: DoctorDocument, console: Console) -> None:
    """What this machine can do, a line each, with what to do about what is missing."""
    table = simple_table("", "what", "found")
    for c in document.capabilities:
        found = Text(c.detail)
        if c.fix:
            found.append(f"\n{c.fix}", style="bold")
        table.add_row(Text(c.status, style=_STATUS_STYLES[c.status]), c.name, found)
    console.print(table)
    abilities = {
        "compile": document.can_compile,
        "disassemble": document.can_disassemble,
        "simulate": document.can_simulate,
        "measure": document.can_measure,
    }
    can = [name for name, able in abilities.items() if able]
    cannot = [name for name, able in abilities.items() if not able]
    lacking = f"; it cannot {_list(cannot, 'or')}" if cannot else ""
    console.print(f"This machine can {_list(can, 'and') or 'do nothing yet'}{lacking}.", soft_wrap=True)


def print_ops(document: OpsDocument, console: Console) -> None:
    """The ops of a workspace."""
    table = simple_table("op", "what it computes", "workloads", "templates")
    for op in document.ops:
        if op.error is not None:
            table.add_row(op.name, Text(op.error, style="bold red"), "", "")
        else:
            table.add_row(
                op.name, Text(op.summary), ", ".join(op.workloads), ", ".join(op.templates) or "none"
            )
    console.print(table)


def print_op(document: OpDocument, console: Console) -> None:
    """One op's contract: buffers, rounding, tolerances, workloads with rooflines, templates."""
    console.print(Text(document.name, style="bold"))
    console.print(Text(document.doc.strip()), soft_wrap=True)
    table = simple_table("buffer", "shape", "dtype", "role", "", title="Buffers")
    for b in document.buffers:
        table.add_row(b.name, f"\\[{', '.join(b.shape)}]", b.dtype, b.role, Text(b.doc))
    console.print(table)
    table = simple_table(
        "output", "exact", "baseline factor", "rms floor/cap", "worst floor/cap", title="Tolerances"
    )
    for name, t in document.tolerances.items():
        table.add_row(
            name,
            "yes" if t.exact else "no",
            f"{t.factor:g}",
            f"{t.floor_rms:g} / {t.cap_rms:g}",
            f"{t.floor_worst:g} / {t.cap_worst:g}",
        )
    console.print(table)
    console.print(f"Inputs: {', '.join(document.generators)}", soft_wrap=True)
    if document.constants:
        console.print(f"Constants: {settings(document.constants)}", soft_wrap=True)
    table = simple_table(
        "workload", "axes", "compulsory", "flops", "roofline", "bound",
        title=f"Workloads (roofline: predicted for {document.machine})",
        right=("compulsory", "flops", "roofline"),
    )  # fmt: skip
    for w in document.workloads:
        table.add_row(
            w.name,
            settings(w.axes),
            size(w.compulsory_bytes),
            quantity(w.flops),
            microseconds(w.roofline_us),
            w.bound,
        )
    console.print(table)
    table = simple_table("template", "knobs", "valid points", title="Templates")
    for template in document.templates:
        knobs = "\n".join(f"{k}: {' '.join(map(str, v))}" for k, v in template.knobs.items())
        table.add_row(
            Text.assemble((template.name, "bold"), "\n", template.summary),
            knobs,
            "\n".join(f"{k}: {v}" for k, v in template.points.items()),
        )
    console.print(table)


def print_report(report: Report, console: Console, listing: Listing | None = None) -> None:
    """Checks of one artifact with their verdicts and findings."""
    console.print(
        f"{report.op}/{report.template} at {report.workload} on {report.arch} ({settings(report.knobs)}),"
        f" checked on: {report.device}",
        soft_wrap=True,
    )
    table = simple_table("check", "verdict", "")
    for check in report.checks:
        table.add_row(check.name, verdict_text(check.verdict), Text(check.summary))
    console.print(table)
    for check in report.checks:
        if check.findings:
            console.print(Text(check.name, style="bold"))
            print_findings(check.findings, console, listing)
    console.print(Text.assemble("verdict: ", verdict_text(report.verdict), f"  ({report.seconds:.1f} s)"))


def print_run(result: RunResult, console: Console, limit: int = 40) -> None:
    """Candidates of a run, best first, and its winner."""
    console.print(candidate_table(result, limit))
    best = result.best()
    for line in conversations.summary(result):
        console.print(Text(line), soft_wrap=True)
    kinds = _tally(result.candidates)
    console.print(
        f"{len(result.candidates)} candidates in {result.seconds:.1f} s: {kinds}. Times are predicted for"
        f" {result.settings.machine}, not measured.",
        soft_wrap=True,
    )
    if best is None:
        console.print(Text("No candidate passed every check; nothing is exported.", style="bold red"))
        return
    console.print(
        Text.assemble(
            ("winner ", "bold green"),
            f"#{best.proposal.index} {best.proposal.template} ({settings(best.proposal.knobs)}): predicted"
            f" {microseconds(best.predicted_us)}, {distance(best.predicted_us, result.roofline_us)} the"
            f" roofline of {microseconds(result.roofline_us)}",
        ),
        soft_wrap=True,
    )
    if result.exported is not None:
        console.print(f"exported to {result.exported}", soft_wrap=True)


def candidate_table(result: RunResult, limit: int = 40) -> Table:
    """Candidates of a run: verified ones by predicted time, then those refused or failed, with the reason."""
    table = simple_table(
        "#", "status", "predicted", "x roofline", "candidate", right=("#", "predicted", "x roofline")
    )
    ranked = ranked_candidates(result)
    for c in ranked[:limit]:
        candidate = Text(f"{c.proposal.template}: {settings(c.proposal.knobs)}")
        if came := conversations.origin(c):
            candidate.append(f"\n{shorten(came)}", style="dim")
        if c.reason:
            candidate.append(f"\n{shorten(c.reason)}", style="red")
        table.add_row(
            str(c.proposal.index),
            Text(c.status.value, style="green" if c.status.value == "verified" else "bold red"),
            microseconds(c.predicted_us),
            times_roofline(c.predicted_us, result.roofline_us),
            candidate,
        )
    if len(ranked) > limit:
        table.caption = f"and {len(ranked) - limit} more; `workbench report {result.run_id}` has them all"
    return table


def ranked_candidates(result: RunResult) -> list[Candidate]:
    """Verified candidates by predicted time, then the others in the order they were proposed."""
    return sorted(
        result.candidates,
        key=lambda c: (c.predicted_us is None, c.predicted_us or 0.0, c.proposal.index),
    )


def print_runs(document: RunsDocument, console: Console) -> None:
    """The runs of a workspace."""
    if not document.runs:
        console.print("no runs yet; start one with `workbench propose --op OP`")
        return
    table = simple_table(
        "run", "op", "workload", "state", "candidates", "verified", "winner", "predicted",
        right=("candidates", "verified", "predicted"),
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for r in document.runs:
        state = "finished" if r.finished else "interrupted"
        table.add_row(
            r.run_id, r.op, r.workload, state, str(r.candidates), str(r.verified), r.winner or "",
            microseconds(r.predicted_us),
        )  # fmt: skip
    console.print(table)


def print_records(document: RecordsDocument, console: Console) -> None:
    """Tuning records, newest first."""
    if not document.records:
        console.print(
            "no records that match; `workbench propose` and `workbench tune` write them", soft_wrap=True
        )
    else:
        table = simple_table(
            "op",
            "workload",
            "template",
            "knobs",
            "arch",
            "device",
            "objective",
            "time",
            "outcome",
            right=("time",),
        )
        for r in document.records:
            outcome = r.failure or r.verdict or ""
            table.add_row(
                r.op, r.workload, r.template, settings(r.knobs), r.arch, r.device, r.objective,
                microseconds(r.value_us), Text(outcome),
            )  # fmt: skip
        console.print(table)
        console.print(
            f"{len(document.records)} of {document.total} records in {document.path}", soft_wrap=True
        )
    if document.unusable:
        console.print(
            f"{document.unusable} rows were written under another schema and are not used", soft_wrap=True
        )


def print_import(document: ImportedRecordsDocument, console: Console) -> None:
    """What an import added and what it skipped."""
    console.print(f"{document.added} records added, {document.known} known already")
    for skipped in document.skipped:
        console.print(Text(f"line {skipped.line} skipped: {skipped.reason}", style="yellow"), soft_wrap=True)


def print_replay(report: ReplayReport, console: Console) -> None:
    """How near a sampler came to the optimum of a known space."""
    table = simple_table(
        "evaluations", "fraction of the optimum", right=("evaluations", "fraction of the optimum")
    )
    for evaluations, fraction in report.fraction_of_optimum.items():
        table.add_row(str(evaluations), f"{fraction:.4f}")
    console.print(table)
    console.print(
        f"{report.sampler} on {report.space}: mean of {report.seeds} seeds,"
        f" {report.overhead_ms:.2f} ms a proposal",
        soft_wrap=True,
    )


def verdict_text(verdict: Verdict) -> Text:
    """A verdict in its colour."""
    return Text(verdict.value, style=VERDICT_STYLES[verdict])


def check_line(check: Check) -> Text:
    """A check on one line."""
    return Text.assemble(verdict_text(check.verdict), f" {check.name}: {check.summary}")


def settings(values: Mapping[str, object]) -> str:
    """`name=value` pairs."""
    return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items())


def size(nbytes: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def quantity(value: float) -> str:
    """A count with a decimal prefix."""
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.0f}" if not prefix else f"{value:.1f} {prefix}"
        value /= 1000
    return f"{value:.2f} T"


def kernel_name(entry: str) -> str:
    """A readable name of a PTX entry: CuTe DSL puts class, source hash and argument types into it."""
    match = _ENTRY.match(entry)
    if match is not None:
        return ".".join(part for part in (match[2], match[1]) if part)
    plain = _PLAIN_ENTRY.match(entry)
    return entry if plain is None else plain[1]


def microseconds(us: float | None) -> str:
    """A time with two decimals, or two digits where it is below a microsecond; empty if there is none."""
    if us is None:
        return ""
    return f"{us:.2f} us" if us >= 1 else f"{us:.2g} us"


def times_roofline(us: float | None, roofline_us: float) -> str:
    """How many times the roofline a time is; empty if there is no time."""
    if us is None or roofline_us <= 0:
        return ""
    ratio = us / roofline_us
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def distance(us: float | None, roofline_us: float) -> str:
    """How far a time is from the roofline, in words."""
    ratio = times_roofline(us, roofline_us)
    return f"{ratio} times" if ratio else "at an unknown distance from"


def shorten(text: str, limit: int = 160) -> str:
    """The text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _tally(candidates: Sequence[Candidate]) -> str:
    counts: dict[str, int] = {}
    for c in candidates:
        counts[c.status.value] = counts.get(c.status.value, 0) + 1
    return ", ".join(f"{n} {status}" for status, n in counts.items())


def _list(words: list[str], last: str) -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
