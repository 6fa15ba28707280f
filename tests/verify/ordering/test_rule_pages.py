"""docs/rules: a page for every rule id, each with what a page must say, and an index of them all."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from pairing import PAGES, index, pages, pairs

from workbench.findings import Severity
from workbench.verify.ordering import RULES

IDS = [
    "pdl-load-before-wait", "pdl-wait-missing", "pdl-chain-not-transitive", "pdl-early-trigger",
    "nc-load-of-mutable", "prefetch-sunk", "flag-without-acquire", "flag-without-release",
    "scope-too-narrow", "proxy-fence-missing", "mbarrier-phase", "elected-arrive", "buffer-reuse",
    "cp-async-group", "sentinel-alias", "multimem-order", "stale-epoch", "not-co-resident",
    "barrier-divergence", "barrier-reuse", "cluster-barrier", "tcgen05-order", "tmem-lifetime",
    "wgmma-order", "out-of-bounds", "misaligned", "uninitialized-read", "race", "deadlock",
    "asm-ordering", "persistent-device-state",
]  # fmt: skip
"""The rules a finding may carry, `undecided` aside."""
SECTIONS = ["What goes wrong", "The fix", "Assumptions and limits"]


def test_every_rule_has_a_page() -> None:
    assert {p.stem for p in pages()} == {*IDS, "undecided"}
    assert set(RULES) <= set(IDS)


def test_the_index_is_that_of_the_pages() -> None:
    assert (PAGES / "README.md").read_text() == index(), "run `python tests/verify/ordering/pairing.py`"


@pytest.mark.parametrize("rule", IDS)
def test_a_page_says_what_it_must(rule: str) -> None:
    text = (PAGES / f"{rule}.md").read_text()
    assert text.startswith(f"# {rule}\n\n")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert [h for h in headings if h in SECTIONS] == SECTIONS
    severity = re.search(r"^\| severity \| (.+?) \|$", text, re.M)
    assert severity is not None and all(Severity(s) for s in severity[1].split(", "))
    assert re.search(r"^\| found by \| .+ \|$", text, re.M)
    assert "docs.nvidia.com/cuda/parallel-thread-execution" in text
    assert [p for p in pairs() if p.rule == rule and p.name.startswith("page")]
    for other in re.findall(r"\]\(([\w-]+)\.md\)", text):
        assert (PAGES / f"{other}.md").is_file()


def test_there_are_pairs_enough() -> None:
    counts = Counter(p.rule for p in pairs())
    assert counts.total() >= 90
    assert not {r: counts[r] for r in IDS if counts[r] < 3}


def test_pairs_stand_under_rules_that_there_are() -> None:
    assert {p.rule for p in pairs()} <= set(IDS)
