"""Sections in processes of their own, within the time there is; the verdict on ACQBULK."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_check.conduct import Result, Section, conduct, in_child
from gpu_check.report import document, faults, rank_correlation
from gpu_check.sections.ordering import verdict

SCRIPT = """
import argparse, json, sys, time
p = argparse.ArgumentParser()
p.add_argument("--section"); p.add_argument("--records")
a = p.parse_args()
with open(a.records, "w") as f:
    f.write(json.dumps({"record": "family", "n": 1}) + "\\n"); f.flush()
    if a.section == "hangs":
        f.write('{"record": "fam'); f.flush()
        time.sleep(60)
    if a.section == "dies":
        sys.exit("DeviceError: cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_INSTRUCTION")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sections = [Section(n, n.title(), 1.0, 30.0).__dict__ for n in ("good", "hangs", "dies", "good")]
    (tmp_path / "plan.json").write_text(json.dumps({"sections": sections}))
    (tmp_path / "run.py").write_text(SCRIPT)
    return tmp_path


def test_a_section_that_hangs_or_dies_leaves_its_records_and_the_others(folder: Path) -> None:
    run = in_child(folder)
    told: list[str] = []
    results = conduct(
        folder,
        lambda s, limit: run(s, 1.5 if s.name == "hangs" else limit),
        told=lambda r: told.append(r.section.name),
    )
    assert [r.state for r in results] == ["run", "failed", "failed", "run"]
    assert all(r.records == [{"record": "family", "n": 1}] for r in results), "half a line is no record"
    assert results[1].why == "ended after 2 s" and "ILLEGAL_INSTRUCTION" in results[2].why
    assert told == ["good", "hangs", "dies", "good"]


def test_sections_that_do_not_fit_are_reported_as_not_run(folder: Path) -> None:
    now = [0.0]
    limits = []

    def run(section: Section, limit: float) -> Result:
        limits.append(limit)
        now[0] += 4.5
        return Result(section, "run", 4.5)

    results = conduct(folder, run, deadline_s=10.0, clock=lambda: now[0])
    assert [r.state for r in results] == ["run", "run", "run", "not run"]
    assert limits == [10.0, 5.5, 1.0]
    assert results[-1].why == "needs about 1 s, 0 s were left"


def record(
    place: str, old: int, overlapped: int = 5000, after_wait: bool = True, **sass: Any
) -> dict[str, Any]:
    return {
        "record": "variant", "variant": f"{place} {old}", "place": place, "old_values": old,
        "overlapped": overlapped, "clock_between": True, "wait_cycles": {"min": 4000},
        "sass": {"load_after_wait": after_wait, "load_after_barrier": None, **sass},
    }  # fmt: skip


CONTROL = record("before", 5000, after_wait=False)


@pytest.mark.parametrize(
    ("records", "answer", "said"),
    [
        ([CONTROL, record("after", 0)], "no", "no old value in 5000 loads"),
        ([CONTROL, record("after", 0), record("after", 1)], "yes", "after 1 \\(1 of 5000\\)"),
        ([record("before", 0, after_wait=False), record("after", 0)], "undecided", "did not overlap"),
        ([record("before", 0, 0, after_wait=False), record("after", 0)], "undecided", "did not overlap"),
        ([record("after", 0)], "undecided", "did not overlap"),
        ([CONTROL, record("after", 0, 999)], "undecided", "too few"),
        # A load that ptxas placed before the wait or the barrier says nothing about the hardware.
        ([CONTROL, record("after", 0), record("after", 7, after_wait=False)], "no", "no old value"),
        ([CONTROL, record("after", 0), record("after", 7, load_after_barrier=False)], "no", "no old value"),
        ([CONTROL, record("after", 7, after_wait=False)], "undecided", "too few"),
    ],
)
def test_the_verdict_needs_controls_that_see_the_old_value(
    records: list[dict[str, Any]], answer: str, said: str
) -> None:
    found = verdict(records)
    assert found["answer"] == answer
    import re

    assert re.search(said, found["why"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"record": "family", "family": "f", "forms": 9, "differs": 2, "repeatable": True}, "2 of 9 forms"),
        ({"record": "family", "family": "f", "forms": 9, "differs": 0, "repeatable": False}, "second run"),
        (
            {"record": "numerics", "kernel": "k", "generator": "g", "passed": False, "why": "is wrong"},
            "is wrong",
        ),
        (
            {"record": "numerics", "kernel": "k", "generator": "g", "passed": True, "repeatable": False},
            "second run",
        ),
        ({"record": "package", "op": "o", "batch": 1, "case": "c", "buffer": "b", "problem": "bad"}, "bad"),
        ({"record": "verdict", "answer": "yes", "why": "stale"}, "issue past ACQBULK"),
    ],
)
def test_what_is_wrong_is_a_fault(wrong: dict[str, Any], said: str) -> None:
    result = Result(Section("s", "S", 1, 1), "run", records=[wrong])
    (found,) = faults([result])
    assert said in found
    assert document([result], {}, {}, 1.0)["faults"] == [found]


def test_what_is_right_or_was_not_run_is_none() -> None:
    right: list[dict[str, Any]] = [
        {"record": "family", "family": "f", "forms": 9, "differs": 0, "repeatable": True},
        {"record": "numerics", "kernel": "k", "generator": "g", "passed": True, "repeatable": True},
        {"record": "package", "problem": ""},
        {"record": "verdict", "answer": "undecided", "why": ""},
    ]
    section = Section("s", "S", 1, 1)
    assert faults([Result(section, "run", records=right), Result(section, "not run", why="no time")]) == []
    assert faults([Result(section, "failed", why="it died")]) == ["s: it died"]


@pytest.mark.parametrize(
    ("order", "value"),
    [(lambda x: x, 1.0), (lambda x: -x, -1.0), (lambda x: 5.0, 0.0), (lambda x: x**3, 1.0)],
)
def test_rank_correlation(order: Callable[[float], float], value: float) -> None:
    xs = [3.0, 1.0, 4.0, 1.5, 9.0]
    assert rank_correlation(xs, [order(x) for x in xs]) == pytest.approx(value)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)
