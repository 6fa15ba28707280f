"""What a device is to the rest: memory by address, modules with launches, and what it says of itself.

Two devices have this interface: `SimulatedDevice` and `CudaDevice`. One suite of tests holds for both. The
modules of this package that a GPU machine needs import the standard library and numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from workbench.devices.launch import Launch, Parameter, Pointer
from workbench.errors import WorkbenchError

Bytes = npt.NDArray[np.uint8]
INPUT_ROLES = frozenset({"weight", "activation", "state", "metadata"})
"""Roles of buffers whose content is given before the first launch."""
IMMUTABLE_ROLES = frozenset({"weight", "activation", "metadata"})
"""Roles of inputs that no kernel writes."""
ZERO_ROLES = frozenset({"flag"})
"""Roles of buffers that are zero before the first launch."""


class DeviceError(WorkbenchError):
    """A device that is absent, or that refused or failed something; the message says what."""


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself."""

    kind: Literal["simulator", "cuda"]
    name: str
    """`simulator`, or the product's name."""
    arch: str
    """Arch that its cubins are built for, for instance `sm_90a`; empty for the simulator, which takes any."""
    ordinal: int = 0
    driver: str = ""
    """CUDA version that the driver supports, for instance `13.0`."""
    sms: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    clock_khz: int = 0
    """Highest clock of the multiprocessors that the driver names."""

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Slot:
    """A buffer that a kernel's parameters point to."""

    name: str
    nbytes: int
    role: str
    """A value of `workbench.ops.model.Role`."""
    align: int = 256
    zeroed: bool = False
    """Zero before the first launch whatever its role."""


@dataclass(frozen=True)
class Kernel:
    """A compiled module with its launches: what a device needs, and nothing of how it came about."""

    name: str
    arch: str
    launches: tuple[Launch, ...]
    slots: tuple[Slot, ...]
    cubin: bytes
    """What a CUDA device loads."""
    ptx: str = ""
    """What the simulator executes; may be left out where only a CUDA device runs the kernel."""

    def slot(self, name: str) -> Slot:
        """The buffer called `name`; raises KeyError."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(name)


class Loaded(Protocol):
    """A kernel on a device, ready to run."""

    def unload(self) -> None:
        """Give the module back; it cannot run afterwards."""
        ...


class Device(Protocol):
    """Runs kernels on memory that it owns. Not for several threads."""

    @property
    def info(self) -> DeviceInfo:
        """What it says of itself."""
        ...

    def allocate(self, nbytes: int, name: str = "", writable: bool = True) -> int:
        """Address of new memory, aligned to 256 bytes, content undefined.

        Args:
            nbytes: size; 0 is taken as 1.
            name: what faults call the buffer, where the device can tell.
            writable: False where no kernel may write; a device may check it.

        Raises:
            DeviceError: if there is not enough memory.
        """
        ...

    def write(self, address: int, data: Bytes) -> None:
        """Copy bytes to the device once all launches before have ended."""
        ...

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set `nbytes` bytes to `byte`."""
        ...

    def read(self, address: int, nbytes: int) -> Bytes:
        """Bytes from the device once all launches before have ended; raises DeviceError if one failed."""
        ...

    def load(self, kernel: Kernel) -> Loaded:
        """Make a kernel ready to run; raises DeviceError if the device does not take it."""
        ...

    def run(self, loaded: Loaded, addresses: Mapping[str, int], after_wait: bool = True) -> None:
        """Launch a kernel's launches in order; they may still run when this returns.

        Args:
            loaded: from `load` of the same device.
            addresses: of every buffer by name.
            after_wait: start the first launch only when everything before has ended, whatever it was built
                for.

        Raises:
            DeviceError: if a launch is refused or, now or at the next call, fails.
            KeyError: if a buffer has no address.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all launches have ended; raises DeviceError if one failed."""
        ...

    def scope(self) -> AbstractContextManager[None]:
        """Memory that is allocated inside is freed at the end."""
        ...

    def close(self) -> None:
        """Free all memory; the device cannot be used afterwards."""
        ...


def hold(device: Device, kernel: Kernel, given: Mapping[str, Bytes]) -> dict[str, int]:
    """Put the inputs that no kernel writes in place, for several kernels of one op; their addresses.

    Raises:
        DeviceError: if a content is missing or has the wrong size, or memory runs out.
    """
    addresses = {}
    for slot in kernel.slots:
        if slot.role in IMMUTABLE_ROLES:
            addresses[slot.name] = device.allocate(slot.nbytes, slot.name, writable=False)
            device.write(addresses[slot.name], _content(kernel, slot, given))
    return addresses


