"""Tensor maps as a contract describes them, in the terms of cuTensorMapEncodeTiled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.simulator.swizzle import NONE, Swizzle
from workbench.simulator.tensormap import BY_NAME, SIZE, TensorMap, TensorMapError, decode, encode

MAP_BYTES = SIZE
_NAMES = {
    "e4m3": "u8",
    "e5m2": "u8",
    "e8m0": "u8",
    "i8": "u8",
    "i32": "s32",
    "i64": "s64",
    "e2m1": "b4x16",
}
"""Names of dtypes elsewhere, as tensor maps know them."""
_Extent = Annotated[int, Field(ge=1)]


class ContractTensorMap(BaseModel):
    """The tensor map that a parameter of 128 bytes is; dimension 0 is the innermost."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dtype: str
    """Element type: u8, u16, u32, s32, u64, s64, f16, bf16, f32, f64, tf32, b4x16, b4x16_p64 or b6x16_p32;
    e4m3, e5m2, e8m0, e2m1 and i32 serve too."""
    shape: Annotated[tuple[_Extent, ...], Field(min_length=1, max_length=5)]
    """Elements in each dimension, the innermost first."""
    box: tuple[_Extent, ...]
    """Elements of the box in each dimension."""
    strides: tuple[_Extent, ...] | None = None
    """Bytes between neighbours in dimensions 1 and up; as if compact, if left out."""
    swizzle: Literal[0, 32, 64, 128] = 0
    """Span of the swizzle in bytes; 0 for none."""
    fill: Literal["zero", "nan"] = "zero"
    """What elements outside the tensor become."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ContractTensorMap:
        try:
            self.made()
        except TensorMapError as e:
            raise ValueError(str(e)) from e
        return self

    def made(self) -> TensorMap:
        """The map, with address 0.

        Raises:
            TensorMapError: with what the driver would refuse.
        """
        name = _NAMES.get(self.dtype, self.dtype)
        if name not in BY_NAME:
            raise TensorMapError(f"there is no element type {self.dtype!r} of tensor maps")
        element = BY_NAME[name]
        strides = self.strides
        if strides is None:
            size = self.shape[0] // element.group * element.data
            found = []
            for extent in self.shape[1:]:
                found.append(size)
                size *= extent
            strides = tuple(found)
        return TensorMap(
            0,
            element,
            self.shape,
            strides,
            self.box,
            swizzle=Swizzle(self.swizzle) if self.swizzle else NONE,
            fill_nan=self.fill == "nan",
        )

    @property
    def raw(self) -> bytes:
        """The map's 128 bytes, with address 0."""
        return encode(self.made())

    @property
    def nbytes(self) -> int:
        """Bytes of global memory from the first element to the end of the last."""
        m = self.made()
        outer = sum((d - 1) * s for d, s in zip(m.dims[1:], m.strides, strict=True))
        return m.dims[0] // m.element.group * m.element.data + outer


def box_bytes(raw: bytes) -> int | None:
    """Bytes that a tile-mode copy through a map counts for at an mbarrier; None if it is no known map."""
    try:
        m = decode(raw)
    except TensorMapError:
        return None
    count = m.box[0] // m.element.group * m.element.data
    for extent, step in zip(m.box[1:], m.steps[1:], strict=True):
        count *= -(-extent // step)
    return count
