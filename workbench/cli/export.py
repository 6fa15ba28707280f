"""`workbench export`: one kernel to generated_kernels/ with its evidence, or all winners as a package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shell import (
    DebugOption,
    JsonOption,
    KnobOption,
    OptionalArchOption,
    OptionalOpOption,
    QuietOption,
    SeedOption,
    Shell,
    WorkloadOption,
    parse_knobs,
)
from workbench.errors import UnknownNameError, WorkbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.report.documents import ModuleDocument

DEFAULT_MACHINE = "gb300"
TARGETS = ("module", "vllm")
"""What `--to` takes."""


def command(
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="[KERNEL]",
            show_default=False,
            help="Name of a template, path of a template or candidate file, or an exported kernel's folder.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="Write all winners as a package instead: module, or vllm with its plugin.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder that the package is written to.")
    ] = None,
    pick: Annotated[
        list[str] | None,
        typer.Option(
            "--pick", metavar="KEY", help="Take this winner where several cannot be ranked; repeatable."
        ),
    ] = None,
    op: OptionalOpOption = None,
    workload: WorkloadOption = None,
    knob: KnobOption = None,
    arch: OptionalArchOption = None,
    waive: Annotated[
        list[str] | None,
        typer.Option("--waive", metavar="CHECK", help="Accept that this check could not decide; repeatable."),
    ] = None,
    waivers: Annotated[
        Path | None,
        typer.Option(
            "--waivers",
            metavar="FILE",
            help="Accept the audit findings that this file names, with person and reason.",
        ),
    ] = None,
    draft_waivers: Annotated[
        Path | None,
        typer.Option(
            "--draft-waivers",
            metavar="FILE",
            help="Write such a file, to be filled in, for what is undecided.",
        ),
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine of the predicted time.")
    ] = DEFAULT_MACHINE,
    seed: SeedOption = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Verify a kernel in full and write it out with its evidence, or write all winners as a package.

    A kernel that fails a check is refused; one that a check could not decide needs --waive CHECK, or
    --waivers FILE for single findings of the ordering audit. With --to module --out DIR the winners in
    generated_kernels/ become an installable package, k3_decode.
    """
    shell = Shell(json, quiet, debug)
    if to is not None:
        kernel_options = {"KERNEL": kernel, "--op": op, "--workload": workload, "--arch": arch}
        lists = {"--knob": knob, "--waive": waive}
        files = {"--waivers": waivers, "--draft-waivers": draft_waivers}
        numbers = {"--machine": machine if machine != DEFAULT_MACHINE else None, "--seed": seed}
        given = [n for n, value in {**kernel_options, **lists, **files, **numbers}.items() if value]
        _package(shell, to, out, pick or [], given)
        return
    if out is not None or pick:
        raise WorkbenchError("--out and --pick go with --to module and --to vllm")
    if kernel is None:
        raise WorkbenchError(
            "give the KERNEL to verify and export, or --to module --out DIR for a package of all winners"
        )
    from workbench import api

    workspace = shell.workspace()
    subject = api.compile_kernel(
        kernel, op=op, workload=workload, knobs=parse_knobs(knob or []), arch=arch, workspace=workspace
    )
    shell.note(f"verifying {subject.op}/{subject.template} at {subject.workload} on the simulator (full)")
    document = api.export_kernel(
        subject,
        waive=waive or (),
        waivers=waivers,
        draft_waivers=draft_waivers,
        machine=machine,
        seed=seed,
        workspace=workspace,
    )
    shell.show(
        document,
        lambda console: console.print(
            f"exported to {document.folder}: {', '.join(document.files)}", soft_wrap=True
        ),
    )


def _package(shell: Shell, to: str, out: Path | None, pick: list[str], given: list[str]) -> None:
    """`--to`: the winners as an installable package."""
    if to not in TARGETS:
        raise UnknownNameError("target", to, TARGETS)
    if given:
        raise WorkbenchError(f"{given[0]} does not go with --to {to}, which takes all winners; leave it out")
    if out is None:
        raise WorkbenchError(f"--to {to} needs --out DIR, the folder to write")
    from workbench.export.module import write_module

    document = write_module(shell.workspace(), out, pick, plugin=to == "vllm")
    shell.show(document, lambda console: _show_package(document, console))


def _show_package(document: ModuleDocument, console: Console) -> None:
    console.print(f"{document.package} {document.version} written to {document.folder}", soft_wrap=True)
    for k in document.kernels:
        time = "no predicted time" if k.predicted_us is None else f"{float(k.predicted_us):.2f} us predicted"
        waived = f"; waived: {', '.join(k.waived)}" if k.waived else ""
        console.print(f"  {k.op} {k.workload} {k.arch}: {k.key[:12]}, {time}{waived}", soft_wrap=True)
    if document.by_reference:
        console.print(f"  by reference: {', '.join(document.by_reference)}", soft_wrap=True)
    if document.passed_over:
        console.print(f"  {len(document.passed_over)} winners passed over for better ones", soft_wrap=True)
    console.print(f"wheel {document.wheel}, {document.wheel_nbytes / 1024:.0f} KiB", soft_wrap=True)
