"""`workbench export KERNEL`: verify a kernel and write it to generated_kernels/ with its evidence."""

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
    WorkloadOption,
    parse_knobs,
)


def command(
    kernel: KernelArgument,
    op: OptionalOpOption = None,
    workload: WorkloadOption = None,
    knob: KnobOption = None,
    arch: OptionalArchOption = None,
    waive: Annotated[
        list[str] | None,
        typer.Option("--waive", metavar="CHECK", help="Accept that this check could not decide; repeatable."),
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine of the predicted time.")
    ] = "gb300",
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Verify a kernel in full and write it out with its evidence.

    A kernel that fails a check is refused; one that a check could not decide needs --waive CHECK.
    """
    from workbench import api

    shell = Shell(json, quiet, debug)
    workspace = shell.workspace()
    subject = api.compile_kernel(
        kernel, op=op, workload=workload, knobs=parse_knobs(knob or []), arch=arch, workspace=workspace
    )
    shell.note(f"verifying {subject.op}/{subject.template} at {subject.workload} on the simulator (full)")
    document = api.export_kernel(subject, waive=waive or (), machine=machine, seed=seed, workspace=workspace)
    shell.show(
        document,
        lambda console: console.print(
            f"exported to {document.folder}: {', '.join(document.files)}", soft_wrap=True
        ),
    )
