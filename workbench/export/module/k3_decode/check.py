"""`python -m k3_decode --check`: runs every kernel of this machine's arch and judges it as the workbench did.

Inputs come from the contract's own generators, adversarial ones included; results are compared with the
float64 reference under the contract's own tolerance, at the verified batch and at one row less. On a GPU a
captured graph is replayed and must give the same bits. Without a device for the kernels nothing runs and
nothing is claimed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import counters, ops
from .contracts import contract, storage_shape
from .reference import as_contract
from .table import Kernel, table

Tensors = dict[str, torch.Tensor]
_POISON = 0x5A


@dataclass(frozen=True)
class Result:
    """One comparison."""

    kernel: str
    op: str
    batch: int
    case: str
    """Name of the generator, or `graph`."""
    buffer: str
    problem: str
    """Empty if the kernel is right."""

    def __str__(self) -> str:
        told = f"{self.op} {self.kernel[:12]} batch {self.batch} {self.case} {self.buffer}"
        return f"{'FAIL' if self.problem else 'ok  '} {told}{': ' if self.problem else ''}{self.problem}"


def check(device: torch.device, arch: str) -> Iterator[Result]:
    """Run and judge every kernel of an arch on a device of that arch."""
    for kernel in table().kernels:
        if kernel.arch == arch:
            yield from check_kernel(kernel, device)


def check_kernel(kernel: Kernel, device: torch.device) -> Iterator[Result]:
    """Run and judge one kernel."""
    for name in contract(kernel.op).generators:
        yield from _judged(kernel, device, kernel.batch, name)
    if kernel.batch > 1 and not table().ops[kernel.op].padding:
        yield from _judged(kernel, device, kernel.batch - 1, "ordinary")
    if device.type == "cuda":
        yield from _replayed(kernel, device)


def _judged(kernel: Kernel, device: torch.device, batch: int, generator: str) -> Iterator[Result]:
    judge = importlib.import_module(f"{__package__}.contract.ops.compare")
    axes = {**kernel.axes, "B": batch}
    declared, op = contract(kernel.op), table().ops[kernel.op]
    inputs, carried = _tensors(kernel.op, axes, generator, device)
    standard = judge.standard_of(declared, inputs, axes)
    before = counters.counts().kernels.get((kernel.op, kernel.key), 0)
    _run(kernel.op, carried, axes)
    if counters.counts().kernels.get((kernel.op, kernel.key), 0) == before:
        decision = ops.plan(op, carried, {a: axes[a] for a in op.given}).decision
        why = decision.reason or "another kernel answered"
        yield Result(kernel.key, kernel.op, batch, generator, "", f"did not run: {why}")
        return
    for b in op.buffers:
        if b.mutated:
            out = as_contract(b, carried[b.name]).cpu()
            tolerance, honest = declared.tolerances[b.name], standard.honest[b.name]
            found = judge.compare(standard.golden[b.name], out, tolerance, honest)
            yield Result(kernel.key, kernel.op, batch, generator, b.name, found.reason)


def _replayed(kernel: Kernel, device: torch.device) -> Iterator[Result]:
    """A captured graph against a plain call, bit by bit."""
    axes = {**kernel.axes, "B": kernel.batch}
    _, plain = _tensors(kernel.op, axes, "ordinary", device)
    _, captured = _tensors(kernel.op, axes, "ordinary", device)
    kept = {name: t.clone() for name, t in captured.items()}
    _run(kernel.op, plain, axes)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        _run(kernel.op, captured, axes)
    for name, t in kept.items():
        captured[name].copy_(t)
    graph.replay()
    torch.cuda.synchronize()
    for b in table().ops[kernel.op].buffers:
        if b.mutated:
            same = torch.equal(plain[b.name].view(torch.uint8), captured[b.name].view(torch.uint8))
            problem = "" if same else "a replayed graph gives other bits than a call"
            yield Result(kernel.key, kernel.op, kernel.batch, "graph", b.name, problem)


def _run(op: str, tensors: Tensors, axes: Mapping[str, int]) -> None:
    given = [axes[a] for a in table().ops[op].given]
    getattr(getattr(torch.ops, ops.NAMESPACE), op)(*tensors.values(), *given)


def _tensors(
    op: str, axes: Mapping[str, int], generator: str, device: torch.device
) -> tuple[Tensors, Tensors]:
    """Inputs as the contract has them, on the CPU; all buffers as the op takes them, outputs poisoned."""
    trivial = importlib.import_module(f"{__package__}.contract.ops.trivial")
    declared: Any = contract(op)
    storage = trivial.zero_inputs(declared, axes)
    inputs = dict(declared.generators[generator](axes, 0, storage.__getitem__))
    carried = {}
    for b in table().ops[op].buffers:
        dtype = getattr(torch, b.torch_dtype)
        if b.name in inputs:
            carried[b.name] = inputs[b.name].view(dtype).to(device, copy=True)
        else:
            carried[b.name] = torch.empty(storage_shape(b, axes), dtype=dtype, device=device)
            carried[b.name].view(torch.uint8).fill_(_POISON)
    return inputs, carried
