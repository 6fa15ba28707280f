"""One rank's partial of the output projection: `out = bf16(x @ weight.T)`, zeros stored as +0.

The partial travels to the other ranks in mailboxes whose empty mark is a pair of -0, so that no result may be
-0. Each rank rounds its partial to bf16 once; the consumer adds the ranks' partials in float32.
"""

import torch

from workbench.ops import Op, Workload, linear

OP = Op(
    name="o_proj",
    doc="One rank's bf16 partial of the output projection; a zero is +0.",
    buffers=linear.buffers("this rank's heads", "this rank's columns of o_proj", "bf16(x @ weight.T)"),
    workloads=(
        Workload("tp8_b1", {"B": 1, "N": 7168, "K": 1536}, doc="one token"),
        Workload("tp8_b8", {"B": 8, "N": 7168, "K": 1536}, doc="eight tokens"),
        Workload("tp16_b1", {"B": 1, "N": 7168, "K": 768}, doc="one token"),
        Workload("small_b1", {"B": 1, "N": 96, "K": 256}, real=False),
        Workload("small_b3", {"B": 3, "N": 96, "K": 256}, real=False),
    ),
    reference=linear.Product(positive_zero=True),
    baseline=linear.Product(torch.float32, positive_zero=True),
    generators=linear.GENERATORS,
    tolerances={"out": linear.PARTIAL},
    flops=linear.flops,
    compulsory_bytes=linear.compulsory_bytes,
    faults=linear.faults(positive_zero=True),
)
