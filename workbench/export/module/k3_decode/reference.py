"""The fallback: the op's own reference in PyTorch, float64 inside. It is right, not fast."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .contracts import contract
from .table import Buffer, Op

_EIGHT_BITS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
"""Eight-bit floats, which ops take as bytes."""


class NotCapturable(RuntimeError):  # noqa: N818
    """A call fell back to the reference while a graph is being captured, which the reference cannot be in."""


def run(op: Op, tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int]) -> None:
    """Compute the op by its reference and write its outputs and states in place.

    Args:
        op: the op.
        tensors: storage tensors of all its buffers, on one device.
        axes: all axes, B included.
    """
    seen = {b.name: as_contract(b, tensors[b.name]) for b in op.buffers}
    inputs = {b.name: seen[b.name] for b in op.buffers if b.role != "output"}
    device = next(iter(tensors.values())).device
    with torch.no_grad(), torch.device(device):
        results = contract(op.name).reference(inputs, axes)
        for b in op.buffers:
            if b.mutated:
                seen[b.name].copy_(results[b.name])


def as_contract(buffer: Buffer, tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with the dtype that the contract names."""
    dtype = _EIGHT_BITS.get(buffer.dtype)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))
