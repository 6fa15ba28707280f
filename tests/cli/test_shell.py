from __future__ import annotations

import pytest

from workbench.cli.shell import Exit, exit_code, parse_knobs
from workbench.errors import WorkbenchError
from workbench.verify.report import Verdict


def test_knobs_keep_the_type_they_are_written_in() -> None:
    assert parse_knobs(["a=12", "b=0x10", "c=true", "d=False", "e=ca", "f = -3"]) == {
        "a": 12,
        "b": 16,
        "c": True,
        "d": False,
        "e": "ca",
        "f": -3,
    }
    assert type(parse_knobs(["c=true"])["c"]) is bool


@pytest.mark.parametrize("text", ["threads", "=3", "threads=", "9x=1", "a b=1", ""])
def test_a_knob_that_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(WorkbenchError, match="name=value"):
        parse_knobs([text])


def test_a_knob_given_twice_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="threads is given twice"):
        parse_knobs(["threads=64", "threads=128"])


@pytest.mark.parametrize(
    ("verdict", "strict", "code"),
    [
        (Verdict.PASS, False, Exit.GOOD),
        (Verdict.PASS, True, Exit.GOOD),
        (Verdict.FAIL, False, Exit.FINDING),
        (Verdict.FAIL, True, Exit.FINDING),
        (Verdict.UNKNOWN, False, Exit.GOOD),
        (Verdict.UNKNOWN, True, Exit.UNDECIDED),
    ],
)
def test_exit_codes_follow_the_verdict(verdict: Verdict, strict: bool, code: Exit) -> None:
    assert exit_code(verdict, strict) is code
