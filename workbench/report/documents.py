"""The JSON documents of the command line, one model a command.

`schemas()` names every published model; `docs/schemas/<name>.json` holds each one's JSON Schema.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from workbench.verify.report import Figure


class Document(BaseModel):
    """Base of the documents: immutable; a float that JSON cannot hold is written as its name."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, extra="forbid", ser_json_inf_nan="strings"
    )


class Capability(Document):
    """One thing that was looked for on this machine."""

    name: str
    status: Literal["ok", "warning", "missing"]
    """`missing` keeps something from working; a `warning` narrows it."""
    detail: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty if nothing is needed."""


class DoctorDocument(Document):
    """`workbench doctor --json`."""

    capabilities: tuple[Capability, ...]
    can_compile: bool
    """CuTe DSL and ptxas are there."""
    can_disassemble: bool
    """nvdisasm is there, so that ordering can be decided on the SASS."""
    can_simulate: bool
    can_measure: bool
    """A CUDA device is there, so that times can be measured instead of predicted."""

    @property
    def usable(self) -> bool:
        """True if kernels can be compiled and simulated, and nothing that is needed for it is missing."""
        complete = all(c.status != "missing" for c in self.capabilities)
        return self.can_compile and self.can_simulate and complete


class OpSummary(Document):
    """One line of `workbench ops`."""

    name: str
    summary: str
    """First sentence of the verifier's documentation."""
    workloads: tuple[str, ...]
    templates: tuple[str, ...]
    error: str | None = None
    """Why the verifier cannot be used, with file and line."""


class OpsDocument(Document):
    """`workbench ops --json`."""

    ops: tuple[OpSummary, ...]


class BufferContract(Document):
    """A buffer of an op."""

    name: str
    shape: tuple[str, ...]
    """Extents in elements, as integers or expressions over the axes."""
    dtype: str
    role: str
    align: int
    """Alignment of the base address in bytes."""
    doc: str


class ToleranceContract(Document):
    """How an output is judged; see `workbench.ops.Tolerance`."""

    exact: bool
    factor: float
    floor_rms: float
    floor_worst: float
    cap_rms: float
    cap_worst: float


class BufferSize(Document):
    """A buffer at one workload."""

    name: str
    shape: tuple[int, ...]
    """Extents in elements."""
    nbytes: int
    """Bytes; sub-byte types are packed."""


class WorkloadContract(Document):
    """One workload of an op."""

    name: str
    doc: str
    real: bool
    """True for sizes of the real model, false for small ones that serve tests."""
    axes: dict[str, int]
    buffers: tuple[BufferSize, ...]
    flops: int
    compulsory_bytes: int
    """Bytes that must cross the memory interface: weights touched once plus inputs and outputs."""
    roofline_us: Figure
    """Least time on `machine`, microseconds: predicted from the machine's description, never measured."""
    bound: str
    """`memory`, `compute` or `latency`: what the roofline rests on."""


class TemplateContract(Document):
    """A template of an op."""

    name: str
    summary: str
    knobs: dict[str, tuple[int | str | bool, ...]]
    default: dict[str, int | str | bool]
    points: dict[str, int]
    """Number of valid points by workload."""


class OpDocument(Document):
    """`workbench ops OP --json`: one op's contract."""

    name: str
    doc: str
    machine: str
    """Machine of the rooflines."""
    buffers: tuple[BufferContract, ...]
    constants: dict[str, int | float]
    tolerances: dict[str, ToleranceContract]
    """By output buffer."""
    generators: tuple[str, ...]
    """Named input generators; `ordinary` and the adversarial ones."""
    workloads: tuple[WorkloadContract, ...]
    templates: tuple[TemplateContract, ...]


class InitDocument(Document):
    """`workbench init --json`."""

    folder: str
    files: tuple[str, ...]
    """Files laid out, relative to `folder`."""


class ExportDocument(Document):
    """`workbench export --json`."""

    folder: str
    """Folder of the exported kernel, relative to the workspace."""
    key: str
    """Key of the exported artifact."""
    files: tuple[str, ...]
    waived: tuple[str, ...] = ()
    """Undecided checks that a person waived by name."""


