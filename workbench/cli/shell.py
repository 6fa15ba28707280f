"""What every command shares: its options, where its output goes, and how an error leaves it.

Documents and tables go to standard output, progress and errors to standard error. An error is one line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from workbench.verify.report import Verdict
    from workbench.workspace import Workspace


class Exit(IntEnum):
    """Exit codes of every command."""

    GOOD = 0
    FINDING = 1
    """A check failed, a finding is an error, or the machine lacks something."""
    UNUSABLE = 2
    """Bad usage, unreadable input, or an error of the workbench itself; one line says which."""
    UNDECIDED = 3
    """A check could not decide, under `--strict`."""
    INTERRUPTED = 130


class Interrupted(WorkbenchError):  # noqa: N818
    """Ctrl-C during work that can be continued; the message says how."""


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no tables; errors still show.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Exit 3 where a check could not decide.")]


def _allow_unsafe(value: bool) -> bool:
    if value:
        from workbench.compile import policy

        policy.allow_unsafe()
    return value


UnsafeCompileOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-compile",
        help="Compile even if this machine lacks a required fence (see `workbench doctor`); for trusted code",
        callback=_allow_unsafe,
    ),
]
OpOption = Annotated[
    str, typer.Option("--op", metavar="OP", help="Name of the op; `workbench ops` lists them.")
]
OptionalOpOption = Annotated[
    str | None, typer.Option("--op", metavar="OP", help="Op of the kernel, where KERNEL does not say it.")
]
WorkloadOption = Annotated[
    str | None, typer.Option("--workload", metavar="W", help="Workload; by default the op's first.")
]
ArchOption = Annotated[
    str, typer.Option("--arch", metavar="ARCH", help="Target: sm_103a, sm_100a or sm_90a.")
]
OptionalArchOption = Annotated[
    str | None,
    typer.Option("--arch", metavar="ARCH", help="Target; by default sm_103a, or what KERNEL was built for."),
]
KernelArgument = Annotated[
    str,
    typer.Argument(
        metavar="KERNEL",
        help="Name of a template, path of a template or candidate file, or an exported kernel's folder.",
    ),
]
KnobOption = Annotated[
    list[str] | None,
    typer.Option(
        "--knob", metavar="NAME=VALUE", help="Set a knob; the others keep their defaults. Repeatable."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same result.")]


@dataclass(frozen=True)
class Shell:
    """How one command speaks."""

    json: bool = False
    quiet: bool = False
    debug: bool = False

    def show(self, document: BaseModel, render: Callable[[Console], None]) -> None:
        """Print `document` as JSON under `--json`; otherwise let `render` print it for people."""
        if self.json:
            sys.stdout.write(document.model_dump_json(by_alias=True) + "\n")
            sys.stdout.flush()
        elif not self.quiet:
            render(console())

    def note(self, text: str) -> None:
        """One line of progress on standard error."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    @property
    def wants_progress(self) -> bool:
        """True if progress should be drawn on standard error."""
        return not self.quiet

    def workspace(self) -> Workspace:
        """The workspace that the command works in; raises WorkbenchError if there is none."""
        from workbench.workspace import Workspace

        return Workspace.find()


def console(*, stderr: bool = False) -> Console:
    """A console that wraps at 120 columns where there is no terminal to ask."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 120)


def complain(message: str) -> None:
    """Print one line on standard error."""
    print(f"workbench: {' '.join(message.split())}", file=sys.stderr, flush=True)


def given(context: typer.Context) -> dict[str, object]:
    """Values of the parameters that stand on the command line, by name; defaults are left out."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {
        n: context.params[n] for n, source in sources if source is not None and source.name == "COMMANDLINE"
    }


def option(name: str) -> str:
    """A parameter's name as it is written on the command line."""
    return "--" + name.replace("_", "-")


def exit_code(verdict: Verdict, strict: bool) -> Exit:
    """Exit code that goes with a verdict."""
    if verdict.value == "fail":
        return Exit.FINDING
    return Exit.UNDECIDED if strict and verdict.value == "unknown" else Exit.GOOD


def parse_knobs(texts: list[str]) -> dict[str, int | str | bool]:
    """Read `name=value` settings: integers, `true`/`false`, else text.

    Raises:
        WorkbenchError: if one has no `=` or a name comes twice.
    """
    knobs: dict[str, int | str | bool] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise WorkbenchError(
                f"--knob {text!r} is not of the form name=value, for instance --knob threads=128"
            )
        if name in knobs:
            raise WorkbenchError(f"--knob {name} is given twice")
        knobs[name] = _value(value)
    return knobs


def _value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text, 0)
    except ValueError:
        return text
