"""Opening SQLite files with care: what is damaged, foreign or newer is left as it is and said so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError

_MAGIC = b"SQLite format 3\0"
TIMEOUT_S = 30.0
"""How long a writer waits for another one."""


@dataclass(frozen=True)
class FileState:
    """What an existing database file says about itself."""

    application_id: int
    version: int
    """`PRAGMA user_version`."""
    tables: frozenset[str]


def inspect(path: Path, what: str) -> FileState | None:
    """Look at a database without changing it; None if there is no file or an empty one.

    `what` names the file in messages, for instance "tuning database".

    Raises:
        WorkbenchError: if the file is not a database, is damaged, or cannot be read.
    """
    advice = "it was left as it is; move it away or restore a copy"
    try:
        if not path.exists() or path.stat().st_size == 0:
            return None
        with path.open("rb") as f:
            head = f.read(len(_MAGIC))
    except OSError as e:
        raise WorkbenchError(f"cannot read the {what} {path}: {e.strerror or e}") from e
    if head != _MAGIC:
        raise WorkbenchError(f"{path} is not a {what} (no SQLite header); {advice}")
    try:
        with closing(sqlite3.connect(read_only_uri(path), uri=True, timeout=TIMEOUT_S)) as db:
            problems = [row[0] for row in db.execute("PRAGMA quick_check(1)")]
            if problems != ["ok"]:
                reason = str(problems[0]).splitlines()[-1]
                raise WorkbenchError(f"the {what} {path} is damaged ({reason}); {advice}")
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            tables = frozenset(r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type='table'"))
    except sqlite3.OperationalError as e:
        if "locked" in str(e) or "unable to open" in str(e):
            raise WorkbenchError(f"cannot open the {what} {path}: {e}; try again, or check the folder") from e
        if "readonly" in str(e):
            raise WorkbenchError(
                f"cannot open the {what} {path}: {e}; make the file and its folder writable"
            ) from e
        raise WorkbenchError(f"the {what} {path} is damaged ({e}); {advice}") from e
    except sqlite3.DatabaseError as e:
        raise WorkbenchError(f"the {what} {path} is damaged ({e}); {advice}") from e
    return FileState(application, version, tables)


def read_only_uri(path: Path) -> str:
    """SQLite URI that reads `path` and never writes it."""
    return f"{path.resolve().as_uri()}?mode=ro"
