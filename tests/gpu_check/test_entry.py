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
