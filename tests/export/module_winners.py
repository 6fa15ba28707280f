"""Winners made quickly for the package's tests, and a program that simulates exported launches."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from tests.export.conftest import REPOSITORY, make_report
from workbench.artifact import Artifact, KernelParam, Launch
from workbench.compile import CompileRequest, compile_candidate
from workbench.devices.launch import _Packed
from workbench.export import export_winner
from workbench.export.module.k3_decode.launch import Launch as PackagedLaunch
from workbench.isa.ptx import parse
from workbench.ops import Workload, load_op
from workbench.simulator import Memory
from workbench.simulator.simulate import bound, simulate_module
from workbench.templates import load_template
from workbench.verify.report import Verdict
from workbench.workspace import Workspace


def compiled(op_name: str, workload: str, arch: str = "sm_103a", **axes: int) -> Artifact:
    """The default point of an op's first template at a workload, or at axes that no workload has."""
    op = load_op(REPOSITORY, op_name)
    where = Workload(workload, axes) if axes else op.workload(workload)
    template = load_template(REPOSITORY.template(op_name, REPOSITORY.template_names(op_name)[0]))
    space = template.space(where.axes)
    points = list(space.points())
    point = next((p for p in points if dict(p) == dict(template.default)), points[0])
    return compile_candidate(CompileRequest.of(op, where, template, point, arch=arch))


def put(workspace: Workspace, *artifacts: Artifact) -> Workspace:
    """Export artifacts as winners of a workspace that shares the repository's verifiers and templates."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    for name in ("verifiers", "templates"):
        if not (workspace.root / name).exists():
            (workspace.root / name).symlink_to(REPOSITORY.root / name)
    for artifact in artifacts:
        report = make_report(artifact, ("numerics/ordinary", Verdict.PASS), ("ordering/static", Verdict.PASS))
        export_winner(workspace, artifact, report)
    return workspace


def imported(folder: Path) -> ModuleType:
    """The package of an export, imported; only one in a process, since its ops are registered once."""
    sys.path.insert(0, str(folder))
    try:
        import k3_decode
    finally:
        sys.path.remove(str(folder))
    assert Path(str(k3_decode.__file__)).is_relative_to(folder)
    return k3_decode


class SimulatedProgram:
    """Stands in for `launch.Program`: executes the PTX behind a cubin on the memory of CPU tensors."""

    artifacts: ClassVar[dict[str, Artifact]] = {}
    """By hash of the cubin."""
    calls: ClassVar[list[tuple[str, bool]]] = []
    """Op and `after_wait` of every run."""

    def __init__(self, cubin: bytes, launches: Sequence[PackagedLaunch]) -> None:
        self.artifact = self.artifacts[hashlib.sha256(cubin).hexdigest()]
        self.launches = launches

    def run(self, addresses: Mapping[str, int], stream: int, after_wait: bool = False) -> None:
        self.calls.append((self.artifact.op, after_wait))
        memory = Memory()
        for b in self.artifact.buffers:
            view = memory.allocate(
                b.name, b.nbytes, align=b.align, writable=b.role.is_writable, initialized=True
            )
            view[:] = _host(addresses[b.name], b.nbytes)
        module = parse(self.artifact.ptx)
        placed = {b.name: memory.address(b.name) for b in self.artifact.buffers}
        launches = [bound(module, _literal(launch, placed), {}) for launch in self.launches]
        outcome = simulate_module(module, launches, memory)
        assert outcome.completed and not [f for f in outcome.findings if f.severity.value == "error"]
        for b in self.artifact.buffers:
            if b.role.is_writable:
                _host(addresses[b.name], b.nbytes)[:] = memory.view(b.name)

    @classmethod
    def knows(cls, *artifacts: Artifact) -> None:
        cls.artifacts |= {hashlib.sha256(a.cubin).hexdigest(): a for a in artifacts}


def _literal(launch: PackagedLaunch, addresses: Mapping[str, int]) -> Launch:
    """The packaged launch with its addresses filled in by the package's own code."""
    packed = _Packed(launch)
    packed.fill(addresses)
    sizes = [len(p.data) for p in launch.parameters]
    return Launch(
        kernel=launch.kernel,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        smem_bytes=launch.smem_bytes,
        pdl=launch.pdl,
        params=tuple(
            KernelParam(data=block.raw[:n].hex()) for block, n in zip(packed.blocks, sizes, strict=True)
        ),
    )


def _host(address: int, nbytes: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def tensors_of(
    package: ModuleType, op: str, axes: Mapping[str, int], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Ordinary inputs of an op and poisoned outputs, as the package's op takes them."""
    contract = REPOSITORY_OPS(op)
    from workbench.ops.trivial import zero_inputs

    storage = zero_inputs(contract, axes)
    made = dict(contract.generators["ordinary"](axes, seed, storage.__getitem__))
    known = package.table().ops[op]
    whole = {}
    for b in known.buffers:
        dtype = getattr(torch, b.torch_dtype)
        if b.name in made:
            whole[b.name] = made[b.name].view(dtype)
        else:
            shape = package.ops.storage_shape(b, axes)
            whole[b.name] = torch.full(shape, 0x5A, dtype=torch.uint8).to(dtype)
    return whole


def REPOSITORY_OPS(name: str) -> Any:  # noqa: N802
    """An op of the repository."""
    return load_op(REPOSITORY, name)
