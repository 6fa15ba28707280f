"""Chooses the kernel for a request, or says which requirement failed. Pure: table in, decision out.

A kernel answers only for the arch, axes, dtypes, layout and batch that it was verified for. A batch between
two verified ones goes to the next larger one, its missing rows padded, where the op's rows are independent.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .table import Kernel, Op, Table

LAYOUT = "row-major"
"""Contiguous tensors as the op's contract declares them: checkpoint order, two E2M1 elements a byte."""


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    op: str
    arch: str | None
    """Of the device, `sm_103a` and the like; None if there is no device."""
    batch: int
    axes: Mapping[str, int]
    """Without B. Axes that are left out may have any value."""
    dtypes: Mapping[str, str] | None = None
    """By buffer, names in torch; those left out are the contract's."""
    layout: str = LAYOUT
    parallelism: str | None = None
    """Name of a shape, where one is asked for by name."""


@dataclass(frozen=True)
class Requirement:
    """One thing that must hold for a kernel to run."""

    name: str
    met: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.met else 'FAIL'} {self.name}: {self.detail}"


@dataclass(frozen=True)
class Decision:
    """Which kernel answers, or why none does."""

    op: str
    kernel: Kernel | None
    batch: int
    requirements: tuple[Requirement, ...]

    @property
    def padded(self) -> bool:
        """True if rows are added to reach the kernel's batch."""
        return self.kernel is not None and self.kernel.batch != self.batch

    @property
    def reason(self) -> str:
        """Why the reference runs; empty if a kernel does."""
        return "; ".join(f"{r.name}: {r.detail}" for r in self.requirements if not r.met)


def decide(table: Table, request: Request) -> Decision:
    """The kernel for a request; the first requirement that fails ends the search."""
    met: list[Requirement] = []

    def answer(kernel: Kernel | None = None, failed: Requirement | None = None) -> Decision:
        found = (*met, failed) if failed is not None else tuple(met)
        return Decision(request.op, kernel, request.batch, found)

    op = table.ops.get(request.op)
    if op is None:
        return answer(failed=Requirement("op", False, _unknown(request.op, table.ops)))
    left = [k for k in table.kernels if k.op == request.op]
    if not left:
        return answer(failed=Requirement("op", False, f"no kernel of {request.op} was verified yet"))
    met.append(Requirement("op", True, f"{len(left)} verified kernel{'s' if len(left) > 1 else ''}"))
    if request.arch is None:
        return answer(failed=Requirement("device", False, "no CUDA device holds the tensors"))
    for name, holds, wanted, has in _filters(request, op):
        kept = [k for k in left if holds(k)]
        if not kept:
            there = ", ".join(sorted({has(k) for k in left}))
            return answer(failed=Requirement(name, False, f"{wanted} is wanted, verified are {there}"))
        left = kept
        met.append(Requirement(name, True, wanted))
    return _by_batch(request, op, left, met)


_Filter = tuple[str, Callable[[Kernel], bool], str, Callable[[Kernel], str]]


def _filters(request: Request, op: Op) -> Iterable[_Filter]:
    """Name, test, what is wanted, and what a kernel has instead."""
    contract = {b.name: b.torch_dtype for b in op.buffers}
    wanted = {**contract, **(request.dtypes or {})}
    odd = {name: dtype for name, dtype in wanted.items() if contract.get(name) != dtype}
    yield "arch", lambda k: k.arch == request.arch, str(request.arch), lambda k: k.arch
    if request.parallelism is not None:
        yield (
            "parallelism",
            lambda k: request.parallelism in k.parallelism,
            request.parallelism,
            lambda k: "/".join(k.parallelism) or k.workload,
        )
    yield (
        "shape",
        lambda k: all(k.axes.get(axis) == n for axis, n in request.axes.items()),
        _pairs(request.axes),
        lambda k: _pairs(k.axes),
    )
    yield (
        "dtypes",
        lambda k: dict(k.dtypes) == wanted,
        _pairs(odd) or "those of the contract",
        lambda k: _pairs({n: d for n, d in k.dtypes.items() if n in odd}),
    )
    yield "layout", lambda k: k.layout == request.layout, request.layout, lambda k: k.layout


def _by_batch(request: Request, op: Op, left: Sequence[Kernel], met: list[Requirement]) -> Decision:
    verified = sorted({k.batch for k in left})
    listed = ", ".join(str(b) for b in verified)
    above = [b for b in verified if b >= request.batch]

    def answer(kernel: Kernel | None, detail: str) -> Decision:
        last = [Requirement("batch", kernel is not None, detail)]
        rest = {a: n for a, n in kernel.axes.items() if a not in request.axes} if kernel else {}
        if rest:
            last.append(Requirement("other axes", True, f"not asked for; verified at {_pairs(rest)}"))
        return Decision(request.op, kernel, request.batch, (*met, *last))

    if request.batch < 1:
        return answer(None, f"a batch of {request.batch} has no rows")
    if not above:
        return answer(None, f"{request.batch} rows are more than the largest verified batch, {verified[-1]}")
    kernel = next(k for k in left if k.batch == above[0])
    if above[0] == request.batch:
        return answer(kernel, f"verified at {request.batch}")
    if op.padding:
        return answer(
            None,
            f"{request.batch} is not a verified batch ({listed}), and rows cannot be added: {op.padding}",
        )
    return answer(kernel, f"{request.batch} rows padded to {above[0]}; verified are {listed}")


def _pairs(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(values.items()))


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
    return f"there is no op {name!r}; nearest: {', '.join(near)}"
