"""Files: atomic writes (a reader sees the old file or the whole new one, never a part) and TOML."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from workbench.errors import ContentError, WorkbenchError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` through a temporary file in the same folder, then rename.

    Raises:
        WorkbenchError: if the folder cannot be written or the disk is full; `path` is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101
        os.replace(temporary, path)  # noqa: PTH105
        temporary = None
    except OSError as e:
        reason = e.strerror or str(e)
        raise WorkbenchError(f"cannot write {path}: {reason}; free space or choose a writable folder") from e
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def check_destination(path: Path, *others: Path) -> None:
    """Refuse a place that `write_atomic` could not write, before the work whose result goes there.

    Args:
        path: the file to be written.
        others: files that the same command reads or writes and that it must not replace.

    Raises:
        WorkbenchError: if it is a folder, one of `others`, or lies under something that is no folder.
    """
    if path.is_dir():
        raise WorkbenchError(f"cannot write {path}: it is a folder; give the name of a file")
    if any(path.resolve() == other.resolve() for other in others):
        raise WorkbenchError(f"cannot write {path}: the command uses this file already; give another name")
    above = next(p for p in path.absolute().parents if p.exists())
    if not above.is_dir():
        raise WorkbenchError(f"cannot write {path}: {above} is no folder; choose a writable folder")
    if not os.access(above, os.W_OK):
        raise WorkbenchError(f"cannot write {path}: {above} may not be written; choose a writable folder")


def read_toml(path: Path, most_bytes: int = 1 << 20) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises:
        ContentError: if it cannot be read, has more than `most_bytes`, or is not TOML; says where.
    """
    try:
        if path.stat().st_size > most_bytes:
            raise ContentError(path, f"is too large: more than {most_bytes} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise ContentError(path, f"is not TOML: {e}") from e
    return parse_toml(text, path)


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Return what TOML text holds; `path` names it in errors. Raises ContentError."""
    try:
        return tomllib.loads(text)
    except RecursionError as e:
        raise ContentError(path, "is not TOML: it is nested too deep") from e
    except ValueError as e:  # a date that does not exist is a bare ValueError
        line = re.search(r"line (\d+)", str(e))
        raise ContentError(path, f"is not TOML: {e}", int(line[1]) if line else None) from e
