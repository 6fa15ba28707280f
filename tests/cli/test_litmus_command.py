from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "litmus"

MESSAGE = """PTX mp
{ x=0; f=0; }
 P0@cta 0,gpu 0       | P1@cta 1,gpu 0       ;
 st.weak x, 1         | ld.acquire.gpu r0, f ;
 st.release.gpu f, 1  | ld.weak r1, x        ;
exists (P1:r0 == 1 /\\ P1:r1 == 0)
"""
LOCK = """PTX spins
{ x=0; }
 P0@cta 0,gpu 0               | P1@cta 0,gpu 0 ;
 LC00:                        | st.weak x, 0   ;
 atom.relaxed.gpu.add r0, x, 1 |               ;
 bne r0, 9, LC00              |                ;
exists (P0:r0 == 9)
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mp.litmus").write_text(MESSAGE)
    (tmp_path / "spins.litmus").write_text(LOCK)
    return tmp_path


@pytest.mark.skipif(
    not (PUBLIC / "expected.csv").is_file(),
    reason="the public litmus tests are not beside the project (../shared/data/litmus)",
)
def test_the_public_suite_agrees(run: Any) -> None:
    document = run("litmus", str(PUBLIC), "--expected", str(PUBLIC / "expected.csv"), "--json").json("litmus")
    assert set(document) == {"tests", "decided", "agree"}
    assert all(set(t) == {"path", "verdict", "expected", "seconds"} for t in document["tests"])
    assert (len(document["tests"]), document["decided"], document["agree"]) == (200, 200, 200)


def test_a_file_gives_its_verdict(run: Any, tests: Path) -> None:
    path = str(tests / "a" / "mp.litmus")
    (test,) = run("litmus", path, "--json").json("litmus")["tests"]
    assert (test["path"], test["verdict"], test["expected"]) == (path, 0, None)
    result = run("litmus", path)
    assert result.code == 0 and result.out.splitlines()[-1] == "1 of 1 decided"
    assert run("litmus", path, "--quiet").out == ""


def test_a_disagreement_is_exit_code_one(run: Any, tests: Path) -> None:
    table = tests / "expected.csv"
    table.write_text("a/mp.litmus,1\n")
    result = run("litmus", str(tests / "a"), "--expected", str(table))
    assert result.code == 1 and "expected 1" in result.out and "0 of 1 agree" in result.out
    table.write_text("a/mp.litmus,0\n")
    assert run("litmus", str(tests / "a"), "--expected", str(table)).code == 0


def test_what_is_not_decided_says_so(run: Any, tests: Path) -> None:
    path = str(tests / "spins.litmus")
    result = run("litmus", path, "--json")
    document = result.json("litmus")
    assert result.code == 0 and document["decided"] == 0
    assert document["tests"][0]["verdict"] is None and "undecided" in result.err
    assert run("litmus", path, "--strict").code == 3
    limited = run("litmus", str(tests / "a" / "mp.litmus"), "--limit", "1", "--strict")
    assert limited.code == 3 and "more than the work of 1 candidate" in limited.err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", ":1: a litmus test begins with the line `PTX NAME`"),
        (MESSAGE.replace("st.weak", "st.wek"), ":4: unknown instruction 'st.wek'"),
        (MESSAGE.replace("P1:r0", "P7:r0"), ":6: there is no thread P7"),
        (MESSAGE.replace("exists", "sometimes"), ":6: "),
    ],
)
def test_bad_text_is_one_line_with_its_place(run: Any, tests: Path, text: str, complaint: str) -> None:
    path = tests / "bad.litmus"
    path.write_text(text)
    assert f"{path}{complaint}" in run("litmus", str(path)).complaint


def test_bad_tables_and_folders_are_one_line(run: Any, tests: Path) -> None:
    table = tests / "expected.csv"
    for text, complaint in (
        ("mp.litmus,2\n", "expected.csv:1: expected a row"),
        ("a,1\na,0\n", "expected.csv:2: a is there twice"),
    ):
        table.write_text(text)
        assert complaint in run("litmus", str(tests / "a"), "--expected", str(table)).complaint
    assert "missing: there is no such file" in run("litmus", str(tests / "missing")).complaint
    (tests / "empty").mkdir()
    assert "no .litmus file" in run("litmus", str(tests / "empty")).complaint
    (tests / "binary.litmus").write_bytes(b"PTX \xff\xfe")
    assert "is not UTF-8" in run("litmus", str(tests / "binary.litmus")).complaint
