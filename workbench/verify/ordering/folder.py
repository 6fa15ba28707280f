"""Which files of a folder an audit looks at."""

from __future__ import annotations

from pathlib import Path

from workbench.compile.plain import is_kernel_file
from workbench.errors import ContentError


def kernel_files(folder: Path) -> list[Path]:
    """PTX files, cubins without a PTX beside them, and Python files with CuTe DSL kernels, in subfolders too.

    Hidden folders and `__pycache__` are left out.

    Raises:
        ContentError: if there is none, or the folder cannot be read.
    """
    try:
        every = sorted(p for p in folder.rglob("*") if p.is_file())
    except OSError as e:
        raise ContentError(folder, f"cannot be read: {e.strerror}") from e
    found = [p for p in every if _looked_at(p, folder)]
    if not found:
        raise ContentError(folder, "holds no .ptx, no .cubin and no .py file with a CuTe DSL kernel")
    return found


def _looked_at(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    if any(p.startswith(".") or p == "__pycache__" for p in parts):
        return False
    match path.suffix.lower():
        case ".ptx":
            return True
        case ".cubin":
            return not path.with_suffix(".ptx").is_file()
        case ".py":
            return is_kernel_file(path)
        case _:
            return False
