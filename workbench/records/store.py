"""The record store: an append-only SQLite file that several processes may write at once.

Records are never changed: a later record of the same key supersedes an earlier one, and both stay. A writer
that is killed loses at most the record it was writing (SQLite's write-ahead log). The file carries an
application id and a schema version; a newer or damaged file is refused and left as it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from workbench.errors import WorkbenchError
from workbench.files import write_atomic
from workbench.records.model import SCHEMA, Objective, Record, RecordKey
from workbench.records.sqlite import TIMEOUT_S, inspect

APPLICATION_ID = 0x57424442  # "WBDB"
_KIND = "tuning database"
_METADATA = sa.MetaData()
_RECORDS = sa.Table(
    "records",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String, nullable=False, unique=True),
    sa.Column("key", sa.String, nullable=False, index=True),
    sa.Column("op", sa.String, nullable=False, index=True),
    sa.Column("workload", sa.String, nullable=False),
    sa.Column("template", sa.String, nullable=False),
    sa.Column("arch", sa.String, nullable=False),
    sa.Column("device", sa.String, nullable=False),
    sa.Column("objective", sa.String, nullable=False),
    sa.Column("run", sa.String, nullable=False),
    sa.Column("value_us", sa.Float),
    sa.Column("document", sa.String, nullable=False),
)
_FILTERS = ("op", "workload", "template", "arch", "device", "objective", "run")


@dataclass(frozen=True)
class BadLine:
    """A line of an import that was skipped."""

    line: int
    """1-based."""
    reason: str


@dataclass(frozen=True)
class ImportResult:
    """What an import did."""

    added: int
    known: int
    """Records that the store already had."""
    bad: tuple[BadLine, ...]


class RecordStore:
    """Records in one SQLite file. Safe to share between processes; holds no connection between calls.

    Raises:
        WorkbenchError: on opening a file that is damaged, of a newer schema, or no tuning database; the file
            is left untouched.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._engine = sa.create_engine(
            f"sqlite:///{self.path}", poolclass=NullPool, connect_args={"timeout": TIMEOUT_S}
        )
        sa.event.listen(self._engine, "connect", _configure)
        self._check()

    def add(self, *records: Record) -> None:
        """Append records in one transaction; a record that the store already has is not added again."""
        rows = [_row(r) for r in records]
        if rows:
            with self._begin() as connection:
                connection.execute(sa.insert(_RECORDS).prefix_with("OR IGNORE"), rows)

    def query(
        self,
        *,
        op: str | None = None,
        workload: str | None = None,
        template: str | None = None,
        arch: str | None = None,
        device: str | None = None,
        objective: Objective | None = None,
        run: str | None = None,
        key: RecordKey | None = None,
        history: bool = False,
    ) -> list[Record]:
        """Records that match every given field, oldest first.

        Only the latest record of each key is returned unless `history` is set. Rows that do not validate
        against today's schema (written with fewer fields) are not used; `unusable` counts them.
        """
        wanted = dict(zip(_FILTERS, (op, workload, template, arch, device, objective, run), strict=True))
        statement = sa.select(_RECORDS.c.key, _RECORDS.c.document).order_by(_RECORDS.c.number)
        for name, value in wanted.items():
            if value is not None:
                statement = statement.where(_RECORDS.c[name] == str(value))
        if key is not None:
            statement = statement.where(_RECORDS.c.key == key.hash)
        found: list[Record] = []
        for row in self._rows(statement):
            stored_key, document = row
            record = _parse(document)
            if record is not None and record.key.hash == stored_key:
                found.append(record)
        if history:
            return found
        latest = {r.key.hash: r for r in found}
        return list(latest.values())

    def find(self, key: RecordKey) -> Record | None:
        """The latest record of exactly this key."""
        found = self.query(key=key)
        return found[-1] if found else None

    def best(
        self,
        op: str,
        workload: str,
        arch: str,
        *,
        objective: Objective,
        template: str | None = None,
        device: str | None = None,
        premises: str | None = None,
        tolerance_hash: str | None = None,
        verifier_hash: str | None = None,
    ) -> Record | None:
        """The fastest usable record (verified, with a time) under one set of premises; None if there is none.

        Ties go to the lower key hash, so that the answer does not depend on the order of writing.

        Raises:
            WorkbenchError: if the matching records rest on different premises (device, machine figures or
                timing protocol, tolerances, verifier, axes) and the arguments do not choose between them.
        """
        chosen = {"premises": premises, "tolerance_hash": tolerance_hash, "verifier_hash": verifier_hash}
        found = self.query(
            op=op, workload=workload, arch=arch, objective=objective, template=template, device=device
        )
        usable = [
            r
            for r in found
            if r.is_usable and all(v is None or getattr(r.key, k) == v for k, v in chosen.items())
        ]
        if not usable:
            return None
        shared = ("device", "premises", "tolerance_hash", "verifier_hash", "axes")
        for other in usable[1:]:
            mixed = [n for n in shared if getattr(other.key, n) != getattr(usable[0].key, n)]
            if mixed:
                raise WorkbenchError(
                    f"{self.path}: records of {op} {workload} {arch} rest on different premises "
                    f"({', '.join(mixed)}) and cannot be ranked together; name one"
                )
        return min(usable, key=lambda r: (r.value_us or 0.0, r.key.hash))

    def unusable(self) -> int:
        """Number of rows that today's schema does not accept."""
        return sum(_parse(d) is None for (d,) in self._rows(sa.select(_RECORDS.c.document)))

    def __len__(self) -> int:
        return sum(n for (n,) in self._rows(sa.select(sa.func.count()).select_from(_RECORDS)))

    def export_jsonl(self, path: Path) -> int:
        """Write all usable rows as JSON lines, atomically; returns how many."""
        records = self.query(history=True)
        lines = [json.dumps({"schema": SCHEMA, **r.model_dump(mode="json")}, sort_keys=True) for r in records]
        write_atomic(path, "".join(f"{line}\n" for line in lines))
        return len(lines)

    def import_jsonl(self, path: Path) -> ImportResult:
        """Add records from JSON lines; lines that cannot be read are skipped and reported, never guessed at.

        Raises:
            WorkbenchError: if the file cannot be read.
        """
        try:
            raw = Path(path).read_bytes()
        except OSError as e:
            raise WorkbenchError(f"cannot read {path}: {e.strerror or e}") from e
        good, bad = _read_lines(raw.split(b"\n"))
        before = len(self)
        self.add(*good)
        added = len(self) - before
        return ImportResult(added, len(good) - added, tuple(bad))

    def _check(self) -> None:
        state = inspect(self.path, _KIND)
        if state is None or not (state.tables or state.application_id):
            return
        if state.application_id != APPLICATION_ID:
            raise WorkbenchError(f"{self.path} is a SQLite file but no {_KIND}; it was left as it is")
        if state.version > SCHEMA:
            raise WorkbenchError(
                f"{self.path} has schema {state.version}, newer than this workbench's {SCHEMA}; it was left "
                "as it is: upgrade the workbench or choose another file"
            )
        if state.version < SCHEMA or "records" not in state.tables:
            raise WorkbenchError(
                f"{self.path} has schema {state.version} and this workbench reads {SCHEMA}; it was left as "
                "it is: export it with the version that wrote it and import the lines here"
            )

    def _rows(self, statement: sa.Select[Any]) -> Sequence[Any]:
        if not self.path.exists():
            return []
        try:
            with self._engine.connect() as connection:
                return connection.execute(statement).all()
        except DBAPIError as e:
            if "no such table" in str(e.orig):  # another process is just creating the file
                return []
            raise WorkbenchError(f"cannot read the {_KIND} {self.path}: {e.orig}") from e

    def _begin(self) -> _Transaction:
        return _Transaction(self._engine, self.path)


