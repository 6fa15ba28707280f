from __future__ import annotations

import math

import pytest

from workbench.export.evidence.agreement import Points, compare_figures, compare_provenance, compare_reports
from workbench.export.provenance import Provenance
from workbench.findings import Finding, Severity
from workbench.report.evidence import EvidencePoint
from workbench.verify.report import Check, Report, Verdict

PASS, FAIL, UNKNOWN = Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN
FOUND = Finding(rule="prefetch-sunk", severity=Severity.PERFORMANCE, message="m", ptx_line=3)


def report(*checks: Check) -> Report:
    return Report(op="o", workload="w", template="t", knobs={}, arch="sm_103a", artifact_key="k",
                  device="simulator", checks=checks)  # fmt: skip


def compared(stated: Check | None, found: Check | None, because: tuple[str, ...] = ()) -> EvidencePoint:
    points = Points("k")
    left, right = (report(*(c,) if c else ()) for c in (stated, found))
    compare_reports(points, left, [], "0" * 64, right, because)
    (point,) = points.all
    return point


@pytest.mark.parametrize(
    ("stated", "found", "because", "status"),
    [
        (PASS, PASS, (), "agree"),
        (PASS, FAIL, (), "differ"),
        (PASS, FAIL, ("workbench",), "differ"),  # a fault is a fault, whichever version finds it
        (PASS, UNKNOWN, (), "differ"),
        (PASS, UNKNOWN, ("workbench",), "not repeated"),
        (UNKNOWN, UNKNOWN, (), "agree"),
        (UNKNOWN, PASS, (), "agree"),
        (UNKNOWN, FAIL, ("workbench",), "differ"),
    ],
)
def test_verdicts(stated: Verdict, found: Verdict, because: tuple[str, ...], status: str) -> None:
    point = compared(Check(name="c", verdict=stated), Check(name="c", verdict=found), because)
    assert (point.status, point.stated, point.found) == (status, stated.value, found.value)


@pytest.mark.parametrize(("found", "status"), [(PASS, "agree"), (FAIL, "differ"), (UNKNOWN, "not repeated")])
def test_a_check_that_the_bundle_lacks(found: Verdict, status: str) -> None:
    point = compared(None, Check(name="c", verdict=found))
    assert point.status == status and point.stated == "not in the bundle"


def test_a_check_that_is_not_made_here() -> None:
    assert compared(Check(name="c", verdict=PASS), None).status == "not repeated"


def test_figures_that_differ_are_a_disagreement_only_under_equal_premises() -> None:
    a, b = (Check(name="c", verdict=PASS, measures={"accesses": n}) for n in (3.0, 4.0))
    assert compared(a, b).status == "differ"
    excused = compared(a, b, ("libraries",))
    assert excused.status == "not repeated" and excused.detail == (
        "figures differ: accesses 3 / 4; premises differ: libraries"
    )


def test_findings_that_come_or_go_are_a_disagreement_only_under_equal_premises() -> None:
    a, b = Check(name="c", verdict=PASS), Check(name="c", verdict=PASS, findings=(FOUND,))
    assert compared(a, b).status == "differ" and "1 findings are new" in compared(a, b).detail
    assert compared(b, a).status == "differ" and "1 findings are gone" in compared(b, a).detail
    assert compared(b, a, ("workbench",)).status == "not repeated"


@pytest.mark.parametrize(
    ("stated", "found", "unequal", "close"),
    [
        ({"a": 1.0}, {"a": 1.0}, 0, 0),
        ({"a": math.nan}, {"a": math.nan}, 0, 0),
        ({"a": math.inf}, {"a": math.inf}, 0, 0),
        ({"a": 1.0}, {"a": 1.0 + 1e-15}, 1, 0),
        ({"a": 1.0}, {}, 1, 0),
        ({}, {"a": 1.0}, 1, 0),
        ({"a": 0.10, "a_limit": 1.0}, {"a": 0.14, "a_limit": 1.0}, 0, 1),
        ({"a": 0.10, "a_limit": 1.0}, {"a": 0.16, "a_limit": 1.0}, 1, 0),
        ({"a": 0.10, "a_limit": 1.0}, {"a": math.nan, "a_limit": 1.0}, 1, 0),
        ({"a_limit": 1.0}, {"a_limit": 1.04}, 0, 1),
        ({"a_limit": 1.0}, {"a_limit": 2.0}, 1, 0),
        ({"a": 0.1, "a_limit": math.inf}, {"a": 0.9, "a_limit": math.inf}, 0, 1),
    ],
)
def test_figures(stated: dict[str, float], found: dict[str, float], unequal: int, close: int) -> None:
    got = compare_figures(stated, found)
    assert (len(got[0]), len(got[1])) == (unequal, close)


PROVENANCE = Provenance(
    seed=0, op_hash="a" * 64, tolerance_hash="b" * 64, verifier_hash="c" * 64, workbench="1",
    workbench_hash="d" * 64, libraries={"torch": "2"}, python="3.11", machine="Linux",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"op_hash": "0" * 64}, "contract"),
        ({"tolerance_hash": "0" * 64}, "tolerances"),
        ({"verifier_hash": "0" * 64}, "verifier"),
        ({"workbench_hash": "0" * 64}, "workbench"),
        ({"libraries": {"torch": "3"}}, "libraries"),
        ({"machine": "Linux AVX2"}, "machine"),
        ({"python": "3.12"}, "machine"),
    ],
)
def test_a_premise_that_differs_is_named(change: dict[str, object], name: str) -> None:
    points = Points("k")
    assert compare_provenance(points, PROVENANCE, PROVENANCE.model_copy(update=change)) == [name]
    assert [p.name for p in points.all if p.status == "differ"] == [name]
    assert {p.kind for p in points.all} == {"premise"}


def test_equal_premises_excuse_nothing_and_unrecorded_ones_everything() -> None:
    assert compare_provenance(Points("k"), PROVENANCE, PROVENANCE) == []
    points = Points("k")
    assert compare_provenance(points, None, PROVENANCE) == ["the export recorded no premises"]
    assert [p.status for p in points.all] == ["not repeated"]
