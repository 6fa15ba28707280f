"""The floor of an op on a machine: compulsory bytes at the peak bandwidth, FLOPs at the peak rate."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from workbench.cost.machine import Machine
from workbench.ops.dtypes import DType
from workbench.ops.model import Op, Role, Workload

_RATE = {DType.F64: "fp32", DType.F32: "fp32", DType.E4M3: "fp8", DType.E5M2: "fp8"}


class Roofline(BaseModel):
    """No kernel of the op can be faster than `us` with cold memory."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    op: str
    workload: str
    machine: str
    bytes: int
    """Compulsory bytes: weights touched once, inputs and outputs."""
    flops: int
    rate: str
    """Which peak the FLOPs are held against."""
    memory_us: float
    compute_us: float
    bound: Literal["memory", "compute"]
    us: float


def roofline(op: Op, workload: Workload, machine: Machine) -> Roofline:
    """Roofline of an op at one workload, at the peak bandwidth and the dense peak of its arithmetic.

    The arithmetic is that of the activations (bf16 activations with MXFP4 weights compute in bf16); an op
    without matrix weights counts against the FP32 peak.
    """
    nbytes, flops = op.compulsory_bytes(workload.axes), op.flops(workload.axes)
    rate = _rate(op)
    memory_us = nbytes / machine.chip.hbm_tb_s / 1e6
    compute_us = flops / machine.peak_tflops[rate] / 1e6
    return Roofline(
        op=op.name,
        workload=workload.name,
        machine=machine.name,
        bytes=nbytes,
        flops=flops,
        rate=rate,
        memory_us=memory_us,
        compute_us=compute_us,
        bound="memory" if memory_us >= compute_us else "compute",
        us=max(memory_us, compute_us),
    )


def _rate(op: Op) -> str:
    if not any(b.role is Role.WEIGHT and len(b.shape) > 1 for b in op.buffers):
        return "fp32"
    activations = [b.dtype for b in op.buffers if b.role is Role.ACTIVATION and b.dtype.is_float]
    return _RATE.get(activations[0], "bf16") if activations else "bf16"
