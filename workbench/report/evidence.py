"""The JSON documents of `workbench evidence`."""

from __future__ import annotations

from typing import Any, Literal

from workbench.report.documents import Document
from workbench.verify.report import Figure, Verdict

Status = Literal["agree", "differ", "not repeated"]


class EvidenceFigure(Document):
    """A stated time with its premises."""

    kind: Literal["predicted", "measured"]
    us: Figure
    """Microseconds of one run of all launches; of a measured time the median."""
    samples: int
    """Raw samples behind it; 0 for a prediction."""
    premises: dict[str, Any]


class EvidenceWaiver(Document):
    """A finding that a person accepted."""

    finding: str
    """Its fingerprint."""
    person: str
    reason: str


class EvidenceKernel(Document):
    """A kernel of a bundle, as the bundle states it."""

    key: str
    op: str
    workload: str
    arch: str
    template: str
    knobs: dict[str, int | str | bool]
    verdict: Verdict
    checks: int
    waived: tuple[str, ...]
    """Undecided checks that a person accepted."""
    waivers: tuple[EvidenceWaiver, ...]
    """Of single findings."""
    rests_on: dict[str, str]
    """Premises of the figures of its checks: seed, contract, verifier, workbench, libraries. Empty where the
    export did not record them."""
    toolchain: str
    hashes: dict[str, str]
    """SHA-256 of source, PTX, cubin and SASS."""
    figures: tuple[EvidenceFigure, ...]


class EvidenceMakeDocument(Document):
    """`workbench evidence make --json`."""

    bundle: str
    """The file that was written."""
    sha256: str
    """Of the file."""
    nbytes: int
    members: tuple[str, ...]
    kernels: tuple[EvidenceKernel, ...]
    notes: tuple[str, ...] = ()
    """What the bundle could not hold, and why."""
    signature: str | None = None
    """File of the signature, if it was signed."""


class EvidenceProblem(Document):
    """Something wrong with a bundle."""

    where: str
    """The member; `container` for bytes that belong to none; `signature`, `file`."""
    what: str
    offset: int | None = None
    """First byte of the file that is concerned, where it is known."""


class EvidenceCheckDocument(Document):
    """`workbench evidence check --json`."""

    bundle: str
    sha256: str
    """Of the file as it is."""
    nbytes: int
    verdict: Verdict
    problems: tuple[EvidenceProblem, ...]
    signature: str
    """What is known of a signature: who signed, or that nothing was checked."""
    members: int
    """Members that are as they were written, the list of hashes included."""
    kernels: tuple[EvidenceKernel, ...]
    notes: tuple[str, ...] = ()


class EvidencePoint(Document):
    """One statement of a bundle, held against what was found here."""

    kernel: str
    """Beginning of the kernel's key; empty for the bundle as a whole."""
    name: str
    """For instance `ptx`, `check/memory`, `predicted time`."""
    kind: Literal["premise", "result"]
    """A premise that differs is no disagreement; it says why a result may not be comparable."""
    status: Status
    stated: str
    """By the bundle."""
    found: str
    """Here."""
    detail: str = ""
    """Why the two differ, or why nothing was repeated."""


class EvidenceRunDocument(Document):
    """`workbench evidence run --json`."""

    bundle: str
    sha256: str
    device: str
    """The CUDA device that times were taken on, or why there is none."""
    verdict: Verdict
    """`fail` if a result differs, `unknown` if one that the bundle states was not repeated, else `pass`."""
    timing: str
    """What became of the timing, in one line."""
    points: tuple[EvidencePoint, ...]
    kernels: tuple[EvidenceKernel, ...]
    seconds: float

    def count(self, status: Status, kind: str = "result") -> int:
        """How many points of a kind have a status."""
        return sum(p.status == status and p.kind == kind for p in self.points)
