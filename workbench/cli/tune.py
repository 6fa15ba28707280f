"""`workbench tune`: search the knobs of a template."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.progress import followed
from workbench.cli.shell import (
    ArchOption,
    DebugOption,
    Exit,
    JsonOption,
    OpOption,
    QuietOption,
    SeedOption,
    Shell,
    UnsafeCompileOption,
    WorkloadOption,
)
from workbench.errors import UnknownNameError


def command(
    op: OpOption,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="T", help="Template to tune; by default all of the op's."),
    ] = None,
    workload: WorkloadOption = None,
    arch: ArchOption = "sm_103a",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Points to evaluate.")] = 32,
    objective: Annotated[
        str, typer.Option("--objective", help="`predicted`: the cost model's time on --machine.")
    ] = "predicted",
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine that times are predicted for.")
    ] = "gb300",
    seed: SeedOption = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Evaluation processes; by default one a core.")
    ] = None,
    unsafe_compile: UnsafeCompileOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Search the knobs of a template.

    Every point is compiled, verified and timed by prediction.

    Nothing is exported; `workbench propose` does that. Exit code 1 if no point passed every check.
    """
    from workbench import api
    from workbench.report.tables import print_run

    shell = Shell(json, quiet, debug)
    if objective != "predicted":
        raise UnknownNameError("objective", objective, ["predicted"])
    with followed(shell) as on_event:
        result = api.tune_template(
            op,
            template,
            workload,
            arch=arch,
            trials=trials,
            machine=machine,
            seed=seed,
            workers=workers,
            on_event=on_event,
            workspace=shell.workspace(),
        )
    shell.show(result, lambda out: print_run(result, out))
    raise typer.Exit(Exit.GOOD if result.winner is not None else Exit.FINDING)
