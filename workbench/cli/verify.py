"""`workbench verify KERNEL`: check one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    UnsafeCompileOption,
    WorkloadOption,
    exit_code,
    parse_knobs,
)
from workbench.findings import Severity

if TYPE_CHECKING:
    from rich.console import Console


def command(
    kernel: KernelArgument,
    op: OptionalOpOption = None,
    workload: WorkloadOption = None,
    knob: KnobOption = None,
    arch: OptionalArchOption = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Where it runs: `simulator`, or `cuda`, which leaves memory undecided."
        ),
    ] = "simulator",
    level: Annotated[
        str, typer.Option("--level", help="`full`: every check there is; `screen`: a first look.")
    ] = "full",
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="WHAT",
            help="Print what `thread=CTA:THREAD` executes or who touches `address=BUFFER+OFFSET`, "
            "in one run on ordinary inputs, instead of checking.",
        ),
    ] = None,
    seed: SeedOption = 0,
    strict: StrictOption = False,
    unsafe_compile: UnsafeCompileOption = False,
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
    arch = arch or api.check_device(device)
    api.check_level(level)
    if trace is not None:
        from workbench.simulator import Trace

        Trace.parse(trace)
    subject = api.compile_kernel(
        kernel,
        op=op,
        workload=workload,
        knobs=parse_knobs(knob or []),
        arch=arch,
        workspace=shell.workspace(),
    )
    if trace is not None:
        from workbench.report.findings import print_findings
        from workbench.report.trace import print_trace

        shell.note(f"tracing {trace} of {subject.op}/{subject.template} at {subject.workload}")
        document = api.trace_kernel(subject, trace, seed=seed, workspace=shell.workspace())

        def render(console: Console) -> None:
            print_trace(document.trace, trace, console)
            print_findings(document.findings, console, Listing.of(subject))

        shell.show(document, render)
        raise typer.Exit(1 if any(f.severity is Severity.ERROR for f in document.findings) else 0)
    shell.note(f"verifying {subject.op}/{subject.template} at {subject.workload} on {device} ({level})")
    report = api.verify_kernel(subject, level=level, seed=seed, device=device, workspace=shell.workspace())
    shell.show(report, lambda console: print_report(report, console, Listing.of(subject)))
    if not json and not quiet and device == "simulator":
        from workbench.cli.shell import console
        from workbench.report.trace import print_dump

        dump = api.dump_finding(subject, report, seed=seed, workspace=shell.workspace())
        if dump is not None:
            print_dump(dump, console())
    raise typer.Exit(exit_code(report.verdict, strict))