class ModuleKernel(Document):
    """A kernel of an exported package."""

    key: str
    op: str
    workload: str
    arch: str
    batch: int
    predicted_us: Figure | None
    """Predicted time of one run, microseconds; never measured."""
    waived: tuple[str, ...]
    """Undecided checks that a person waived by name."""


class ModuleDocument(Document):
    """`workbench export --to module --json`."""

    folder: str
    """The project folder that was written."""
    package: str
    version: str
    """Ends with a hash of the package's content."""
    wheel: str
    """The wheel, relative to `folder`."""
    wheel_nbytes: int
    kernels: tuple[ModuleKernel, ...]
    passed_over: tuple[str, ...]
    """Keys of winners of the same configurations with a longer predicted time."""
    by_reference: tuple[str, ...]
    """Ops of the package that have no kernel."""


class RunSummary(Document):
    """One proposing run."""

    run_id: str
    op: str
    workload: str
    arch: str
    finished: bool
    candidates: int
    verified: int
    winner: str | None
    """Template of the winner."""
    knobs: dict[str, int | str | bool] | None
    """Knobs of the winner."""
    predicted_us: Figure | None
    """Predicted time of the winner, microseconds."""


class RunsDocument(Document):
    """`workbench report --json`: the runs of this workspace, newest first."""

    runs: tuple[RunSummary, ...]


class RecordSummary(Document):
    """One tuning record; `workbench db export` writes it whole."""

    id: str
    op: str
    workload: str
    template: str
    knobs: dict[str, int | str | bool]
    arch: str
    device: str
    objective: Literal["predicted", "measured"]
    """What `value_us` is; the two kinds never meet in one ranking."""
    value_us: Figure | None
    """Time of one run of the op, microseconds."""
    verdict: Literal["pass", "fail", "unknown"] | None
    failure: str | None
    message: str
    run: str
    finished: str
    """ISO 8601, UTC."""


class RecordsDocument(Document):
    """`workbench db list --json`, newest first."""

    path: str
    total: int
    """Records that match, of which at most `--limit` are listed."""
    unusable: int
    """Rows of the database that today's schema does not accept."""
    records: tuple[RecordSummary, ...]


class ExportedRecordsDocument(Document):
    """`workbench db export --json`."""

    file: str
    records: int


class SkippedLine(Document):
    """A line of an import that could not be used."""

    line: int
    """1-based."""
    reason: str


class ImportedRecordsDocument(Document):
    """`workbench db import --json`."""

    added: int
    known: int
    """Records that were there already."""
    skipped: tuple[SkippedLine, ...]


def schemas() -> dict[str, type[BaseModel]]:
    """The published models by name."""
    from workbench.agent.run import RunResult
    from workbench.export.manifest import Manifest
    from workbench.memory_model import LitmusDocument
    from workbench.report.claims.judge import ClaimsDocument
    from workbench.report.evidence import EvidenceCheckDocument, EvidenceMakeDocument, EvidenceRunDocument
    from workbench.tune import ReplayReport
    from workbench.verify.ordering import AuditDocument
    from workbench.verify.report import Report
    from workbench.verify.trace import TraceDocument

    return {
        "audit": AuditDocument,
        "claims": ClaimsDocument,
        "db-export": ExportedRecordsDocument,
        "db-import": ImportedRecordsDocument,
        "db-list": RecordsDocument,
        "doctor": DoctorDocument,
        "evidence-check": EvidenceCheckDocument,
        "evidence-make": EvidenceMakeDocument,
        "evidence-run": EvidenceRunDocument,
        "export": ExportDocument,
        "export-module": ModuleDocument,
        "init": InitDocument,
        "litmus": LitmusDocument,
        "manifest": Manifest,
        "op": OpDocument,
        "ops": OpsDocument,
        "propose": RunResult,
        "replay": ReplayReport,
        "runs": RunsDocument,
        "trace": TraceDocument,
        "verify": Report,
    }


def json_schema(name: str) -> dict[str, Any]:
    """JSON Schema of a published document.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    from workbench.errors import UnknownNameError

    known = schemas()
    if name not in known:
        raise UnknownNameError("schema", name, known)
    return known[name].model_json_schema(mode="serialization")
