"""How many CTAs of a kernel fit on one SM, by the rules of CUDA's calculator (`cuda_occupancy.h`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from workbench.cost.machine import Machine


class Occupancy(BaseModel):
    """Resident CTAs of one kernel on one SM."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    ctas_per_sm: int
    """0 if the kernel cannot be launched."""
    warps_per_sm: int
    fraction: float
    """Resident warps over the SM's limit."""
    limited_by: tuple[str, ...]
    """Resources that allow no more: `registers`, `shared memory`, `warps`, `CTAs`."""
    limits: dict[str, int]
    """CTAs that each resource alone would allow."""


def occupancy(machine: Machine, *, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Occupancy of a kernel.

    Args:
        machine: the GPU.
        threads: threads a CTA.
        registers: 32-bit registers a thread.
        smem_bytes: static and dynamic shared memory a CTA, without the system's reserve.
    """
    of = machine.limits
    warps = -(-threads // 32)
    limits = {
        "CTAs": of.max_ctas,
        "warps": of.max_warps // warps if 0 < threads <= of.max_threads_per_cta else 0,
        "registers": _by_registers(machine, warps, registers),
        "shared memory": _by_shared_memory(machine, smem_bytes),
    }
    ctas = min(limits.values())
    return Occupancy(
        ctas_per_sm=ctas,
        warps_per_sm=ctas * warps,
        fraction=ctas * warps / of.max_warps,
        limited_by=tuple(sorted(k for k, v in limits.items() if v == ctas)),
        limits=limits,
    )


def _by_registers(machine: Machine, warps: int, registers: int) -> int:
    of = machine.limits
    if registers > of.max_registers_per_thread or warps == 0:
        return 0
    if registers == 0:
        return of.max_ctas
    a_warp = _round_up(registers * 32, of.register_unit)
    # A launch needs room for whole rounds of the sub-partitions; after that warps are counted one by one.
    if a_warp * _round_up(warps, of.subpartitions) > of.registers_per_sm:
        return 0
    return of.registers_per_sm // of.subpartitions // a_warp * of.subpartitions // warps


def _by_shared_memory(machine: Machine, smem_bytes: int) -> int:
    of = machine.limits
    if smem_bytes > of.smem_per_cta:
        return 0
    a_cta = _round_up(smem_bytes + of.smem_reserved, of.smem_unit)
    return of.smem_per_sm // a_cta if a_cta else of.max_ctas


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
