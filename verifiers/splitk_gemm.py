"""Projection of a batch: `out = bf16(x @ weight.T)`, one rounding, sums in any order.

The contract of `skinny_gemm` at the batches where tensor cores and a split of K pay. Partial sums that
meet (in shared memory, across a cluster) stay in float32: a rounding on the way is a mistake.
"""

import torch

from workbench.ops import Op, Workload, linear

OP = Op(
    name="splitk_gemm",
    doc="Product of a batch of rows with N weight rows of K elements, K split; one rounding to bf16.",
    buffers=linear.buffers("rows, one a token", "weight rows, one an output", "bf16(x @ weight.T)"),
    workloads=(
        Workload("tp8_b8", {"B": 8, "N": 6288, "K": 7168}, doc="input projection of a KDA layer, TP8"),
        Workload("tp8_b64", {"B": 64, "N": 6288, "K": 7168}, doc="input projection of a KDA layer, TP8"),
        Workload("tp16_b8", {"B": 8, "N": 3216, "K": 7168}, doc="input projection of a KDA layer, TP16"),
        Workload("tp16_b16", {"B": 16, "N": 3216, "K": 7168}, doc="input projection of a KDA layer, TP16"),
        Workload("small_b8", {"B": 8, "N": 128, "K": 512}, real=False),
        Workload("small_b3", {"B": 3, "N": 64, "K": 256}, real=False),
    ),
    reference=linear.Product(),
    baseline=linear.Product(torch.float32),
    generators=linear.GENERATORS,
    tolerances={"out": linear.TOLERANCE},
    flops=linear.flops,
    compulsory_bytes=linear.compulsory_bytes,
    faults=linear.faults(),
)
