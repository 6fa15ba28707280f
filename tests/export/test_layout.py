from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.export.layout import content_root, lay_out
from workbench.workspace import Workspace


@pytest.fixture
def content(tmp_path: Path) -> Path:
    root = tmp_path / "content"
    for name, text in {
        "verifiers/op.py": "OP = 1\n",
        "verifiers/__pycache__/op.pyc": "x",
        "templates/op/fast.py": "TEMPLATE = {}\n",
        "notebooks/01.ipynb": "{}",
        "docs/cute_dsl.md": "notes",
        "docs/rules/race.md": "a page",
        "docs/schemas/op.json": "{}",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")
    }


def test_a_new_workspace_is_complete_and_valid(content: Path, tmp_path: Path) -> None:
    document = lay_out(tmp_path / "deep" / "new", content)
    workspace = Workspace(tmp_path / "deep" / "new")
    assert (
        workspace.is_valid() and workspace.op_names() == ["op"] and workspace.template_names("op") == ["fast"]
    )
    assert workspace.generated.is_dir() and workspace.tuning_db.is_dir()
    assert document.files == (
        "verifiers/op.py",
        "templates/op/fast.py",
        "notebooks/01.ipynb",
        "docs/cute_dsl.md",
        "docs/rules/race.md",
        "docs/schemas/op.json",
    )
    assert sorted(p.name for p in workspace.root.iterdir()) == [
        "docs",
        "generated_kernels",
        "notebooks",
        "templates",
        "tuning_db",
        "verifiers",
    ]


def test_every_link_of_the_documents_leads_somewhere(tmp_path: Path) -> None:
    lay_out(tmp_path / "new")
    pages = sorted((tmp_path / "new" / "docs").rglob("*.md"))
    links = [(p, link) for p in pages for link in re.findall(r"\]\(([^)#\s]+)", p.read_text())]
    assert len(links) > 30
    assert [(p.name, link) for p, link in links if "://" not in link and not (p.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["verifiers", "templates", "notebooks", "generated_kernels", "tuning_db"])
def test_nothing_is_overwritten(content: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "new"
    (target / name).mkdir(parents=True)
    (target / name / "mine").write_text("keep")
    before = tree(target)
    with pytest.raises(WorkbenchError, match=f"{name} exists already"):
        lay_out(target, content)
    assert tree(target) == before


def test_other_files_of_the_folder_stay(content: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    (target / "notes.txt").write_text("keep")
    lay_out(target, content)
    assert (target / "notes.txt").read_text() == "keep" and Workspace(target).is_valid()


def test_a_failure_leaves_nothing_behind(
    content: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new"
    target.mkdir()

    def full(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(WorkbenchError, match="No space left on device"):
        lay_out(target, content)
    assert tree(target) == {}


def test_a_failure_halfway_through_moving_leaves_nothing_behind(
    content: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new"
    target.mkdir()
    rename = Path.rename

    def fails_late(self: Path, to: Path) -> Path:
        if to.name == "notebooks":
            raise OSError(13, "Permission denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails_late)
    with pytest.raises(WorkbenchError, match="Permission denied"):
        lay_out(target, content)
    assert tree(target) == {}


def test_a_file_in_the_way_is_said(content: Path, tmp_path: Path) -> None:
    (tmp_path / "new").write_text("a file")
    with pytest.raises(WorkbenchError, match="new"):
        lay_out(tmp_path / "new", content)
    assert (tmp_path / "new").read_text() == "a file"


def test_the_package_carries_its_content() -> None:
    assert (content_root() / "verifiers").is_dir()
