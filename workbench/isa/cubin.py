"""What a cubin says about its kernels, read from the ELF file itself: no tool, no GPU.

Sections used: `.nv.info` (registers, frames by symbol), `.nv.info.<kernel>` (parameters, required block),
`.nv.shared.<kernel>` (static shared memory), `.text.<kernel>`; the ELF header's flags hold the architecture.
Attribute records are (format u8, attribute u8, then u16 value or u16 size and that many bytes).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from workbench.errors import WorkbenchError


class CubinError(WorkbenchError):
    """Bytes that are no readable cubin."""


@dataclass(frozen=True)
class ParamInfo:
    """One kernel parameter: index, byte offset in the parameter block, size in bytes."""

    index: int
    offset: int
    size: int


@dataclass(frozen=True)
class CubinKernel:
    """What the cubin says about one kernel."""

    name: str
    registers: int
    """32-bit registers a thread."""
    static_smem: int
    """Static shared memory, bytes a CTA, without the system's reserve."""
    frame_bytes: int
    """Local-memory frame a thread, bytes."""
    params: tuple[ParamInfo, ...]
    """In order of index."""
    code_bytes: int
    """Size of the machine code."""
    block: tuple[int, int, int] | None = None
    """Required block (`.reqntid`), if any."""
    max_threads: int | None = None
    """Most threads a CTA may have (`.maxntid`), if stated."""
    cluster: tuple[int, int, int] | None = None
    """Required cluster (`.reqnctapercluster`), if any."""


@dataclass(frozen=True)
class Cubin:
    """A cubin: `sm` such as 103, its kernels by name, and how it was assembled."""

    sm: int
    kernels: dict[str, CubinKernel]
    arch: str | None = None
    """Full target such as `sm_103a`, from the assembler's note; the ELF header lacks the suffix."""
    assembler: str | None = None
    """Who assembled it, such as `ptxas 13.5.37`, from the same note."""
    assembler_flags: str | None = None
    """The options it ran with."""


_EM_CUDA = 190
_SHT_NOBITS, _SHT_SYMTAB = 8, 2
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_KPARAM_INFO, _MAX_THREADS, _REQNTID, _CLUSTER = 0x17, 0x05, 0x10, 0x3D


_RESERVED_SMEM = 1024
"""Shared memory of a CTA that the system keeps from sm_90 on; a kernel's section, if any, counts it."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    entry_size: int
    link: int


def read_cubin(data: bytes) -> Cubin:
    """Read a cubin.

    Raises:
        CubinError: if the bytes are not a 64-bit CUDA ELF file or are cut short.
    """
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, ValueError) as e:
        raise CubinError(f"the cubin is damaged: {e}") from e


def _read(data: bytes) -> Cubin:
    if data[:4] != b"\x7fELF" or len(data) < 64 or data[4] != 2 or data[5] != 1:
        raise CubinError("not a cubin: no 64-bit little-endian ELF header")
    machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    if machine != _EM_CUDA:
        raise CubinError(f"not a cubin: ELF machine {machine}")
    table, entry, count, names_at = (
        *struct.unpack_from("<Q", data, 40),
        *struct.unpack_from("<HHH", data, 58),
    )
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
    names = raw[names_at]

    def section_name(offset: int) -> str:
        start = names[4] + offset
        return data[start : data.index(b"\0", start)].decode()

    sections = {}
    ordered = []
    for h in raw:
        s = _Section(section_name(h[0]), h[1], h[4], h[5], h[9], h[6])
        if s.kind != _SHT_NOBITS and s.offset + s.size > len(data):
            raise CubinError(f"the cubin is cut short in section {s.name}")
        sections[s.name] = s
        ordered.append(s)
    symbols = _symbols(data, ordered)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    if ".nv.info" in sections:
        for attribute, payload in _attributes(data, sections[".nv.info"]):
            if attribute in (_REGCOUNT, _FRAME_SIZE) and len(payload) == 8:
                index, value = struct.unpack("<II", payload)
                (registers if attribute == _REGCOUNT else frames)[symbols[index]] = value
    kernels = {}
    for s in ordered:
        if s.name.startswith(".text.") and f".nv.info.{s.name[6:]}" in sections:
            name = s.name[6:]
            kernels[name] = _kernel(data, name, s, sections, registers, frames)
    # Up to CUDA 12 the flags' low byte is the architecture; from ELF ABI 8 on it is the second byte.
    sm = flags >> 8 & 0xFF if data[8] >= 8 else flags & 0xFF
    note = sections.get(".note.nv.tkinfo")
    text = data[note.offset : note.offset + note.size] if note else b""
    found = re.search(rb"-arch (sm_\d+[af]?)", text)
    made = re.search(rb"(\w+)\0[^\0]*release [\d.]+, V([\d.]+)\0[^\0]*\0([^\0]*)", text)
    tool = f"{made[1].decode()} {made[2].decode()}" if made else None
    flags = " ".join(made[3].decode(errors="replace").split()) if made else ""
    return Cubin(sm, kernels, found.group(1).decode() if found else None, tool, flags or None)


def _kernel(data: bytes, name: str, text: _Section, sections: dict[str, _Section],
            registers: dict[str, int], frames: dict[str, int]) -> CubinKernel:  # fmt: skip
    params: list[ParamInfo] = []
    block = cluster = None
    max_threads = None
    for attribute, payload in _attributes(data, sections[f".nv.info.{name}"]):
        if attribute == _KPARAM_INFO and len(payload) == 12:
            _, ordinal, offset, flags = struct.unpack("<IHHI", payload)
            params.append(ParamInfo(ordinal, offset, flags >> 18 & 0x3FFF))
        elif attribute == _REQNTID and len(payload) == 12:
            block = struct.unpack("<III", payload)
        elif attribute == _MAX_THREADS and len(payload) == 12:
            x, y, z = struct.unpack("<III", payload)
            max_threads = x * y * z
        elif attribute == _CLUSTER and len(payload) == 12:
            cluster = struct.unpack("<III", payload)
    if name not in registers:
        raise CubinError(f"the cubin does not say how many registers {name} takes")
    shared = sections.get(f".nv.shared.{name}")
    return CubinKernel(
        name=name,
        registers=registers[name],
        static_smem=max(0, shared.size - _RESERVED_SMEM) if shared else 0,
        frame_bytes=frames.get(name, 0),
        params=tuple(sorted(params, key=lambda p: p.index)),
        code_bytes=text.size,
        block=block,
        max_threads=max_threads,
        cluster=cluster,
    )


def _symbols(data: bytes, sections: list[_Section]) -> dict[int, str]:
    table = next((s for s in sections if s.kind == _SHT_SYMTAB), None)
    if table is None:
        return {}
    strings = sections[table.link]
    found = {}
    for i in range(table.size // 24):
        (name,) = struct.unpack_from("<I", data, table.offset + 24 * i)
        start = strings.offset + name
        found[i] = data[start : data.index(b"\0", start)].decode()
    return found


def _attributes(data: bytes, section: _Section) -> list[tuple[int, bytes]]:
    found, at, end = [], section.offset, section.offset + section.size
    while at + 4 <= end:
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = b""
        if form == 4:  # sized value; the other forms hold at most the 16 bits read above
            payload = data[at : at + value]
            at += value
        found.append((attribute, payload))
    return found
