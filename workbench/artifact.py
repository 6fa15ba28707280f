"""The compiled artifact: PTX, cubin, launches and resources as plain data.

Every check and every timing works on an `Artifact`; no candidate code is loaded to use one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from workbench.ops.dtypes import DType
from workbench.ops.model import Role


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class BoundBuffer(_Data):
    """A buffer of the op or a scratch buffer of the template, with its shape at one workload."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    align: int = 256
    """Alignment of the base address in bytes."""
    zeroed: bool = False
    """True if the buffer is zero before the first launch (flags, counters)."""

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        """Size in bytes; sub-byte dtypes are packed."""
        return self.dtype.nbytes(self.elements)


class Relocation(_Data):
    """Eight bytes of a kernel parameter that hold `address of buffer + addend`."""

    offset: int
    """Byte offset inside the parameter."""
    buffer: str
    addend: int = 0


class KernelParam(_Data):
    """One PTX `.param` of one launch: literal bytes plus the pointers to fill in."""

    data: str
    """Parameter bytes in hex, pointers zeroed; its length is the parameter's size."""
    relocations: tuple[Relocation, ...] = ()

    @property
    def size(self) -> int:
        """Size of the parameter in bytes."""
        return len(self.data) // 2

    def bind(self, addresses: dict[str, int]) -> bytes:
        """Return the parameter's bytes with buffer addresses filled in.

        Raises:
            KeyError: if `addresses` lacks a buffer.
        """
        raw = bytearray.fromhex(self.data)
        for r in self.relocations:
            raw[r.offset : r.offset + 8] = (addresses[r.buffer] + r.addend).to_bytes(8, "little")
        return bytes(raw)


class Launch(_Data):
    """One kernel launch, in stream order."""

    kernel: str
    """PTX entry name."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem_bytes: int = 0
    """Dynamic shared memory, bytes a CTA."""
    pdl: bool = False
    """Launched with programmatic stream serialization: may start before its predecessor ends."""
    cooperative: bool = False
    params: tuple[KernelParam, ...] = ()


class Resources(_Data):
    """What one kernel takes of an SM, read from the cubin."""

    registers: int
    """32-bit registers a thread."""
    static_smem: int = 0
    """Static shared memory, bytes a CTA (without the system's reserve)."""
    stack_bytes: int = 0
    """Local-memory frame a thread, bytes."""
    spill_stores: int = 0
    """Spill store bytes a thread, as ptxas reports them."""
    spill_loads: int = 0


class Toolchain(_Data):
    """What compiled the artifact; part of its identity."""

    dsl: str
    """nvidia-cutlass-dsl version."""
    flavour: str
    """CUDA flavour of the DSL, for instance `13.x` (PTX ISA follows from it)."""
    ptx_isa: str
    """`.version` of the PTX."""
    ptxas: str
    """Version of the ptxas that made the cubin."""
    ptxas_flags: tuple[str, ...] = ()


class Artifact(_Data):
    """One compiled candidate. `key` is the hash of everything that identifies it."""

    key: str
    op: str
    workload: str
    axes: dict[str, int]
    template: str
    """Template or candidate name."""
    knobs: dict[str, int | str | bool]
    arch: str
    source: str
    """The Python source that was compiled."""
    source_hash: str
    toolchain: Toolchain
    buffers: tuple[BoundBuffer, ...]
    launches: tuple[Launch, ...]
    resources: dict[str, Resources]
    """By PTX entry name."""
    fences: tuple[str, ...] | None = None
    """Fences that held around the process that ran the source; None if it was compiled before they were
    recorded."""
    ptx: str = Field(repr=False)
    cubin: bytes = Field(repr=False)

    model_config = ConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        extra="forbid",
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    def buffer(self, name: str) -> BoundBuffer:
        """Return the buffer called `name`; raises KeyError if there is none."""
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)

    def save(self, path: Path) -> None:
        """Write the artifact as one JSON file, atomically."""
        from workbench.files import write_atomic

        write_atomic(path, self.model_dump_json())

    @staticmethod
    def load(path: Path) -> Artifact:
        """Read an artifact written by `save`; raises pydantic.ValidationError if it is damaged."""
        return Artifact.model_validate_json(path.read_text())


def stable_hash(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value, independent of dict order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
