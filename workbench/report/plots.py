"""Two plots: how a search went, and where its candidates lie under the roofline.

Each returns a matplotlib `Figure` that belongs to no global state: a notebook shows it, HTML embeds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib.ticker
from matplotlib.figure import Figure

from workbench.report.tables import microseconds
from workbench.workspace import Workspace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from workbench.agent.run import Candidate, RunResult

_VERIFIED, _REFUSED, _LIMIT, _WINNER = "#2a6f97", "#c1121f", "#444444", "#2b9348"
_FAR = 10
"""Times the roofline from which on it is named rather than drawn."""


def plot_progress(result: RunResult) -> Figure:
    """Predicted time of each candidate in the order they were proposed, with the best so far.

    Candidates without a time, because a check refused them or they did not compile, stand at the top edge.
    """
    figure, axes = _axes("candidate", "predicted time (us)")
    timed = _timed(result)
    if timed:
        numbers = [c.proposal.index for c, _ in timed]
        times = [us for _, us in timed]
        best = [min(times[: i + 1]) for i in range(len(times))]
        axes.plot(numbers, times, "o", color=_VERIFIED, ms=5, alpha=0.8, label="verified")
        axes.step(numbers, best, where="post", color=_VERIFIED, lw=1.2, label="best so far")
    refused = [c.proposal.index for c in result.candidates if c.predicted_us is None]
    if refused:
        axes.plot(
            refused,
            [0.98] * len(refused),
            "x",
            color=_REFUSED,
            ms=6,
            transform=axes.get_xaxis_transform(),
            label="refused or failed",
        )
    label = f"roofline {microseconds(result.roofline_us)}"
    if timed and min(us for _, us in timed) > _FAR * result.roofline_us:
        # Drawn to scale it would squeeze the candidates into one line.
        axes.plot([], [], color=_LIMIT, ls="--", lw=1, label=f"{label} (far below)")
    else:
        axes.axhline(result.roofline_us, color=_LIMIT, ls="--", lw=1, label=label)
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    settings = result.settings
    axes.set_title(f"{settings.op} {settings.workload}: search (times predicted for {settings.machine})")
    axes.legend(fontsize=8)
    return figure


def plot_roofline(result: RunResult, workspace: Workspace | None = None) -> Figure:
    """Candidates under the machine's roofline: useful FLOP/s against FLOPs a compulsory byte, log-log.

    A candidate's rate is the op's FLOPs over its predicted time. All candidates of a run do the same work and
    so share one abscissa.

    Args:
        result: the run.
        workspace: holds the op's verifier; by default the one at or above the current folder.
    """
    from workbench.cost import load_machine, roofline
    from workbench.ops import load_op

    settings = result.settings
    machine = load_machine(settings.machine)
    op = load_op(workspace or Workspace.find(), settings.op)
    limit = roofline(op, op.workload(settings.workload), machine)
    bandwidth, peak = machine.chip.hbm_tb_s, machine.peak_tflops[limit.rate]
    figure, axes = _axes("FLOP / compulsory byte", "TFLOP/s")
    intensity = limit.flops / limit.bytes
    ridge = peak / bandwidth
    left, right = min(intensity, ridge) / 8, max(intensity, ridge) * 8
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color=_LIMIT, lw=1.5)
    middle = (left * ridge) ** 0.5
    beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": _LIMIT}
    axes.annotate(f"{bandwidth:g} TB/s", (middle, middle * bandwidth), (-6, 4), ha="right", **beside)
    axes.annotate(f"{peak:g} TFLOP/s {limit.rate}", (right, peak), (0, 5), ha="right", **beside)
    ceiling = limit.flops / limit.us / 1e6
    axes.plot(
        [intensity], [ceiling], "_", color=_LIMIT, ms=16, label=f"limit of the op: {microseconds(limit.us)}"
    )
    timed = _timed(result)
    rates = [limit.flops / us / 1e6 for _, us in timed]
    axes.plot(
        [intensity] * len(rates), rates, "o", color=_VERIFIED, ms=5, alpha=0.5, label="verified candidates"
    )
    best = result.best()
    if best is not None and best.predicted_us is not None:
        rate = limit.flops / best.predicted_us / 1e6
        axes.plot(
            [intensity], [rate], "*", color=_WINNER, ms=12, label=f"winner: {microseconds(best.predicted_us)}"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=peak * 4)
    axes.set_title(f"{settings.op} {settings.workload} on {machine.name} (predicted)")
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _timed(result: RunResult) -> list[tuple[Candidate, float]]:
    return [(c, c.predicted_us) for c in result.candidates if c.predicted_us is not None]


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    return figure, axes
