"""Launches modules of the corpus in the simulator: binds buffers, interprets the host function, runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import corpus
import numpy as np
import torch

from workbench.compile.launches import RawLaunch, interpret_launches
from workbench.isa.ptx import Module, parse
from workbench.simulator import KernelLaunch, Memory, Outcome, SimulationOptions, simulate_module


@dataclass(frozen=True)
class Kernel:
    """One module of the corpus."""

    name: str
    module: Module
    mlir: str
    function: str
    arguments: tuple[dict[str, Any], ...]


@cache
def load(name: str) -> Kernel:
    """Read a module from the cache; skips the test if it did not compile."""
    at = corpus.folder() / name
    if not at.is_dir():
        import pytest

        pytest.skip(f"{name} did not compile")
    about = json.loads((at / "about.json").read_text())
    return Kernel(
        name, parse((at / "kernel.ptx").read_text()), (at / "host.mlir").read_text(), about["function"],
        tuple(about["arguments"]),
    )  # fmt: skip


class Device:
    """Simulated memory that tensors are put into and read back from."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._count = 0
        self._addresses: dict[int, tuple[torch.Tensor, int]] = {}

    def put(self, value: torch.Tensor, name: str = "", written: bool = True) -> torch.Tensor:
        """Copy a tensor with its strides; the result is a view of simulated memory with the same layout."""
        self._count += 1
        name = name or f"buffer{self._count}"
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        raw = self.memory.allocate(name, extent * value.element_size(), align=1024)
        flat = torch.from_numpy(raw).view(value.dtype)
        view = flat.as_strided(value.shape, value.stride())
        view.copy_(value)
        if written:
            self.memory.mark_written(name)
        else:
            raw[:] = 0xFF
        self._addresses[raw.ctypes.data] = (view, self.memory.address(name))
        return view

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16, name: str = "") -> torch.Tensor:
        """An output: poisoned, and unwritten for the simulator."""
        return self.put(torch.zeros(shape, dtype=dtype), name, written=False)

    def address(self, tensor: torch.Tensor) -> int:
        """Device address of a tensor's first element; it may be a view of one that was put."""
        at = tensor.data_ptr()
        base = max((b for b in self._addresses if b <= at), default=None)
        assert base is not None, "the tensor is not in simulated memory"
        return self._addresses[base][1] + at - base


def _bits(dtype: str, value: float) -> int:
    if dtype == "Float32":
        return int.from_bytes(struct.pack("<f", value), "little")
    if dtype == "Float64":
        return int.from_bytes(struct.pack("<d", value), "little")
    return int(value)


def bind(kernel: Kernel, device: Device, values: Sequence[Any]) -> tuple[RawLaunch, ...]:
    """Launches at given values: a tensor or a number an argument, None and the stream left out."""
    given: list[Sequence[int] | None] = []
    left = list(values)
    for argument in kernel.arguments:
        match argument["kind"]:
            case "none":
                continue
            case "stream":
                given.append(None)
            case "scalar":
                given.append((_bits(argument["dtype"], left.pop(0)),))
            case _:
                t = left.pop(0)
                leaves = [n for n, s in zip(t.shape, argument["shape"], strict=True) if isinstance(s, str)]
                leaves += [
                    n for n, s in zip(t.stride(), argument["stride"], strict=True) if isinstance(s, str)
                ]
                fixed = [
                    (n, s) for n, s in zip(t.shape, argument["shape"], strict=True) if not isinstance(s, str)
                ]
                assert all(n == s for n, s in fixed), (tuple(t.shape), argument["shape"])
                given.append((device.address(t), *leaves))
    assert not left, f"{len(left)} values too many for {kernel.name}"
    return interpret_launches(kernel.mlir, kernel.function, given)


def packed(kernel: Kernel, launch: RawLaunch) -> KernelLaunch:
    """A launch with its parameter block laid out as the PTX has it."""
    block = bytearray()
    for param, raw in zip(kernel.module.kernel(launch.kernel).params, launch.params, strict=True):
        assert len(raw) == param.size, (param.name, len(raw), param.size)
        block.extend(bytes(param.offset - len(block)))
        block.extend(raw)
    return KernelLaunch(
        launch.kernel, launch.grid, launch.block, bytes(block), launch.cluster, launch.smem_bytes
    )


def run(name: str, device: Device, *values: Any, options: SimulationOptions | None = None) -> Outcome:
    """Run a module's host function on the simulator; `values` as for `bind`."""
    kernel = load(name)
    launches = [packed(kernel, raw) for raw in bind(kernel, device, values)]
    return simulate_module(kernel.module, launches, device.memory, options)


def clean(outcome: Outcome, known: str = "") -> None:
    """Fail with the findings, those of the rule `known` left out, or if the run did not end."""
    found = [f for f in outcome.findings if f.rule != known]
    text = "\n".join(f"{f.severity.value} {f.rule} line {f.ptx_line}: {f.message}" for f in found)
    assert outcome.completed and not found, text


def normal(seed: int, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal random numbers."""
    rng = np.random.default_rng([seed, *shape])
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * np.float32(std)).to(dtype)


def weight_map(
    device: Device, tensor: torch.Tensor, box: tuple[int, ...], element: str = "bf16",
    dims: tuple[int, ...] | None = None, strides: tuple[int, ...] | None = None, swizzle: int = 128,
) -> int:  # fmt: skip
    """Put a tensor map into simulated memory and return its address; [rows, columns] if no dims are given."""
    from workbench.simulator.swizzle import Swizzle
    from workbench.simulator.tensormap import BY_NAME, TensorMap, encode

    dims = dims or tuple(reversed(tensor.shape))
    strides = strides or (tensor.stride(0) * tensor.element_size(),)
    made = TensorMap(
        device.address(tensor), BY_NAME[element], dims, strides, box, swizzle=Swizzle(swizzle), l2_promotion=3
    )
    raw = torch.frombuffer(bytearray(encode(made)), dtype=torch.uint8)
    return device.address(device.put(raw))
