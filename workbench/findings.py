"""A finding: one thing that is wrong, where it is, what can happen and how to mend it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Severity(StrEnum):
    """How much a finding matters; only `error` fails a check."""

    ERROR = "error"
    WARNING = "warning"
    PERFORMANCE = "performance"
    INFO = "info"


class Finding(BaseModel):
    """One finding. `rule` is a stable id (see docs); places are absent where they are not known."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    rule: str
    severity: Severity
    message: str
    """What can happen, in one sentence that a kernel author understands."""
    fix: str = ""
    """What to change."""
    kernel: str | None = None
    """PTX entry the finding is about."""
    ptx_line: int | None = None
    """1-based line in the artifact's PTX."""
    sass_offset: int | None = None
    """Byte offset of the SASS instruction inside the kernel's text."""
    source: str | None = None
    """`file:line` in the kernel's Python source, where line information is present."""
    buffer: str | None = None
    """Name of the buffer concerned."""
    thread: str | None = None
    """First thread that shows it, as `cta=(x,y,z) thread=(x,y,z)`."""
    address: int | None = None
    """First address that shows it (byte address in the simulated machine)."""
    count: int = 1
    """How many times it was seen; findings are grouped, never one a lane."""
