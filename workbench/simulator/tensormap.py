"""The 128-byte tensor map (CUtensorMap) of tensor copies: decoding, encoding, replacing a field.

The layout is opaque in NVIDIA's documents. What is used here was established by experiment:

* `ptxas` expands `tensormap.replace` to loads and stores of the fields, for sm_90a and sm_103a alike: every
  field, its bits, and its bias.
* CuTe DSL writes whole maps; those it writes for every rank, element type and swizzle tried agree, and add
  that the low nibble of word 2 is 2 for a tile-mode map.

Words of 32 bits, little-endian; dimension 0 is the innermost:

    0, 1     global address
    2        3..0 kind (2: tiled) | 6..4 rank - 1 | 10..7 element type | 12..11 interleave | 14..13 swizzle |
             15 NaN fill | 16 tf32 | 18..17 L2 promotion | 20..19 swizzle atomicity | 22 96-byte swizzle
    3..6     strides of dimensions 1 to 4 in units of 16 bytes, bits 31..0
    7        the same strides, bits 35..32: four nibbles
    8..12    sizes of dimensions 0 to 4, less 1
    13       element strides of dimensions 0 to 4, less 1, 3 bits each | 31..24 box in dimension 0, less 1
    14       sizes of the box in dimensions 1 to 4, less 1, 8 bits each
    15..31   0 in tile mode

Assumed: that bits 18..17 of word 2 are the L2 promotion (CuTe DSL always writes 2; it has no effect on
results). Bit 21 is set for tensors of 128 KiB and more (public encoders clear it below that, and
`tensormap.replace` of the address clears it too) and does not change what is copied. All bits not named are
not known: a map that sets one is refused, as are im2col maps, interleaved maps and the 96-byte swizzle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from workbench.errors import WorkbenchError
from workbench.simulator.swizzle import NONE, Swizzle

SIZE = 128
MAX_RANK = 5
_TILED = 2
_KNOWN_2 = 0x007F_FFFF
_LARGE = 1 << 21
_LARGE_FROM = 128 << 10
_KNOWN_7 = 0xFFFF
_KNOWN_13 = 0xFF00_7FFF
_NINETY_SIX = 1 << 22
_TF32 = 1 << 16


class TensorMapError(WorkbenchError):
    """A tensor map that is not valid, or holds something the simulator does not know."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element type of tensor maps.

    Attributes:
        name: as in PTX.
        code: number in the map; `tensormap.replace.elemtype` uses 11 and 12 for the tf32 types.
        group: elements that are moved as one unit; 1 but for sub-byte types.
        data: bytes of a unit in global memory, and what it counts for at an mbarrier.
        pitch: bytes of a unit in shared memory.
        kind: NumPy dtype for reductions; '' if there is none.
    """

    name: str
    code: int
    group: int
    data: int
    pitch: int
    kind: str = ""

    @property
    def floating(self) -> bool:
        """Whether out-of-bounds elements may be filled with NaN."""
        return self.name in ("f16", "bf16", "f32", "f32.ftz", "f64", "tf32", "tf32.ftz")


ELEMENTS = (
    Element("u8", 0, 1, 1, 1, "u1"),
    Element("u16", 1, 1, 2, 2, "u2"),
    Element("u32", 2, 1, 4, 4, "u4"),
    Element("s32", 3, 1, 4, 4, "i4"),
    Element("u64", 4, 1, 8, 8, "u8"),
    Element("s64", 5, 1, 8, 8, "i8"),
    Element("f16", 6, 1, 2, 2, "f2"),
    Element("f32", 7, 1, 4, 4, "f4"),
    Element("f32.ftz", 8, 1, 4, 4, "f4"),
    Element("f64", 9, 1, 8, 8, "f8"),
    Element("bf16", 10, 1, 2, 2, "bf16"),
    Element("tf32", 11, 1, 4, 4),
    Element("tf32.ftz", 12, 1, 4, 4),
    Element("b4x16", 13, 2, 1, 1),
    Element("b4x16_p64", 14, 16, 8, 16),
    Element("b6x16_p32", 15, 16, 12, 16),
)
"""Element types by the numbers of `tensormap.replace.elemtype` (PTX ISA 9.7.9.28)."""
BY_NAME = {e.name: e for e in ELEMENTS}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tile-mode tensor map; dimension 0 is the innermost.

    Attributes:
        address: device address of element (0, ..., 0).
        element: its type.
        dims: elements in each dimension.
        strides: bytes between neighbours in dimensions 1 and up.
        box: extent of the box in each dimension, in elements of the tensor.
        steps: element strides: only every `step`-th element of the extent is moved; dimension 0 has none.
        swizzle: how the box lies in shared memory.
        fill_nan: out-of-bounds elements become NaN instead of zero.
        l2_promotion: 0 to 3, no effect here.
    """

    address: int
    element: Element
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: Swizzle = field(default=NONE)
    fill_nan: bool = False
    l2_promotion: int = 0

    def __post_init__(self) -> None:
        """Complete `steps` and check what the driver checks.

        Raises:
            TensorMapError: with what is wrong.
        """
        rank = len(self.dims)
        if not self.steps:
            object.__setattr__(self, "steps", (1,) * rank)
        if not 1 <= rank <= MAX_RANK or len(self.strides) != rank - 1:
            raise TensorMapError(f"tensor map of rank {rank} with {len(self.strides)} strides")
        if len(self.box) != rank or len(self.steps) != rank:
            raise TensorMapError(f"tensor map of rank {rank} with a box {self.box} and steps {self.steps}")
        if not all(1 <= d <= 1 << 32 for d in self.dims):
            raise TensorMapError(f"tensor map with sizes {self.dims}: 1 to 2^32 are possible")
        if not all(1 <= b <= 256 for b in self.box):
            raise TensorMapError(f"tensor map with a box of {self.box}: 1 to 256 are possible")
        if not all(1 <= s <= 8 for s in self.steps):
            raise TensorMapError(f"tensor map with element strides {self.steps}: 1 to 8 are possible")
        unit = 32 if self.element.pitch == 16 else 16
        if any(s % unit or not 0 <= s < 1 << 40 for s in self.strides):
            raise TensorMapError(
                f"tensor map with strides {self.strides}: multiples of {unit} bytes below 2^40 are possible"
            )
        e = self.element
        if self.dims[0] % e.group or self.box[0] % e.group:
            raise TensorMapError(
                f".{e.name} with {self.dims[0]} elements, {self.box[0]} in the box: multiples of {e.group}"
            )
        if e.pitch == 16 and (self.dims[0] % 128 or self.box[0] != 128 or self.swizzle.span not in (0, 128)):
            raise TensorMapError(
                f".{e.name} wants a box 128 wide, sizes in multiples of 128, and no or a 128-byte swizzle"
            )
        if e.pitch == 16 and self.swizzle.flip:
            raise TensorMapError(f".{e.name} has no swizzle with a flip")
        if self.box[0] // e.group * e.data % 16:
            raise TensorMapError(
                f"the box is {self.box[0]} .{e.name} wide: its inner dimension must be a multiple of 16 bytes"
            )
        if self.swizzle.span and self.box[0] // e.group * e.pitch > self.swizzle.span:
            raise TensorMapError(
                f"the box is {self.box[0] // e.group * e.pitch} bytes wide, its swizzle {self.swizzle.span}"
            )
        if self.fill_nan and not e.floating:
            raise TensorMapError(f"NaN as out-of-bounds fill for .{e.name}")

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)


