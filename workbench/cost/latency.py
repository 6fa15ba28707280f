"""The latency model: a predicted time for each launch of an artifact, with the terms it is made of.

A launch takes the largest of three terms, plus a tenth of the others for imperfect overlap:
- memory: bytes from HBM and L2, over the bandwidth that the loads under way can reach (Little's law);
- issue: warp instructions of the busiest SM over the issue rate of their class and of the schedulers;
- latency: rounds of resident CTAs times what one warp takes alone (`scoreboard`).
What is added: the first load's latency where another term is the largest, and the gap to the kernel before.
What is taken off: loads before a PDL wait, as far as the predecessor leaves memory idle meanwhile.

It is a prediction: it ranks candidates and says what limits them; it is never mixed with a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from workbench.artifact import Artifact, Launch, stable_hash
from workbench.cost.machine import Machine
from workbench.cost.occupancy import Occupancy, occupancy
from workbench.cost.scoreboard import FREE, FREE_OPCODES, Code, Walk, ptx_code, sass_code, walk
from workbench.errors import WorkbenchError
from workbench.isa.ptx import Module, parse
from workbench.isa.sass.model import SassModule
from workbench.ops.model import Role
from workbench.simulator.counters import Counters

MODEL_VERSION = 1
"""Raised when predictions change: part of a prediction's premises."""
OVERLAP_LOSS = 0.1
"""Share of the smaller terms that does not overlap with the largest."""

UNCOUNTED = "sectors were not counted: every requested byte is taken for a distinct one (too many from HBM)"

L1_BYTES = 128 * 1024
"""A buffer of at most this size is taken to stay in an SM's L1 while its warps read it (half of L1)."""

_COLD = (Role.WEIGHT, Role.STATE, Role.METADATA)

ASSUMPTIONS = (
    "weights, state and metadata come cold from HBM; what the predecessor wrote comes from L2",
    f"buffers of up to {L1_BYTES // 1024} KiB stay in L1 once an SM has read them",
    "all CTAs take alike; SMs share memory and L2 evenly",
    f"terms overlap except for {OVERLAP_LOSS:.0%} of the smaller ones (estimate)",
    "with PDL, loads before griddepcontrol.wait hide behind the predecessor while it leaves memory idle",
    "inside a CUDA graph, clocks as the machine description states",
)


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class LaunchPrediction(_Data):
    """One launch."""

    kernel: str
    us: float
    """Time of the launch itself, without the gap before it."""
    gap_us: float
    """Launch cost that cannot be hidden: start of the chain, or gap to the predecessor."""
    limit: Literal["memory", "issue", "latency"]
    """The largest term."""
    terms_us: dict[str, float]
    """`memory`, `issue`, `latency`, `fill` (first load, added where latency is not the limit), and `hidden`
    (taken off: what loads before the PDL wait hide behind the predecessor)."""
    reason: str
    """One line: what limits the largest term."""
    occupancy: Occupancy
    waves: int
    """Rounds of resident CTAs."""
    busiest_sm_ctas: int
    imbalance: float
    """CTAs of the busiest SM over the mean."""
    hbm_bytes: int
    l2_bytes: int
    bandwidth_tb_s: float
    """What the loads under way can reach from HBM."""
    bandwidth_limit: Literal["hbm", "bytes in flight", "SM port"]


class Premises(_Data):
    """What a prediction rests on."""

    machine: str
    machine_hash: str
    model_version: int
    op: str
    workload: str
    axes: dict[str, int]
    arch: str
    artifact_key: str
    code: Literal["sass", "ptx"]
    """Whose instruction order was walked."""
    assumptions: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Hash of what a predicted value rests on beside the artifact: what a tuning record's key holds."""
        rests_on = self.model_dump(
            mode="json", include={"machine_hash", "model_version", "code", "assumptions"}
        )
        return stable_hash(rests_on)


