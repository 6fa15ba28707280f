"""A family of instructions: small kernels, their inputs, and what the simulator made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from workbench.devices.model import Bytes, Kernel, Slot, launch_from_json, launch_to_json


@dataclass(frozen=True)
class Part:
    """What one instruction form left in a buffer."""

    name: str
    """The form, for instance `cvt.rn.bf16.f32`."""
    buffer: str
    offset: int
    """Bytes from the start of the buffer."""
    nbytes: int
    format: str
    """`u8`, `u16`, `u32`, `u64`, or a floating-point format, whose differences are counted in ulp."""
    exact: bool = True
    """The ISA defines every bit. Otherwise a difference is reported, and is no fault within the bound."""
    any_nan: bool = False
    """The ISA leaves the bits of a NaN open: one NaN for another is shown, and is no fault."""
    bound: str = ""
    """What the ISA allows, in words."""
    ulp: float | None = None
    relative: float | None = None
    absolute: float | None = None


@dataclass(frozen=True)
class Family:
    """Kernels that run one after the other in one stream, their parts in the order of the launches."""

    name: str
    doc: str
    kernel: Kernel
    inputs: Mapping[str, Bytes]
    parts: tuple[Part, ...]
    covers: tuple[str, ...]
    """Instructions, modifiers sorted, that the kernels exercise."""


def save(folder: Path, family: Family, simulated: Mapping[str, Bytes]) -> None:
    """Write a family and the simulated content of its outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    k = family.kernel
    described = {
        "name": family.name,
        "doc": family.doc,
        "arch": k.arch,
        "slots": [asdict(s) for s in k.slots],
        "launches": [launch_to_json(n) for n in k.launches],
        "parts": [asdict(p) for p in family.parts],
        "covers": family.covers,
    }
    (folder / "family.json").write_text(json.dumps(described) + "\n")
    (folder / "kernel.ptx").write_text(k.ptx)
    (folder / "kernel.cubin").write_bytes(k.cubin)
    for name, data in family.inputs.items():
        np.save(folder / f"in-{name}.npy", data)
    for name, data in simulated.items():
        np.save(folder / f"simulated-{name}.npy", data)


def load(folder: Path) -> tuple[Family, dict[str, Bytes]]:
    """Read what `save` wrote."""
    raw = json.loads((folder / "family.json").read_text())
    kernel = Kernel(
        name=raw["name"],
        arch=raw["arch"],
        launches=tuple(launch_from_json(n) for n in raw["launches"]),
        slots=tuple(Slot(**s) for s in raw["slots"]),
        cubin=(folder / "kernel.cubin").read_bytes(),
        ptx=(folder / "kernel.ptx").read_text(),
    )
    inputs = {p.stem.removeprefix("in-"): np.load(p) for p in sorted(folder.glob("in-*.npy"))}
    simulated = {p.stem.removeprefix("simulated-"): np.load(p) for p in folder.glob("simulated-*.npy")}
    parts = tuple(Part(**p) for p in raw["parts"])
    return Family(raw["name"], raw["doc"], kernel, inputs, parts, tuple(raw["covers"])), simulated
