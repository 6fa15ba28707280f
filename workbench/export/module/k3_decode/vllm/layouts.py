"""How vLLM keeps the routed experts after loading, and the way back to the checkpoint's order.

Layouts, by the backend that vLLM chose:

* `row-major`: as in the checkpoint: rows 0..I-1 of `w13` gate, I..2I-1 up, scales `[rows, K / 32]`.
* `trtllm-shuffled` (FlashInfer's TensorRT-LLM kernels, vLLM's choice on Blackwell): rows of gate and up
  alternate, up first; within each 32 rows, row `8 j + i` of the result is row `4 i + j` of those (j below 4,
  i below 8); `w2` has the second rule alone. Scales follow their rows and then lie in tiles of 128 rows by 4:
  scale (r, c) of a tile at byte `16 (r mod 32) + 4 (r div 32) + c`, tiles row by row.

Kernels of the package want `row-major`. A copy in that order costs as much again as the experts; it is made
once, only within the memory that the settings allow, and stock keeps the original for its own steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROW_MAJOR, SHUFFLED = "row-major", "trtllm-shuffled"
_BACKENDS = {
    "FLASHINFER_TRTLLM_MXFP4_MXFP8": SHUFFLED,
    "FLASHINFER_TRTLLM_MXFP4_BF16": SHUFFLED,
    "B12X_MXFP4_MXFP8": ROW_MAJOR,
    "B12X_MXFP4_BF16": ROW_MAJOR,
    "EMULATION": ROW_MAJOR,
}
"""Layouts by the name of vLLM's backend. The others' are not known here."""
NAMES = {
    "w13": "w13_weight",
    "w13_scale": "w13_weight_scale",
    "w2": "w2_weight",
    "w2_scale": "w2_weight_scale",
}
"""Attributes of vLLM's module by the op's buffers."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer as they lie in memory."""

    layout: str
    """`row-major`, `trtllm-shuffled`, or `unknown: ...`."""
    tensors: Mapping[str, torch.Tensor]
    """Bytes, by the op's buffer."""

    @property
    def nbytes(self) -> int:
        """Memory of a copy."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def experts_of(routed: Any) -> Experts:
    """The experts of vLLM's module.

    Raises:
        ValueError: naming the tensor that is missing or is not MXFP4.
    """
    tensors = {}
    for name, attribute in NAMES.items():
        tensor = getattr(routed, attribute, None)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"the routed experts have no {attribute}")
        tensor = tensor.detach()
        if tensor.element_size() != 1 or tensor.dim() != 3:
            raise ValueError(f"{attribute} is {tensor.dtype} {list(tensor.shape)}, not MXFP4")
        tensors[name] = tensor.view(torch.uint8)
    return Experts(_layout(routed), tensors)


def row_major(experts: Experts) -> dict[str, torch.Tensor]:
    """The experts in the checkpoint's order: the same tensors, or copies.

    Raises:
        ValueError: if the layout is not known.
    """
    if experts.layout == ROW_MAJOR:
        return dict(experts.tensors)
    if experts.layout != SHUFFLED:
        raise ValueError(f"experts lie in the layout {experts.layout}")
    made = {}
    for weight, scale, gated in (("w13", "w13_scale", True), ("w2", "w2_scale", False)):
        rows = experts.tensors[weight].shape[1]
        back = source_rows(rows, gated).to(experts.tensors[weight].device)
        made[weight] = _unshuffled(experts.tensors[weight], back)
        made[scale] = _unshuffled(scales_in_rows(experts.tensors[scale]), back)
    return made


def source_rows(rows: int, gated: bool) -> torch.Tensor:
    """Checkpoint row of each shuffled row, `[rows]` int64; `gated` for `w13`.

    Raises:
        ValueError: if the rows are not whole blocks of 32.
    """
    if rows % 32:
        raise ValueError(f"{rows} rows are not whole blocks of 32")
    place = torch.arange(rows)
    within = place % 32
    before = place - within + 4 * (within % 8) + within // 8
    if not gated:
        return before
    return torch.where(before % 2 == 0, rows // 2, 0) + before // 2


def scales_in_rows(tiled: torch.Tensor) -> torch.Tensor:
    """Scales `[E, N, K / 32]` row by row, from tiles of 128 rows by 4.

    Raises:
        ValueError: if they are not whole tiles.
    """
    experts, rows, columns = tiled.shape
    if rows % 128 or columns % 4:
        raise ValueError(f"scales of {rows} rows and {columns} columns are not whole tiles of 128 by 4")
    tiles = tiled.reshape(experts, rows // 128, columns // 4, 32, 4, 4)  # row mod 32, row div 32, column
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, columns)


def _unshuffled(shuffled: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(shuffled, memory_format=torch.contiguous_format)
    for expert in range(shuffled.shape[0]):  # one expert at a time: no second copy of them all
        made[expert, source] = shuffled[expert]
    return made


def _layout(routed: Any) -> str:
    method = getattr(routed, "quant_method", None) or getattr(routed, "_quant_method", None)
    backend = getattr(method, "mxfp4_backend", None)
    name = getattr(backend, "name", None) or str(backend)
    return _BACKENDS.get(name, f"unknown: backend {name}")
