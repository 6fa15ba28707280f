"""`workbench evidence`: bundles of evidence that anyone can check and repeat."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shell import (
    DebugOption,
    JsonOption,
    QuietOption,
    Shell,
    StrictOption,
    UnsafeCompileOption,
    exit_code,
)
from workbench.errors import UnknownNameError, WorkbenchError

if TYPE_CHECKING:
    from workbench.export.evidence.check import Signature

app = typer.Typer(
    help="Bundles of evidence that anyone can check and repeat: make, check, run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="A file that `workbench evidence make` wrote.")
]
SummaryOption = Annotated[
    Path | None,
    typer.Option("--summary", metavar="FILE.md", help="Write a Markdown summary fit for a pull request."),
]


@app.command()
def make(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KERNEL]...",
            show_default=False,
            help="Folders of exported kernels, or beginnings of keys; by default all in generated_kernels/.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File that the bundle is written to.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure each kernel on this machine's CUDA device as well.")
    ] = False,
    sign: Annotated[
        str | None, typer.Option("--sign", metavar="TOOL", help="Sign the bundle: minisign or sigstore.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="minisign's secret key; by default its own.")
    ] = None,
    summary: SummaryOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write exported kernels with all of their evidence to one file.

    The same exports give the same bytes. The file holds sources, PTX, SASS, cubins, reports, seeds, raw
    samples, machine descriptions and the premises of every number.
    """
    from workbench.export.evidence import make as making
    from workbench.export.evidence import signing
    from workbench.files import check_destination, write_atomic
    from workbench.report.evidence_text import make_markdown, print_make

    shell = Shell(json, quiet, debug)
    if out is None:
        raise WorkbenchError("give the file to write with --out FILE")
    if summary is not None:
        check_destination(summary, out)
    if sign is not None:
        if sign not in signing.TOOLS:
            raise UnknownNameError("tool", sign, signing.TOOLS)
        signing.find_tool(sign)
    elif key is not None:
        raise WorkbenchError("--key goes with --sign minisign")
    workspace = shell.workspace()
    measuring = None
    if measure:
        from workbench.export.evidence.timing import measurer

        measuring = measurer(workspace)
    folders = making.find_kernels(workspace, kernels or [])
    document = making.make_bundle(workspace, out, folders, measuring)
    if sign is not None:
        signature = signing.sign(out, sign, key)
        document = document.model_copy(update={"signature": str(signature)})
    if summary is not None:
        write_atomic(summary, make_markdown(document))
    shell.show(document, lambda console: print_make(document, console))


@app.command()
def check(
    bundle: BundleArgument,
    sha256: Annotated[
        str | None, typer.Option("--sha256", metavar="HEX", help="What the file's SHA-256 is said to be.")
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(
            "--public-key", metavar="KEY", help="Check BUNDLE.minisig with this key or file of a key."
        ),
    ] = None,
    signer: Annotated[
        str | None,
        typer.Option("--signer", metavar="WHO", help="Check BUNDLE.sigstore.json: identity of the signer."),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option("--issuer", metavar="URL", help="Who vouches for the signer's identity.")
    ] = None,
    summary: SummaryOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check that a bundle is as it was written and holds together; offline, nothing in it is run.

    Exit code 1 if a byte was changed or two parts contradict each other; the member is named.
    """
    from workbench.export.evidence.check import check_bundle
    from workbench.files import check_destination, write_atomic
    from workbench.report.evidence_text import check_markdown, print_check

    shell = Shell(json, quiet, debug)
    if summary is not None:
        check_destination(summary, bundle)
    if sha256 is not None and re.fullmatch("[0-9a-fA-F]{64}", sha256.strip()) is None:
        raise WorkbenchError(f"--sha256 {sha256!r} is no SHA-256: give its 64 hexadecimal digits")
    document = check_bundle(bundle, sha256=sha256, signature=_signature(public_key, signer, issuer))
    if summary is not None:
        write_atomic(summary, check_markdown(document))
    shell.show(document, lambda console: print_check(document, console))
    raise typer.Exit(exit_code(document.verdict, strict=False))


@app.command()
def run(
    bundle: BundleArgument,
    pick: Annotated[
        list[str] | None,
        typer.Option("--pick", metavar="KEY", help="Repeat this kernel alone; repeatable."),
    ] = None,
    summary: SummaryOption = None,
    strict: StrictOption = False,
    unsafe_compile: UnsafeCompileOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile, verify and audit a bundle's kernels again, time them where there is a GPU, and compare.

    Exit code 1 if a result differs from what the bundle states; 2 if the bundle is damaged; under --strict, 3
    if something that it states could not be repeated here.
    """
    from workbench.export.evidence.run import run_bundle
    from workbench.files import check_destination, write_atomic
    from workbench.report.evidence_text import print_run, run_markdown

    shell = Shell(json, quiet, debug)
    if summary is not None:
        check_destination(summary, bundle)
    document = run_bundle(shell.workspace(), bundle, pick or [], shell.note)
    if summary is not None:
        write_atomic(summary, run_markdown(document))
    shell.show(document, lambda console: print_run(document, console))
    raise typer.Exit(exit_code(document.verdict, strict))


def _signature(public_key: str | None, signer: str | None, issuer: str | None) -> Signature | None:
    from workbench.export.evidence import signing

    if public_key is not None and (signer or issuer):
        raise WorkbenchError(
            "--public-key is for minisign, --signer and --issuer for sigstore; give one of them"
        )
    if (signer is None) != (issuer is None):
        raise WorkbenchError("--signer and --issuer go together")
    if public_key is not None:
        signing.find_tool("minisign")
        return lambda path: signing.verify_minisign(path, public_key)
    if signer is not None and issuer is not None:
        signing.find_tool("sigstore")
        return lambda path: signing.verify_sigstore(path, signer, issuer)
    return None
