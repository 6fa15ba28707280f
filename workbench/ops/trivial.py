"""Trivial outputs that no op may accept: zeros, ones, the mean, a copied input, and nothing written at
all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from workbench.ops.compare import Standard, compare
from workbench.ops.model import Buffer, Op, Role, Tensors, storage_shape

if TYPE_CHECKING:
    import torch

POISONS = (0xFF, 0x5A)
"""Bytes that outputs and scratch are filled with before a run: NaN in every float type here, and a finite
number."""


def zero_inputs(op: Op, axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Zero-filled storage of every input buffer, lazily: untouched pages cost nothing."""
    import numpy as np
    import torch

    tensors = {}
    for b in op.inputs:
        raw = torch.from_numpy(np.zeros(b.dtype.nbytes(math.prod(b.resolve(axes))), np.uint8))
        tensors[b.name] = raw.view(getattr(torch, b.dtype.torch_name)).view(storage_shape(b, axes))
    return tensors


def poisoned(buffer: Buffer, axes: Mapping[str, int], byte: int) -> torch.Tensor:
    """Storage of a buffer with every byte set to `byte`."""
    import torch

    raw = torch.full((buffer.dtype.nbytes(math.prod(buffer.resolve(axes))),), byte, dtype=torch.uint8)
    return raw.view(getattr(torch, buffer.dtype.torch_name)).view(storage_shape(buffer, axes))


def trivial_outputs(
    op: Op, axes: Mapping[str, int], inputs: Tensors, golden: Tensors, buffer: Buffer
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a kernel that computes nothing could leave in `buffer`: (description, tensor) pairs."""
    import torch

    g = golden[buffer.name]
    finite = g[g.isfinite()].double()
    mean = finite.mean() if finite.numel() else torch.tensor(0.0, dtype=torch.float64)
    yield "zeros", torch.zeros_like(g)
    yield "ones", torch.ones_like(g)
    yield "the mean", torch.full_like(g, round(float(mean)) if not g.is_floating_point() else float(mean))
    for b in op.inputs:
        source = inputs[b.name]
        if b.name != buffer.name and source.shape == g.shape:
            yield f"a copy of {b.name}", source.to(g.dtype)
    if buffer.role is Role.STATE:
        yield "a no-op", inputs[buffer.name].to(g.dtype)
    else:
        for byte in POISONS:
            yield f"a no-op (poison 0x{byte:02X})", poisoned(buffer, axes, byte).to(g.dtype)


def accepted_trivial(op: Op, axes: Mapping[str, int], inputs: Tensors, standard: Standard) -> str | None:
    """Describe the first trivial output that the op's own tolerance accepts, or return None."""
    for b in op.outputs:
        for name, out in trivial_outputs(op, axes, inputs, standard.golden, b):
            if compare(standard.golden[b.name], out, op.tolerances[b.name], standard.honest[b.name]).passed:
                return f"{name} would pass as {b.name!r}"
    return None
