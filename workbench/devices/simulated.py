"""The simulator as a device: executes a kernel's PTX on the CPU when it is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from workbench.devices.launch import Launch
from workbench.devices.model import Bytes, DeviceError, DeviceInfo, Kernel, Loaded
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator import Counters, KernelLaunch, Memory, SimulationOptions, simulate_module
from workbench.simulator.memory import BASE


@dataclass
class Simulated:
    """A kernel that was given to a `SimulatedDevice`."""

    kernel: Kernel
    module: Module
    counters: tuple[Counters, ...] = ()
    """Of the last run, one a launch."""
    loaded: bool = field(default=True)

    def unload(self) -> None:
        """See `Loaded.unload`."""
        self.loaded = False


class SimulatedDevice:
    """Executes PTX on the CPU; see `Device`. A finding of severity `error` fails the run.

    Args:
        options: of the simulator.
        capacity: bytes of address space.
    """

    def __init__(self, options: SimulationOptions | None = None, capacity: int | None = None) -> None:
        self.options = options or SimulationOptions()
        self.memory = Memory() if capacity is None else Memory(capacity)
        self._count = 0

    @property
    def info(self) -> DeviceInfo:
        """What it is."""
        return DeviceInfo("simulator", "simulator", "", memory_bytes=self.memory.capacity)

    def allocate(self, nbytes: int, name: str = "", writable: bool = True) -> int:
        """See `Device.allocate`; names that are taken get a number."""
        self._count += 1
        label = name if name and name not in self.memory else f"{name or 'buffer'} #{self._count}"
        try:
            self.memory.allocate(label, max(nbytes, 1), writable=writable)
        except DeviceError:
            raise
        except Exception as e:
            raise DeviceError(f"no memory for {nbytes} bytes of {label}: {e}") from e
        return self.memory.address(label)

    def write(self, address: int, data: Bytes) -> None:
        """See `Device.write`."""
        at = self._offset(address, data.nbytes)
        self.memory.bytes[at : at + data.nbytes] = data.reshape(-1)
        self.memory.shadow[at : at + data.nbytes] = 1

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """See `Device.fill`; bytes other than 0 are poison and count as unwritten."""
        at = self._offset(address, nbytes)
        self.memory.bytes[at : at + nbytes] = byte
        self.memory.shadow[at : at + nbytes] = byte == 0

    def read(self, address: int, nbytes: int) -> Bytes:
        """See `Device.read`."""
        at = self._offset(address, nbytes)
        return self.memory.bytes[at : at + nbytes].copy()

    def load(self, kernel: Kernel) -> Simulated:
        """See `Device.load`."""
        if not kernel.ptx:
            raise DeviceError(f"{kernel.name} has no PTX to simulate")
        module = parse(kernel.ptx)
        known = {k.name for k in module.kernels}
        for launch in kernel.launches:
            if launch.kernel not in known:
                raise DeviceError(f"{kernel.name} has no entry {launch.kernel}")
        return Simulated(kernel, module)

    def run(self, loaded: Loaded, addresses: Mapping[str, int], after_wait: bool = True) -> None:
        """See `Device.run`; the run has ended when this returns."""
        assert isinstance(loaded, Simulated)
        if not loaded.loaded:
            raise DeviceError(f"{loaded.kernel.name} was unloaded")
        launches = [bound(loaded.module, n, addresses) for n in loaded.kernel.launches]
        outcome = simulate_module(loaded.module, launches, self.memory, self.options)
        loaded.counters = outcome.counters
        wrong = [f for f in outcome.findings if f.severity.value == "error"]
        if wrong or not outcome.completed:
            why = f"{wrong[0].rule}: {wrong[0].message}" if wrong else "it did not come to its end"
            raise DeviceError(f"{loaded.kernel.name}: {why}")

    def synchronize(self) -> None:
        """See `Device.synchronize`; nothing is ever under way."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """See `Device.scope`."""
        mark = self.memory.mark()
        try:
            yield
        finally:
            self.memory.release(mark)

    def close(self) -> None:
        """See `Device.close`."""
        self.memory.release(0)

    def _offset(self, address: int, nbytes: int) -> int:
        at = address - BASE
        found = self.memory.find(at) if nbytes else None
        if nbytes and (found is None or at + nbytes > found.end):
            raise DeviceError(f"{nbytes} bytes at {address:#x} lie in no buffer")
        return at


def bound(module: Module, launch: Launch, addresses: Mapping[str, int]) -> KernelLaunch:
    """A launch with its parameters packed as the PTX entry lays them out.

    Raises:
        DeviceError: if the parameters do not fit the entry.
        KeyError: if a buffer has no address.
    """
    entry = module.kernel(launch.kernel)
    sizes = [p.size for p in entry.params]
    given = [len(p.data) for p in launch.parameters]
    if sizes != given:
        raise DeviceError(f"{launch.kernel} takes parameters of {sizes} bytes, {given} are given")
    block = bytearray()
    for param, parameter in zip(entry.params, launch.parameters, strict=True):
        raw = bytearray(parameter.data)
        for p in parameter.pointers:
            raw[p.offset : p.offset + 8] = (addresses[p.buffer] + p.addend).to_bytes(8, "little")
        block.extend(bytes(param.offset - len(block)))
        block.extend(raw)
    return KernelLaunch(
        launch.kernel,
        launch.grid,
        launch.block,
        bytes(block),
        launch.cluster,
        launch.smem_bytes,
        launch.pdl,
    )
