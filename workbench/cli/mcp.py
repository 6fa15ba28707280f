"""`workbench mcp`: serve the desk to an outside coding agent."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.shell import (
    ArchOption,
    DebugOption,
    OpOption,
    SeedOption,
    Shell,
    UnsafeCompileOption,
    WorkloadOption,
)
from workbench.errors import WorkbenchError


def command(
    op: OpOption,
    workload: WorkloadOption = None,
    arch: ArchOption = "sm_103a",
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine that times are predicted for.")
    ] = "gb300",
    seed: SeedOption = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Evaluation processes; by default one a core.")
    ] = None,
    max_candidates: Annotated[
        int | None, typer.Option("--max-candidates", min=1, help="Candidates that may be submitted.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", min=1.0, help="Wall time in which they may be.")
    ] = None,
    unsafe_compile: UnsafeCompileOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve tools for one op over MCP, on standard input and output.

    A coding agent that speaks MCP reads contracts, submits kernels and reads their reports; the checks and
    the sandbox are those of `propose`.
    """
    import anyio

    from workbench import api

    try:
        from workbench.agent.mcp_server import Allowance, DeskServer, open_desk
    except ImportError as e:
        raise WorkbenchError("the MCP SDK is missing; install it with `pip install 'workbench[mcp]'`") from e

    workspace = Shell(debug=debug).workspace()
    name = workload if workload is not None else api.default_workload(op, workspace)
    with open_desk(workspace, op, name, arch=arch, machine=machine, seed=seed, workers=workers) as desk:
        anyio.run(DeskServer(desk, Allowance(max_candidates, max_seconds)).serve)