class _Transaction:
    """One write transaction, begun with the write lock held and the tables in place."""

    def __init__(self, engine: sa.Engine, path: Path) -> None:
        self._engine, self._path = engine, path

    def __enter__(self) -> sa.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._connect()
            self._connection.exec_driver_sql("BEGIN IMMEDIATE")
            if not sa.inspect(self._connection).has_table("records"):
                _METADATA.create_all(self._connection)
                self._connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
                self._connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")
        except (DBAPIError, OSError) as e:
            raise self._error(e) from e
        return self._connection

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._connection.exec_driver_sql("COMMIT")
            else:
                with suppress(DBAPIError):  # SQLite has rolled back by itself where the disk is full
                    self._connection.exec_driver_sql("ROLLBACK")
        except DBAPIError as e:
            raise self._error(e) from e
        finally:
            self._connection.close()
        if isinstance(error, DBAPIError):
            raise self._error(error) from error

    def _connect(self) -> sa.Connection:
        """Connect and switch to the write-ahead log; SQLite refuses at once while another process does."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            connection = self._engine.connect()
            try:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
                return connection
            except OperationalError as e:
                connection.close()
                if "locked" not in str(e.orig) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _error(self, e: Exception) -> WorkbenchError:
        reason = e.orig if isinstance(e, DBAPIError) else e
        advice = "free space or choose a writable folder"
        return WorkbenchError(f"cannot write the {_KIND} {self._path}: {reason}; {advice}")


def _configure(connection: Any, _: object) -> None:
    # Transactions are begun by hand (BEGIN IMMEDIATE), so that creating tables is part of one.
    connection.isolation_level = None


def _row(record: Record) -> dict[str, object]:
    key = record.key
    return {
        "id": record.id, "key": key.hash, "op": key.op, "workload": key.workload, "template": key.template,
        "arch": key.arch, "device": key.device, "objective": key.objective.value, "run": record.run,
        "value_us": record.value_us, "document": record.model_dump_json(),
    }  # fmt: skip


def _parse(document: str) -> Record | None:
    try:
        return Record.model_validate_json(document)
    except ValidationError:
        return None


def _read_lines(lines: Iterable[bytes]) -> tuple[list[Record], list[BadLine]]:
    good: list[Record] = []
    bad: list[BadLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            good.append(_read_line(line))
        except ValueError as e:
            bad.append(BadLine(number, str(e)))
    return good, bad


def _read_line(line: bytes) -> Record:
    try:
        fields = json.loads(line)
    except ValueError as e:
        raise ValueError(f"no JSON: {e}") from None
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    schema = fields.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"schema {schema!r}, expected {SCHEMA}")
    try:
        return Record.model_validate_json(json.dumps(fields))
    except ValidationError as e:
        first = e.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}") from None
