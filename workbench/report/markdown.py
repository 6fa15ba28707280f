"""Reports as Markdown: of one kernel, for its evidence, and of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from workbench.cost import Prediction
from workbench.findings import Finding
from workbench.report import conversations
from workbench.report.findings import by_severity
from workbench.report.tables import (
    distance,
    kernel_name,
    microseconds,
    ranked_candidates,
    settings,
    shorten,
    times_roofline,
)
from workbench.verify.report import Report

if TYPE_CHECKING:
    from workbench.agent.run import RunResult
    from workbench.artifact import Artifact
    from workbench.export.manifest import RunInfo


def kernel_markdown(
    artifact: Artifact, report: Report, prediction: Prediction | None, run: RunInfo | None
) -> str:
    """What is known about one kernel, and how. Says nothing of the machine it was made on."""
    parts = [
        f"# {artifact.op} at {artifact.workload} for {artifact.arch}",
        f"Template `{artifact.template}`, {_code(settings(artifact.knobs))}, key `{artifact.key}`.",
        table(("axis", "value"), [(k, v) for k, v in artifact.axes.items()]),
        "## Launches",
        table(
            (
                "kernel",
                "grid",
                "block",
                "cluster",
                "dynamic shared memory",
                "PDL",
                "registers",
                "spilled bytes",
            ),
            [
                (
                    f"`{kernel_name(launch.kernel)}`",
                    _extent(launch.grid),
                    _extent(launch.block),
                    _extent(launch.cluster),
                    launch.smem_bytes,
                    "yes" if launch.pdl else "no",
                    artifact.resources[launch.kernel].registers,
                    artifact.resources[launch.kernel].spill_stores,
                )
                for launch in artifact.launches
            ],
        ),
        f"## Verification: {report.verdict.value}",
        f"Checked on: {report.device}.",
        *_checks(report),
        *_prediction(prediction),
        "## Toolchain",
        _toolchain(artifact),
        sandbox_line(artifact),
    ]
    if run is not None:
        parts.append(f"Found by run `{run.run_id}` among {run.candidates} candidates.")
    return "\n\n".join(parts) + "\n"


def run_markdown(result: RunResult) -> str:
    """A run: settings, winner and every candidate with what became of it."""
    chosen, best = result.settings, result.best()
    parts = [
        f"# Run {chosen.run_id}",
        f"Op `{chosen.op}` at `{chosen.workload}` for {chosen.arch}; agent {chosen.agent}, seed"
        f" {chosen.seed}, {chosen.rounds} rounds of {chosen.batch}; {len(result.candidates)} candidates in"
        f" {result.seconds:.1f} s.",
        f"Times are predicted for {chosen.machine}, not measured."
        f" Roofline: {microseconds(result.roofline_us)}.",
    ]
    if lines := conversations.summary(result):
        parts.append("\n".join(f"- {line}" for line in lines))
    if best is None:
        parts.append("No candidate passed every check; nothing was exported.")
    else:
        parts.append(
            f"Winner: #{best.proposal.index} `{best.proposal.template}`,"
            f" {_code(settings(best.proposal.knobs))}, predicted {microseconds(best.predicted_us)},"
            f" {distance(best.predicted_us, result.roofline_us)} the roofline;"
            f" exported to `{result.exported}`."
        )
        if best.report is not None:
            parts += ["## Checks of the winner", *_checks(best.report)]
        parts += _prediction(best.prediction)
    parts += ["## Candidates", candidates_table(result)]
    return "\n\n".join(parts) + "\n"


def candidates_table(result: RunResult) -> str:
    """All candidates of a run, best first."""
    return table(
        ("#", "template", "knobs", "status", "predicted us", "x roofline", "origin", "why"),
        [
            (
                c.proposal.index,
                c.proposal.template,
                _code(settings(c.proposal.knobs)),
                c.status.value,
                f"{c.predicted_us:.3f}" if c.predicted_us is not None else "",
                times_roofline(c.predicted_us, result.roofline_us),
                conversations.origin(c),
                shorten(c.reason),
            )
            for c in ranked_candidates(result)
        ],
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    lines = [_row(header), _row(["---"] * len(header)), *(_row(r) for r in rows)]
    return "\n".join(lines)


def _checks(report: Report) -> list[str]:
    parts = [table(("check", "verdict", ""), [(c.name, c.verdict.value, c.summary) for c in report.checks])]
    findings = by_severity(report.findings)
    if findings:
        parts.append(
            table(
                ("severity", "rule", "place", "buffer", "what", "fix"),
                [
                    (f.severity.value, f"`{f.rule}`", _place(f), f.buffer or "", f.message, f.fix)
                    for f in findings
                ],
            )
        )  # fmt: skip
    assumptions = sorted({a for c in report.checks for a in c.assumptions})
    if assumptions:
        parts.append("Assumptions:\n" + "\n".join(f"- {a}" for a in assumptions))
    return parts


def _prediction(prediction: Prediction | None) -> list[str]:
    if prediction is None:
        return ["## Time", "No time was predicted."]
    premises = prediction.premises
    return [
        "## Predicted time",
        f"{prediction.us:.3f} us on {premises.machine} for {premises.workload} ({settings(premises.axes)}),"
        f" cost model {premises.model_version} on the {premises.code.upper()}; nothing was measured.",
        table(
            ("kernel", "us", "gap us", "limited by", "because"),
            [
                (f"`{kernel_name(p.kernel)}`", f"{p.us:.3f}", f"{p.gap_us:.3f}", p.limit, p.reason)
                for p in prediction.launches
            ],
        ),
        "It rests on:\n" + "\n".join(f"- {a}" for a in premises.assumptions),
    ]


def _toolchain(artifact: Artifact) -> str:
    t = artifact.toolchain
    return (
        f"CuTe DSL {t.dsl} (CUDA {t.flavour}), PTX ISA {t.ptx_isa}, ptxas {t.ptxas}"
        f" ({_code(' '.join(t.ptxas_flags)) if t.ptxas_flags else 'no flags'})."
    )


def sandbox_line(artifact: Artifact) -> str:
    """What fenced in the process that ran the source, in one sentence."""
    from workbench.compile import policy

    if artifact.fences is None:
        return "It was compiled before the fences of the compile sandbox were recorded."
    held = ", ".join(artifact.fences) or "none"
    if missing := policy.lacking(artifact.fences):
        return (
            f"Compiled without a whole sandbox, as `--unsafe-compile` allows: not fenced in: "
            f"{', '.join(missing)}; fences that held: {held}."
        )
    return f"Compiled in a sandbox; fences that held: {held}."


def _place(finding: Finding) -> str:
    places = [finding.source] if finding.source is not None else []
    if finding.ptx_line is not None:
        places.append(f"PTX {finding.ptx_line}")
    if finding.sass_offset is not None:
        places.append(f"SASS 0x{finding.sass_offset:04x}")
    return ", ".join(places)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(" ".join(str(c).split()).replace("|", "\\|") for c in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else "no knobs"


def _extent(extent: tuple[int, int, int]) -> str:
    return " x ".join(str(e) for e in extent)
