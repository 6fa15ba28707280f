"""Lays out a new workspace from the content that the package carries."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.report.documents import InitDocument

_CONTENT = {
    "verifiers": ("*.py",),
    "templates": ("*/*.py",),
    "notebooks": ("*.ipynb",),
    "docs": ("*.md", "rules/*.md", "schemas/*.json"),
}
_EMPTY = ("generated_kernels", "tuning_db")


def content_root() -> Path:
    """Folder of verifiers/, templates/, notebooks/ and docs/: inside an installed package, or the repository.

    Raises:
        WorkbenchError: if the installation carries no content.
    """
    package = Path(__file__).resolve().parents[1]
    for root in (package / "_content", package.parent):
        if (root / "verifiers").is_dir() and (root / "templates").is_dir():
            return root
    raise WorkbenchError("this installation carries no verifiers and templates; reinstall the package")


def lay_out(folder: Path, content: Path | None = None) -> InitDocument:
    """Create a workspace in `folder`: all of it or nothing.

    Raises:
        WorkbenchError: if one of its parts exists already, or the folder cannot be written.
    """
    source = content or content_root()
    for name in (*_CONTENT, *_EMPTY):
        if os.path.lexists(folder / name):
            raise WorkbenchError(
                f"{folder / name} exists already; nothing is overwritten, choose another folder"
            )
    moved: list[Path] = []
    staging: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".init-", dir=folder))
        files = _stage(source, staging)
        for name in (*_CONTENT, *_EMPTY):
            (staging / name).rename(folder / name)
            moved.append(folder / name)
    except OSError as e:
        for part in moved:
            shutil.rmtree(part, ignore_errors=True)
        reason = e.strerror or str(e)
        raise WorkbenchError(
            f"cannot lay out {folder}: {reason}; choose a writable folder with free space"
        ) from e
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return InitDocument(folder=str(folder), files=tuple(files))


def _stage(source: Path, staging: Path) -> list[str]:
    files = []
    for name, patterns in _CONTENT.items():
        (staging / name).mkdir()
        for path in sorted(p for pattern in patterns for p in (source / name).glob(pattern)):
            relative = path.relative_to(source)
            target = staging / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            files.append(relative.as_posix())
    for name in _EMPTY:
        (staging / name).mkdir()
    return files
