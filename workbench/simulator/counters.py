"""What a simulated launch did, for the cost model: counts, never times."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Counters(BaseModel):
    """Counts of one launch. `warp_instructions` counts issue slots: one a warp and instruction, by class.

    Classes: `fp32`, `fp16` (packed half and bf16), `fp64`, `int`, `convert`, `sfu`, `move`, `predicate`,
    `shuffle`, `vote`, `branch`, `barrier`, `load_global`, `store_global`, `load_shared`, `store_shared`,
    `load_local`, `store_local`, `load_const`, `atomic`, `async_copy`, `tensor`, `fence`, `pdl`, `other`.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    kernel: str
    ctas: int
    warps: int
    lane_instructions: int
    """PTX instructions times active lanes."""
    warp_instructions: dict[str, int]
    longest_warp: dict[str, int]
    """`warp_instructions` of the warp that issued most."""
    global_load_bytes: int = 0
    """Bytes requested by lanes."""
    global_store_bytes: int = 0
    global_load_sectors: int = 0
    """32-byte sectors requested, counted a warp request at a time."""
    global_store_sectors: int = 0
    unique_load_bytes: int = 0
    """Distinct 32-byte sectors read over the launch, in bytes: what must come from memory or L2 at least
    once.
    """
    unique_store_bytes: int = 0
    shared_bytes: int = 0
    bank_conflicts: int = 0
    """Extra shared-memory passes beyond one a request."""
    divergent_branches: int = 0
    barrier_waits: int = 0
    async_bytes: int = 0
    atomics: int = 0
