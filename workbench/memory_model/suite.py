"""Many litmus tests at once, compared with expected verdicts."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from workbench.memory_model.explore import LIMIT, decide
from workbench.memory_model.reader import read
from workbench.memory_model.text import LitmusError


class LitmusResult(BaseModel):
    """One test."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    path: str
    """Path of the test as it was given, or within the folder that was given."""
    verdict: Literal[0, 1] | None
    """1: the condition holds under its quantifier; null: undecided."""
    expected: Literal[0, 1] | None
    """Expected verdict, where there is one."""
    seconds: float


class LitmusDocument(BaseModel):
    """What `workbench litmus --json` prints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    tests: tuple[LitmusResult, ...]
    decided: int
    """Tests with a verdict."""
    agree: int
    """Tests whose verdict is the expected one."""

    @property
    def disagreements(self) -> tuple[LitmusResult, ...]:
        """Tests that were decided otherwise than expected."""
        return tuple(t for t in self.tests if None not in (t.verdict, t.expected) and t.verdict != t.expected)

    @property
    def undecided(self) -> tuple[LitmusResult, ...]:
        """Tests without a verdict."""
        return tuple(t for t in self.tests if t.verdict is None)


def find_tests(paths: Iterable[Path]) -> list[tuple[str, Path]]:
    """Tests that are meant: files as they are, and every `.litmus` file below folders.

    Returns:
        name and path of each; the names of those below a folder are relative to it.

    Raises:
        LitmusError: if a path is neither, or a folder holds no test.
    """
    found: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_dir():
            below = sorted(path.rglob("*.litmus"))
            if not below:
                raise LitmusError(path, "there is no .litmus file in this folder")
            found.extend((p.relative_to(path).as_posix(), p) for p in below)
        elif path.is_file():
            found.append((str(path), path))
        else:
            raise LitmusError(path, "there is no such file or folder")
    return found


def read_expected(path: Path) -> dict[str, int]:
    """Read expected verdicts: rows `path,0` or `path,1`, paths relative to the file.

    Returns:
        verdict by path as written.

    Raises:
        LitmusError: with the line of a row that is not of this form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise LitmusError(path, f"cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise LitmusError(path, "is not UTF-8 text") from e
    expected: dict[str, int] = {}
    try:
        for line, row in enumerate(csv.reader(text.splitlines()), 1):
            if not row or (line == 1 and row == ["path", "verdict"]):
                continue
            if len(row) != 2 or row[1].strip() not in ("0", "1"):
                raise LitmusError(path, "expected a row `path,0` or `path,1`", line)
            if row[0].strip() in expected:
                raise LitmusError(path, f"{row[0].strip()} is there twice", line)
            expected[row[0].strip()] = int(row[1])
    except csv.Error as e:
        raise LitmusError(path, f"is not a table of comma-separated values: {e}") from e
    return expected


def check_files(
    paths: Iterable[Path],
    expected: Path | None = None,
    limit: int = LIMIT,
    note: Callable[[str], None] = lambda _: None,
) -> LitmusDocument:
    """Decide litmus tests.

    Args:
        paths: files, and folders of them.
        expected: table of expected verdicts; see `read_expected`.
        limit: candidates to look at before a test is given up.
        note: is told why a test was given up.

    Raises:
        LitmusError: for a file that cannot be understood, or expected verdicts of other tests alone.
    """
    wanted = _by_path(expected) if expected is not None else {}
    tests = find_tests(paths)
    if expected is not None and not any(path.resolve() in wanted for _, path in tests):
        raise LitmusError(expected, "names none of these tests; its paths are relative to itself")
    parsed = [(name, path, read(path)) for name, path in tests]
    results = []
    for name, path, test in parsed:
        start = time.perf_counter()
        decision = decide(test, limit)
        seconds = time.perf_counter() - start
        if decision.holds is None:
            note(f"{name}: undecided: {decision.reason}")
        results.append(
            LitmusResult(
                path=name,
                verdict=None if decision.holds is None else (1 if decision.holds else 0),
                expected=_binary(wanted.get(path.resolve())),
                seconds=round(seconds, 6),
            )
        )
    decided = sum(r.verdict is not None for r in results)
    agree = sum(r.verdict is not None and r.verdict == r.expected for r in results)
    return LitmusDocument(tests=tuple(results), decided=decided, agree=agree)


def _by_path(expected: Path) -> Mapping[Path, int]:
    return {(expected.parent / name).resolve(): value for name, value in read_expected(expected).items()}


def _binary(value: int | None) -> Literal[0, 1] | None:
    return None if value is None else 1 if value else 0
