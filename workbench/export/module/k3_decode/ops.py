"""The custom ops `torch.ops.k3_decode.<op>`: one for each op of the package.

An op takes the tensors of all its buffers in the contract's order, then the axes that no shape tells. It
writes outputs and states in place, declared so, and returns nothing. Importing this module registers them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import counters, reference, runtime
from .contracts import Shape, infer, storage_shape
from .device import SWITCH, arch_of, enabled, switched_off
from .dispatch import Decision, Request, Requirement, decide
from .explaining import with_machine
from .launch import LaunchError
from .table import DamagedPackage, Kernel, Op, table

NAMESPACE = "k3_decode"
pretended_arch: str | None = None
"""Tests set it, and `runtime.make_program`, to simulate kernels on CPU tensors as if on this arch."""
metadata_complete = False
"""Set it if slots and lengths are complete before the predecessor of each op starts; see `Executor.run`."""


@dataclass(frozen=True)
class Plan:
    """What a call with tensors of these shapes does."""

    axes: Mapping[str, int]
    decision: Decision


_plans: dict[Any, Plan] = {}


def plan(op: Op, tensors: Mapping[str, torch.Tensor], given: Mapping[str, int]) -> Plan:
    """Decide for these tensors; the answer is kept by shape, dtype, place and alignment.

    Raises:
        ValueError: if the tensors do not fit the op's contract.
    """
    key = _key(op, tensors, given)
    known = _plans.get(key)
    if known is None:
        known = _plans[key] = _decide(op, tensors, given)
    return known


def _key(op: Op, tensors: Mapping[str, torch.Tensor], given: Mapping[str, int]) -> Any:
    """All that a plan depends on."""
    return (
        op.name,
        tuple(given.values()),
        pretended_arch,
        os.environ.get(SWITCH),
        *((t.shape, t.dtype, t.device, t.is_contiguous(), t.data_ptr() % 256) for t in tensors.values()),
    )


def _without(planned: Plan, failed: Requirement) -> Plan:
    """The plan with a requirement that turned out not to hold."""
    decision = planned.decision
    requirements = (*decision.requirements, failed)
    return Plan(planned.axes, Decision(decision.op, None, decision.batch, requirements))


def call(op: Op, tensors: Mapping[str, torch.Tensor], given: Mapping[str, int]) -> None:
    """Run an op in place: by its kernel, or by the reference, counted and explained."""
    planned = plan(op, tensors, given)
    kernel = planned.decision.kernel
    if kernel is not None:
        try:
            made = runtime.executor(op, kernel, tensors, planned.decision.batch)
        except LaunchError as e:  # the driver does not take the module: from now on the reference answers
            planned = _without(planned, Requirement("driver", False, str(e)))
            _plans[_key(op, tensors, given)] = planned
        else:
            made.run(tensors, planned.decision.batch, metadata_complete)
            counters.ran(op.name, kernel.key, planned.decision.batch, kernel.batch)
            return
    reason = planned.decision.reason
    if runtime.capturing(next(iter(tensors.values())).device):
        raise reference.NotCapturable(
            f"{op.name} has no kernel here ({reason}) and its reference cannot be captured in a graph"
        )
    counters.fell_back(op.name, reason)
    reference.run(op, tensors, planned.axes)


def run(name: str, tensors: Mapping[str, torch.Tensor], **given: int) -> dict[str, torch.Tensor]:
    """Run an op, its outputs made where they are not given, and return outputs and states by name.

    Args:
        name: name of the op.
        tensors: storage tensors by buffer; states are updated in place.
        given: axes that the tensors do not tell, those of outputs that are made included.

    Raises:
        ValueError: if there is no such op, a tensor is missing, or a shape does not fit.
    """
    op = _op(name)
    missing = [b.name for b in op.buffers if b.role != "output" and b.name not in tensors]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)} too")
    shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in tensors.items()}
    axes = infer(op, shapes, given)
    device = _device(op, tensors)
    whole = {}
    for b in op.buffers:
        if b.name in tensors:
            whole[b.name] = tensors[b.name]
        else:
            dtype = getattr(torch, b.torch_dtype)
            whole[b.name] = torch.empty(storage_shape(b, axes), dtype=dtype, device=device)
    getattr(getattr(torch.ops, NAMESPACE), name)(*whole.values(), *(axes[a] for a in op.given))
    return {b.name: whole[b.name] for b in op.buffers if b.mutated}


def arch_for(device: torch.device) -> str | None:
    """Arch of a device; None for the CPU."""
    if device.type == "cuda":
        return arch_of(torch.cuda.get_device_capability(device))
    return pretended_arch


def schema(op: Op) -> str:
    """Schema of an op's custom op, mutation declared."""
    parts = [
        f"Tensor({chr(ord('a') + i)}!) {b.name}" if b.mutated else f"Tensor {b.name}"
        for i, b in enumerate(op.buffers)
    ]
    return f"({', '.join([*parts, *(f'int {axis}' for axis in op.given)])}) -> ()"


