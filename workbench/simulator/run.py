"""Runs one kernel of a PTX text on NumPy arrays: the simulator in one call."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import UnknownNameError, WorkbenchError
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Param
from workbench.simulator.launch import SimulationOptions
from workbench.simulator.memory import Memory
from workbench.simulator.simulate import KernelLaunch, Outcome, simulate_module

Extent = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unwritten:
    """An array whose content does not count: the kernel must write before it reads."""

    array: npt.NDArray[Any]


Argument = npt.NDArray[Any] | Unwritten | int | float | bool | np.generic | bytes


def run_ptx(
    text: str,
    kernel: str | None = None,
    grid: Extent = 1,
    block: Extent = 32,
    arguments: Sequence[Argument] | Mapping[str, Argument] = (),
    *,
    cluster: Extent = 1,
    shared_bytes: int = 0,
    options: SimulationOptions | None = None,
) -> Outcome:
    """Run a kernel and return findings and counters; arrays are updated in place.

    Args:
        text: PTX.
        kernel: name of the entry; may be left out if there is one only.
        grid: CTAs, one number or up to three.
        block: threads of a CTA.
        arguments: one for each parameter, in order or by the parameter's name. An array stands for a pointer
            to its bytes: the kernel finds its content, and may change it unless the array is read-only;
            `Unwritten(array)` gives memory that nobody has written yet. Numbers are converted to the
            parameter's type, bytes taken as they are.
        cluster: CTAs of a cluster.
        shared_bytes: dynamic shared memory of a CTA.
        options: see `SimulationOptions`.

    Raises:
        UnsupportedInstruction: if the simulator lacks an instruction.
        WorkbenchError: if the arguments do not fit the kernel.
    """
    module = parse(text)
    if kernel is None:
        if len(module.kernels) != 1:
            names = ", ".join(k.name for k in module.kernels)
            raise WorkbenchError(f"say which kernel to run; there are {names or 'none'}")
        kernel = module.kernels[0].name
    if kernel not in [k.name for k in module.kernels]:
        raise UnknownNameError("kernel", kernel, [k.name for k in module.kernels])
    entry = module.kernel(kernel)
    given = _ordered(entry.params, arguments)
    arrays = [a.array if isinstance(a, Unwritten) else a for a in given]
    total = sum(a.nbytes + 16384 for a in arrays if isinstance(a, np.ndarray))
    memory = Memory(2 * total + (1 << 24))
    raw = bytearray()
    for p, a in zip(entry.params, given, strict=True):
        raw.extend(bytes(p.offset - len(raw)))
        raw.extend(_packed(p, a, memory))
    launch = KernelLaunch(kernel, _triple(grid), _triple(block), bytes(raw), _triple(cluster), shared_bytes)
    outcome = simulate_module(module, [launch], memory, options)
    for p, array in zip(entry.params, arrays, strict=True):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[...] = memory.view(p.name).view(array.dtype).reshape(array.shape)
    return outcome


def _ordered(
    params: Sequence[Param], arguments: Sequence[Argument] | Mapping[str, Argument]
) -> list[Argument]:
    names = [p.name for p in params]
    if isinstance(arguments, Mapping):
        for name in arguments:
            if name not in names:
                raise UnknownNameError("parameter", name, names)
        missing = [n for n in names if n not in arguments]
        if missing:
            raise WorkbenchError(f"there is no argument for {', '.join(missing)}")
        return [arguments[n] for n in names]
    if len(arguments) != len(names):
        raise WorkbenchError(
            f"the kernel has {len(names)} parameters ({', '.join(names)}), not {len(arguments)}"
        )
    return list(arguments)


def _packed(param: Param, value: Argument, memory: Memory) -> bytes:
    fresh = isinstance(value, Unwritten)
    if isinstance(value, Unwritten):
        value = value.array
    if isinstance(value, np.ndarray):
        if param.size != 8:
            raise WorkbenchError(f"parameter {param.name} has {param.size} bytes; it is no pointer")
        writable = bool(value.flags.writeable)
        view = memory.allocate(param.name, value.nbytes, writable=writable, initialized=not fresh)
        if fresh:
            memory.poison(param.name, 0xFF)
        else:
            view[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return struct.pack("<Q", memory.address(param.name))
    if isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, bytes):
        if len(value) != param.size:
            raise WorkbenchError(f"parameter {param.name} has {param.size} bytes, not {len(value)}")
        return value
    if isinstance(value, float):
        if param.size not in (4, 8):
            raise WorkbenchError(f"parameter {param.name} has {param.size} bytes; it is no float")
        return struct.pack("<f" if param.size == 4 else "<d", value)
    try:
        return int(value).to_bytes(param.size, "little", signed=value < 0)
    except OverflowError:
        raise WorkbenchError(f"{value} does not fit into parameter {param.name}") from None


def _triple(extent: Extent) -> tuple[int, int, int]:
    numbers = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(numbers) <= 3 or any(n < 1 for n in numbers):
        raise WorkbenchError(f"{extent} is no extent; give one to three positive numbers")
    x, y, z = (*numbers, 1, 1)[:3]
    return (x, y, z)
