"""`workbench verify KERNEL`: check one kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.shell import (
    DebugOption,
    JsonOption,
    KernelArgument,
    KnobOption,
    OptionalArchOption,
    OptionalOpOption,
    QuietOption,
    SeedOption,
    Shell,
    StrictOption,
    WorkloadOption,
    exit_code,
    parse_knobs,
)
from workbench.errors import UnknownNameError


def command(
    kernel: KernelArgument,
    op: OptionalOpOption = None,
    workload: WorkloadOption = None,
    knob: KnobOption = None,
    arch: OptionalArchOption = None,
    device: Annotated[str, typer.Option("--device", help="Where it runs: `simulator`.")] = "simulator",
    level: Annotated[
        str, typer.Option("--level", help="`full`: every check there is; `screen`: a first look.")
    ] = "full",
    seed: SeedOption = 0,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a kernel's numerics, memory accesses and ordering.

    Exit code 1 if a check fails; under --strict, 3 if one could not decide.
    """
    from workbench import api
    from workbench.report.findings import Listing
    from workbench.report.tables import print_report

    shell = Shell(json, quiet, debug)
    if device != "simulator":
        raise UnknownNameError("device", device, ["simulator"])
    api.check_level(level)
    subject = api.compile_kernel(
        kernel,
        op=op,
        workload=workload,
        knobs=parse_knobs(knob or []),
        arch=arch,
        workspace=shell.workspace(),
    )
    shell.note(f"verifying {subject.op}/{subject.template} at {subject.workload} on the simulator ({level})")
    report = api.verify_kernel(subject, level=level, seed=seed, workspace=shell.workspace())
    shell.show(report, lambda console: print_report(report, console, Listing.of(subject)))
    raise typer.Exit(exit_code(report.verdict, strict))