class Prediction(_Data):
    """A predicted time of the whole chain of launches."""

    kind: Literal["predicted"] = "predicted"
    us: float
    launches: tuple[LaunchPrediction, ...]
    premises: Premises

    def explain(self) -> str:
        """A few lines that say where the time goes."""
        lines = [f"predicted {self.us:.2f} us on {self.premises.machine} ({self.premises.workload})"]
        for p in self.launches:
            terms = ", ".join(f"{k} {v:.2f}" for k, v in p.terms_us.items())
            lines.append(
                f"  {p.kernel}: {p.us:.2f} us + {p.gap_us:.2f} gap; {p.limit}-bound: {p.reason} ({terms}; "
                f"{p.occupancy.warps_per_sm} warps an SM, limited by {', '.join(p.occupancy.limited_by)}; "
                f"{p.waves} wave{'s' if p.waves > 1 else ''})"
            )
        return "\n".join(lines)


def predict(
    artifact: Artifact, counters: Sequence[Counters], machine: Machine, sass: SassModule | None = None
) -> Prediction:
    """Predict the time of an artifact's launches.

    Args:
        artifact: what was compiled.
        counters: one for each launch, in order, from the simulator.
        machine: the GPU that the time is predicted for.
        sass: the disassembled cubin; without it the PTX order stands for the order of execution.

    Raises:
        WorkbenchError: if the counters do not belong to the launches, the machine cannot run the artifact's
            architecture, or a kernel cannot be launched on it.
    """
    if [c.kernel for c in counters] != [launch.kernel for launch in artifact.launches]:
        raise WorkbenchError(
            f"counters of {[c.kernel for c in counters]} do not belong to the launches "
            f"{[launch.kernel for launch in artifact.launches]}"
        )
    if artifact.arch not in machine.arches:
        raise WorkbenchError(
            f"{artifact.arch} does not run on {machine.name}; it takes {', '.join(machine.arches)}"
        )
    module = parse(artifact.ptx)
    counted = all(c.global_load_sectors or not c.global_load_bytes for c in counters)
    launches: list[LaunchPrediction] = []
    idle_us = 0.0  # how long memory is idle before the next launch's wait ends, beside the gap
    for launch, c in zip(artifact.launches, counters, strict=True):
        code, growth = _codes(launch.kernel, module, sass)
        filled = _with_sectors(artifact, launch, c)
        overhead = machine.launch_us
        gap = overhead.pdl_gap if launch.pdl else overhead.gap
        p = _predict(artifact, launch, filled, machine, code, growth, overhead.pdl_gap + idle_us)
        launches.append(p.model_copy(update={"gap_us": gap if launches else overhead.first}))
        idle_us = max(0.0, p.us - p.terms_us["memory"]) if code.releases else 0.0
    premises = Premises(
        machine=machine.name,
        machine_hash=machine.hash,
        model_version=MODEL_VERSION,
        op=artifact.op,
        workload=artifact.workload,
        axes=artifact.axes,
        arch=artifact.arch,
        artifact_key=artifact.key,
        code="ptx" if sass is None else "sass",
        assumptions=ASSUMPTIONS if counted else (*ASSUMPTIONS, UNCOUNTED),
    )
    return Prediction(us=sum(p.us + p.gap_us for p in launches), launches=tuple(launches), premises=premises)


