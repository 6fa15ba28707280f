"""`workbench ops [OP]`: the ops, or one op's contract."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.shell import DebugOption, JsonOption, QuietOption, Shell
from workbench.errors import WorkbenchError

DEFAULT_MACHINE = "gb300"


def command(
    op: Annotated[str | None, typer.Argument(metavar="[OP]", help="Show this op's contract.")] = None,
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine of the roofline.")
    ] = DEFAULT_MACHINE,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """List the ops, or show one op's contract and rooflines."""
    from workbench.report.contracts import describe_op, list_ops
    from workbench.report.tables import print_op, print_ops

    shell = Shell(json, quiet, debug)
    workspace = shell.workspace()
    if op is None:
        if machine != DEFAULT_MACHINE:
            raise WorkbenchError(
                "--machine is of an op's rooflines; name the op: `workbench ops OP --machine M`"
            )
        listing = list_ops(workspace)
        shell.show(listing, lambda console: print_ops(listing, console))
    else:
        contract = describe_op(workspace, op, machine)
        shell.show(contract, lambda console: print_op(contract, console))
