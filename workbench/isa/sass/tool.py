"""Running nvdisasm, which the PyPI package `nvidia-cuda-nvdisasm` brings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from workbench.environment import kept
from workbench.errors import MissingToolError, WorkbenchError

_SECONDS = 60


@cache
def find_nvdisasm() -> Path:
    """Path of nvdisasm in the installed `nvidia` package.

    Raises:
        MissingToolError: if no package brings it.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("*/bin/nvdisasm"), reverse=True):
            if os.access(path, os.X_OK):
                return path
    raise MissingToolError("nvdisasm is not installed; pip install 'nvidia-cuda-nvdisasm>=13.0'")


def disassemble(cubin: bytes, *, tool: Path | None = None) -> str:
    """Disassemble a cubin to text with labels and line comments.

    Raises:
        WorkbenchError: if the bytes are no ELF object, or nvdisasm refuses them or takes over a minute.
        MissingToolError: if nvdisasm is not installed or does not start.
    """
    if not cubin.startswith(b"\x7fELF"):
        raise WorkbenchError("not a cubin: the bytes do not start with an ELF header")
    program = tool or find_nvdisasm()
    with tempfile.TemporaryDirectory(prefix="workbench-sass-") as folder:
        path = Path(folder) / "kernel.cubin"
        try:
            path.write_bytes(cubin)
        except OSError as e:
            raise WorkbenchError(
                f"cannot write the cubin to a temporary folder: {e.strerror}; set TMPDIR"
            ) from e
        try:
            done = subprocess.run(
                [str(program), "-g", "-c", str(path)],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                env=kept(),
            )
        except subprocess.TimeoutExpired:
            raise WorkbenchError(f"nvdisasm was not done after {_SECONDS} s") from None
        except OSError as e:
            raise MissingToolError(
                f"{program} does not start: {e.strerror}; pip install 'nvidia-cuda-nvdisasm>=13.0'"
            ) from e
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()
        said = reason[0].replace(str(path), "the cubin") if reason else f"status {done.returncode}"
        raise WorkbenchError(f"nvdisasm cannot read the cubin: {said}")
    return done.stdout
