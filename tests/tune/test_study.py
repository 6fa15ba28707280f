"""Studies: ask and tell, failures, resume, parallel workers, and storage that must not be harmed."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tuning_landscapes import KNOBS, SPACE, identity, points, time_us

from workbench.errors import WorkbenchError
from workbench.templates import Space
from workbench.tune import ABANDONED, SAMPLERS, Points, State, Study, Trial, make_sampler

DEFAULT = {"threads": 128, "rows": 4, "vec": 8, "stages": 2, "fused": True, "order": "row"}


def make_study(sampler: str = "tpe", seed: int = 0, **options: object) -> Study:
    return Study(points(), identity(), make_sampler(sampler, seed), **options)  # type: ignore[arg-type]


def finish(study: Study, trial: Trial) -> None:
    value = time_us(trial.knobs)
    study.tell(trial, **({"failure": "compiler"} if value is None else {"value_us": value}))


def drive(study: Study, budget: int) -> list[dict[str, object]]:
    while study.evaluated < budget and (trial := study.ask()) is not None:
        finish(study, trial)
    return [dict(t.knobs) for t in study.trials]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_study_finds_and_reports_the_best(sampler: str) -> None:
    study = make_study(sampler)
    drive(study, 40)
    done = [t for t in study.trials if t.state is State.DONE]
    assert study.evaluated == 40 == len(study.trials)
    assert study.best is not None and study.best.value_us == min(t.value_us or 0 for t in done)
    assert study.best.value_us == time_us(study.best.knobs)


def test_default_and_earlier_winners_come_first() -> None:
    other = DEFAULT | {"vec": 4}
    invalid = DEFAULT | {"threads": 512, "rows": 16}
    study = make_study(first=[DEFAULT, invalid, DEFAULT, other])
    asked = study.ask_batch(3)
    assert [t.knobs for t in asked[:2]] == [DEFAULT, other]
    assert len({tuple(t.knobs.values()) for t in asked}) == 3


def test_failures_are_never_best_and_never_taken_again() -> None:
    study = make_study("random")
    for i in range(20):
        trial = study.ask()
        assert trial is not None
        study.tell(trial, **({"failure": "timeout"} if i % 2 else {"value_us": 10.0 + i}))
    assert study.best is not None and study.best.value_us == 10.0
    assert study.evaluated == 20 and len({tuple(t.knobs.values()) for t in study.trials}) == 20
    assert {t.failure for t in study.trials if t.state is State.FAILED} == {"timeout"}


def test_study_without_success_has_no_best() -> None:
    study = make_study()
    for t in study.ask_batch(15):
        study.tell(t, failure="crash")
    assert study.best is None and study.ask() is not None


def test_exhausted_space_ends_cleanly() -> None:
    space = Space({"a": (1, 2, 3), "b": (True, False)}, ("a != 2",), {})
    study = Study(points(space), identity(space), make_sampler("tpe"), first=[{"a": 3, "b": True}])
    seen = []
    while (trial := study.ask()) is not None:
        study.tell(trial, value_us=1.0 + trial.number)
        seen.append(trial.knobs)
    assert len(seen) == 4 and all(space.is_valid(k) for k in seen)
    assert study.ask_batch(3) == []


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rounds_are_deterministic_whatever_the_completion_order(sampler: str) -> None:
    def run(shuffle_seed: int) -> list[dict[str, object]]:
        study = make_study(sampler, seed=5)
        order = random.Random(shuffle_seed)
        for _ in range(5):
            batch = study.ask_batch(4)
            order.shuffle(batch)
            for trial in batch:
                finish(study, trial)
        return [dict(t.knobs) for t in study.trials]

    assert run(1) == run(2) == run(3)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resume_goes_on_as_if_never_stopped(sampler: str, tmp_path: Path) -> None:
    whole = drive(make_study(sampler, seed=2), 24)
    path = tmp_path / "s.sqlite"
    drive(make_study(sampler, seed=2, storage=path), 15)
    resumed = make_study(sampler, seed=2, storage=path)
    assert resumed.notice is None and resumed.evaluated == 15
    assert drive(resumed, 24) == whole


def test_changed_space_is_a_new_study_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    drive(make_study(storage=path), 3)
    wider = Space({**KNOBS, "vec": (2, 4, 8, 16, 32)}, SPACE.constraints, SPACE.axes)
    study = Study(points(wider), identity(wider), make_sampler("tpe"), storage=path)
    assert study.evaluated == 0 and study.notice is not None
    assert "knob vec" in study.notice and "32" in study.notice and "\n" not in study.notice
    source = Study(points(), identity(source_hash="other"), make_sampler("tpe"), storage=path)
    assert source.notice is not None and "source_hash" in source.notice
    assert make_study(storage=path).evaluated == 3


@pytest.mark.parametrize(
    "field", ["op", "workload", "template", "source_hash", "arch", "device", "premises", "run"]
)
def test_identity_covers(field: str) -> None:
    assert identity().name != identity(**{field: "other"}).name


def test_known_results_are_not_paid_for_again() -> None:
    study = make_study("random")
    assert study.add(DEFAULT, value_us=3.0) and not study.add(DEFAULT, value_us=2.0)
    assert study.add(DEFAULT | {"stages": 1}, failure="compiler")
    assert not study.add(DEFAULT | {"threads": 512, "rows": 16}, value_us=1.0)
    again = Study(points(), identity(), make_sampler("random"), first=[DEFAULT])
    again.add(DEFAULT, value_us=3.0)
    assert all(t.knobs != DEFAULT for t in [*study.ask_batch(10), *again.ask_batch(10)])
    assert study.best is not None and study.best.knobs == DEFAULT


def test_killed_worker_is_reclaimed_once(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    first = make_study("random", storage=path)
    lost = first.ask()
    assert lost is not None
    study = make_study("random", storage=path)
    assert study.reclaim(older_than_s=3600) == 0 and study.reclaim() == 1 == len(study.trials)
    assert study.evaluated == 0 and study.reclaim() == 0
    again = Study(points(), identity(), make_sampler("random"), storage=path, first=[lost.knobs])
    retried = again.ask()
    assert retried is not None and retried.knobs == lost.knobs
    assert again.reclaim() == 1 and again.trials[-1].failure == ABANDONED
    third = again.ask()
    assert third is not None and third.knobs != lost.knobs


@pytest.mark.parametrize(
    "bad", [{}, {"value_us": 1.0, "failure": "x"}, {"value_us": float("nan")}, {"value_us": 0.0}]
)
def test_bad_tell_is_refused(bad: dict[str, object]) -> None:
    study = make_study()
    trial = study.ask()
    assert trial is not None
    with pytest.raises(WorkbenchError):
        study.tell(trial, **bad)  # type: ignore[arg-type]
    study.tell(trial, value_us=1.0)
    with pytest.raises(WorkbenchError, match="already"):
        study.tell(trial, value_us=2.0)


def _work(path: Path, seed: int, count: int) -> None:
    study = make_study("random", seed=seed, storage=path)
    for _ in range(count):
        trial = study.ask()
        assert trial is not None
        finish(study, trial)


def test_parallel_workers_never_measure_a_point_twice(tmp_path: Path) -> None:
    """Workers with the same seed wish for the same points; each point goes to one of them."""
    path = tmp_path / "s.sqlite"
    make_study(storage=path)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(path, 0, 6)) for _ in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert [w.exitcode for w in workers] == [0, 0]
    trials = make_study(storage=path).trials
    assert len(trials) == 12 == len({tuple(t.knobs.values()) for t in trials})


def test_bad_storage_is_left_untouched(tmp_path: Path) -> None:
    good = tmp_path / "good.sqlite"
    drive(make_study(storage=good), 30)
    sound = good.read_bytes()
    with sqlite3.connect(tmp_path / "newer") as db:
        for statement in ("CREATE TABLE studies (x)", "CREATE TABLE trials (x)",
                          "CREATE TABLE alembic_version (version_num)",
                          "INSERT INTO alembic_version VALUES ('v99.0.0.a')"):  # fmt: skip
            db.execute(statement)
    with sqlite3.connect(tmp_path / "foreign") as db:
        db.execute("CREATE TABLE t (x)")
    cases = {
        "garbage": (b"no database at all " * 50, "no SQLite header"),
        "truncated": (sound[: len(sound) // 2], "damaged"),
        "head": (sound[:100], "damaged"),
        "newer": ((tmp_path / "newer").read_bytes(), "v99.0.0.a.*newer"),
        "foreign": ((tmp_path / "foreign").read_bytes(), "no study storage"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.sqlite"
        path.write_bytes(content)
        with pytest.raises(WorkbenchError, match=message) as e:
            make_study(storage=path)
        assert "\n" not in str(e.value) and path.read_bytes() == content, name


def test_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    """A database that may not grow stands for a full disk; once there is room the study goes on."""
    import sqlalchemy

    path = tmp_path / "s.sqlite"
    study = make_study("random", storage=path)
    drive(study, 3)
    engine = study._storage.engine  # type: ignore[attr-defined]

    def full(connection: Any, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")

    sqlalchemy.event.listen(engine, "connect", full)
    engine.dispose()
    with pytest.raises(WorkbenchError, match="full") as e:
        drive(study, 400)
    assert "\n" not in str(e.value)
    sqlalchemy.event.remove(engine, "connect", full)
    engine.dispose()
    again = make_study("random", storage=path)
    before = again.evaluated
    assert before >= 3
    again.reclaim()
    drive(again, before + 2)
    assert again.evaluated == before + 2


def test_study_of_a_newer_workbench_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    study = make_study(storage=path)
    study._study.set_user_attr("workbench_schema", 99)
    with pytest.raises(WorkbenchError, match="schema 99"):
        make_study(storage=path)


def test_unreachable_database_is_one_line() -> None:
    with pytest.raises(WorkbenchError, match="cannot open the study storage"):
        make_study(storage="nosuchdialect://host/db")


def test_points_of_a_space_are_all_valid() -> None:
    space = Points.of(SPACE)
    assert len(space) == len(SPACE.all_points) > 300
    assert all(SPACE.is_valid(space.knobs(r)) and space.row(space.knobs(r)) == r for r in range(len(space)))
