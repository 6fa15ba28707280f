"""Special registers: who a lane is and what the launch looks like (PTX ISA chapter 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


def special(ck: Chunk, co: Cohort, name: str) -> Array:
    """Return a special register for the lanes of a cohort."""
    launch = ck.launch
    base, _, axis = name.partition(".")
    place = "xyz".find(axis) if axis else 0

    def one(value: int, kind: Any = np.uint32) -> Array:
        return np.full((1, 1), value & (0xFFFFFFFF if kind is np.uint32 else 0xFFFFFFFFFFFFFFFF), kind)

    def rows(value: Array) -> Array:
        chosen = value[co.ctas].astype(np.uint32)
        return chosen[:, None] if co.rectangular else chosen[None, :]

    if base == "%tid":
        return launch.tid[axis][co.threads][None, :]
    if base == "%ctaid":
        return rows(ck.ctaid[axis])
    if base in ("%ntid", "%nctaid", "%cluster_nctaid"):
        return one(
            {"%ntid": launch.block, "%nctaid": launch.grid, "%cluster_nctaid": launch.cluster}[base][place]
        )
    if base == "%nclusterid":
        return one(launch.grid[place] // launch.cluster[place])
    if base == "%clusterid":
        return rows(ck.ctaid[axis] // launch.cluster[place])
    if base == "%cluster_ctaid":
        return rows(ck.ctaid[axis] % launch.cluster[place])
    cx, cy, cz = launch.cluster
    if base == "%cluster_ctarank":
        c = ck.ctaid
        return rows(c["x"] % cx + cx * (c["y"] % cy + cy * (c["z"] % cz)))
    lane = (co.threads & 31).astype(np.uint32)[None, :]
    shared = launch.shared_dynamic
    total = shared + launch.program.shared_static
    simple = {
        "%cluster_nctarank": cx * cy * cz,
        "%nwarpid": 64,
        "%nsmid": 160,
        "%gridid": 1,
        "%dynamic_smem_size": shared,
        "%total_smem_size": total,
        "%aggr_smem_size": total,
        "%reserved_smem_offset_begin": 0,
        "%reserved_smem_offset_end": 0x400,
        "%reserved_smem_offset_cap": 0x400,
    }
    if base in simple:
        return one(simple[base])
    if base == "%laneid":
        return lane
    if base == "%warpid":
        return (co.threads >> 5).astype(np.uint32)[None, :]
    if base == "%smid":
        return rows(ck.ctas % 160)
    if base == "%is_explicit_cluster":
        return np.full((1, 1), cx * cy * cz > 1)
    if base.startswith("%lanemask_"):
        bit = np.uint32(1) << lane
        below = bit - np.uint32(1)
        return {"eq": bit, "lt": below, "le": below | bit, "gt": ~(below | bit), "ge": ~below}[base[10:]]
    ticks = launch.lane_instructions // 32 + 1
    if base in ("%clock64", "%globaltimer"):
        return one(ticks, np.uint64)
    return one(ticks >> 32 if base.endswith("_hi") else ticks)
