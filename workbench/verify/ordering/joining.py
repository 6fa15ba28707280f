"""Joins what runs of a kernel showed with what its code shows: one rule at one place is one finding."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from workbench.artifact import Artifact
from workbench.cost import machine_for, occupancy
from workbench.errors import UnknownNameError
from workbench.findings import Finding, Severity
from workbench.isa.cubin import Cubin
from workbench.isa.ptx.model import Kernel, Module
from workbench.ops.model import Role
from workbench.verify.contract import Contract, ContractKernel
from workbench.verify.ordering.binding import Launch
from workbench.verify.ordering.contents import SimulatedBuffer
from workbench.verify.ordering.dynamic import DynamicAudit, dynamic_or_reason
from workbench.verify.ordering.runs import LATER, DynamicLaunch
from workbench.verify.ordering.static import KernelAudit
from workbench.verify.report import Verdict
from workbench.verify.tensor_maps import MAP_BYTES

_WAITS = frozenset(("pdl-load-before-wait", "pdl-wait-missing", "nc-load-of-mutable"))
"""Rules that name the same mistake, seen from different sides."""
_OF_THE_LIST = frozenset(("pdl-chain-not-transitive",))
"""Rules on a kernel's part in the launch list: that its runs show it too is nothing new."""
_MOST_SMEM = 227 << 10
"""Bytes of shared memory that a CTA can have."""
_MOST_SMS = {"gb300": 160}
"""Multiprocessors that a contract may count on at most, where that is more than the machine described has."""


def run_contract(
    module: Module | None,
    contract: Contract | None,
    cubin: Cubin | None,
    launch_of: Callable[[ContractKernel, str], Launch],
) -> DynamicAudit | None:
    """Run the kernels of a contract in the order of the file; None if there is nothing to run.

    Args:
        module: the PTX; without it nothing is run.
        contract: grid, block, buffers and scalars.
        cubin: for the registers of the kernels.
        launch_of: binds a contract entry of the kernel of that name.
    """
    if module is None or contract is None or not contract.kernel:
        return None
    names = [k.name for k in module.kernels]

    def build() -> tuple[list[DynamicLaunch], list[SimulatedBuffer]] | str:
        launches: list[DynamicLaunch] = []
        buffers: dict[str, SimulatedBuffer] = {}
        for entry in contract.kernel:
            name = entry.name or names[0]
            kernel = module.kernel(name)
            launch = launch_of(entry, name)
            if any(i.opcode == "cp" and "tensor" in i.modifiers for i in kernel.instructions):
                bare = [b.name for b in entry.buffer if b.tensor_map is None
                        and launch.params[b.param].size >= MAP_BYTES]  # fmt: skip
                if bare or all(b.tensor_map is None for b in entry.buffer):
                    whose = f"of {bare[0]!r} " if bare else ""
                    return (
                        f"{name} copies through a tensor map {whose}that the contract does not describe "
                        "(tensor_map of a buffer); that expect_tx announces the bytes of its copies is taken "
                        "for granted"
                    )
            smem = _dynamic_smem(module, kernel, entry)
            absent = [n for n in range(len(kernel.params)) if n not in launch.params]
            if absent:
                return f"the contract does not say what parameter {absent[0]} of {name} is"
            for b in entry.buffer:
                if b.size is None:
                    return f"the contract does not say how many bytes {b.name!r} has"
                old = buffers.get(b.name)
                role = Role.METADATA if b.settled and b.role is Role.ACTIVATION else b.role
                word = {"zero": 0}.get(b.first) if isinstance(b.first, str) else b.first
                made = SimulatedBuffer(
                    b.name, b.size, role, b.align, word, b.first == "random", b.first == "sentinel"
                )
                buffers[b.name] = made if old is None else _both(old, made)
            if kernel.params and any(launch.params[n].size != p.size for n, p in enumerate(kernel.params)):
                return f"the contract's parameters of {name} do not have the kernel's sizes"
            later: list[Callable[[Mapping[str, int]], bytes]] = []
            following = entry.following()
            while following is not None and len(later) < LATER:
                later.append(_binder(kernel, launch_of(following, name)))
                following = following.following()
            launches.append(
                DynamicLaunch(
                    name, entry.grid, entry.block, entry.cluster, smem, entry.pdl, _binder(kernel, launch),
                    None if entry.cooperative
                    else _capacity(module, entry.block, entry.smem_bytes, cubin, name),
                    _static_smem(module, kernel),
                    tuple(later),
                )
            )  # fmt: skip
        return launches, list(buffers.values())

    return dynamic_or_reason(build, module)


def _dynamic_smem(module: Module, kernel: Kernel, entry: ContractKernel) -> int:
    """Dynamic shared memory of a CTA: all there is, if the kernel uses some and the contract says nothing."""
    variables = (*module.variables, *kernel.variables)
    if entry.smem_bytes or not any(
        v.space == "shared" and (v.elements is None or v.extern) for v in variables
    ):
        return entry.smem_bytes
    return max(0, _MOST_SMEM - _static_smem(module, kernel) - 1024)


def _static_smem(module: Module, kernel: Kernel) -> int:
    """Static shared memory of a CTA, bytes."""
    return sum(
        v.elements * int(v.type.lstrip("busf")) // 8
        for v in (*module.variables, *kernel.variables)
        if v.space == "shared" and v.elements is not None and not v.extern
    )


