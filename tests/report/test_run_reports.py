from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from workbench.agent.run import RunResult
from workbench.report.html import run_html
from workbench.report.markdown import run_markdown, table
from workbench.report.tables import kernel_name, print_run, quantity, shorten, size
from workbench.workspace import Workspace

REPOSITORY = Workspace(Path(__file__).parents[2])


def printed(result: RunResult, limit: int = 40) -> str:
    out = io.StringIO()
    print_run(result, Console(file=out, width=160), limit)
    return out.getvalue()


def test_candidates_are_ranked_with_their_distance_from_the_roofline(result: RunResult) -> None:
    lines = [line.strip() for line in printed(result).splitlines()]
    rows = [i for i, line in enumerate(lines) if "row: threads=" in line]
    assert [lines[i].split()[0] for i in rows] == ["2", "0", "1", "3"]
    assert lines[rows[0]].split()[1:5] == ["verified", "4.25", "us", "8.50"]
    assert lines[rows[2]].split()[1] == "refused" and " us " not in lines[rows[2]]
    assert lines[rows[2] + 1] == "ordering/static: reads <x> & more [before] the wait"
    assert lines[rows[3]].split()[1] == "failed" and lines[rows[3] + 1] == "compiler: it | broke badly"


def test_the_winner_is_named_with_premises(result: RunResult) -> None:
    text = printed(result)
    assert "winner #2 row (threads=128): predicted 4.25 us, 8.50 times the roofline of 0.5 us" in text
    assert "2 verified, 1 refused, 1 failed" in text and "predicted for gb300, not measured" in text
    assert "generated_kernels/rmsnorm/latent_b1-sm_103a/abc" in text


def test_a_run_without_a_winner_says_so(result: RunResult) -> None:
    lost = result.model_copy(update={"winner": None, "exported": None})
    assert "No candidate passed every check" in printed(lost)
    assert "No candidate passed every check" in run_markdown(lost)
    assert "No candidate passed every check" in run_html(REPOSITORY, lost)


def test_a_long_table_is_cut_and_says_where_the_rest_is(result: RunResult) -> None:
    text = printed(result, limit=1)
    assert "and 3 more; `workbench report rmsnorm-latent_b1-1`" in " ".join(text.split())


def test_markdown_tables_keep_their_columns(result: RunResult) -> None:
    for line in run_markdown(result).splitlines():
        if line.startswith("| 3 |"):
            assert line.replace("\\|", "").count("|") == 9
            break
    else:
        pytest.fail("candidate 3 is missing")
    assert table(("a",), [("x|y\nz",)]).splitlines()[-1] == "| x\\|y z |"


class Checker(HTMLParser):
    """Fails on anything that would be loaded from elsewhere, and on tags that do not nest."""

    VOID = ("meta", "br", "img", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "link", "object")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                assert value is not None and value.startswith("#"), (name, value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_self_contained_and_escaped(result: RunResult) -> None:
    page = run_html(REPOSITORY, result)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "reads <x> & more [before] the wait" in checker.text
    assert page.count("<svg") == 2 and "memory is cold" in checker.text


def test_the_same_run_gives_the_same_page(result: RunResult) -> None:
    assert run_markdown(result) == run_markdown(result)
    assert run_html(REPOSITORY, result) == run_html(REPOSITORY, result)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.00 GiB")],
)
def test_sizes(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (999, "999"), (28_672, "28.7 k"), (2.5e12, "2.50 T")])
def test_quantities(value: float, text: str) -> None:
    assert quantity(value) == text


def test_long_reasons_are_cut_to_one_line() -> None:
    assert shorten("a\n b") == "a b" and len(shorten("x" * 500)) == 160 and shorten("x" * 160) == "x" * 160


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (
            "kernel_cutlass_kernel_candidate_8835166efdb0RowNorm_object_at__tensorptrbf16gmem_0",
            "RowNorm.kernel",
        ),
        ("kernel_cutlass_copy_candidate_8835166efdb0_tensorptrf32_0", "copy"),
        ("my_kernel", "my_kernel"),
    ],
)
def test_kernel_names_are_readable(entry: str, name: str) -> None:
    assert kernel_name(entry) == name
