"""What is asked of the compiler, what it may cost, and how it fails."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from workbench.artifact import BoundBuffer, stable_hash
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.ops.model import Op, Workload
from workbench.templates import Template

ARCHITECTURES = ("sm_103a", "sm_100a", "sm_90a")
"""Targets the workbench compiles for; the first is the default (GB300)."""

DEFAULT_PTXAS_FLAGS = ("-O3", "-lineinfo")

_PTXAS_FLAG = re.compile(
    r"-O[0-3]|-lineinfo|--fmad=(true|false)|--maxrregcount=\d{1,3}|--register-usage-level=\d{1,2}"
    r"|--allow-expensive-optimizations=(true|false)|--def-load-cache=(ca|cg|cs|lu|cv)|--def-store-cache=(wb|cg|cs|wt)"
)

ErrorKind = Literal["rejected", "user", "compiler", "crash", "timeout", "memory", "arch", "tool"]


class CompileError(WorkbenchError):
    """A candidate that did not become an artifact; costs its own trial and nothing else.

    `kind` is one of
    - `rejected`: the source uses something a candidate may not use (see `workbench.compile.screen`);
    - `user`: the source is wrong (a Python or DSL error, a launch the device cannot make);
    - `compiler`: the DSL, libNVVM or ptxas refused or broke; says nothing about the candidate's numerics;
    - `crash`: the child died, or answered with something that is not a result;
    - `timeout`, `memory`: the child hit its limit;
    - `arch`: the object is not for the wanted architecture;
    - `tool`: the toolchain itself is missing or unusable.
    `line` is the 1-based line in the candidate's source where known; `detail` is the longer log, if any.
    """

    def __init__(self, kind: ErrorKind, message: str, line: int | None = None, detail: str = "") -> None:
        self.kind: ErrorKind = kind
        # A stranger may have written it: no control characters, no halves of characters.
        message = "".join(c if c.isprintable() else " " for c in message)
        self.message, self.line, self.detail = message, line, detail
        place = f" (candidate line {line})" if line is not None else ""
        super().__init__(f"{kind}: {message}{place}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.kind, self.message, self.line, self.detail))


class Limits(BaseModel):
    """What one compile may take. Beyond any of them the child is killed with its whole process group."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    seconds: float = 60.0
    """Wall-clock time of the child, and of ptxas."""
    memory_bytes: int = 3 << 30
    """Address space the child may add to what the compiler has mapped already."""
    file_bytes: int = 64 << 20
    """Largest file the child may write, and twice this for all its files together."""
    result_bytes: int = 64 << 20
    """Largest answer the parent reads."""
    open_files: int = 256


class CompileRequest(BaseModel):
    """Everything that decides what a candidate compiles to."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    op: str
    workload: str
    axes: dict[str, int]
    template: str
    """Template or candidate name."""
    knobs: dict[str, int | str | bool]
    arch: str = ARCHITECTURES[0]
    source: str
    """Python source with a function `build(axes, knobs)`."""
    buffers: tuple[BoundBuffer, ...]
    constants: dict[str, int | float] = {}
    """The op's constants; `build` finds them in `axes`."""
    ptxas_flags: tuple[str, ...] = DEFAULT_PTXAS_FLAGS

    @field_validator("arch")
    @classmethod
    def _known_arch(cls, arch: str) -> str:
        if arch not in ARCHITECTURES:
            raise UnknownNameError("arch", arch, ARCHITECTURES)
        return arch

    @field_validator("ptxas_flags")
    @classmethod
    def _known_flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        for flag in flags:
            if not _PTXAS_FLAG.fullmatch(flag):
                raise WorkbenchError(
                    f"ptxas flag {flag!r} is not one the workbench passes on; see CompileRequest"
                )
        return flags

    @model_validator(mode="after")
    def _distinct_names(self) -> CompileRequest:
        clash = self.axes.keys() & self.constants.keys()
        if clash:
            raise WorkbenchError(f"{self.op}: {sorted(clash)} are both axes and constants")
        names = [b.name for b in self.buffers]
        if len(set(names)) != len(names) or "stream" in names:
            raise WorkbenchError(f"{self.op}: buffer names must differ and none may be `stream`: {names}")
        return self

    @staticmethod
    def of(
        op: Op,
        workload: Workload | str,
        template: Template,
        knobs: Mapping[str, int | str | bool],
        arch: str = ARCHITECTURES[0],
        ptxas_flags: tuple[str, ...] = DEFAULT_PTXAS_FLAGS,
    ) -> CompileRequest:
        """Bind a template to an op's workload.

        Raises:
            WorkbenchError: if the knobs are not a valid point or the workload or arch is unknown.
        """
        w = op.workload(workload) if isinstance(workload, str) else workload
        return CompileRequest(
            op=op.name,
            workload=w.name,
            axes=dict(w.axes),
            template=template.name,
            knobs=dict(knobs),
            arch=arch,
            source=template.source,
            buffers=template.bind(op, w, knobs),
            constants=dict(op.constants),
            ptxas_flags=ptxas_flags,
        )

    @cached_property
    def source_hash(self) -> str:
        """SHA-256 of the source text."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def key(self, toolchain: Mapping[str, str]) -> str:
        """Content key: hash of every field of the request and of what identifies the toolchain.

        The types of knob values and constants count: `1`, `True` and `1.0` trace differently.
        """
        fields = self.model_dump(mode="json")
        typed = {n: [type(v).__name__ for v in getattr(self, n).values()] for n in ("knobs", "constants")}
        return stable_hash({"request": fields, "types": typed, "toolchain": dict(toolchain)})
