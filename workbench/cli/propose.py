"""`workbench propose`: search for a kernel and export the winner."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.progress import followed
from workbench.cli.shell import (
    ArchOption,
    DebugOption,
    Exit,
    JsonOption,
    OptionalOpOption,
    QuietOption,
    SeedOption,
    Shell,
    WorkloadOption,
)
from workbench.errors import UnknownNameError


def command(
    op: OptionalOpOption = None,
    workload: WorkloadOption = None,
    arch: ArchOption = "sm_103a",
    agent: Annotated[
        str, typer.Option("--agent", help="Who proposes; `offline` needs no model and no key.")
    ] = "offline",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of the search.")] = 4,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Candidates a round.")] = 7,
    template: Annotated[
        list[str] | None,
        typer.Option("--template", metavar="T", help="Draw from this template only. Repeatable."),
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine that times are predicted for.")
    ] = "gb300",
    seed: SeedOption = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Evaluation processes; by default one a core.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue an interrupted run.")
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Search for a kernel and export the winner.

    Candidates are compiled, simulated, verified and ranked; the winner is written with its evidence.

    Exit code 1 if no candidate passed every check.
    """
    from workbench import api
    from workbench.report.tables import print_run

    shell = Shell(json, quiet, debug)
    if agent != "offline":
        raise UnknownNameError("agent", agent, ["offline"])
    with followed(shell) as on_event:
        result = api.propose(
            op,
            workload,
            arch=arch,
            machine=machine,
            seed=seed,
            rounds=rounds,
            batch=batch,
            templates=template or (),
            workers=workers,
            resume=resume,
            on_event=on_event,
            workspace=shell.workspace(),
        )
    shell.show(result, lambda out: print_run(result, out))
    raise typer.Exit(Exit.GOOD if result.winner is not None else Exit.FINDING)