def _decide(op: Op, tensors: Mapping[str, torch.Tensor], given: Mapping[str, int]) -> Plan:
    shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in tensors.items()}
    axes = infer(op, shapes, given)
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise ValueError(
            f"{op.name}: tensors on {', '.join(sorted(map(str, devices)))}; one device is wanted"
        )
    device = devices.pop()
    for b in op.buffers:
        if tensors[b.name].dtype != getattr(torch, b.torch_dtype):
            raise ValueError(f"{op.name}: {b.name} is {tensors[b.name].dtype}, not torch.{b.torch_dtype}")
    arch = arch_for(device)
    others = {axis: n for axis, n in axes.items() if axis != "B"}
    decision = decide(table(), Request(op.name, arch, axes.get("B", 1), others))
    if decision.kernel is None:
        return Plan(axes, decision)
    wanted = enabled(op.name, decision.batch)
    if not wanted.met:
        return _without(Plan(axes, decision), wanted)
    if pretended_arch is not None:
        return Plan(axes, decision)
    lies = _lies_right(decision.kernel, decision.padded, op, tensors)
    if not lies.met:
        return _without(Plan(axes, decision), lies)
    return Plan(axes, with_machine(decision))


def _lies_right(kernel: Kernel, padded: bool, op: Op, tensors: Mapping[str, torch.Tensor]) -> Requirement:
    """Whether the tensors are contiguous and aligned as the kernel was built for."""
    aligned = {s.name: s.align for s in kernel.slots}
    for b in op.buffers:
        if not tensors[b.name].is_contiguous():
            return Requirement("layout", False, f"{b.name} is not contiguous")
        copied = padded and b.batched
        if not copied and tensors[b.name].data_ptr() % aligned[b.name]:
            return Requirement("alignment", False, f"{b.name} is not aligned to {aligned[b.name]} bytes")
    return Requirement("alignment", True, "all buffers")


def _device(op: Op, tensors: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        there = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{op.name}: the tensors are on {there}; one device is wanted")
    return devices.pop()


def _op(name: str) -> Op:
    known = table().ops
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
        raise ValueError(f"there is no op {name!r}; nearest: {', '.join(near)}")
    return known[name]


def _register(op: Op) -> Any:
    names = [b.name for b in op.buffers]

    def body(*arguments: Any) -> None:
        tensors = dict(zip(names, arguments, strict=False))
        call(op, tensors, dict(zip(op.given, arguments[len(names) :], strict=True)))

    def fake(*arguments: Any) -> None:
        """Nothing is returned, and shapes do not change."""

    register: Callable[..., Any] = torch.library.custom_op
    mutated = [b.name for b in op.buffers if b.mutated]
    made = register(f"{NAMESPACE}::{op.name}", body, mutates_args=mutated, schema=schema(op))
    made.register_fake(fake)
    return made


def _register_all() -> dict[str, Any]:
    try:
        known = table().ops
    except DamagedPackage as e:
        counters.log.warning("no op is registered: %s", e)
        return {}
    for name in switched_off():
        if name != "all" and name not in known:
            counters.log.warning("%s names %s, which is no op: %s", SWITCH, name, ", ".join(known))
    return {name: _register(op) for name, op in known.items()}


registered: Mapping[str, Any] = _register_all()
"""The custom ops by name."""
