"""The line under `workbench evidence run`'s tables counts what stands in them."""

from __future__ import annotations

import io
import re
from collections import Counter
from itertools import product

import pytest
from rich.console import Console

from workbench.report.evidence import EvidencePoint, EvidenceRunDocument, Status
from workbench.report.evidence_text import print_run, run_markdown
from workbench.verify.report import Verdict

STATUSES: tuple[Status, ...] = ("agree", "differ", "not repeated")
KINDS = ("result", "premise")
COUNTS = {
    "result": r"(\d+) results agree, (\d+) differ, (\d+) not repeated;",
    "premise": r"; (\d+) premises agree, (\d+) differ, (\d+) not stated\.",
}


def document(*points: tuple[str, Status]) -> EvidenceRunDocument:
    made = tuple(
        EvidencePoint.model_validate(
            {"kernel": "", "name": f"p{n}", "kind": kind, "status": status, "stated": "a", "found": "b"}
        )
        for n, (kind, status) in enumerate(points)
    )
    return EvidenceRunDocument(
        bundle="b.tar", sha256="0" * 64, device="none", verdict=Verdict.PASS, timing="timing not repeated",
        points=made, kernels=(), seconds=1.0,
    )  # fmt: skip


def counted(text: str) -> dict[str, tuple[int, ...]]:
    flat = " ".join(text.split())
    found = {kind: re.search(pattern, flat) for kind, pattern in COUNTS.items()}
    return {kind: tuple(int(n) for n in m.groups()) for kind, m in found.items() if m is not None}


MANY = [p for n, p in enumerate(product(KINDS, STATUSES), 1) for _ in range(n)]


@pytest.mark.parametrize("points", [(), *([p] for p in product(KINDS, STATUSES)), MANY])
def test_the_line_below_counts_the_rows_above(points: list[tuple[str, Status]]) -> None:
    made = document(*points)
    out = io.StringIO()
    print_run(made, Console(file=out, width=120))
    text, markdown = out.getvalue(), run_markdown(made)
    assert counted(text) == counted(markdown)
    shown = counted(text)
    told = ("agree", "differ", "not repeated", "premise differs", "not stated")
    rows = Counter(
        next(s for s in sorted(told, key=len, reverse=True) if line.strip().startswith(s))
        for line in text.splitlines()
        if re.search(r"\bp\d+\b", line)
    )
    every = markdown.partition("every point")[2]
    cells = Counter(s for s in told for line in every.splitlines() if re.search(rf"\| {s} \|", line))
    assert cells == rows and sum(rows.values()) == len(points)
    assert shown["result"] + shown["premise"] == (
        rows["agree"] - shown["premise"][0],
        rows["differ"],
        rows["not repeated"],
        rows["agree"] - shown["result"][0],
        rows["premise differs"],
        rows["not stated"],
    )


def test_what_the_bundle_does_not_state_was_not_left_out() -> None:
    made = document(("premise", "not repeated"))
    out = io.StringIO()
    print_run(made, Console(file=out, width=120))
    assert "not stated" in out.getvalue() and counted(out.getvalue())["result"] == (0, 0, 0)
    assert made.model_dump(mode="json")["points"][0]["status"] == "not repeated", "the JSON stays as it was"
