from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from workbench.agent.run import RunResult
from workbench.cost import load_machine
from workbench.report.plots import plot_progress, plot_roofline
from workbench.workspace import Workspace

REPOSITORY = Workspace(Path(__file__).parents[2])


def curve(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    (line,) = [line for line in figure.axes[0].get_lines() if str(line.get_label()).startswith(label)]
    return list(np.asarray(line.get_xdata(), float)), list(np.asarray(line.get_ydata(), float))


def test_progress_shows_each_candidate_once(result: RunResult) -> None:
    figure = plot_progress(result)
    assert curve(figure, "verified") == ([0, 2], [5.5, 4.25])
    assert curve(figure, "best so far") == ([0, 2], [5.5, 4.25])
    assert curve(figure, "refused")[0] == [1, 3]
    assert curve(figure, "roofline")[1] == [0.5, 0.5]


def test_a_roofline_far_below_is_named_and_leaves_the_candidates_their_space(result: RunResult) -> None:
    figure = plot_progress(result.model_copy(update={"roofline_us": 0.001}))
    assert curve(figure, "roofline 0.001 us (far below)") == ([], [])
    assert figure.axes[0].get_ylim()[0] > 3


def test_best_so_far_never_rises(result: RunResult) -> None:
    swapped = result.model_copy(update={"candidates": tuple(reversed(result.candidates))})
    assert curve(plot_progress(swapped), "best so far")[1] == [4.25, 4.25]


def test_candidates_lie_under_the_roofline(result: RunResult) -> None:
    figure = plot_roofline(result, REPOSITORY)
    machine = load_machine("gb300")
    xs, rates = curve(figure, "verified candidates")
    intensity = xs[0]
    assert intensity == pytest.approx(3584 * 4 / (2 * 3584 * 3))
    assert rates == pytest.approx([3584 * 4 / 5.5 / 1e6, 3584 * 4 / 4.25 / 1e6])
    assert all(rate <= intensity * machine.chip.hbm_tb_s for rate in rates)
    assert curve(figure, "winner")[1] == [rates[1]]
    ceiling = curve(figure, "limit of the op")[1][0]
    assert ceiling == pytest.approx(intensity * machine.chip.hbm_tb_s)


def test_a_run_without_a_time_is_still_drawn(result: RunResult) -> None:
    none = result.model_copy(update={"candidates": (result.candidates[1],), "winner": None})
    for figure in (plot_progress(none), plot_roofline(none, REPOSITORY)):
        figure.savefig(io.BytesIO(), format="png")
