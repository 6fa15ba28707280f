"""From an artifact and its op's contract to a run or a timing on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from workbench.devices.cuda import CudaDevice
from workbench.devices.launch import Launch, Parameter, Pointer
from workbench.devices.model import Bytes, Kernel, Slot
from workbench.devices.timing import Timing, TimingOptions, time_kernel
from workbench.errors import UnknownNameError

if TYPE_CHECKING:
    from workbench.artifact import Artifact
    from workbench.ops.model import Op


def kernel_of(artifact: Artifact) -> Kernel:
    """What a device needs of an artifact."""
    return Kernel(
        name=f"{artifact.op} {artifact.workload} {artifact.template}",
        arch=artifact.arch,
        launches=tuple(
            Launch(
                kernel=n.kernel,
                grid=n.grid,
                block=n.block,
                cluster=n.cluster,
                smem_bytes=n.smem_bytes,
                pdl=n.pdl,
                cooperative=n.cooperative,
                parameters=tuple(
                    Parameter(
                        bytes.fromhex(p.data),
                        tuple(Pointer(r.offset, r.buffer, r.addend) for r in p.relocations),
                    )
                    for p in n.params
                ),
            )
            for n in artifact.launches
        ),
        slots=tuple(Slot(b.name, b.nbytes, b.role.value, b.align, b.zeroed) for b in artifact.buffers),
        cubin=artifact.cubin,
        ptx=artifact.ptx,
    )


def inputs(op: Op, axes: Mapping[str, int], generator: str = "ordinary", seed: int = 0) -> dict[str, Bytes]:
    """Bytes of an op's inputs from one of its generators; pages that it does not touch cost nothing.

    Raises:
        UnknownNameError: if the op has no such generator.
    """
    import torch

    from workbench.ops.model import storage_shape

    if generator not in op.generators:
        raise UnknownNameError("generator", generator, op.generators)
    raw: dict[str, Bytes] = {}
    tensors: dict[str, torch.Tensor] = {}
    for b in op.inputs:
        raw[b.name] = np.zeros(b.dtype.nbytes(math.prod(b.resolve(axes))), np.uint8)
        stored = torch.from_numpy(raw[b.name]).view(getattr(torch, b.dtype.torch_name))
        tensors[b.name] = stored.view(storage_shape(b, axes))
    op.generators[generator](axes, seed, tensors.__getitem__)
    return raw


def time(
    artifact: Artifact,
    op: Op,
    *,
    generator: str = "ordinary",
    seed: int = 0,
    options: TimingOptions | None = None,
    device: CudaDevice | None = None,
) -> Timing:
    """Measure an artifact on a CUDA device of its arch.

    Args:
        artifact: the compiled kernel; its cubin is launched.
        op: its contract, whose generator gives the inputs.
        generator: of the inputs.
        seed: of the inputs.
        options: the protocol; by default 100 samples between CUDA events, L2 flushed.
        device: where; by default the first one.

    Raises:
        DeviceError: if there is no device (`available` says so beforehand), it is of another arch, or a
            launch fails.
        UnknownNameError: if the op has no such generator.
    """
    given = inputs(op, artifact.axes, generator, seed)
    used = device or CudaDevice()
    try:
        return time_kernel(used, kernel_of(artifact), given, options)
    finally:
        if device is None:
            used.close()
