"""Element types of buffers: their size, and their names in NumPy, torch and CuTe DSL.

torch and cutlass are imported nowhere here: names are strings, so that every floor can use this module.
"""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """Element type of a buffer. Sub-byte types are packed, low nibble first."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"
    E8M0 = "e8m0"
    I64 = "i64"
    I32 = "i32"
    U32 = "u32"
    I8 = "i8"
    U8 = "u8"

    @property
    def bits(self) -> int:
        """Bits an element."""
        return _BITS[self]

    @property
    def numpy_name(self) -> str:
        """Name of the NumPy (or ml_dtypes) type; packed E2M1 is held as `uint8`, two elements a byte."""
        return _NUMPY[self]

    @property
    def torch_name(self) -> str:
        """Attribute of `torch` that holds the type; packed E2M1 and E8M0 are held as `uint8`."""
        return _TORCH[self]

    @property
    def cutlass_name(self) -> str:
        """Attribute of `cutlass` that holds the type a kernel sees; packed bytes are `Uint8`."""
        return _CUTLASS[self]

    @property
    def is_float(self) -> bool:
        """True for floating-point types."""
        return self.value[0] in "fbe"

    def nbytes(self, elements: int) -> int:
        """Bytes that `elements` packed elements take."""
        return (elements * self.bits + 7) // 8


_BITS = {
    DType.F64: 64, DType.F32: 32, DType.F16: 16, DType.BF16: 16, DType.E4M3: 8, DType.E5M2: 8, DType.E2M1: 4,
    DType.E8M0: 8, DType.I64: 64, DType.I32: 32, DType.U32: 32, DType.I8: 8, DType.U8: 8,
}  # fmt: skip
_NUMPY = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16",
    DType.E4M3: "float8_e4m3fn", DType.E5M2: "float8_e5m2", DType.E2M1: "uint8", DType.E8M0: "float8_e8m0fnu",
    DType.I64: "int64", DType.I32: "int32", DType.U32: "uint32", DType.I8: "int8", DType.U8: "uint8",
}  # fmt: skip
_TORCH = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16",
    DType.E4M3: "float8_e4m3fn", DType.E5M2: "float8_e5m2", DType.E2M1: "uint8", DType.E8M0: "uint8",
    DType.I64: "int64", DType.I32: "int32", DType.U32: "uint32", DType.I8: "int8", DType.U8: "uint8",
}  # fmt: skip
_CUTLASS = {
    DType.F64: "Float64", DType.F32: "Float32", DType.F16: "Float16", DType.BF16: "BFloat16",
    DType.E4M3: "Float8E4M3FN", DType.E5M2: "Float8E5M2", DType.E2M1: "Uint8", DType.E8M0: "Uint8",
    DType.I64: "Int64", DType.I32: "Int32", DType.U32: "Uint32", DType.I8: "Int8", DType.U8: "Uint8",
}  # fmt: skip
