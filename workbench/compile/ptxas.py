"""PTX to cubin by the ptxas that NVIDIA publishes on PyPI, outside the child that ran the candidate."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from workbench.compile.request import CompileError, Limits
from workbench.environment import kept
from workbench.errors import MissingToolError, WorkbenchError

_DSL_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
_INSTALL = "pip install 'nvidia-cuda-nvcc>=13.0'"
_VERSION = re.compile(r"release [\d.]+, V(?P<version>[\d.]+)")
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ERROR = re.compile(
    r"^(?:ptxas )?(?:(?P<file>\S+), line (?P<line>\d+); )?(?:error|fatal)\s*:\s*(?P<text>.+)$", re.M
)


@dataclass(frozen=True)
class Assembled:
    """What ptxas made of a PTX module."""

    cubin: bytes
    spills: dict[str, tuple[int, int]]
    """Spill store and spill load bytes a thread, by PTX entry."""
    log: str


def find_ptxas() -> Path:
    """Path of the newest installed ptxas.

    Raises:
        MissingToolError: if no package brings one.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = [p for root in roots for p in root.glob("*/bin/ptxas") if os.access(p, os.X_OK)]
    if not found:
        raise MissingToolError(f"ptxas is not installed; {_INSTALL}")
    return max(found, key=lambda p: [int(n) for n in ptxas_version(p).split(".")])


def ptxas_version(path: Path) -> str:
    """Version such as `13.5.37`; raises MissingToolError if the program does not run."""
    try:
        stat = path.stat()
    except OSError as e:
        raise MissingToolError(f"{path} cannot be read: {e.strerror}; {_INSTALL}") from e
    return _version_of(str(path), stat.st_mtime_ns, stat.st_size)


@cache
def _version_of(path: str, mtime_ns: int, size: int) -> str:
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True, env=kept()
        ).stdout
        m = _VERSION.search(text)
    except (OSError, subprocess.SubprocessError) as e:
        raise MissingToolError(f"{path} does not run: {e}; {_INSTALL}") from e
    if m is None:
        raise MissingToolError(f"{path} does not say its version; {_INSTALL}")
    return m["version"]


def toolchain_identity() -> dict[str, str]:
    """What identifies the toolchain before anything is compiled: the DSL's packages and flavour, and ptxas.

    Raises:
        MissingToolError: if the DSL or ptxas is not installed.
    """
    identity = {}
    for name in _DSL_PACKAGES:
        try:
            identity[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "nvidia-cutlass-dsl" not in identity:
        raise MissingToolError("CuTe DSL is not installed; pip install 'nvidia-cutlass-dsl[cu13]'")
    return {**identity, "flavour": dsl_flavour(identity), "ptxas": ptxas_version(find_ptxas())}


def dsl_flavour(packages: Iterable[str]) -> str:
    """Major CUDA version of the libraries that the DSL will choose, such as `13`.

    The DSL takes the newest that the CUDA driver supports, or the newest of all where there is no driver. PTX
    differs between them: the choice must be known before an artifact is looked up, and is checked afterwards.

    Raises:
        MissingToolError: if none of the installed ones will do.
    """
    prefix = "nvidia-cutlass-dsl-libs-cu"
    installed = sorted(int(p.removeprefix(prefix)) for p in packages if p.startswith(prefix))
    driver = _driver_major()
    usable = [n for n in installed if driver is None or n <= driver]
    if not usable:
        raise MissingToolError(
            f"CuTe DSL has libraries for CUDA {installed}, the driver is for CUDA {driver}; "
            "pip install 'nvidia-cutlass-dsl[cu13]' or update the driver"
        )
    return str(usable[-1])


@cache
def _driver_major() -> int | None:
    """Major CUDA version of the driver, None without one. Asking makes no context and touches no GPU."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


def assemble(ptx: str, arch: str, flags: Sequence[str], limits: Limits) -> Assembled:
    """Assemble PTX for `arch`.

    Raises:
        CompileError: `compiler` with the log's first useful line, `timeout` or `memory` at the limit.
        MissingToolError: if there is no ptxas.
    """
    ptxas = find_ptxas()
    with tempfile.TemporaryDirectory(prefix="workbench-ptxas-") as folder:
        try:
            (Path(folder) / "kernel.ptx").write_text(ptx)
        except OSError as e:
            raise WorkbenchError(
                f"cannot write to the temporary folder: {e.strerror}; free space or set TMPDIR"
            ) from e
        command = [str(ptxas), "-arch", arch, *flags, "-v", "kernel.ptx", "-o", "kernel.cubin"]
        environment = {"PATH": os.environ.get("PATH", ""), "TMPDIR": folder, "HOME": folder, "LC_ALL": "C"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            resource.prlimit(process.pid, resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
            raw, _ = process.communicate(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            raise CompileError("timeout", f"ptxas is not done after {limits.seconds:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        log = raw.decode(errors="replace").replace(f"{folder}/", "")
        if process.returncode != 0:
            raise _failure(process.returncode, log, limits)
        cubin = (Path(folder) / "kernel.cubin").read_bytes()
    return Assembled(cubin, _spills(log), log)


def _failure(code: int, log: str, limits: Limits) -> CompileError:
    m = _ERROR.search(log)
    if "bad_alloc" in log or "Memory allocation failure" in log or code == -signal.SIGKILL:
        return CompileError(
            "memory", f"ptxas is out of memory; limit {limits.memory_bytes >> 20} MiB", detail=log
        )
    if m is None:
        return CompileError("compiler", f"ptxas ended with status {code}", detail=log)
    place = f" (PTX line {m['line']})" if m["line"] else ""
    return CompileError("compiler", f"ptxas: {m['text'].strip()}{place}", detail=log)


def _spills(log: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    entry = None
    for line in log.splitlines():
        if m := _ENTRY.search(line):
            entry = m["name"]
        elif entry is not None and (s := _SPILLS.search(line)):
            found.setdefault(entry, (int(s.group(2)), int(s.group(3))))
    return found
