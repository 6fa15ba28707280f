from __future__ import annotations

from pathlib import Path

import pytest

from workbench import memory_model as mm
from workbench.memory_model.suite import read_expected

FOLDER = Path(__file__).parent / "litmus"
EXPECTED = read_expected(FOLDER / "expected.csv")


def test_every_file_has_a_verdict() -> None:
    assert sorted(p.name for p in FOLDER.glob("*.litmus")) == sorted(EXPECTED)
    assert len(EXPECTED) >= 120


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_verdict(name: str) -> None:
    test = mm.read(FOLDER / name)
    assert test.comments, "say why"
    assert mm.decide(test) == mm.Decision(bool(EXPECTED[name]))


def test_every_rule_of_our_own_has_tests_of_both_kinds() -> None:
    """Each rule that the page lists is behind a test that allows something and one that forbids something."""
    page = (Path(__file__).parents[2] / "docs" / "memory-model.md").read_text()
    rules = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| X")}
    assert rules == {f"X{n}" for n in range(1, 11)}
    words: dict[str, set[str]] = {rule: set() for rule in rules}
    for path in FOLDER.glob("*.litmus"):
        remark = " ".join(mm.read(path).comments).replace(",", " ").split()
        for rule in rules & {w.rstrip(".") for w in remark[:3]}:
            words[rule] |= {w.rstrip(":") for w in remark if w.endswith(":")}
    missing = {rule: {"Allowed", "Forbidden"} - seen for rule, seen in words.items()}
    assert not any(missing.values()), missing