_SPAN = (0, 32, 64, 128)
_ATOM = ((16, False), (32, False), (32, True), (64, False))


def decode(raw: bytes) -> TensorMap:
    """Return what the 128 bytes of a tensor map say.

    Raises:
        TensorMapError: if they are no valid tile-mode map, or set bits whose meaning is not known.
    """
    if len(raw) != SIZE:
        raise TensorMapError(f"a tensor map has {SIZE} bytes, these are {len(raw)}")
    words = struct.unpack("<32I", raw)
    flags = words[2]
    if flags & 15 != _TILED:
        what = "an uninitialized" if not any(words) else f"kind {flags & 15}, an im2col or unknown"
        raise TensorMapError(f"{what} tensor map; only tile mode (kind 2) is known")
    if flags & ~_KNOWN_2 & 0xFFFF_FFFF or words[7] & ~_KNOWN_7 or words[13] & ~_KNOWN_13 or any(words[15:]):
        unknown = {2: flags & ~_KNOWN_2, 7: words[7] & ~_KNOWN_7, 13: words[13] & ~_KNOWN_13}
        unknown.update((k, words[k]) for k in range(15, 32))
        bits = ", ".join(f"word {k}: {v & 0xFFFFFFFF:#x}" for k, v in unknown.items() if v)
        raise TensorMapError(f"a tensor map sets bits whose meaning is not known ({bits})")
    if flags >> 11 & 3:
        raise TensorMapError(f"interleave {flags >> 11 & 3} of a tensor map is not known to the simulator")
    if flags & _NINETY_SIX:
        raise TensorMapError("the 96-byte swizzle of a tensor map is not known to the simulator")
    rank = (flags >> 4 & 7) + 1
    if rank > MAX_RANK:
        raise TensorMapError(f"a tensor map of rank {rank}")
    code = flags >> 7 & 15
    if flags & _TF32:
        if code not in (7, 8):
            raise TensorMapError(f"a tensor map with the tf32 bit and element type {code}")
        code += 4
    elif code in (11, 12):
        raise TensorMapError(f"a tensor map with element type {code} and no tf32 bit")
    span = _SPAN[flags >> 13 & 3]
    atom, flip = _ATOM[flags >> 19 & 3]
    if span != 128 and (atom, flip) != (16, False) and span:
        raise TensorMapError(f"a tensor map with a {span}-byte swizzle in atoms of {atom} bytes")
    result = TensorMap(
        address=words[0] | words[1] << 32,
        element=ELEMENTS[code],
        dims=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=tuple((words[3 + i] | (words[7] >> 4 * i & 15) << 32) * 16 for i in range(rank - 1)),
        box=((words[13] >> 24) + 1, *((words[14] >> 8 * i & 255) + 1 for i in range(rank - 1))),
        steps=(1, *((words[13] >> 3 * i & 7) + 1 for i in range(1, rank))),
        swizzle=Swizzle(span, atom, flip) if span else NONE,
        fill_nan=bool(flags >> 15 & 1),
        l2_promotion=flags >> 17 & 3,
    )
    outer = sum((d - 1) * stride for d, stride in zip(result.dims[1:], result.strides, strict=True))
    extent = result.dims[0] // result.element.group * result.element.data + outer
    if flags & _LARGE and extent < _LARGE_FROM:
        raise TensorMapError(
            f"a tensor map sets bit 21 of word 2, which says 128 KiB or more, for {extent} bytes"
        )
    return result


