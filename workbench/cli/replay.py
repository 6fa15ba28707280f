"""`workbench replay SPACE`: score a sampler on a space whose every time is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import DebugOption, JsonOption, QuietOption, Shell


def command(
    space: Annotated[
        Path, typer.Argument(metavar="SPACE", help="Kernel Tuner cache file, .json or .json.gz.")
    ],
    sampler: Annotated[str, typer.Option("--sampler", metavar="S", help="Sampler to score.")] = "tpe",
    budget: Annotated[int, typer.Option("--budget", min=1, help="Evaluations a seed.")] = 200,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, from 0.")] = 10,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Score a sampler on a brute-forced search space.

    Prints the mean fraction of the optimum that the best point reaches after so many evaluations.
    """
    from workbench.report.tables import print_replay
    from workbench.tune import load_space, make_sampler, replay

    shell = Shell(json, quiet, debug)
    make_sampler(sampler, 0)
    loaded = load_space(space)
    shell.note(f"replaying {loaded.name}: {seeds} seeds of {budget} evaluations")
    document = replay(loaded, sampler, budget=budget, seeds=seeds)
    shell.show(document, lambda console: print_replay(document, console))
