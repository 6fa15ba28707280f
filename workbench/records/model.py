"""What a tuning record is: its key, which holds everything that identifies a result, and the result.

Every field of `RecordKey` is required: a stored record that lacks one (written by an older schema) does not
validate and is not used, so that it can never be taken for a record of something else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench import ops
from workbench.artifact import Artifact, BoundBuffer, Resources, Toolchain, stable_hash
from workbench.errors import WorkbenchError
from workbench.ops.model import Op

SCHEMA = 1
"""Version of the record's form, written into databases and export files."""


class Objective(StrEnum):
    """What a record's value is; the two kinds never meet in one ranking."""

    PREDICTED = "predicted"
    MEASURED = "measured"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class BufferKey(_Data):
    """Layout and dtype of one buffer."""

    name: str
    shape: tuple[int, ...]
    """Extents in elements."""
    strides: tuple[int, ...]
    """Strides in elements."""
    dtype: str
    role: str
    align: int
    """Alignment of the base address in bytes."""
    zeroed: bool

    @staticmethod
    def of(buffer: BoundBuffer) -> BufferKey:
        """The key of a compact row-major buffer, the only layout that candidates get today."""
        strides, step = [], 1
        for extent in reversed(buffer.shape):
            strides.append(step)
            step *= extent
        return BufferKey(name=buffer.name, shape=buffer.shape, strides=tuple(reversed(strides)),
                         dtype=buffer.dtype.value, role=buffer.role.value, align=buffer.align,
                         zeroed=buffer.zeroed)  # fmt: skip


class RecordKey(_Data):
    """Identity of a result. Two requests that differ in any field never share a record."""

    op: str
    workload: str
    axes: dict[str, int]
    """Every axis of the workload."""
    buffers: tuple[BufferKey, ...]
    """Layouts and dtypes of all buffers, scratch included, in declaration order."""
    template: str
    source_hash: str
    """SHA-256 of the source that was compiled."""
    knobs: dict[str, int | str | bool]
    arch: str
    device: str
    """Machine description (predicted) or CUDA device (measured)."""
    objective: Objective
    premises: str
    """Hash of what the value rests on: machine figures and model version, or the timing protocol."""
    toolchain: Toolchain
    """DSL, flavour, PTX ISA and ptxas versions, and flags."""
    tolerance_hash: str
    """Hash of the tolerance policy that the verdict was reached under."""
    verifier_hash: str
    """Hash of the verifier's source and of what it is made of."""

    @property
    def hash(self) -> str:
        """SHA-256 of the key, independent of the order of axes and knobs."""
        return stable_hash(self.model_dump(mode="json"))

    @staticmethod
    def of(
        artifact: Artifact,
        *,
        device: str,
        objective: Objective,
        premises: str,
        tolerance_hash: str,
        verifier_hash: str,
    ) -> RecordKey:
        """The key of a result about `artifact`."""
        return RecordKey(
            op=artifact.op,
            workload=artifact.workload,
            axes=artifact.axes,
            buffers=tuple(BufferKey.of(b) for b in artifact.buffers),
            template=artifact.template,
            source_hash=artifact.source_hash,
            knobs=artifact.knobs,
            arch=artifact.arch,
            device=device,
            objective=objective,
            premises=premises,
            toolchain=artifact.toolchain,
            tolerance_hash=tolerance_hash,
            verifier_hash=verifier_hash,
        )


class Record(_Data):
    """One result: a time with its verdict, or a failure with its kind."""

    key: RecordKey
    value_us: float | None = None
    """Microseconds of one run of the whole op; absent where the candidate failed before it had a time."""
    samples_us: tuple[float, ...] = ()
    """Single timings behind a measured value."""
    verdict: Literal["pass", "fail", "unknown"] | None = None
    """Verdict of the verification, absent where the candidate did not get that far."""
    failure: str | None = None
    """Kind of failure (`rejected`, `compiler`, `timeout`, `verify`, ...); absent for a usable result."""
    message: str = ""
    """One line about the failure."""
    resources: dict[str, Resources] = {}
    """By PTX entry name."""
    artifact_key: str = ""
    seed: int = 0
    """Seed of the inputs and the scheduler."""
    run: str = ""
    """Run or study the record came from."""
    started: datetime
    finished: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @model_validator(mode="after")
    def _is_consistent(self) -> Record:
        if self.value_us is not None and not (math.isfinite(self.value_us) and self.value_us > 0):
            raise ValueError(f"value_us={self.value_us} is not a positive finite time")
        if self.value_us is None and self.failure is None:
            raise ValueError("a record without a value must name its failure")
        if self.verdict == "pass" and self.failure is not None:
            raise ValueError(f"a record that passed cannot have failed as {self.failure!r}")
        return self

    @property
    def id(self) -> str:
        """Content hash: the same record imported twice is one record."""
        return stable_hash(self.model_dump(mode="json"))

    @property
    def is_usable(self) -> bool:
        """True if the record may win: it has a time and its verification passed."""
        return self.failure is None and self.value_us is not None and self.verdict == "pass"


def hash_tolerances(op: Op) -> str:
    """Hash of an op's tolerance policy."""
    return stable_hash({name: asdict(t) for name, t in op.tolerances.items()})


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, for instance of a verifier.

    Raises:
        WorkbenchError: if it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise WorkbenchError(f"cannot read {path}: {e.strerror or e}") from e


def hash_verifier(path: Path) -> str:
    """Hash of a verifier's file and of `workbench.ops`, whose functions verifiers are made of.

    Raises:
        WorkbenchError: if a file cannot be read.
    """
    shared = sorted(Path(ops.__file__).parent.glob("*.py"))
    return stable_hash([hash_file(path), *((p.name, hash_file(p)) for p in shared)])


def differences(a: RecordKey, b: RecordKey) -> tuple[str, ...]:
    """Names of the key fields in which two keys differ (`toolchain.ptxas` for a nested one)."""
    return tuple(_differences(a.model_dump(mode="json"), b.model_dump(mode="json"), ""))


def _differences(a: Mapping[str, object], b: Mapping[str, object], prefix: str) -> list[str]:
    names: list[str] = []
    for name in sorted(a.keys() | b.keys()):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            names += _differences(x, y, f"{prefix}{name}.")
        elif x != y or type(x) is not type(y):
            names.append(f"{prefix}{name}")
    return names
