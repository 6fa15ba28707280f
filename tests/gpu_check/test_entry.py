from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpu_check import entry


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "has no plan.json"),
        (["--to", "folder"], "folder is a folder; give a file with --to"),
        (["--to", "nowhere/results.json"], "nowhere is no folder"),
        (["--seconds", "0"], "--seconds 0 leaves no time"),
        (["--seconds", "nan"], "--seconds nan leaves no time"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if options:
        (tmp_path / "plan.json").write_text("{}")
    monkeypatch.setattr(entry, "FOLDER", tmp_path)
    monkeypatch.setattr(entry, "absent", lambda: "")
    monkeypatch.setattr(entry, "missing", lambda packages: [])
    monkeypatch.setattr(sys, "argv", ["run.py", *options])
    assert entry.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert says in line and line.endswith("nothing was run")


GOOD = (
    b'{"built": {"arch": "sm_90a"}, '
    b'"sections": [{"name": "a", "title": "A", "estimate_s": 1, "limit_s": 2.5}]}'
)


@pytest.mark.parametrize(
    "content",
    [
        b"", GOOD[:40], b"\xff\xfe{}", b"[]", b"null", b"{}", b"[" * 100_000,
        GOOD.replace(b'"sm_90a"', b"9"), GOOD.replace(b'{"arch": "sm_90a"}', b"[]"),
        GOOD.replace(b"2.5", b'"2"'), GOOD.replace(b'"a"', b"null"), GOOD.replace(b', "limit_s": 2.5', b""),
        GOOD.replace(b'"limit_s"', b'"limit"'), b'{"built": {"arch": "x"}, "sections": []}',
        b'{"built": {"arch": "x"}, "sections": [7]}', b'{"built": {"arch": "x"}, "sections": {}}',
    ],
)  # fmt: skip
def test_a_damaged_plan_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    monkeypatch.setattr(entry, "FOLDER", tmp_path)
    monkeypatch.setattr(entry, "absent", lambda: "")
    monkeypatch.setattr(entry, "missing", lambda packages: [])
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert entry.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "plan.json" in line and "make gpu-check" in line and line.endswith("nothing was run")


def test_a_whole_plan_is_taken(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(GOOD)
    assert entry.unusable(tmp_path, tmp_path / "r.json", None) == ""
