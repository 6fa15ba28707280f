from __future__ import annotations

import time
from pathlib import Path

import pytest

from workbench.memory_model import check_files

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "litmus"
needs_public = pytest.mark.skipif(
    not (PUBLIC / "expected.csv").is_file(),
    reason="the public litmus tests are not beside the project (../shared/data/litmus)",
)


@needs_public
def test_every_verdict_agrees() -> None:
    start = time.perf_counter()
    document = check_files([PUBLIC], PUBLIC / "expected.csv")
    assert time.perf_counter() - start < 3
    assert [(t.path, t.verdict, t.expected) for t in document.tests if t.verdict != t.expected] == []
    assert (len(document.tests), document.decided, document.agree) == (200, 200, 200)


@needs_public
def test_verdicts_are_the_same_again() -> None:
    first, second = (check_files([PUBLIC / "Barrier", PUBLIC / "Manual"]) for _ in range(2))
    assert [t.verdict for t in first.tests] == [t.verdict for t in second.tests]
