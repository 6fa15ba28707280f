"""The manifest of an exported kernel: what it is, how to launch it, why to trust it, its files' hashes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from workbench.artifact import BoundBuffer, Launch, Resources, Toolchain
from workbench.cost import Prediction
from workbench.export.provenance import Provenance
from workbench.export.waivers import Waiver
from workbench.verify.report import Verdict

FORMAT = 1
"""Version of the manifest's layout; a reader refuses a newer one."""

LICENCE = (
    "kernel.py is licensed as the template it comes from (Apache-2.0 for those of the workbench). It was"
    " compiled with NVIDIA CuTe DSL and ptxas, which are under NVIDIA's EULA; use of the PTX, the cubin and"
    " the SASS is subject to NVIDIA's terms, for NVIDIA GPUs."
)


class _Data(BaseModel):
    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, extra="forbid", ser_json_inf_nan="strings"
    )


class FileEntry(_Data):
    """One file beside the manifest."""

    sha256: str
    nbytes: int


class RunInfo(_Data):
    """The search that found the kernel."""

    run_id: str
    candidates: int
    """Candidates that were evaluated."""


class CheckVerdict(_Data):
    """The verdict of one check; `report.json` has its findings and figures."""

    name: str
    verdict: Verdict
    waived: bool = False
    """True if the check could not decide and a person waived it by name, or each of its findings."""
    waivers: tuple[Waiver, ...] = ()
    """Of its findings, where a file of waivers named them."""


class Manifest(_Data):
    """Everything needed to rebuild, check and launch the kernel without the workspace it came from."""

    format: Literal[1] = 1
    key: str
    """Key of the artifact: a hash over all that identifies it."""
    op: str
    workload: str
    axes: dict[str, int]
    template: str
    knobs: dict[str, int | str | bool]
    arch: str
    source_hash: str
    """SHA-256 of `kernel.py`, the Python source that was compiled."""
    toolchain: Toolchain
    buffers: tuple[BoundBuffer, ...]
    launches: tuple[Launch, ...]
    """In stream order, with the buffer and offset that feed each parameter."""
    resources: dict[str, Resources]
    """By PTX entry."""
    fences: tuple[str, ...] | None = None
    """Fences that held around the process that ran `kernel.py` to compile it; absent in earlier exports."""
    verified_on: str
    """`simulator` or the CUDA device's name."""
    checks: tuple[CheckVerdict, ...]
    provenance: Provenance | None = None
    """What the checks rest on; absent in exports of earlier versions."""
    prediction: Prediction | None
    """Predicted time with its premises; a measured time is never written here."""
    run: RunInfo | None
    licence: str = LICENCE
    files: dict[str, FileEntry]
    """Every file beside this one."""
