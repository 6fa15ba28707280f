"""Records: the key covers everything; the store survives killed writers and refuses bad files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from workbench.artifact import Resources, Toolchain
from workbench.errors import WorkbenchError
from workbench.records import BufferKey, Objective, Record, RecordKey, RecordStore, differences
from workbench.records.store import APPLICATION_ID

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def make_key(**changes: Any) -> RecordKey:
    fields: dict[str, Any] = {
        "op": "moe",
        "workload": "tp8_b1",
        "axes": {"B": 1, "H": 7168},
        "buffers": (
            BufferKey(
                name="x",
                shape=(1, 7168),
                strides=(7168, 1),
                dtype="bf16",
                role="activation",
                align=256,
                zeroed=False,
            ),
        ),
        "template": "chain",
        "source_hash": "s0",
        "knobs": {"threads": 128, "fused": True, "order": "row"},
        "arch": "sm_103a",
        "device": "gb300",
        "objective": Objective.PREDICTED,
        "premises": "p0",
        "toolchain": Toolchain(
            dsl="4.8.1", flavour="13.x", ptx_isa="9.4", ptxas="13.5", ptxas_flags=("-O3",)
        ),
        "tolerance_hash": "t0",
        "verifier_hash": "v0",
    }
    return RecordKey(**(fields | changes))


def make_record(value: float | None = 5.0, **changes: Any) -> Record:
    key = {k: changes.pop(k) for k in list(changes) if k in RecordKey.model_fields}
    fields: dict[str, Any] = {"verdict": "pass", "started": NOW, "finished": NOW}
    return Record(key=make_key(**key), value_us=value, **(fields | changes))


def leaves(value: Any) -> Any:
    """Every way of changing one leaf of a JSON document."""
    match value:
        case dict():
            for k, v in value.items():
                for changed in leaves(v):
                    yield value | {k: changed}
        case list():
            for i, v in enumerate(value):
                for changed in leaves(v):
                    yield [*value[:i], changed, *value[i + 1 :]]
        case bool():
            yield not value
        case int():
            yield value + 1
        case str():
            yield value + "x"


def test_every_field_of_the_key_changes_its_hash() -> None:
    """Two records that differ in one leaf only, however deep, have different keys."""
    base = make_key()
    document = base.model_dump(mode="json")
    seen = {base.hash}
    touched: set[str] = set()
    for changed in leaves(document):
        if changed["objective"] not in list(Objective):
            changed = changed | {"objective": "measured"}
        role = changed["buffers"][0]
        key = RecordKey.model_validate({**changed, "buffers": [role]})
        assert key.hash not in seen
        seen.add(key.hash)
        touched |= {name.split(".")[0] for name in differences(base, key)}
    assert touched == set(RecordKey.model_fields)
    assert set(document["buffers"][0]) == set(BufferKey.model_fields)


def test_added_or_missing_entries_change_the_hash() -> None:
    base = make_key()
    variants = [
        make_key(axes={"B": 1}),
        make_key(axes={"B": 1, "H": 7168, "K": 16}),
        make_key(knobs={"threads": 128}),
        make_key(buffers=()),
        make_key(knobs={"threads": 128, "fused": 1, "order": "row"}),
        make_key(knobs={"threads": "128", "fused": True, "order": "row"}),
        make_key(toolchain=base.toolchain.model_copy(update={"ptxas_flags": ("-O3", "-v")})),
    ]
    assert len({base.hash, *(v.hash for v in variants)}) == len(variants) + 1


def test_order_of_knobs_does_not_matter() -> None:
    a = make_key(knobs={"a": 1, "b": 2})
    b = make_key(knobs={"b": 2, "a": 1})
    assert a.hash == b.hash and differences(a, b) == ()


@pytest.mark.parametrize("field", sorted(RecordKey.model_fields))
def test_record_with_fewer_fields_is_ignored(field: str, tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(make_record())
    with sqlite3.connect(store.path) as db:
        (document,) = db.execute("SELECT document FROM records").fetchone()
        old = json.loads(document)
        del old["key"][field]
        db.execute("UPDATE records SET document = ?", (json.dumps(old),))
    assert store.query() == [] and store.unusable() == 1
    assert store.best("moe", "tp8_b1", "sm_103a", objective=Objective.PREDICTED) is None


def test_record_whose_stored_key_disagrees_is_ignored(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(make_record())
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE records SET document = replace(document, '\"sm_103a\"', '\"sm_100a\"')")
    assert store.query(op="moe") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_impossible_times_are_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        make_record(value)


def test_failures_never_win(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(
        make_record(5.0, knobs={"t": 1}),
        make_record(1.0, knobs={"t": 2}, verdict="fail", failure="verify"),
        make_record(1.5, knobs={"t": 3}, verdict="unknown"),
        make_record(None, knobs={"t": 4}, verdict=None, failure="compiler"),
        make_record(2.0, knobs={"t": 5}, verdict=None),
    )
    best = store.best("moe", "tp8_b1", "sm_103a", objective=Objective.PREDICTED)
    assert best is not None and best.key.knobs == {"t": 1}


def test_predicted_and_measured_never_meet(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(make_record(2.0), make_record(9.0, objective=Objective.MEASURED, device="NVIDIA GB300"))
    best = store.best("moe", "tp8_b1", "sm_103a", objective=Objective.MEASURED)
    assert best is not None and best.value_us == 9.0


@pytest.mark.parametrize("field", ["device", "premises", "tolerance_hash", "verifier_hash"])
def test_ranking_across_premises_is_refused(field: str, tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(make_record(2.0), make_record(1.0, **{field: "other"}))
    with pytest.raises(WorkbenchError, match=field):
        store.best("moe", "tp8_b1", "sm_103a", objective=Objective.PREDICTED)
    chosen: dict[str, Any] = {field: getattr(make_key(), field)}
    best = store.best("moe", "tp8_b1", "sm_103a", objective=Objective.PREDICTED, **chosen)
    assert best is not None and best.value_us == 2.0


def test_later_record_of_a_key_supersedes(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(make_record(2.0), make_record(3.0), make_record(2.5, knobs={"t": 1}))
    assert [r.value_us for r in store.query(op="moe")] == [3.0, 2.5]
    assert len(store.query(op="moe", history=True)) == 3
    best = store.best("moe", "tp8_b1", "sm_103a", objective=Objective.PREDICTED)
    assert best is not None and best.value_us == 2.5
    found = store.find(make_key())
    assert found is not None and found.value_us == 3.0
    assert store.find(make_key(arch="sm_100a")) is None


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    record = make_record(
        3.25, resources={"k": Resources(registers=64)}, samples_us=(3.2, 3.3), seed=7, run="r"
    )
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(record, record)
    assert store.query() == [record] and len(store) == 1


def test_export_import_is_idempotent_and_skips_bad_lines(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "a.sqlite")
    store.add(*(make_record(float(i + 1), knobs={"t": i}) for i in range(4)))
    lines = tmp_path / "r.jsonl"
    assert store.export_jsonl(lines) == 4
    other = RecordStore(tmp_path / "b.sqlite")
    assert other.import_jsonl(lines).added == 4
    again = other.import_jsonl(lines)
    assert (again.added, again.known, again.bad) == (0, 4, ())

    good = lines.read_bytes().splitlines()
    older = json.loads(good[0])
    del older["key"]["arch"]
    newer = json.loads(good[0]) | {"schema": 99}
    broken = [
        good[0],
        b"{",
        good[1][:50] + b"\0" + good[1][50:],
        json.dumps(older).encode(),
        json.dumps(newer).encode(),
        b"[1]",
        b"",
        good[2],
        good[3][: len(good[3]) // 2],
    ]
    lines.write_bytes(b"\n".join(broken))
    third = RecordStore(tmp_path / "c.sqlite")
    result = third.import_jsonl(lines)
    assert result.added == 2 and [b.line for b in result.bad] == [2, 3, 4, 5, 6, 9]
    assert "key.arch" in result.bad[2].reason and "schema 99" in result.bad[3].reason


class _Case(BaseModel):
    name: str
    content: bytes
    message: str


def _database(path: Path, *statements: str) -> bytes:
    with sqlite3.connect(path) as db:
        for s in statements:
            db.execute(s)
    db.close()
    return path.read_bytes()


def test_bad_files_are_left_untouched(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "good.sqlite")
    store.add(*(make_record(float(i + 1), knobs={"t": i}) for i in range(200)))
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    good = store.path.read_bytes()
    torn = bytearray(good)
    torn[8192 : 8192 + 4096] = b"\xa5" * 4096
    cases = [
        _Case(name="garbage", content=b"hello, I am no database" * 100, message="no SQLite header"),
        _Case(name="truncated", content=good[: len(good) // 2], message="damaged"),
        _Case(name="torn", content=bytes(torn), message="damaged"),
        _Case(name="header only", content=good[:20], message="damaged"),
        _Case(
            name="newer",
            content=_database(
                tmp_path / "n",
                f"PRAGMA application_id={APPLICATION_ID}",
                "PRAGMA user_version=99",
                "CREATE TABLE records (x)",
            ),
            message="newer",
        ),
        _Case(
            name="foreign",
            content=_database(tmp_path / "f", "CREATE TABLE t (x)"),
            message="no tuning database",
        ),
    ]
    for case in cases:
        path = tmp_path / f"{case.name}.sqlite"
        path.write_bytes(case.content)
        with pytest.raises(WorkbenchError, match=case.message) as e:
            RecordStore(path).add(make_record())
        assert str(path) in str(e.value) and "\n" not in str(e.value)
        assert path.read_bytes() == case.content


def test_a_file_that_may_not_be_written_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("create table records (x)")

    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises(WorkbenchError, match=r"cannot open .* writable"):
        RecordStore(path)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match="cannot"):
        RecordStore(tmp_path / "file" / "r.sqlite").add(make_record())


def test_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    import sqlalchemy

    store = RecordStore(tmp_path / "r.sqlite")
    store.add(make_record())

    def full(connection: Any, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")

    sqlalchemy.event.listen(store._engine, "connect", full)
    with pytest.raises(WorkbenchError, match=r"cannot write .* full") as e:
        store.add(*(make_record(1.0, knobs={"t": i}) for i in range(500)))
    assert "\n" not in str(e.value)
    sqlalchemy.event.remove(store._engine, "connect", full)
    assert len(store) == 1
    store.add(make_record(1.0, knobs={"t": 1}))
    assert len(store) == 2


def _write(path: Path, writer: int, count: int) -> None:
    store = RecordStore(path)
    for i in range(count):
        store.add(make_record(1.0 + i, knobs={"writer": writer, "i": i}))


def test_concurrent_writers_and_one_killed(tmp_path: Path) -> None:
    """Four processes append; one is killed. Every other record is there, and the file stays sound."""
    path = tmp_path / "r.sqlite"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, w, 50 if w else 100_000)) for w in range(4)]
    for w in writers:
        w.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(r.key.knobs["writer"] == 0 for r in RecordStore(path).query()):
            break
    assert writers[0].pid is not None
    os.kill(writers[0].pid, signal.SIGKILL)
    for w in writers:
        w.join(120)
    assert [w.exitcode for w in writers[1:]] == [0, 0, 0]
    records = RecordStore(path).query(history=True)
    of: dict[Any, list[Any]] = {w: [] for w in range(4)}
    for r in records:
        of[r.key.knobs["writer"]].append(r.key.knobs["i"])
    assert all(of[w] == list(range(50)) for w in (1, 2, 3))
    assert of[0] == list(range(len(of[0]))) and of[0]
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    _write(path, 9, 1)
    assert len(RecordStore(path)) == len(records) + 1


def test_hash_of_a_verifier_covers_what_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from workbench import ops
    from workbench.records import hash_verifier

    path = tmp_path / "v.py"
    path.write_text("OP = 1")
    first = hash_verifier(path)
    assert hash_verifier(path) == first
    path.write_text("OP = 2")
    second = hash_verifier(path)
    copy = tmp_path / "ops"
    shutil.copytree(Path(ops.__file__).parent, copy)
    monkeypatch.setattr(ops, "__file__", str(copy / "__init__.py"))
    assert hash_verifier(path) == second
    helper = copy / "compare.py"
    helper.write_text(helper.read_text() + "\n# changed")
    assert len({first, second, hash_verifier(path)}) == 3
    with pytest.raises(WorkbenchError, match="cannot read"):
        hash_verifier(tmp_path / "none.py")


def test_import_of_the_package_is_cheap() -> None:
    import subprocess
    import sys

    code = (
        "import sys, workbench.records; print(sorted({'sqlalchemy', 'torch', 'optuna'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
