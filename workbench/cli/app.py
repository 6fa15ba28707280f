"""The command line: every command and what happens to an error that leaves one.

Command modules import only what parsing needs; torch, cutlass and optuna come in when a command runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from workbench.cli import (
    audit,
    db,
    doctor,
    evidence,
    export,
    init,
    litmus,
    mcp,
    ops,
    propose,
    replay,
    report,
    tune,
    verify,
)
from workbench.cli.shell import Exit, Interrupted, complain
from workbench.errors import WorkbenchError

app = typer.Typer(
    name="workbench",
    help="Proves, tunes and exports CuTe DSL decode kernels for Kimi K3, without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

for _module in (doctor, ops, init, propose, tune, verify, audit, litmus, report, export, replay, mcp):
    app.command(name=_module.__name__.rpartition(".")[2])(_module.command)
app.add_typer(db.app, name="db")
app.add_typer(evidence.app, name="evidence")


def _version(wanted: bool) -> None:
    if wanted:
        from workbench import __version__

        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    del version


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; every error is one line on standard error.

    `arguments` are those after the program's name, by default the process's own.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=words, prog_name="workbench", standalone_mode=False)
    except typer.TyperException as e:
        return _usage(e)
    except Interrupted as e:
        complain(str(e))
        return Exit.INTERRUPTED
    except WorkbenchError as e:
        if "--debug" in words:
            traceback.print_exc()
        complain(str(e))
        return Exit.UNUSABLE
    except BrokenPipeError:
        # The reader has gone; leave quietly, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.UNUSABLE
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.INTERRUPTED
    except MemoryError:
        complain("out of memory; close other programs or use a smaller workload")
        return Exit.UNUSABLE
    except OSError as e:
        if "--debug" in words:
            traceback.print_exc()
        place = f"{e.filename}: " if e.filename else ""
        complain(f"{place}{e.strerror or e}; check that the path exists, may be used and has free space")
        return Exit.UNUSABLE
    except Exception as e:
        if "--debug" in words:
            traceback.print_exc()
        complain(
            f"internal error: {type(e).__name__}: {e}; run again with --debug for the traceback and report it"
        )
        return Exit.UNUSABLE
    if code == Exit.INTERRUPTED:
        complain("interrupted; nothing half-written is left behind, run the same command again")
    return code if isinstance(code, int) else Exit.GOOD


def _usage(error: typer.TyperException) -> int:
    format_message = getattr(error, "format_message", None)
    message = format_message() if format_message is not None else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return Exit.GOOD
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "workbench"
    complain(f"{message.rstrip('.')}; see `{where} --help`")
    return Exit.UNUSABLE


def run() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(main())
