"""docs/support.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator.legal import complaint
from workbench.simulator.support import FAMILIES, module_text, page, status

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: python -m workbench.simulator.support > docs/support.md"


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("ld.global.u32 %r1, [%d1];", "modelled"),
        ("multimem.st.relaxed.sys.global.v4.f32 [%d1], {%f1, %f2, %f3, %f4};", "modelled"),
        ("bar.sync 0;", "modelled"),
        ("membar.gl;", "ordering only"),
        ("nanosleep.u32 100;", "no effect"),
        ("frob.u32 %r1;", "refused"),
        ("multimem.ld_reduce.relaxed.sys.global.max.f32 %f1, [%d1];", "refused"),
    ],
)
def test_the_status_of_an_instruction(line, verdict):
    assert status(line)[0] == verdict


def test_every_example_is_listed_once():
    lines = [line for family in FAMILIES.values() for line in family]
    assert len(lines) == len(set(lines)) > 150


@pytest.mark.parametrize("family", FAMILIES)
def test_the_examples_are_legal(family):
    for line in FAMILIES[family]:
        arch = "sm_90a" if line.startswith("wgmma") else "sm_100a" if "kind::i8" in line else "sm_103a"
        assert "error" not in complaint(module_text(line), arch), line
