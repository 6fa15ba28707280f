"""The contract of a bare PTX or cubin: how its kernels are launched and what their buffers are for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from workbench.errors import ContentError, UnknownNameError
from workbench.files import read_toml
from workbench.isa.values import MAX_THREADS
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.verify.tensor_maps import ContractTensorMap

_Extent = Annotated[int, Field(ge=1)]
_Shape = tuple[_Extent, _Extent, _Extent]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ContractBuffer(_Entry):
    """A parameter that is a pointer to a buffer."""

    param: int = Field(ge=0)
    """Index of the kernel parameter."""
    name: str
    role: Role
    bytes: int | None = Field(default=None, ge=0)
    """Size of the buffer."""
    offset: int = Field(default=0, ge=0)
    """Byte offset of the pointer inside the parameter (0 for a plain pointer or a tensor map)."""
    align: int = Field(default=256, ge=1)
    settled: bool = False
    """Complete, and used by no other kernel any more, before the predecessor of this launch started: it may
    be used before the wait though the kernel writes it (state of an earlier step, for instance)."""
    first: Literal["zero", "sentinel", "random"] | int | None = None
    """What it holds before the first launch: zeros, the word that polls take for "not there yet", numbers, or
    one 32-bit word throughout. Without it, zeros in flags, sentinels in mailboxes, nothing in outputs and
    scratch, numbers in all else."""
    leads_to: Role | None = None
    """Role of the memory that pointers or tensor maps stored in the buffer lead to."""
    tensor_map: ContractTensorMap | None = None
    """The parameter is this tensor map of the buffer; without it nobody knows what its copies move."""

    @property
    def size(self) -> int | None:
        """Bytes of the buffer, of its tensor map if the contract does not say."""
        if self.bytes is None and self.tensor_map is not None:
            return self.tensor_map.nbytes
        return self.bytes


class ContractScalar(_Entry):
    """A parameter that is a value."""

    param: int = Field(ge=0)
    value: int | float | bool
    step: int = 0
    """Added to the value for each further launch: an epoch that the host counts."""
    offset: int = Field(default=0, ge=0)
    """Byte offset of the value inside the parameter (a structure)."""
    bytes: int | None = Field(default=None, ge=1, le=8)
    """Size of the value; the whole parameter if left out."""

    @model_validator(mode="after")
    def _inside(self) -> ContractScalar:
        if self.offset and self.bytes is None:
            raise ValueError(f"a value at byte {self.offset} of a parameter needs its size in bytes")
        return self


class ContractKernel(_Entry):
    """How one kernel is launched."""

    name: str | None = None
    """May be left out when the module has one entry."""
    grid: _Shape
    block: _Shape
    cluster: _Shape = (1, 1, 1)
    pdl: bool = False
    """Launched with programmatic stream serialization."""
    cooperative: bool = False
    """Launched cooperatively: the launch fails unless all CTAs are resident at once."""
    smem_bytes: int = Field(default=0, ge=0)
    """Dynamic shared memory, bytes a CTA."""
    buffer: tuple[ContractBuffer, ...] = ()
    scalar: tuple[ContractScalar, ...] = ()

    def following(self) -> ContractKernel | None:
        """The next launch, if scalars are stepped; None if it is the same."""
        if not any(s.step for s in self.scalar):
            return None
        stepped = tuple(s.model_copy(update={"value": s.value + s.step}) for s in self.scalar)
        return self.model_copy(update={"scalar": stepped})

    @field_validator("block")
    @classmethod
    def _block_fits(cls, block: _Shape) -> _Shape:
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS:
            raise ValueError(f"{threads} threads; a CTA has at most {MAX_THREADS}")
        return block


class ContractArgument(_Entry):
    """An argument of a host function in a Python file: a tensor, or a scalar if `value` is given."""

    name: str
    """Name of the host function's parameter."""
    value: int | float | bool | None = None
    shape: tuple[_Extent, ...] = ()
    dtype: DType = DType.F32
    role: Role | None = None
    align: int = Field(default=256, ge=1)
    zeroed: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> ContractArgument:
        if (self.value is None) == (not self.shape):
            raise ValueError(f"argument {self.name!r} needs a shape or a value, and not both")
        return self


class Contract(_Entry):
    """All kernels of a contract file."""

    kernel: tuple[ContractKernel, ...] = ()
    argument: tuple[ContractArgument, ...] = ()
    """For a Python file; see `workbench.compile.plain`."""

    @model_validator(mode="after")
    def _says_something(self) -> Contract:
        if not self.kernel and not self.argument:
            raise ValueError("there is no [[kernel]]")
        return self

    def find(self, name: str, entries: int) -> ContractKernel | None:
        """The entry for a kernel of a module with so many entries; None if there is none."""
        for k in self.kernel:
            if k.name == name or (k.name is None and entries == 1):
                return k
        return None

    def check(self, path: Path, names: list[str]) -> None:
        """Refuse entries that no kernel of the module answers to.

        Raises:
            ContentError: if a name is left out though the module has several kernels.
            UnknownNameError: if a name is not a kernel of the module.
        """
        if self.argument:
            raise ContentError(path, "[[argument]] is for a Python file; this one takes [[kernel.buffer]]")
        for k in self.kernel:
            if k.name is None:
                if len(names) != 1:
                    raise ContentError(path, f"[[kernel]] needs a name: the module has {len(names)} kernels")
            elif k.name not in names:
                raise UnknownNameError("kernel", k.name, names)


def load_contract(path: Path) -> Contract:
    """Read a contract.

    Raises:
        ContentError: if the file cannot be read, is not TOML, or an entry is wrong; says which.
    """
    data = read_toml(path)
    try:
        contract = Contract.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"]) or "the file"
        raise ContentError(path, f"{where}: {first['msg']}") from e
    for k in contract.kernel:
        taken: dict[tuple[int, int], str] = {}
        roles: dict[str, Role] = {}
        for b in k.buffer:
            if (b.param, b.offset) in taken:
                both = f"{taken[b.param, b.offset]!r} and {b.name!r}"
                raise ContentError(path, f"parameter {b.param} is given twice: buffers {both}")
            if roles.setdefault(b.name, b.role) is not b.role:
                raise ContentError(path, f"buffer {b.name!r} has two roles")
            taken[b.param, b.offset] = b.name
        for s in k.scalar:
            if any(
                param == s.param and (s.bytes is None or (s.offset < at + 8 and at < s.offset + s.bytes))
                for param, at in taken
            ):
                raise ContentError(path, f"parameter {s.param} is both a buffer and a scalar")
    return contract
