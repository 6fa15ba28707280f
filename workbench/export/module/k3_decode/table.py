"""The table of kernels: what the package holds, read once from `manifest.json`, immutable, hashes checked."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ._identity import MANIFEST_SHA256
from .launch import Launch, Parameter, Pointer

FORMAT = 1
FOLDER = Path(__file__).resolve().parent


class DamagedPackage(RuntimeError):  # noqa: N818
    """A file of the package is not what was exported; the message names it."""


@dataclass(frozen=True)
class Buffer:
    """A buffer of an op."""

    name: str
    shape: tuple[str | int, ...]
    """Extents in elements: integers, or expressions over the axes."""
    dtype: str
    torch_dtype: str
    """Attribute of `torch` that the tensor's dtype is; packed E2M1 and eight-bit floats are `uint8`."""
    role: str
    doc: str
    pad: int | None = None
    """Value of padding rows; without it the last row is repeated."""

    @property
    def mutated(self) -> bool:
        """True if the op writes it."""
        return self.role in ("output", "state")

    @property
    def batched(self) -> bool:
        """True if its rows are the tokens of the batch."""
        return bool(self.shape) and self.shape[0] == "B"


@dataclass(frozen=True)
class Inference:
    """Where an axis can be read: one dimension of one buffer, linear in the axis."""

    buffer: str
    dimension: int
    zero: str
    """Extent if the axis were 0: an expression over axes that are inferred before this one."""
    one: str
    """Extent if the axis were 1."""


@dataclass(frozen=True)
class Op:
    """An op of the package."""

    name: str
    doc: str
    buffers: tuple[Buffer, ...]
    inferred: Mapping[str, Inference]
    """Axes read from the tensors, in order."""
    given: tuple[str, ...]
    """Axes that no shape tells; arguments of the op."""
    shapes: Mapping[str, Mapping[str, int]]
    """Axes without B by the name of the shape: `tp8`, `tp16`, `mla_tp8`, ..."""
    padding: str
    """Empty if rows may be added to a batch, else why not."""


@dataclass(frozen=True)
class Slot:
    """A buffer as a kernel was built for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    align: int
    zeroed: bool
    own: bool
    """True if it belongs to the kernel (scratch, flags), false if it is one of the op's."""


@dataclass(frozen=True)
class Kernel:
    """A configuration that was verified, for the shape and the batch it was verified for and no other."""

    key: str
    op: str
    workload: str
    arch: str
    parallelism: tuple[str, ...]
    """Names of the op's shapes that have exactly these axes."""
    batch: int
    axes: Mapping[str, int]
    """Without B."""
    dtypes: Mapping[str, str]
    layout: str
    template: str
    knobs: Mapping[str, int | str | bool]
    slots: tuple[Slot, ...]
    launches: tuple[Launch, ...]
    cubin: str
    """File, relative to the package."""
    cubin_sha256: str
    verified_on: str
    checks: int
    waived: tuple[str, ...]
    predicted_us: float | None
    predicted_for: str
    """Machine of the predicted time."""

    def load(self) -> bytes:
        """The cubin; raises DamagedPackage if it is not the one that was verified."""
        try:
            data = (FOLDER / self.cubin).read_bytes()
        except OSError as e:
            raise DamagedPackage(f"{self.cubin} cannot be read: {e.strerror}") from e
        if hashlib.sha256(data).hexdigest() != self.cubin_sha256:
            raise DamagedPackage(f"{self.cubin} differs from what was exported")
        return data


@dataclass(frozen=True)
class Table:
    """All ops and kernels."""

    ops: Mapping[str, Op]
    kernels: tuple[Kernel, ...]


def read(folder: Path, sha256: str) -> Table:
    """Read the table from `folder`; `sha256` is the manifest's hash, and nothing else is taken.

    Raises:
        DamagedPackage: if the manifest is missing, altered, or of another format.
    """
    try:
        data = (folder / "manifest.json").read_bytes()
    except OSError as e:
        raise DamagedPackage(f"manifest.json cannot be read: {e.strerror}") from e
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedPackage("manifest.json differs from what was exported")
    raw = json.loads(data)
    if raw.get("format") != FORMAT:
        raise DamagedPackage(f"manifest.json has format {raw.get('format')}, this package reads {FORMAT}")
    ops = {name: _op(name, value) for name, value in raw["ops"].items()}
    return Table(MappingProxyType(ops), tuple(_kernel(value) for value in raw["kernels"]))


@functools.cache
def table() -> Table:
    """The table of this package; raises DamagedPackage if its manifest is not the exported one."""
    return read(FOLDER, MANIFEST_SHA256)


def _op(name: str, raw: Mapping[str, Any]) -> Op:
    return Op(
        name=name,
        doc=raw["doc"],
        buffers=tuple(Buffer(**{**b, "shape": tuple(b["shape"])}) for b in raw["buffers"]),
        inferred=MappingProxyType({axis: Inference(**how) for axis, how in raw["inferred"].items()}),
        given=tuple(raw["given"]),
        shapes=MappingProxyType({n: MappingProxyType(dict(axes)) for n, axes in raw["shapes"].items()}),
        padding=raw["padding"],
    )


def _kernel(raw: Mapping[str, Any]) -> Kernel:
    return Kernel(
        **{
            **raw,
            "parallelism": tuple(raw["parallelism"]),
            "axes": MappingProxyType(dict(raw["axes"])),
            "dtypes": MappingProxyType(dict(raw["dtypes"])),
            "knobs": MappingProxyType(dict(raw["knobs"])),
            "slots": tuple(Slot(**{**s, "shape": tuple(s["shape"])}) for s in raw["slots"]),
            "launches": tuple(_launch(v) for v in raw["launches"]),
            "waived": tuple(raw["waived"]),
        }
    )


def _launch(raw: Mapping[str, Any]) -> Launch:
    parameters = tuple(
        Parameter(bytes.fromhex(p["data"]), tuple(Pointer(**r) for r in p["pointers"]))
        for p in raw["parameters"]
    )
    sizes = {name: tuple(raw[name]) for name in ("grid", "block", "cluster")}
    return Launch(**{**raw, **sizes, "parameters": parameters})
