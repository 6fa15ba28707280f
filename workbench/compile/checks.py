"""What must agree before an artifact exists: PTX, cubin and launches, and the limits of the device."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.artifact import Launch
from workbench.compile.request import CompileError
from workbench.isa.cubin import Cubin

MAX_SMEM_BYTES = 232448
"""Shared memory a CTA may have on sm_90, sm_100, sm_103 (227 KiB, CUDA programming guide)."""
MAX_THREADS, MAX_BLOCK = 1024, (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CTAS = 1 << 24
"""CTAs of a launch that the workbench takes: far more than a decode kernel has, few enough to be run here."""
MAX_CLUSTER = 16
"""Largest cluster, non-portable size included."""
REGISTERS_PER_SM = 65536

# A stranger's text: no part of a pattern may run on where the next match could begin.
_HEADER = re.compile(r"^\.version\s+(?P<version>[\d.]+)[ \t\r]*$\s*^\.target\s+(?P<target>\w+)", re.M)
_ENTRY = re.compile(
    r"^[ \t]*(?:\.visible[ \t]+|\.weak[ \t]+)*\.entry\s+(?P<name>[\w$]+)\s*"
    r"\((?P<params>[^()]*)\)(?P<directives>[^(){}]*)\{",
    re.M,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>[a-z]\d+)\s+(?:\.ptr\b[\s.\w]*?\s+)?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?\s*$"
)
_TRIPLE = re.compile(
    r"\.(?P<name>reqntid|maxntid|reqnctapercluster)\s+(?P<x>\d+)(?:\s*,\s*(?P<y>\d+))?(?:\s*,\s*(?P<z>\d+))?"
)
_FILE = re.compile(r'^([ \t]*\.file\s+\d+\s+)"([^"]*)"', re.M)


@dataclass(frozen=True)
class EntryHeader:
    """Parameter sizes in bytes and launch bounds of one PTX entry."""

    params: tuple[int, ...]
    block: tuple[int, int, int] | None
    max_threads: int | None
    cluster: tuple[int, int, int] | None


@dataclass(frozen=True)
class PtxHeader:
    """Version, target and entries of a PTX module."""

    version: str
    target: str
    entries: dict[str, EntryHeader]


def read_ptx_header(ptx: str) -> PtxHeader:
    """Read what the launches are checked against.

    Raises:
        CompileError: `compiler` if the text is no PTX module.
    """
    header = _HEADER.search(ptx)
    if header is None:
        raise CompileError("compiler", "the PTX has no .version and .target")
    entries = {}
    for m in _ENTRY.finditer(ptx):
        sizes = []
        for part in filter(None, (p.strip() for p in m["params"].split(","))):
            p = _PARAM.fullmatch(part)
            if p is None:
                raise CompileError("compiler", f"PTX parameter is not understood: {part[:120]}")
            sizes.append(int(p["type"][1:]) // 8 * int(p["count"] or 1))
        bounds = {
            t["name"]: (int(t["x"]), int(t["y"] or 1), int(t["z"] or 1))
            for t in _TRIPLE.finditer(m["directives"])
        }
        x, y, z = bounds.get("maxntid", (0, 0, 0))
        entries[m["name"]] = EntryHeader(
            tuple(sizes), bounds.get("reqntid"), x * y * z or None, bounds.get("reqnctapercluster")
        )
    return PtxHeader(header["version"], header["target"], entries)


def scrub_paths(ptx: str) -> str:
    """Replace absolute paths of `.file` lines by stable names, so that equal sources give equal bytes.

    A file of an installed package keeps its path below `site-packages`; any other keeps its name alone.
    """

    def stable(m: re.Match[str]) -> str:
        path = m.group(2)
        _, marker, tail = path.rpartition("-packages/")
        return f'{m.group(1)}"{tail if marker else path.rpartition("/")[2]}"'

    return _FILE.sub(stable, ptx)


def check_arch(ptx: PtxHeader, cubin: Cubin, arch: str) -> None:
    """Check that PTX and cubin are for `arch`; raises CompileError (`arch`)."""
    if ptx.target != arch:
        raise CompileError("arch", f"the PTX is for {ptx.target}, wanted {arch}")
    number = int(re.sub(r"\D", "", arch))
    if cubin.sm != number or (cubin.arch is not None and cubin.arch != arch):
        raise CompileError("arch", f"the cubin is for {cubin.arch or f'sm_{cubin.sm}'}, wanted {arch}")


def check_launches(launches: Sequence[Launch], ptx: PtxHeader, cubin: Cubin) -> None:
    """Check every launch against its PTX entry, the cubin and what the device can do.

    Raises:
        CompileError: `compiler` if launch, PTX and cubin disagree, `user` if no device can make the launch.
    """
    for launch in launches:
        _check_agreement(launch, ptx.entries, cubin)
        _check_limits(launch, ptx.entries[launch.kernel], cubin)


def _check_agreement(launch: Launch, entries: Mapping[str, EntryHeader], cubin: Cubin) -> None:
    name = launch.kernel
    if name not in entries or name not in cubin.kernels:
        raise CompileError("compiler", f"the launched kernel {name} is not in the PTX")
    sizes = tuple(p.size for p in launch.params)
    if sizes != entries[name].params:
        raise CompileError("compiler", f"{name} is launched with parameters of {sizes} bytes; its PTX wants "
                                       f"{entries[name].params}")  # fmt: skip
    in_cubin = tuple(p.size for p in cubin.kernels[name].params)
    if sizes != in_cubin:
        raise CompileError("compiler", f"{name} has parameters of {sizes} bytes; its cubin wants {in_cubin}")


def _check_limits(launch: Launch, entry: EntryHeader, cubin: Cubin) -> None:
    name, kernel = launch.kernel, cubin.kernels[launch.kernel]

    def refuse(message: str) -> None:
        raise CompileError("user", f"{name}: {message}")

    x, y, z = launch.block
    threads = x * y * z
    if not 0 < threads <= MAX_THREADS or any(
        b > limit for b, limit in zip(launch.block, MAX_BLOCK, strict=True)
    ):
        refuse(f"block {launch.block} is not launchable: 1 to {MAX_THREADS} threads, at most {MAX_BLOCK}")
    if any(not 0 < g <= limit for g, limit in zip(launch.grid, MAX_GRID, strict=True)):
        refuse(f"grid {launch.grid} is not launchable: each extent is 1 to {MAX_GRID}")
    if math.prod(launch.grid) > MAX_CTAS:
        refuse(f"grid {launch.grid} has more than {MAX_CTAS} CTAs, which no simulation gets through")
    if any(g % c if c else True for g, c in zip(launch.grid, launch.cluster, strict=True)):
        refuse(f"cluster {launch.cluster} does not divide grid {launch.grid}")
    cx, cy, cz = launch.cluster
    if cx * cy * cz > MAX_CLUSTER:
        refuse(f"cluster {launch.cluster} has more than {MAX_CLUSTER} CTAs")
    if entry.block is not None and entry.block != launch.block:
        refuse(f"block {launch.block} is not the {entry.block} that it was compiled for")
    if entry.max_threads is not None and threads > entry.max_threads:
        refuse(f"block {launch.block} has more than the {entry.max_threads} threads that it was compiled for")
    if entry.cluster is not None and entry.cluster != launch.cluster:
        refuse(f"cluster {launch.cluster} is not the {entry.cluster} that it was compiled for")
    smem = launch.smem_bytes + kernel.static_smem
    if smem > MAX_SMEM_BYTES:
        refuse(f"takes {smem} bytes of shared memory a CTA; the device has {MAX_SMEM_BYTES}")
    registers = -(-threads // 32) * 32 * -(-kernel.registers // 8) * 8
    if registers > REGISTERS_PER_SM:
        refuse(f"takes {registers} registers a CTA, {kernel.registers} a thread, of {REGISTERS_PER_SM}")