def encode(m: TensorMap) -> bytes:
    """Return the 128 bytes of a tensor map."""
    raw = bytearray(SIZE)
    struct.pack_into("<I", raw, 8, _TILED | m.l2_promotion << 17)
    replace(raw, "global_address", 0, m.address)
    replace(raw, "rank", 0, m.rank - 1)
    replace(raw, "elemtype", 0, m.element.code)
    replace(raw, "swizzle_mode", 0, _SPAN.index(m.swizzle.span))
    replace(raw, "swizzle_atomicity", 0, _ATOM.index((m.swizzle.atom, m.swizzle.flip)))
    replace(raw, "fill_mode", 0, int(m.fill_nan))
    for i in range(m.rank):
        replace(raw, "global_dim", i, m.dims[i])
        replace(raw, "box_dim", i, m.box[i])
        replace(raw, "element_stride", i, m.steps[i])
        if i:
            replace(raw, "global_stride", i - 1, m.strides[i - 1])
    return bytes(raw)


FIELDS = frozenset((
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
    "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode",
))  # fmt: skip


def replace(raw: bytearray, name: str, ordinal: int, value: int) -> None:
    """Carry out `tensormap.replace.tile.<name>` (PTX ISA 9.7.9.28) on the bytes of a map, as ptxas does.

    Args:
        raw: the 128 bytes, changed in place.
        name: a member of `FIELDS`.
        ordinal: dimension for the fields that have one; stride 0 is that of dimension 1.
        value: new value in the instruction's terms (`rank` is given less 1).
    """

    def bits(word: int, mask: int, new: int) -> None:
        (old,) = struct.unpack_from("<I", raw, 4 * word)
        struct.pack_into("<I", raw, 4 * word, old & ~mask & 0xFFFF_FFFF | new & mask)

    if name == "global_address":
        struct.pack_into("<Q", raw, 0, value & (1 << 64) - 1)
        bits(2, 1 << 21, 0)
    elif name == "rank":
        bits(2, 0x70, value << 4)
    elif name == "box_dim":
        word, shift = (13, 24) if ordinal == 0 else (14, 8 * (ordinal - 1))
        bits(word, 0xFF << shift, (value - 1 & 0xFF) << shift)
    elif name == "global_dim":
        bits(8 + ordinal, 0xFFFF_FFFF, value - 1)
    elif name == "global_stride":
        bits(3 + ordinal, 0xFFFF_FFFF, value >> 4)
        bits(7, 0xF << 4 * ordinal, (value >> 36 & 0xF) << 4 * ordinal)
    elif name == "element_stride":
        bits(13, 7 << 3 * ordinal, (value - 1 & 7) << 3 * ordinal)
    elif name == "elemtype":
        tf32 = value in (11, 12)
        if tf32:  # no other value clears the bit
            bits(2, _TF32, _TF32)
        bits(2, 0x780, (value - 4 if tf32 else value) << 7)
    elif name == "interleave_layout":
        bits(2, 0x1800, value << 11)
    elif name == "swizzle_mode":
        bits(2, 0x6000, 0 if value == 4 else value << 13)
        bits(2, _NINETY_SIX, _NINETY_SIX if value == 4 else 0)
    elif name == "swizzle_atomicity":
        bits(2, 0x180000, value << 19)
    elif name == "fill_mode":
        bits(2, 0x8000, value << 15)
    else:
        raise TensorMapError(f"there is no field .{name} in a tensor map")
