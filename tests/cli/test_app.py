from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from workbench.cli import app as application
from workbench.cli import ops
from workbench.errors import WorkbenchError
from workbench.workspace import Workspace

HEAVY = ("torch", "cutlass", "optuna", "numpy", "sqlalchemy", "matplotlib")
COMMANDS = (
    "doctor", "ops", "init", "propose", "tune", "verify", "audit", "litmus", "report", "export", "replay",
    "db",
)  # fmt: skip


def imported_by(code: str) -> set[str]:
    probe = f"import sys\n{code}\nprint(*(m for m in sys.modules if '.' not in m), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"], ["--version"], ["nonsense"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded = imported_by(f"from workbench.cli.app import main\nmain({arguments!r})")
    assert "typer" in loaded and not loaded & set(HEAVY)


def test_the_notebook_import_loads_nothing_heavy() -> None:
    assert not imported_by("import workbench as wb; wb.Workspace; wb.__version__; dir(wb)") & set(HEAVY)


def test_help_names_every_command(run: Any) -> None:
    result = run("--help")
    assert result.code == 0 and result.err == ""
    for command in COMMANDS:
        assert f"\n  {command}" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_json_and_quiet(run: Any, command: str) -> None:
    words = [command] if command != "db" else ["db", "list"]
    result = run(*words, "--help")
    assert result.code == 0
    for option in ("--json", "--quiet", "--debug"):
        assert option in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verfy"], "Did you mean 'verify'?"),
        (["verify"], "Missing argument 'KERNEL'"),
        (["verify", "x", "--nonsense"], "No such option: --nonsense"),
        (["propose", "--rounds", "0"], "--rounds"),
        (["propose", "--rounds", "many"], "--rounds"),
        (["propose", "--op"], "--op"),
        (["db", "drop"], "drop"),
        (["verify", "a", "b"], "b"),
    ],
)
def test_bad_usage_is_one_line(run: Any, arguments: list[str], says: str) -> None:
    complaint = run(*arguments).complaint
    assert says in complaint and "--help" in complaint


def test_without_a_command_the_help_shows(run: Any) -> None:
    result = run()
    assert result.code == 0 and "Commands:" in result.out


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `workbench ops` raise `error` in the middle of its work."""

    def fail(self: object) -> Workspace:
        raise error

    monkeypatch.setattr(ops.Shell, "workspace", fail)


def test_an_error_of_many_lines_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, WorkbenchError("first\nsecond\n   third"))
    assert run("ops").complaint == "workbench: first second third"


def test_an_unexpected_error_is_one_line_with_a_hint(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, RuntimeError("surprise\nof two lines"))
    complaint = run("ops").complaint
    assert "internal error: RuntimeError: surprise of two lines" in complaint and "--debug" in complaint


def test_debug_shows_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, RuntimeError("surprise"))
    result = run("ops", "--debug")
    assert (
        result.code == 2
        and "Traceback" in result.err
        and result.err.strip().splitlines()[-1].startswith("workbench: ")
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "somewhere"), "somewhere: No space left on device"),
        (PermissionError(13, "Permission denied", "there"), "there: Permission denied"),
        (MemoryError(), "out of memory"),
    ],
)
def test_the_machines_own_errors_are_one_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, says: str
) -> None:
    raising(monkeypatch, error)
    assert says in run("ops").complaint


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_130(run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    raising(monkeypatch, error)
    result = run("ops")
    assert result.code == 130 and len(result.err.strip().splitlines()) == 1 and "interrupted" in result.err


def test_outside_a_workspace_it_says_what_to_do(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORKBENCH_ROOT", raising=False)
    assert "workbench init" in run("ops").complaint
    monkeypatch.setenv("WORKBENCH_ROOT", str(tmp_path))
    assert "WORKBENCH_ROOT" in run("ops").complaint


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = "import sys\nfrom workbench.cli.app import main\nsys.exit(main(['report', '--schema', 'verify']))"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable!r} -c {code!r} | head -c 1"],
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_the_console_script_is_the_same_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("workbench ")
    assert application.app.info.name == "workbench"
