from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.files import check_destination, write_atomic


@pytest.mark.parametrize("place", ["new.md", "deep/er/new.md", "taken.md"])
def test_a_destination_that_is_accepted_can_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken.md").write_text("old")
    check_destination(tmp_path / place, tmp_path / "other.md")
    write_atomic(tmp_path / place, "new")
    assert (tmp_path / place).read_text() == "new"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("folder", "it is a folder"),
        ("file/new.md", "file is no folder"),
        ("file/deep/new.md", "file is no folder"),
        ("file", "uses this file already"),
        ("folder/../file", "uses this file already"),
        ("link", "uses this file already"),
    ],
)
def test_a_destination_that_cannot_be_written_is_refused_untouched(
    tmp_path: Path, place: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(WorkbenchError, match=says):
        check_destination(tmp_path / place, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "link"]
