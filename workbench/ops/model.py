"""What an op is: axes, buffers with roles, workloads, tolerances, reference and generators.

An op is declared in `verifiers/<op>.py` as a module-level `OP = Op(...)`. Tensors in this layer are torch CPU
tensors in the buffer's storage type (`DType.torch_name`); a packed E2M1 buffer of shape `[..., K]`
elements is a `uint8` tensor of shape `[..., K/2]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from workbench.expressions import evaluate
from workbench.ops.dtypes import DType

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
"""Tensors by buffer name."""


class Role(StrEnum):
    """What a buffer is for; the ordering and memory checks follow from it."""

    WEIGHT = "weight"
    """Immutable while any kernel that uses it can run; may be read before a PDL wait and through `.nc`."""
    ACTIVATION = "activation"
    """Written by the predecessor in the stream: read only after the wait."""
    STATE = "state"
    """Read and written in place."""
    OUTPUT = "output"
    """Written by the op, poisoned before each run."""
    SCRATCH = "scratch"
    """Written and read between the op's own launches, poisoned before each run."""
    FLAG = "flag"
    """Crosses CTAs; zero before the first launch."""
    MAILBOX = "mailbox"
    """Crosses ranks."""
    METADATA = "metadata"
    """Complete before the predecessor started; may be read before the wait."""

    @property
    def is_input(self) -> bool:
        """True if the op reads values that the harness provides."""
        return self in (Role.WEIGHT, Role.ACTIVATION, Role.STATE, Role.METADATA)

    @property
    def is_writable(self) -> bool:
        """True if a kernel may write the buffer."""
        return self in (Role.STATE, Role.OUTPUT, Role.SCRATCH, Role.FLAG, Role.MAILBOX)

    @property
    def is_immutable(self) -> bool:
        """True if the contents cannot change while the op's kernels run or while their predecessor runs."""
        return self in (Role.WEIGHT, Role.METADATA)


@dataclass(frozen=True)
class Buffer:
    """A tensor the op reads or writes.

    `shape` is in elements; an entry is an integer or an expression over the axes, such as `"B"` or
    `"L // 32"`.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: DType
    role: Role
    doc: str = ""
    align: int = 256

    def resolve(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape at one workload; raises ValueError if an axis is missing."""
        return tuple(int(evaluate(e, axes)) if isinstance(e, str) else e for e in self.shape)


def storage_shape(buffer: Buffer, axes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a buffer's storage tensor: as `resolve`, but packed E2M1 has half as many bytes along the
    last axis.

    Raises:
        ValueError: if an axis is missing or the last extent of a packed buffer is odd.
    """
    shape = buffer.resolve(axes)
    if buffer.dtype is not DType.E2M1:
        return shape
    if not shape or shape[-1] % 2:
        raise ValueError(f"packed buffer {buffer.name!r} has the odd last extent in {shape}")
    return (*shape[:-1], shape[-1] // 2)


@dataclass(frozen=True)
class Workload:
    """One set of axis values. `real` marks true K3 sizes; small ones serve quick tests and held-out
    checks."""

    name: str
    axes: Mapping[str, int]
    real: bool = True
    doc: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How one output is judged against golden `g` (float64, rounded where the contract rounds).

    Error measures: `rms = rms(out - g) / rms(g)` and `worst = max |out - g| / (|g| + rms(g))`.
    The candidate passes if it is exact where `exact` is set; otherwise if both measures stay within
    `factor` times the honest baseline's own measure (but never less than `floor_rms` / `floor_worst`),
    and within the hard caps.
    """

    exact: bool = False
    factor: float = 3.0
    floor_rms: float = 1e-4
    floor_worst: float = 4e-3
    cap_rms: float = 1e-2
    cap_worst: float = 8e-2
    allow_inf: bool = True
    """Equal infinities pass; an infinity where golden is finite, or the reverse, never does."""
    positive_zero: bool = False
    """A zero must be +0: -0 is what an empty mailbox holds."""


Allocate = Callable[[str], "torch.Tensor"]
"""`allocate(buffer name)` returns the zero-filled storage tensor of an input buffer at the workload's shape.

Pages stay untouched until written, so a generator may leave a huge tensor mostly zero at no cost in memory.
"""

Generator = Callable[[Mapping[str, int], int, Allocate], "Tensors"]
"""`generator(axes, seed, allocate) -> {input buffer name: tensor}` for every buffer whose role `is_input`.

Every returned tensor was obtained from `allocate` and filled in place: it may be the simulated memory itself.
"""

Reference = Callable[["Tensors", Mapping[str, int]], "Tensors"]
"""`reference(inputs, axes) -> {output or state buffer name: float64 (or exact integer) tensor}`."""


@dataclass(frozen=True)
class Fault:
    """A known mistake: what a kernel that makes it would compute. Used to say why a refused kernel is
    wrong."""

    rule: str
    """Rule id of the finding, for instance `swapped-gate-up`."""
    summary: str
    """What the kernel does wrong, in words that continue "the result is what one gets when ..."."""
    reference: Reference
    applies: Callable[[Mapping[str, int]], bool] = lambda axes: True
    """Whether the mistake can be made at these axes (a tail of 1024 cannot be missing from a row of 256)."""


@dataclass(frozen=True)
class Op:
    """An op contract. Everything a kernel is checked against comes from here."""

    name: str
    doc: str
    buffers: tuple[Buffer, ...]
    workloads: tuple[Workload, ...]
    reference: Reference
    """Golden: float64 arithmetic, rounded only at the documented rounding points."""
    baseline: Reference
    """The honest library computation in the declared dtypes (float32 accumulation)."""
    generators: Mapping[str, Generator]
    """Named input generators; `ordinary` is required, the others are adversarial."""
    tolerances: Mapping[str, Tolerance]
    """By output (or state) buffer name."""
    flops: Callable[[Mapping[str, int]], int]
    compulsory_bytes: Callable[[Mapping[str, int]], int]
    """Bytes that must cross the memory interface: weights touched once plus inputs and outputs."""
    constants: Mapping[str, int | float] = field(default_factory=dict)
    """Constants of the contract that templates may read (eps, betas, ...)."""
    honest: tuple[Reference, ...] = ()
    """Further computations that an honest kernel may make; the tolerance is set by the worst of them and
    `baseline`."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Known mistakes by unique name; compared with a result only after it was refused."""

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """Buffers that the harness fills."""
        return tuple(b for b in self.buffers if b.role.is_input)

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """Buffers that are judged: outputs and updated state."""
        return tuple(b for b in self.buffers if b.role in (Role.OUTPUT, Role.STATE))

    def workload(self, name: str) -> Workload:
        """Return a workload by name; raises UnknownNameError."""
        from workbench.errors import UnknownNameError

        for w in self.workloads:
            if w.name == name:
                return w
        raise UnknownNameError("workload", name, [w.name for w in self.workloads])
