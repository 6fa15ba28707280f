"""Numerics of an artifact on a device: the op's inputs and judgement, the device's results.

A device says what a kernel computes. It does not say which bytes were read or in what order, so that such a
report never stands for the simulator's: its memory check is undecided, and that blocks an export.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from workbench.artifact import Artifact
from workbench.devices import Device, inputs, kernel_of
from workbench.devices.model import Bytes, DeviceError, execute
from workbench.errors import MissingToolError
from workbench.isa.sass import SassModule, disassemble, parse_sass
from workbench.ops.compare import standard_of
from workbench.ops.model import Buffer, Op, storage_shape
from workbench.ops.trivial import POISONS
from workbench.verify.honesty import check_honesty
from workbench.verify.numerics import judge
from workbench.verify.ordering import audit
from workbench.verify.report import Check, Report, Verdict
from workbench.verify.runs import SCREENED, Level


def verify_on_device(
    artifact: Artifact,
    op: Op,
    device: Device,
    *,
    level: Level = Level.FULL,
    seed: int = 0,
    generators: Sequence[str] | None = None,
) -> Report:
    """Run an artifact on a device with its op's inputs and judge the outputs; audit the compiled code.

    Each input runs twice with different poison in outputs and scratch: the bits must be the same.

    Args:
        artifact: of the device's arch.
        op: its contract.
        device: where it runs.
        level: which generators; see `Level`.
        seed: of the inputs.
        generators: names to run instead of those of `level`.

    Raises:
        DeviceError: if the device does not take the kernel.
        UnknownNameError: if the op has no such generator.
    """
    started = time.monotonic()
    kernel = kernel_of(artifact)
    device.load(kernel).unload()
    checks = [audit(artifact, _disassembled(artifact)), check_honesty(artifact, op)]
    wanted = generators if generators is not None else op.generators
    if level is Level.SCREEN and generators is None:
        wanted = [name for name in op.generators if name in SCREENED]
    for name in wanted:
        try:
            checks += _judged(artifact, op, device, name, seed)
        except DeviceError as e:
            # After a fault the device runs nothing more for this process.
            checks.append(
                Check(name=f"numerics/{name}", verdict=Verdict.FAIL, summary=f"it did not run: {e}")
            )
            break
    checks.append(
        Check(
            name="memory",
            verdict=Verdict.UNKNOWN,
            summary=f"{device.info.name} does not say which bytes a kernel reads; verify it on the simulator",
        )
    )
    return Report(
        op=op.name,
        workload=artifact.workload,
        template=artifact.template,
        knobs=artifact.knobs,
        arch=artifact.arch,
        artifact_key=artifact.key,
        device=device.info.name,
        checks=tuple(checks),
        seconds=time.monotonic() - started,
    )


def _judged(artifact: Artifact, op: Op, device: Device, generator: str, seed: int) -> list[Check]:
    given = inputs(op, artifact.axes, generator, seed)
    tensors = {b.name: _shaped(b, artifact, given[b.name]) for b in op.inputs}
    standard = standard_of(op, tensors, artifact.axes)
    kernel = kernel_of(artifact)
    first, second = (execute(device, kernel, given, poison)[0] for poison in POISONS)
    got = {b.name: _shaped(b, artifact, first[b.name]) for b in op.outputs}
    label = generator if not seed else f"{generator}/seed{seed}"
    checks = [judge(op, artifact.axes, standard, got, label, inputs=tensors, poison=POISONS[0])]
    different = [name for name in first if not (first[name] == second[name]).all()]
    if different:
        why = f"a repeat with other poison changes {', '.join(different)}"
        checks.append(Check(name=f"determinism/{label}", verdict=Verdict.FAIL, summary=why))
    return checks


def _shaped(buffer: Buffer, artifact: Artifact, raw: Bytes) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, buffer.dtype.torch_name)
    return torch.from_numpy(raw).view(dtype).view(storage_shape(buffer, artifact.axes))


def _disassembled(artifact: Artifact) -> SassModule | None:
    try:
        return parse_sass(disassemble(artifact.cubin))
    except MissingToolError:
        return None  # the audit then says that it could not see the SASS
