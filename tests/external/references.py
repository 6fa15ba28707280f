"""What kernels compute that no op contract of `verifiers/` covers: pure functions on tensors, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.ops.rounding import to_bf16


def rounded(x: Tensor) -> Tensor:
    """Rounded to bf16, as float64."""
    return to_bf16(x.double()).double()


def embedding(ids: Tensor, weight: Tensor, start: int, vocab: int) -> Tensor:
    """Rows of this rank's shard, zero for tokens of other ranks or out of the vocabulary."""
    row = ids.long() - start
    here = (ids >= 0) & (ids < vocab) & (row >= 0) & (row < weight.shape[0])
    return torch.where(here[:, None], weight[row.clamp(0, weight.shape[0] - 1)].double(), 0.0)


def plan_scales(plan: Tensor, b: int) -> Tensor:
    """E8M0 codes [B, 112] of an experts plan: 16-byte rows of four codes after 64 rows of 3584 values."""
    rows = plan[64 * 3584 :].view(64, 28, 16)[:b, :, :4]
    return rows.reshape(b, 112).int()


def grouped_sum(partials: list[Tensor]) -> Tensor:
    """Four groups of consecutive ranks summed in FP32, then the groups in order."""
    size = max(1, len(partials) // 4)
    groups = []
    for first in range(0, len(partials), size):
        total = partials[first].float()
        for p in partials[first + 1 : first + size]:
            total = total + p.float()
        groups.append(total)
    result = groups[0]
    for g in groups[1:]:
        result = result + g
    return result.double()
