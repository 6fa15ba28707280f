"""Several winners of one configuration: which is taken, and what the refusal lets its reader type."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from workbench.artifact import Artifact
from workbench.cost import Prediction
from workbench.cost.latency import Premises
from workbench.errors import WorkbenchError
from workbench.export import export_winner
from workbench.export.module.ranking import best_of
from workbench.export.winner import ExportedKernel, load_exported
from workbench.verify.report import Report
from workbench.workspace import Workspace


@pytest.fixture
def exported(artifact: Artifact, report: Report, workspace: Workspace) -> ExportedKernel:
    return load_exported(export_winner(workspace, artifact, report))


def a_winner(
    like: ExportedKernel, key: str, us: float | None, knobs: Any = None, **premises: Any
) -> ExportedKernel:
    """Another winner of the same configuration, predicted under other premises."""
    m = like.manifest
    held = {
        "machine": "gb300", "machine_hash": "a" * 64, "model_version": 1, "op": m.op, "workload": m.workload,
        "axes": m.axes, "arch": m.arch, "artifact_key": key, "code": "sass", "assumptions": ("warm L2",),
    } | premises  # fmt: skip
    prediction = None if us is None else Prediction(us=us, launches=(), premises=Premises(**held))
    changes = {"key": key, "prediction": prediction, "knobs": m.knobs | (knobs or {})}
    return replace(like, manifest=m.model_copy(update=changes))


FIRST, SECOND, THIRD = "aa11" * 16, "aa22" * 16, "bb33" * 16


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"us": None}, ("4.25 us predicted", "no predicted time", "machine gb300")),
        ({"machine": "h200", "machine_hash": "b" * 64}, ("machine gb300", "machine h200")),
        ({"machine_hash": "b" * 64}, ("machine hash aaaaaaaaaaaa", "machine hash bbbbbbbbbbbb")),
        ({"model_version": 2}, ("model version 1", "model version 2")),
        ({"code": "ptx"}, ("code sass", "code ptx")),
        ({"assumptions": ()}, ("assumptions warm L2", "assumptions none")),
        ({"code": "ptx", "knobs": {"threads": 999}}, ("threads 999", "code ptx")),
    ],
)
def test_the_choices_are_listed_with_what_tells_them_apart_and_can_be_typed(
    exported: ExportedKernel, other: dict[str, Any], told: tuple[str, ...]
) -> None:
    group = [a_winner(exported, FIRST, 4.25), a_winner(exported, SECOND, **{"us": 3.5} | other)]
    with pytest.raises(WorkbenchError, match="rmsnorm small_b1 sm_103a has winners") as e:
        best_of([group], ())
    said = str(e.value)
    assert "cannot be ranked" in said
    assert all(text in said for text in told), said
    assert "\n" not in said and "source" not in said
    options = re.findall(r"--pick \w+", said)
    assert options == ["--pick aa11aa11aa11", "--pick aa22aa22aa22"]
    for option, wanted in zip(options, group, strict=True):
        assert best_of([group], [shlex.split(option)[1]]) == [wanted]


def test_what_cannot_be_told_apart_otherwise_has_its_source(exported: ExportedKernel) -> None:
    group = [a_winner(exported, key, None) for key in (FIRST, SECOND)]
    changed = group[1].manifest.model_copy(update={"source_hash": "c" * 64})
    with pytest.raises(WorkbenchError, match="source cccccccccccc"):
        best_of([[group[0], replace(group[1], manifest=changed)]], ())


def test_a_beginning_that_several_winners_have_decides_nothing(exported: ExportedKernel) -> None:
    group = [a_winner(exported, FIRST, 4.25), a_winner(exported, SECOND, 3.5, {"threads": 999})]
    assert best_of([group], ()) == [group[1]]
    assert best_of([group], ["aa1"]) == [group[0]]
    with pytest.raises(
        WorkbenchError, match=r"more than one winner: --pick aa11aa11aa11 .*--pick aa22aa22aa22"
    ):
        best_of([group], ["aa"])


def test_every_configuration_that_wants_a_choice_is_told_of_at_once(exported: ExportedKernel) -> None:
    groups = [
        [a_winner(exported, f"{n}1" * 32, 1.0), a_winner(exported, f"{n}2" * 32, None)] for n in "abcdef"
    ]
    with pytest.raises(WorkbenchError, match="and 2 more configurations") as e:
        best_of([*groups[:5], [a_winner(exported, THIRD, None)]], ())
    assert len(re.findall("--pick", str(e.value))) == 6
    taken = best_of(groups, [g[0].manifest.key[:12] for g in groups])
    assert taken == [g[0] for g in groups]
