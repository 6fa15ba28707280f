"""Which earlier records are tried first."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuning_landscapes import identity, points

from workbench.artifact import Toolchain
from workbench.records import Objective, Record, RecordKey, RecordStore
from workbench.tune import Study, earlier_winners, make_sampler

KNOBS = {"threads": 128, "rows": 4, "vec": 8, "stages": 2, "fused": True, "order": "row"}


def record(value: float | None, knobs: dict[str, Any], **changes: Any) -> Record:
    failure = changes.pop("failure", None)
    fields: dict[str, Any] = {
        "op": "toy", "workload": "w", "axes": {}, "buffers": (), "template": "t", "source_hash": "s",
        "arch": "sm_103a", "device": "gb300", "objective": Objective.PREDICTED, "premises": "",
        "toolchain": Toolchain(dsl="4", flavour="13", ptx_isa="9", ptxas="13"), "tolerance_hash": "",
        "verifier_hash": "",
    }  # fmt: skip
    return Record(
        key=RecordKey(**(fields | changes), knobs=KNOBS | knobs),
        value_us=value,
        verdict=None if failure else "pass",
        failure=failure,
        started=datetime(2026, 1, 1, tzinfo=UTC),
    )


def winners(store: RecordStore, **changes: Any) -> list[dict[str, Any]]:
    wanted: dict[str, Any] = {"op": "toy", "template": "t", "workload": "w", "arch": "sm_103a",
                              "objective": Objective.PREDICTED}  # fmt: skip
    return [dict(k) for k in earlier_winners(store, **(wanted | changes))]


def test_nearest_premises_come_first_and_times_are_not_mixed(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(
        record(9.0, {"rows": 1}),
        record(5.0, {"rows": 2}),
        record(1.0, {"rows": 4}, workload="other"),
        record(2.0, {"rows": 8}, arch="sm_100a"),
        record(0.5, {"rows": 16}, objective=Objective.MEASURED),
        record(None, {"vec": 2}, failure="compiler"),
        record(0.1, {"vec": 4}, template="another"),
        record(3.0, {"rows": 2}, workload="third"),
    )
    assert [k["rows"] for k in winners(store, limit=9)] == [2, 1, 8, 4]
    assert [k["rows"] for k in winners(store, limit=2)] == [2, 1]
    assert [k["rows"] for k in winners(store, objective=Objective.MEASURED)] == [16]
    assert winners(store, op="none") == []


def test_study_tries_them_first(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "r.sqlite")
    store.add(record(5.0, {"rows": 2}), record(6.0, {"rows": 16, "threads": 512}))
    study = Study(points(), identity(), make_sampler("tpe"), first=[KNOBS, *winners(store)])
    asked = study.ask_batch(3)
    # The second record's point is not valid in this space and is passed over.
    assert [t.knobs for t in asked[:2]] == [KNOBS, KNOBS | {"rows": 2}] and asked[2].knobs["rows"] != 32
