"""`workbench propose`: search for a kernel and export the winner."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.shell import (
    ArchOption,
    DebugOption,
    Exit,
    JsonOption,
    QuietOption,
    SeedOption,
    Shell,
    WorkloadOption,
    complain,
    console,
)
from workbench.errors import UnknownNameError, WorkbenchError

_AGENTS = ("offline",)


def command(
    op: Annotated[str | None, typer.Option("--op", metavar="OP", help="Op to find a kernel for.")] = None,
    workload: WorkloadOption = None,
    arch: ArchOption = "sm_103a",
    agent: Annotated[
        str, typer.Option("--agent", help="Who proposes; `offline` needs no model and no key.")
    ] = "offline",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of the search.")] = 4,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Candidates a round.")] = 8,
    template: Annotated[
        list[str] | None, typer.Option("--template", help="Draw from this template only; repeatable.")
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine that times are predicted for.")
    ] = "gb300",
    seed: SeedOption = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Evaluation processes; one a core.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue an interrupted run.")
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Search for a kernel: compile, verify, rank, and export the winner with its evidence.

    Exit code 1 if no candidate passed every check.
    """
    from workbench.agent.offline import propose
    from workbench.ops import default_workload
    from workbench.report.progress import RunProgress
    from workbench.report.tables import print_run

    shell = Shell(json, quiet, debug)
    workspace = shell.workspace()
    if agent not in _AGENTS:
        raise UnknownNameError("agent", agent, _AGENTS)
    if resume is None:
        if op is None:
            raise WorkbenchError(
                "say what to propose with --op OP (`workbench ops` lists them), or --resume RUN"
            )
        workload = workload or default_workload(workspace, op)
    with RunProgress(console(stderr=True), enabled=shell.wants_progress) as progress:
        try:
            result = propose(
                workspace,
                op or "",
                workload or "",
                arch=arch,
                machine=machine,
                seed=seed,
                rounds=rounds,
                batch=batch,
                templates=template or (),
                workers=workers,
                resume=resume,
                on_event=progress,
            )
        except KeyboardInterrupt:
            if progress.run_id is None:
                raise
            complain(f"interrupted; continue with `workbench propose --resume {progress.run_id}`")
            raise typer.Exit(Exit.INTERRUPTED) from None
    shell.show(result, lambda out: print_run(result, out))
    raise typer.Exit(Exit.GOOD if result.winner is not None else Exit.FINDING)
