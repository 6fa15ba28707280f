"""What a verification rests on beside the kernel: seed, contract, the workbench itself, the libraries."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from workbench.artifact import stable_hash
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.records.model import hash_tolerances, hash_verifier
from workbench.workspace import Workspace

LARGEST_SEED = 1 << 62
"""Seeds are below this: what random generators take."""
DISASSEMBLER = "nvidia-cuda-nvdisasm"
"""Package whose nvdisasm writes the SASS."""
_LIBRARIES = ("torch", "numpy", "ml_dtypes", DISASSEMBLER)
_PARTS = (
    "artifact.py", "compile", "cost", "expressions.py", "findings.py", "isa", "memory_model", "ops",
    "simulator", "templates.py", "verify",
)  # fmt: skip


class Provenance(BaseModel):
    """The premises of a report: where two agree in all fields, the same artifact gets the same report."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    seed: int = Field(ge=0, lt=LARGEST_SEED)
    """Of the inputs and the schedules."""
    op_hash: str
    """Hash of the op's contract as data: buffers, workloads, constants, tolerances, names of generators."""
    tolerance_hash: str
    verifier_hash: str
    """Hash of the verifier's file and of the functions that verifiers are made of."""
    workbench: str
    """Version."""
    workbench_hash: str
    """Hash of the parts of the workbench's source that compile, check and predict."""
    libraries: dict[str, str]
    """Versions of what references and simulator compute with, and of the disassembler."""
    python: str
    machine: str
    """System, processor architecture, and the vector instructions that torch uses."""


def provenance(workspace: Workspace, op_name: str, seed: int) -> Provenance:
    """What a verification in this workspace by this process rests on.

    Raises:
        UnknownNameError: if the workspace has no such op.
        ContentError: if its verifier cannot be used.
    """
    from workbench import __version__

    op = load_op(workspace, op_name)
    return Provenance(
        seed=seed,
        op_hash=hash_op(op),
        tolerance_hash=hash_tolerances(op),
        verifier_hash=hash_verifier(workspace.verifier(op_name)),
        workbench=__version__,
        workbench_hash=hash_workbench(),
        libraries=_libraries(),
        python=platform.python_version(),
        machine=_machine(),
    )


def hash_op(op: Op) -> str:
    """Hash of what an op's contract says, the code of its functions aside."""
    return stable_hash(
        {
            "name": op.name,
            "buffers": [(b.name, b.shape, b.dtype.value, b.role.value, b.align) for b in op.buffers],
            "workloads": [(w.name, dict(w.axes), w.real) for w in op.workloads],
            "constants": dict(op.constants),
            "tolerances": hash_tolerances(op),
            "generators": sorted(op.generators),
        }
    )


@cache
def hash_workbench() -> str:
    """Hash of the parts of the workbench that compile, check and predict, by names in the package."""
    root = Path(__file__).resolve().parents[1]
    files = {p.relative_to(root).as_posix(): p for p in (*root.rglob("*.py"), *root.rglob("*.toml"))}
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.split("/")[0] in _PARTS:
            digest.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _libraries() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> str:
    import torch

    return f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