def _with_sectors(artifact: Artifact, launch: Launch, counters: Counters) -> Counters:
    """Fill in sector counts that the simulator was not asked for, from the bytes that lanes requested."""
    if counters.global_load_sectors or not counters.global_load_bytes:
        return counters
    bound = {r.buffer for p in launch.params for r in p.relocations}
    held = sum(b.nbytes for b in artifact.buffers if b.name in bound)
    return counters.model_copy(
        update={
            "global_load_sectors": -(-counters.global_load_bytes // 32),
            "global_store_sectors": -(-counters.global_store_bytes // 32),
            "unique_load_bytes": min(counters.global_load_bytes, held),
            "unique_store_bytes": min(counters.global_store_bytes, held),
        }
    )


def _codes(kernel: str, module: Module, sass: SassModule | None) -> tuple[Code, float]:
    """The code whose order counts, and SASS instructions for each PTX instruction that is not free."""
    if sass is None:
        return ptx_code(module.kernel(kernel)), 1.0
    code = sass_code(sass.function(kernel))
    counted = sum(i.opcode not in FREE_OPCODES for i in module.kernel(kernel).instructions)
    return code, min(max(code.issued / max(counted, 1), 0.25), 4.0)


def _predict(
    artifact: Artifact,
    launch: Launch,
    counters: Counters,
    machine: Machine,
    code: Code,
    growth: float,
    slack_us: float,
) -> LaunchPrediction:
    fit = _occupancy(artifact, launch, machine)
    ctas = max(counters.ctas, 1)
    busiest = -(-ctas // machine.chip.sms)
    waves = -(-ctas // (machine.chip.sms * fit.ctas_per_sm))
    warps = -(-_product(launch.block) // 32)
    hbm_bytes, l2_bytes = _traffic(artifact, launch, counters, min(ctas, machine.chip.sms))
    cold = hbm_bytes / max(counters.unique_load_bytes, 1)
    load_cycles = machine.latency_cycles.l2 + cold * (machine.latency_cycles.dram - machine.latency_cycles.l2)
    path = walk(code, _latencies(machine, load_cycles))
    longest = growth * sum(n for kind, n in counters.longest_warp.items() if kind not in FREE)

    bandwidth, bandwidth_limit = _bandwidth(machine, counters, path, min(fit.ctas_per_sm, busiest) * warps)
    memory, memory_reason = _memory(machine, hbm_bytes, l2_bytes, bandwidth, bandwidth_limit, ctas, busiest)
    issue, issue_reason = _issue(machine, counters, growth, busiest / ctas)
    chain = path.cycles_for(longest)
    terms = {"memory": memory, "issue": issue, "latency": waves * machine.microseconds(chain)}
    reasons = {
        "memory": memory_reason,
        "issue": issue_reason,
        "latency": f"{chain:.0f} cycles of the longest warp, {longest:.0f} instructions",
    }
    limit = max(("memory", "issue", "latency"), key=lambda k: terms[k])
    fill = 0.0 if limit == "latency" else machine.microseconds(load_cycles)
    us = terms[limit] + OVERLAP_LOSS * (sum(terms.values()) - terms[limit]) + fill
    hidden = 0.0
    if launch.pdl and path.head_load_bytes:
        lanes = min(fit.ctas_per_sm, busiest) * warps * 32 * min(ctas, machine.chip.sms)
        ahead = min(hbm_bytes, lanes * path.head_load_bytes) / bandwidth / 1e6
        useful = machine.microseconds(path.head_cycles) if limit == "latency" else fill + ahead
        hidden = min(useful, slack_us, us / 2)
    return LaunchPrediction(
        kernel=launch.kernel,
        us=us - hidden,
        gap_us=0.0,
        limit=limit,
        terms_us={**terms, "fill": fill, "hidden": hidden},
        reason=reasons[limit],
        occupancy=fit,
        waves=waves,
        busiest_sm_ctas=busiest,
        imbalance=busiest * machine.chip.sms / ctas if ctas > machine.chip.sms else 1.0,
        hbm_bytes=hbm_bytes,
        l2_bytes=l2_bytes,
        bandwidth_tb_s=bandwidth,
        bandwidth_limit=bandwidth_limit,
    )


def _occupancy(artifact: Artifact, launch: Launch, machine: Machine) -> Occupancy:
    resources = artifact.resources[launch.kernel]
    fit = occupancy(
        machine,
        threads=_product(launch.block),
        registers=resources.registers,
        smem_bytes=resources.static_smem + launch.smem_bytes,
    )
    if fit.ctas_per_sm == 0:
        raise WorkbenchError(
            f"{launch.kernel} cannot be launched on {machine.name}: {', '.join(fit.limited_by)} allow no CTA "
            f"({_product(launch.block)} threads, {resources.registers} registers, "
            f"{resources.static_smem + launch.smem_bytes} bytes of shared memory)"
        )
    return fit


def _traffic(artifact: Artifact, launch: Launch, counters: Counters, sms: int) -> tuple[int, int]:
    """Bytes from HBM and bytes through L2."""
    bound = {r.buffer for p in launch.params for r in p.relocations}
    warm = sum(b.nbytes for b in artifact.buffers if b.name in bound and b.role not in _COLD)
    hbm = max(0, counters.unique_load_bytes - warm)
    # Buffers that fit in L1 are fetched once an SM, however often its warps read them; other rereads
    # come through L2 each time.
    read = [b for b in artifact.buffers if b.name in bound and b.role is not Role.OUTPUT]
    kept = sum(b.nbytes for b in read if b.nbytes <= L1_BYTES)
    again = max(0, counters.global_load_sectors * 32 - counters.unique_load_bytes)
    from_l1 = min(again, counters.warps * kept)
    loads = counters.unique_load_bytes + again - from_l1 + min(from_l1, kept * sms)
    return hbm, loads + counters.async_bytes + counters.unique_store_bytes


def _latencies(machine: Machine, load_cycles: float) -> dict[str, float]:
    of = machine.latency_cycles
    return {
        "alu": of.alu, "sfu": of.sfu, "shuffle": of.shuffle, "vote": of.shuffle / 2, "barrier": of.barrier,
        "fence": of.fence, "tensor": of.tensor, "load_shared": of.shared, "load_const": of.shared,
        "load_global": load_cycles, "load_local": of.l2, "atomic": of.l2, "async_wait": load_cycles,
    }  # fmt: skip


def _bandwidth(
    machine: Machine, counters: Counters, path: Walk, warps: int
) -> tuple[float, Literal["hbm", "bytes in flight", "SM port"]]:
    """TB/s that the SMs in use can draw from HBM, and what bounds it (Little's law)."""
    sms = min(max(counters.ctas, 1), machine.chip.sms)
    moved = counters.global_load_sectors * 32 / max(counters.global_load_bytes, 1)
    in_flight = warps * 32 * path.peak_load_bytes * min(moved, 1.0)
    in_flight += counters.async_bytes / max(counters.ctas, 1)
    in_flight = min(max(in_flight, 32.0), machine.memory_parallelism.sm_bytes_in_flight)
    latency_us = machine.microseconds(machine.latency_cycles.dram)
    options: dict[Literal["hbm", "bytes in flight", "SM port"], float] = {
        "hbm": machine.chip.hbm_tb_s * machine.chip.hbm_efficiency,
        "bytes in flight": sms * in_flight / latency_us / 1e6,
        "SM port": sms * machine.chip.sm_l2_bytes_per_cycle * machine.chip.clock_ghz / 1e3,
    }
    limit = min(options, key=lambda k: options[k])
    return options[limit], limit


def _memory(
    machine: Machine, hbm: int, l2: int, bandwidth: float, limit: str, ctas: int, busiest: int
) -> tuple[float, str]:
    port = machine.chip.sm_l2_bytes_per_cycle * machine.chip.clock_ghz / 1e3
    options = {
        f"{hbm / 1e6:.2f} MB from HBM at {bandwidth:.2f} TB/s ({limit})": hbm / bandwidth / 1e6,
        f"{l2 / 1e6:.2f} MB through L2": l2 / machine.chip.l2_tb_s / 1e6,
        f"{l2 / ctas * busiest / 1e3:.1f} KB into the busiest SM": l2 / ctas * busiest / port / 1e6,
    }
    reason = max(options, key=lambda k: options[k])
    return options[reason], reason


def _issue(machine: Machine, counters: Counters, growth: float, share: float) -> tuple[float, str]:
    """Microseconds to issue the busiest SM's share of the warp instructions, and the class that bounds it."""
    counts = {k: n * growth for k, n in counters.warp_instructions.items() if k not in FREE}
    passes = dict(counts)
    shared = sum(counts.get(k, 0) for k in ("load_shared", "store_shared"))
    if shared:
        passes["load_shared"] = shared + counters.bank_conflicts
    # 128 bytes a cycle go through L1, whatever the width of the loads.
    l1 = (counters.global_load_sectors + counters.global_store_sectors) * 32 / 128
    passes["load_global"] = max(passes.get("load_global", 0.0), l1)
    rates = machine.issue_rate
    cycles = {k: n / rates.get(k, rates["other"]) for k, n in passes.items()}
    cycles["all classes"] = sum(counts.values()) / rates["total"]
    worst = max(cycles, key=lambda k: cycles[k])
    return (
        machine.microseconds(cycles[worst] * share),
        f"{worst}: {cycles[worst] * share:.0f} cycles of the busiest SM",
    )


def _product(extent: tuple[int, int, int]) -> int:
    return extent[0] * extent[1] * extent[2]
