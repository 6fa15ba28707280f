"""Where studies live: an Optuna storage, by default one SQLite file under `tuning_db/`.

The file is looked at before Optuna opens it, because Optuna would add its tables to a file that it does not
know.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.records.sqlite import TIMEOUT_S, inspect, read_only_uri

if TYPE_CHECKING:
    import optuna

_KIND = "study storage"


def open_storage(location: str | Path | None) -> optuna.storages.BaseStorage:
    """Open a storage: None keeps studies in memory, a path is a SQLite file, `...://...` a database URL.

    Raises:
        WorkbenchError: if the file is damaged, foreign, or of a newer Optuna, in which case it is left as it
            is; or if the database cannot be reached.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    if location is None:
        return optuna.storages.InMemoryStorage()
    url = str(location)
    path = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else Path(location)
    is_file = "://" not in url or url.startswith("sqlite:///")
    try:
        if is_file:
            _check_file(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            url = f"sqlite:///{path}"
            return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": TIMEOUT_S}})
        return optuna.storages.RDBStorage(url)
    except (SQLAlchemyError, RuntimeError, ImportError, OSError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise WorkbenchError(f"cannot open the {_KIND} {location}: {reason}") from e


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn errors of the database (full disk, lost connection, locked file) into one line about `what`."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as e:
        cause = e.__cause__ if isinstance(e, StorageInternalError) and e.__cause__ is not None else e
        reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        raise WorkbenchError(
            f"cannot write or read {what}: {reason}; free space or check the database, then resume"
        ) from e


def _check_file(path: Path) -> None:
    state = inspect(path, _KIND)
    if state is None or not state.tables:
        return
    if not {"studies", "trials", "alembic_version"} <= state.tables:
        raise WorkbenchError(f"{path} is a SQLite file but no {_KIND}; it was left as it is")
    with closing(sqlite3.connect(read_only_uri(path), uri=True, timeout=TIMEOUT_S)) as db:
        row = db.execute("SELECT version_num FROM alembic_version").fetchone()
    known, head = _versions()
    if row is None or row[0] not in known:
        raise WorkbenchError(
            f"the {_KIND} {path} has schema {row[0] if row else 'none'}, which this Optuna does not know (a "
            "newer one wrote it); it was left as it is: upgrade Optuna or choose another file"
        )
    if row[0] != head:
        raise WorkbenchError(
            f"the {_KIND} {path} has the older schema {row[0]}; it was left as it is: run "
            f"`optuna storage upgrade --storage sqlite:///{path}`"
        )


@lru_cache(maxsize=1)
def _versions() -> tuple[frozenset[str], str]:
    """Schema versions that the installed Optuna knows, and the one it writes."""
    import optuna

    probe = optuna.storages.RDBStorage("sqlite://")
    return frozenset(probe.get_all_versions()), probe.get_head_version()