def _both(a: SimulatedBuffer, b: SimulatedBuffer) -> SimulatedBuffer:
    """One buffer that two kernels use: what one writes and the other reads is written before it is read."""
    role = a.role if a.role is b.role else (a.role if a.role in _WRITTEN else b.role)
    return replace(a, nbytes=max(a.nbytes, b.nbytes), role=role, align=min(a.align, b.align))


_WRITTEN = (Role.OUTPUT, Role.SCRATCH, Role.STATE, Role.FLAG, Role.MAILBOX)


def _binder(kernel: Kernel, launch: Launch) -> Callable[[Mapping[str, int]], bytes]:
    def parameters(addresses: Mapping[str, int]) -> bytes:
        block = bytearray()
        for n, p in enumerate(kernel.params):
            block.extend(bytes(p.offset - len(block)))
            block.extend(launch.params[n].bind(dict(addresses)))
        return bytes(block)

    return parameters


def _capacity(
    module: Module, block: tuple[int, int, int], smem_bytes: int, cubin: Cubin | None, name: str
) -> int | None:
    """CTAs of a kernel that the device holds at a time."""
    if cubin is None or name not in cubin.kernels:
        return None
    try:
        machine = machine_for(module.target)
    except UnknownNameError:
        return None
    info = cubin.kernels[name]
    fit = occupancy(
        machine, threads=math.prod(block), registers=info.registers, smem_bytes=info.static_smem + smem_bytes
    )
    return fit.ctas_per_sm * _MOST_SMS.get(machine.name, machine.chip.sms) or None


def run_artifact(
    module: Module, artifact: Artifact, launches: Sequence[Launch], cubin: Cubin
) -> DynamicAudit:
    """Run the launches of an artifact; `launches` has them with the roles that hold."""

    def build() -> tuple[list[DynamicLaunch], list[SimulatedBuffer]] | str:
        made: list[DynamicLaunch] = []
        for given, launch in zip(artifact.launches, launches, strict=True):
            kernel = module.kernel(given.kernel)
            made.append(
                DynamicLaunch(
                    given.kernel, given.grid, given.block, given.cluster, given.smem_bytes, given.pdl,
                    _binder(kernel, launch),
                    None if given.cooperative
                    else _capacity(module, given.block, given.smem_bytes, cubin, given.kernel),
                    _static_smem(module, kernel),
                )
            )  # fmt: skip
        buffers = []
        roles = launches[0].roles if launches else {}
        for b in artifact.buffers:
            role = roles.get(b.name, b.role)
            if role is None:
                return f"nobody said what {b.name!r} is for"
            zero = 0 if b.zeroed and role not in (Role.FLAG, Role.MAILBOX) else None
            buffers.append(SimulatedBuffer(b.name, b.nbytes, role, b.align, zero))
        return made, buffers

    return dynamic_or_reason(build, module)


def joined(audit: KernelAudit, dynamic: DynamicAudit | None) -> KernelAudit:
    """The audit of a kernel with what its runs showed."""
    if dynamic is None:
        return audit
    mine = [f for f in dynamic.findings if f.kernel == audit.kernel]
    known = {(f.rule, f.ptx_line) for f in audit.findings} | {
        (f.rule, f.source) for f in audit.findings if f.source is not None
    }
    fresh = [f for f in mine if (f.rule, f.ptx_line) not in known and (f.rule, f.source) not in known]
    listed = {f.rule for f in audit.findings} & _OF_THE_LIST
    fresh = [f for f in fresh if f.rule not in listed]
    waits = {f.buffer for f in audit.findings if f.rule in _WAITS and f.severity is Severity.ERROR}
    fresh = [f for f in fresh if f.rule not in _WAITS or f.buffer not in waits]
    fresh = _grouped(fresh)
    verdict = audit.verdict
    if any(f.severity is Severity.ERROR for f in fresh):
        verdict = Verdict.FAIL
    elif verdict is Verdict.PASS and any(f.rule == "undecided" for f in fresh):
        verdict = Verdict.UNKNOWN
    return replace(audit, findings=(*audit.findings, *fresh), verdict=verdict)


def _grouped(findings: Sequence[Finding]) -> list[Finding]:
    """Findings on copies of one line of the source that say the same but for places are one, with a count."""
    groups: dict[tuple[object, ...], Finding] = {}
    for f in findings:
        place = f.source if f.source is not None else f.ptx_line
        key = (f.rule, f.severity, f.buffer, place, re.sub(r"\d+", "", f.message))
        old = groups.get(key)
        groups[key] = f if old is None else old.model_copy(update={"count": old.count + f.count})
    return list(groups.values())


def premises(dynamic: DynamicAudit | None) -> tuple[str, ...]:
    """What the runs rest on, or why there were none: the static verdict then stands alone."""
    if dynamic is None:
        return ()
    if dynamic.spent and dynamic.skipped is not None:
        return (f"a run in the simulator was begun and judges nothing: {dynamic.skipped}",)
    if dynamic.skipped is not None:
        return (f"the kernel was not run in the simulator: {dynamic.skipped}",)
    ran = f"run in the simulator on invented data under {len(dynamic.schedules)} schedules"
    if dynamic.spent:
        ran += f", where its budget of work ended: {'; '.join(map(str, dynamic.schedules))}"
    notes = [ran]
    if dynamic.ctas is not None:
        notes.append(f"the grid is large: only its first and last CTAs, {dynamic.ctas} in all, were run")
    if dynamic.not_judged:
        shown = ", ".join(dynamic.not_judged[:3])
        notes.append(f"not judged, for it depends on what the inputs hold: {shown}")
    return tuple(notes)
