"""`explain`: which kernel would run, and why, or which requirement failed. Works on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .device import current_arch, enabled, launcher, torch_there
from .dispatch import LAYOUT, Decision, Request, Requirement, decide
from .table import DamagedPackage, Kernel, table


@dataclass(frozen=True)
class Explanation:
    """The answer; `str` of it is text for people."""

    op: str
    kernel: str | None
    """Key of the kernel that would run; None if the reference would."""
    padded_to: int | None
    """Batch of the kernel, where rows are added to reach it."""
    reason: str
    """Why the reference would run; empty if a kernel would."""
    requirements: tuple[Requirement, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def explain(
    op: str,
    *,
    batch: int = 1,
    parallelism: str | int | None = None,
    arch: str | None = None,
    axes: Mapping[str, int] | None = None,
    dtypes: Mapping[str, str] | None = None,
    layout: str = LAYOUT,
) -> Explanation:
    """Say which kernel would run an op and why, or which requirement failed.

    Args:
        op: name of the op.
        batch: number of tokens.
        parallelism: name of one of the op's shapes, `tp8`, `mla_tp16`; 8 and 16 stand for `tp8` and `tp16`.
            By default the op's first.
        arch: `sm_103a` and the like, as a question about another machine; by default the current device.
        axes: axes without B, in place of those of `parallelism`.
        dtypes: torch names by buffer; by default those of the op's contract.
        layout: how the tensors lie; `row-major` is what the contract says.
    """
    here = arch is None
    try:
        held = table()
    except DamagedPackage as e:
        return _told(Decision(op, None, batch, (Requirement("package", False, str(e)),)), None)
    name = f"tp{parallelism}" if isinstance(parallelism, int) else parallelism
    known = held.ops.get(op)
    if known is not None and axes is None:
        name = name or next(iter(known.shapes))
        if name not in known.shapes:
            detail = f"{op} has no shape {name!r}; it has {', '.join(known.shapes)}"
            return _told(Decision(op, None, batch, (Requirement("parallelism", False, detail),)), None)
        axes = known.shapes[name]
    asked = current_arch() if here else arch
    request = Request(op, asked, batch, axes or {}, dtypes, layout, name)
    decision = decide(held, request)
    if here:
        decision = with_machine(decision)
    return _told(decision, decision.kernel)


def with_machine(decision: Decision) -> Decision:
    """The decision with this machine's requirements: torch, the launcher, the cubin as it was exported."""
    kernel = decision.kernel
    if kernel is None:
        missing = (enabled(decision.op, decision.batch), torch_there(), launcher())
        return replace(decision, requirements=(*decision.requirements, *(r for r in missing if not r.met)))
    met = [*decision.requirements, enabled(decision.op, decision.batch), torch_there(), launcher()]
    try:
        kernel.load()
        met.append(Requirement("cubin", True, kernel.cubin))
    except DamagedPackage as e:
        met.append(Requirement("cubin", False, str(e)))
    return replace(decision, kernel=kernel if all(r.met for r in met) else None, requirements=tuple(met))


def _told(decision: Decision, kernel: Kernel | None) -> Explanation:
    lines = [f"{decision.op}, batch {decision.batch}: {_headline(decision, kernel)}"]
    lines += [f"  {r}" for r in decision.requirements]
    return Explanation(
        op=decision.op,
        kernel=kernel.key if kernel else None,
        padded_to=kernel.batch if kernel and decision.padded else None,
        reason=decision.reason,
        requirements=decision.requirements,
        text="\n".join(lines),
    )


def _headline(decision: Decision, kernel: Kernel | None) -> str:
    if kernel is None:
        return f"the PyTorch reference ({decision.reason})"
    told = f"kernel {kernel.key[:12]} ({kernel.template}, {kernel.workload}, {kernel.arch})"
    if kernel.predicted_us is not None:
        told += f", {kernel.predicted_us:.2f} us predicted for {kernel.predicted_for}, not measured"
    told += f"; verified on {kernel.verified_on}, {kernel.checks} checks"
    if kernel.waived:
        told += f", undecided and waived: {', '.join(kernel.waived)}"
    return told
