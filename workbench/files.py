"""Atomic file writes: a reader sees the old file or the whole new one, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from workbench.errors import WorkbenchError


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
