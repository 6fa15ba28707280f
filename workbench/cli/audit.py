"""`workbench audit FILE`: check the memory ordering of compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import (
    DebugOption,
    JsonOption,
    KnobOption,
    OptionalArchOption,
    QuietOption,
    Shell,
    StrictOption,
    WorkloadOption,
    exit_code,
    parse_knobs,
)


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="FILE.ptx, FILE.cubin, FILE.py[:NAME] or an exported kernel's folder."
        ),
    ],
    contract: Annotated[
        Path | None,
        typer.Option("--contract", metavar="C.toml", help="Launch and buffers of a bare PTX file or cubin."),
    ] = None,
    workload: WorkloadOption = None,
    knob: KnobOption = None,
    arch: OptionalArchOption = None,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the memory ordering of compiled code.

    Exit code 1 if a finding is an error; under --strict, 3 if something could not be decided.
    """
    from workbench import api
    from workbench.report.tables import print_audit

    shell = Shell(json, quiet, debug)
    document, listing = api.audit_with_code(
        file, contract, workload=workload, knobs=parse_knobs(knob or []), arch=arch
    )
    shell.show(document, lambda console: print_audit(document, console, listing))
    raise typer.Exit(exit_code(document.verdict, strict))
