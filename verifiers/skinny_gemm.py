"""Projection of one or a few tokens: `out = bf16(x @ weight.T)`, one rounding, sums in any order.

The sizes are those of the input projections: one weight a layer makes q, k, v, gate, f_a and beta (KDA) or
the two latents and the gate (MLA). See `workbench/ops/linear.py`.
"""

import torch

from workbench.ops import Op, Workload, linear

OP = Op(
    name="skinny_gemm",
    doc="Product of B rows of K elements with N weight rows of K elements, one rounding to bf16.",
    buffers=linear.buffers("rows, one a token", "weight rows, one an output", "bf16(x @ weight.T)"),
    workloads=(
        Workload("tp8_b1", {"B": 1, "N": 6288, "K": 7168}, doc="input projection of a KDA layer, TP8"),
        Workload("tp8_b2", {"B": 2, "N": 6288, "K": 7168}, doc="input projection of a KDA layer, TP8"),
        Workload("tp8_b8", {"B": 8, "N": 6288, "K": 7168}, doc="input projection of a KDA layer, TP8"),
        Workload("tp16_b1", {"B": 1, "N": 3216, "K": 7168}, doc="input projection of a KDA layer, TP16"),
        Workload("tp16_b2", {"B": 2, "N": 3216, "K": 7168}, doc="input projection of a KDA layer, TP16"),
        Workload("mla_tp8_b1", {"B": 1, "N": 3648, "K": 7168}, doc="input projection of an MLA layer, TP8"),
        Workload("mla_tp16_b1", {"B": 1, "N": 2880, "K": 7168}, doc="input projection of an MLA layer, TP16"),
        Workload("small", {"B": 1, "N": 64, "K": 1024}, real=False),
        Workload("small_b1", {"B": 1, "N": 52, "K": 1024}, real=False),
        Workload("small_b3", {"B": 3, "N": 36, "K": 1280}, real=False),
    ),
    reference=linear.Product(),
    baseline=linear.Product(torch.float32),
    generators=linear.GENERATORS,
    tolerances={"out": linear.TOLERANCE},
    flops=linear.flops,
    compulsory_bytes=linear.compulsory_bytes,
    faults=linear.faults(),
)
