"""Looks at this machine: what can be compiled, disassembled, simulated and measured, and what is missing."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.report.documents import Capability, DoctorDocument
from workbench.report.tables import size
from workbench.workspace import Workspace

if TYPE_CHECKING:
    from workbench.artifact import Artifact

_NEEDED_MEMORY = 8 << 30
_NEEDED_DISK = 2 << 30
_INSTALL = "install the package with its dependencies: pip install -c constraints.txt -e ."


_PROBE = """
import cutlass.cute as cute


@cute.kernel
def copy(x: cute.Tensor, out: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    out[lane] = x[lane]


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, stream):
    copy(x, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def build(axes, knobs):
    return launch
"""


@dataclass(frozen=True)
class Probe:
    """Something to look for. `look` returns what was found, or raises with what to do about it."""

    name: str
    look: Callable[[], str]
    missing_is: str = "missing"
    """Status if it is not there: `missing` or `warning`."""
    fix: str = ""


class Absent(Exception):  # noqa: N818
    """What a probe looked for is not there."""

    def __init__(self, detail: str, fix: str = "") -> None:
        super().__init__(detail)
        self.detail, self.fix = detail, fix


def examine(workspace: Workspace | None = None) -> DoctorDocument:
    """Look at this machine and, if there is one, at the workspace; nothing is changed and nothing raised."""
    found = {p.name: _look(p) for p in _probes()}
    lines = [*found.values(), *_workspace_lines(workspace)]
    ok = {name for name, c in found.items() if c.status == "ok"}
    return DoctorDocument(
        capabilities=tuple(lines),
        can_compile="compile" in ok,
        can_disassemble="nvdisasm" in ok,
        can_simulate={"simulate", "PyTorch"} <= ok,
        can_measure="CUDA device" in ok,
    )


def _look(probe: Probe) -> Capability:
    try:
        return Capability(name=probe.name, status="ok", detail=probe.look())
    except Absent as e:
        detail, fix = e.detail, e.fix or probe.fix
    except WorkbenchError as e:
        detail, fix = str(e), probe.fix
    except Exception as e:  # a broken installation can fail in any way, and that is what is being looked for
        detail, fix = f"{type(e).__name__}: {e}", probe.fix
    status = "warning" if probe.missing_is == "warning" else "missing"
    return Capability(name=probe.name, status=status, detail=" ".join(detail.split()), fix=fix)


def _probes() -> Iterator[Probe]:
    yield Probe("Python", _python, fix="use Python 3.11 or newer")
    yield Probe("CuTe DSL", _dsl, fix=_INSTALL)
    yield Probe("ptxas", _ptxas, fix="pip install nvidia-cuda-nvcc")
    yield Probe("sandbox", _sandbox, "warning")
    yield Probe("compile", _compiles, fix="see the lines above")
    yield Probe(
        "nvdisasm",
        _nvdisasm,
        "warning",
        fix="pip install nvidia-cuda-nvdisasm; without it SASS order is unknown",
    )
    yield Probe("NumPy", lambda: _versions("numpy", "ml_dtypes"), fix=_INSTALL)
    yield Probe("PyTorch", lambda: _versions("torch"), fix=_INSTALL)
    yield Probe("simulate", _simulates, fix="see the lines above")
    yield Probe(
        "notebook extra",
        lambda: _versions("matplotlib", "nbclient"),
        "warning",
        "pip install 'workbench[notebook]'",
    )
    yield Probe("CUDA device", _cuda, "warning")
    yield Probe("cores", _cores, "warning")
    yield Probe("memory", _memory, "warning", fix="a run wants 8 GiB; use fewer --workers")
    yield Probe(
        "temporary space",
        lambda: _disk(Path(tempfile.gettempdir())),
        "warning",
        "free space there or set TMPDIR",
    )


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _versions(*packages: str) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            raise Absent(f"package {package} is not installed") from None
    return ", ".join(found)


def _dsl() -> str:
    from workbench.compile import toolchain_identity

    identity = toolchain_identity()
    flavours = [name.rpartition("-")[2] for name in identity if name.rpartition("-")[2].startswith("cu1")]
    if not flavours:
        raise Absent(
            f"{identity['nvidia-cutlass-dsl']} without its CUDA libraries",
            "pip install 'nvidia-cutlass-dsl[cu13]'",
        )
    return f"{identity['nvidia-cutlass-dsl']}, libraries for {' and '.join(flavours)}"


def _ptxas() -> str:
    from workbench.compile import find_ptxas, ptxas_version

    return ptxas_version(find_ptxas())


def _nvdisasm() -> str:
    from workbench.isa.sass import disassemble

    if "EXIT" not in disassemble(_probe().cubin):
        raise Absent("the probe kernel's cubin does not disassemble to anything known")
    return metadata.version("nvidia-cuda-nvdisasm")


def _compiles() -> str:
    artifact = _probe()
    toolchain = artifact.toolchain
    return f"a probe kernel for {artifact.arch}: PTX ISA {toolchain.ptx_isa}, CUDA {toolchain.flavour}"


def _simulates() -> str:
    from workbench.simulator import Memory, simulate

    artifact = _probe()
    memory = Memory()
    data = memory.allocate("x", 128, initialized=True)
    data[:] = 7
    memory.allocate("out", 128)
    outcome = simulate(artifact, memory)
    if not outcome.completed or outcome.findings or not (memory.view("out") == 7).all():
        raise Absent("the probe kernel's result is wrong", "report it as a bug of the simulator")
    return "a probe kernel gives the right result"


@cache
def _probe() -> Artifact:
    """Compile a kernel that copies 32 words."""
    from workbench.artifact import BoundBuffer
    from workbench.compile import CompileRequest, compile_candidate
    from workbench.ops.dtypes import DType
    from workbench.ops.model import Role

    buffers = (
        BoundBuffer(name="x", shape=(32,), dtype=DType.F32, role=Role.ACTIVATION),
        BoundBuffer(name="out", shape=(32,), dtype=DType.F32, role=Role.OUTPUT),
    )
    return compile_candidate(
        CompileRequest(
            op="probe", workload="probe", axes={}, template="probe", knobs={}, source=_PROBE, buffers=buffers
        )
    )


def _sandbox() -> str:
    from workbench.compile import policy, sandbox_capabilities

    fences = sandbox_capabilities()
    held = [name for name, holds in fences.items() if holds]
    if missing := policy.lacking(held):
        raise Absent(
            f"not fenced in: {', '.join(missing)}; fences that hold: {', '.join(held) or 'none'}; "
            "nothing is compiled",
            "install bubblewrap (package `bubblewrap`), use a kernel that permits them, or compile what you "
            "trust with --unsafe-compile",
        )
    others = [name for name, holds in fences.items() if not holds]
    return ", ".join(held) + (f"; not here, and not required: {', '.join(others)}" if others else "")


def _cuda() -> str:
    advice = "none is needed; times are predicted instead of measured"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Absent("no CUDA driver", advice) from None
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        raise Absent("a CUDA driver, but no device that it can use", advice)
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(name, len(name), 0)
    first = name.value.decode(errors="replace")
    return first if count.value == 1 else f"{count.value} devices, the first: {first}"


def _cores() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        raise Absent("1", "a run takes twice as long on one core")
    return str(cores)


def _memory() -> str:
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit = _cgroup_limit()
    if limit is not None and limit < total:
        total, available = limit, min(available, limit)
    text = f"{size(available)} available of {size(total)}"
    if available < _NEEDED_MEMORY:
        raise Absent(text)
    return text


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise Absent(f"/proc/meminfo has no {field}")


def _cgroup_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _disk(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_DISK:
        raise Absent(f"{size(free)} free")
    return f"{size(free)} free"


def _workspace_lines(workspace: Workspace | None) -> Iterator[Capability]:
    try:
        workspace = workspace or Workspace.find()
    except WorkbenchError as e:
        yield Capability(name="workspace", status="warning", detail=str(e), fix="workbench init DIR")
        return
    root = workspace.root
    yield Capability(name="workspace", status="ok", detail=str(root))
    yield _look(Probe("workspace space", lambda: _disk(root), "warning", "free space there"))
    for folder in (workspace.generated, workspace.tuning_db, workspace.cache, workspace.runs):
        name = f"{folder.relative_to(root)}/"
        yield _look(Probe(name, lambda f=folder: _writable(f), fix="make it writable"))  # type: ignore[misc]
    yield _look(Probe("tuning records", lambda: _records(workspace)))


def _writable(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise Absent("is not a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            return "writable"
    except OSError as e:
        raise Absent(f"cannot be written: {e.strerror or e}") from e


def _records(workspace: Workspace) -> str:
    from workbench.records import RecordStore

    path = workspace.tuning_db / "records.sqlite"
    if not path.exists():
        return "none yet"
    store = RecordStore(path)
    unusable = store.unusable()
    return f"{len(store)} records" + (f", {unusable} of another schema" if unusable else "")
