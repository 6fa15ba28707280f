"""`workbench audit FILE`: check the memory ordering of compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shell import (
    DebugOption,
    Exit,
    JsonOption,
    KnobOption,
    OptionalArchOption,
    QuietOption,
    Shell,
    StrictOption,
    UnsafeCompileOption,
    WorkloadOption,
    complain,
    exit_code,
    parse_knobs,
)


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="FILE.ptx, FILE.cubin, FILE.py[:NAME], an exported kernel's folder or a folder of files.",
        ),
    ],
    contract: Annotated[
        Path | None,
        typer.Option(
            "--contract",
            metavar="C.toml",
            help="Launch and buffers of a PTX file or cubin, or arguments of a .py.",
        ),
    ] = None,
    workload: WorkloadOption = None,
    knob: KnobOption = None,
    arch: OptionalArchOption = None,
    strict: StrictOption = False,
    unsafe_compile: UnsafeCompileOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the memory ordering of compiled code.

    Exit code 1 if a finding is an error; 2 if a file cannot be audited; under --strict, 3 if something could
    not be decided.
    """
    from workbench import api
    from workbench.report.audits import print_audit

    shell = Shell(json, quiet, debug)
    document, listings = api.audit_with_code(
        file, contract, workload=workload, knobs=parse_knobs(knob or []), arch=arch
    )
    shell.show(document, lambda console: print_audit(document, console, listings))
    for u in document.unreadable:
        complain(u.message)
    raise typer.Exit(Exit.UNUSABLE if document.unreadable else exit_code(document.verdict, strict))
