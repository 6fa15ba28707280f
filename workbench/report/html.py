"""A run as one self-contained HTML file: no scripts, no links, plots as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from workbench.report import conversations
from workbench.report.findings import Listing, by_severity
from workbench.report.tables import (
    distance,
    kernel_name,
    microseconds,
    ranked_candidates,
    settings,
    times_roofline,
)
from workbench.verify.report import Report, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from workbench.agent.run import Candidate, RunResult
    from workbench.workspace import Workspace

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222;
       max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; }
th, td { text-align: left; vertical-align: top;
         padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.pass, .verified { color: #2b9348; } .fail, .refused, .failed { color: #c1121f; }
.unknown, .lost { color: #b8860b; }
code, pre { font-size: 13px; } pre { margin: 0; white-space: pre-wrap; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
"""
Cell = tuple[str, str]
"""Text (escaped when written) and CSS class."""


def run_html(workspace: Workspace, result: RunResult) -> str:
    """A run's report: settings, plots, winner with checks and premises, all candidates and why refused."""
    from workbench.report.plots import plot_progress, plot_roofline

    chosen, best = result.settings, result.best()
    body = [
        f"<h1>{_text(chosen.op)} at {_text(chosen.workload)} for {_text(chosen.arch)}</h1>",
        _paragraph(
            f"Run {chosen.run_id}: agent {chosen.agent}, seed {chosen.seed}, {len(result.candidates)}"
            f" candidates in {result.seconds:.1f} s. Times are predicted for {chosen.machine}, not measured;"
            f" the roofline is {microseconds(result.roofline_us)}."
        ),
        *(_paragraph(line) for line in conversations.summary(result)),
        _figure(plot_progress(result)),
        _figure(plot_roofline(result, workspace)),
        *_winner(result, best),
        "<h2>Candidates</h2>",
        _candidates(result),
        *_refusals(result),
    ]
    title = _text(f"{chosen.op} {chosen.workload}: {chosen.run_id}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _winner(result: RunResult, best: Candidate | None) -> list[str]:
    if best is None:
        nothing = "No candidate passed every check; nothing was exported."
        return ["<h2>Winner</h2>", _paragraph(nothing)]
    parts = [
        "<h2>Winner</h2>",
        _paragraph(
            f"#{best.proposal.index} {best.proposal.template} ({settings(best.proposal.knobs)}): predicted"
            f" {microseconds(best.predicted_us)},"
            f" {distance(best.predicted_us, result.roofline_us)} the roofline;"
            f" exported to {result.exported}."
        ),
    ]
    if best.report is not None:
        parts.append(_checks(best.report))
    if best.prediction is not None:
        parts += [
            "<h3>Where the predicted time goes</h3>",
            _table(
                ("kernel", "us", "gap us", "limited by", "because"),
                [
                    [
                        (kernel_name(p.kernel), ""),
                        (f"{p.us:.3f}", "number"),
                        (f"{p.gap_us:.3f}", "number"),
                        (p.limit, ""),
                        (p.reason, ""),
                    ]
                    for p in best.prediction.launches
                ],
            ),
            "<ul>" + "".join(f"<li>{_text(a)}</li>" for a in best.prediction.premises.assumptions) + "</ul>",
        ]  # fmt: skip
    return parts


def _candidates(result: RunResult) -> str:
    rows: list[list[Cell]] = []
    for c in ranked_candidates(result):
        us = c.predicted_us
        rows.append(
            [
                (str(c.proposal.index), "number"),
                (c.proposal.template, ""),
                (settings(c.proposal.knobs), ""),
                (c.status.value, c.status.value),
                (f"{us:.3f}" if us is not None else "", "number"),
                (times_roofline(us, result.roofline_us), "number"),
                (conversations.origin(c), ""),
                (c.reason, ""),
            ]
        )
    header = ("#", "template", "knobs", "status", "predicted us", "x roofline", "origin", "why")
    return _table(header, rows)


def _refusals(result: RunResult) -> list[str]:
    parts: list[str] = []
    for c in result.candidates:
        if c.report is not None and c.report.verdict is not Verdict.PASS:
            heading = f"#{c.proposal.index} {c.proposal.template} ({settings(c.proposal.knobs)})"
            parts += [f"<h3>{_text(heading)}</h3>", _checks(c.report)]
    return ["<h2>Why candidates were refused</h2>", *parts] if parts else []


def _checks(report: Report) -> str:
    checks = _table(
        ("check", "verdict", ""),
        [[(c.name, ""), (c.verdict.value, c.verdict.value), (c.summary, "")] for c in report.checks],
    )
    findings = "".join(
        f"<li><b>{_text(f.severity.value)} {_text(f.rule)}</b>: {_text(f.message)}"
        + "".join(f"<pre>{_text(f'{place}  {code}')}</pre>" for place, code in Listing().quote(f))
        + (f" Fix: {_text(f.fix)}" if f.fix else "")
        + "</li>"
        for f in by_severity(report.findings)
    )
    return checks + (f"<ul>{findings}</ul>" if findings else "")


def _figure(figure: Figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "workbench"}):  # the same run gives the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{_text(h)}</th>" for h in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{_text(css)}">{_text(t)}</td>' if css else f"<td>{_text(t)}</td>" for t, css in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>"


def _text(text: object) -> str:
    return escape(str(text))