def place(
    device: Device,
    kernel: Kernel,
    given: Mapping[str, Bytes],
    poison: int = 0xFF,
    held: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Allocate a kernel's buffers and set them up as before its first launch; returns their addresses.

    Args:
        device: where.
        kernel: whose buffers.
        given: contents of weights, activations, states and metadata.
        poison: byte that outputs and scratch are filled with.
        held: addresses of inputs that are in place already.

    Raises:
        DeviceError: if a content is missing or has the wrong size, or memory runs out.
    """
    addresses = dict(held or {})
    for slot in kernel.slots:
        if slot.name not in addresses:
            writable = slot.role not in IMMUTABLE_ROLES
            addresses[slot.name] = device.allocate(slot.nbytes, slot.name, writable)
    reset(device, kernel, addresses, given, poison, frozenset(held or ()))
    return addresses


def reset(
    device: Device,
    kernel: Kernel,
    addresses: Mapping[str, int],
    given: Mapping[str, Bytes],
    poison: int = 0xFF,
    held: frozenset[str] = frozenset(),
) -> None:
    """Set buffers up as before the first launch, but for those that are `held`."""
    for slot in kernel.slots:
        address = addresses[slot.name]
        if slot.name in held:
            continue
        if slot.role in INPUT_ROLES:
            device.write(address, _content(kernel, slot, given))
        else:
            zero = slot.zeroed or slot.role in ZERO_ROLES
            device.fill(address, slot.nbytes, 0 if zero else poison)


def _content(kernel: Kernel, slot: Slot, given: Mapping[str, Bytes]) -> Bytes:
    if slot.name not in given:
        raise DeviceError(f"{kernel.name}: nothing is given for the buffer {slot.name}")
    data = given[slot.name]
    if data.nbytes != slot.nbytes:
        raise DeviceError(f"{kernel.name}: {slot.name} has {slot.nbytes} bytes, {data.nbytes} are given")
    return data


def execute(
    device: Device,
    kernel: Kernel,
    given: Mapping[str, Bytes],
    poison: int = 0xFF,
    repeats: int = 1,
    held: Mapping[str, int] | None = None,
) -> list[dict[str, Bytes]]:
    """Run a kernel on inputs, `repeats` times from the same start; outputs and states of each run.

    `held` has the addresses of inputs that `hold` put in place.

    Raises:
        DeviceError: if the device does not take or run the kernel.
    """
    with device.scope():
        addresses = place(device, kernel, given, poison, held)
        unwritten = frozenset(s.name for s in kernel.slots if s.role in IMMUTABLE_ROLES)
        loaded = device.load(kernel)
        results = []
        for n in range(repeats):
            if n:
                reset(device, kernel, addresses, given, poison, unwritten)
            device.run(loaded, addresses)
            results.append(
                {
                    s.name: device.read(addresses[s.name], s.nbytes)
                    for s in kernel.slots
                    if s.role in ("output", "state")
                }
            )
        loaded.unload()
    return results


def launch_to_json(launch: Launch) -> dict[str, Any]:
    """A launch as JSON has it, parameters in hex."""
    return {
        "kernel": launch.kernel,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "smem_bytes": launch.smem_bytes,
        "pdl": launch.pdl,
        "cooperative": launch.cooperative,
        "parameters": [
            {"data": p.data.hex(), "pointers": [asdict(r) for r in p.pointers]} for p in launch.parameters
        ],
    }


def launch_from_json(raw: Mapping[str, Any]) -> Launch:
    """The launch that `launch_to_json` wrote."""
    x, y, z = raw["grid"]
    bx, by, bz = raw["block"]
    cx, cy, cz = raw["cluster"]
    return Launch(
        kernel=raw["kernel"],
        grid=(x, y, z),
        block=(bx, by, bz),
        cluster=(cx, cy, cz),
        smem_bytes=raw["smem_bytes"],
        pdl=raw["pdl"],
        cooperative=raw["cooperative"],
        parameters=tuple(
            Parameter(bytes.fromhex(p["data"]), tuple(Pointer(**r) for r in p["pointers"]))
            for p in raw["parameters"]
        ),
    )


def pointers(names: Sequence[str]) -> tuple[Parameter, ...]:
    """Parameters of a kernel that takes one pointer for each buffer, in order."""
    return tuple(Parameter(bytes(8), (Pointer(0, name),)) for name in names)
