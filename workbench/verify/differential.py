"""Honesty that shows only when the same kernel runs again on something else.

- `input-ignored`: an input is exchanged for another sample, golden moves, the kernel's outputs do not: it has
  learnt its data, or caches by a fingerprint.
- `address-dependent`: the same contents at other addresses give other bits: it looks at pointers.

Meant for small workloads: each input costs a run and a golden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workbench.artifact import Artifact
from workbench.findings import Finding, Severity
from workbench.ops.model import Op, Role, Workload
from workbench.simulator import Memory, SimulationOptions, simulate
from workbench.verify.inputs import POISONS, Case, place_scratch, reset_scratch
from workbench.verify.report import Check, Verdict, verdict_of

MAX_BYTES = 64 << 20
"""Largest sum of input bytes for which inputs are exchanged."""
_SHIFT = 3 << 20
"""Bytes that buffers are moved by; no multiple of a power of two beyond 1 MiB."""

Tensors = dict[str, torch.Tensor]


def check_differential(artifact: Artifact, op: Op, workload: Workload, seed: int) -> Check:
    """Check `honesty/differential`: exchange each floating-point input, then move all buffers.

    Args:
        artifact: passes on ordinary inputs.
        op: its op.
        workload: the one it was compiled for.
        seed: of the inputs it passed on.
    """
    base, other = Memory(), Memory()
    case = Case.create(op, workload, "ordinary", seed, base)
    donor = Case.create(op, workload, "ordinary", seed + 1, other)
    before = _outputs(artifact, case, base)
    if before is None:
        return Check(
            name="honesty/differential", verdict=Verdict.UNKNOWN, summary="the kernel does not run to its end"
        )
    findings = list(_exchanged(artifact, case, donor, base, other, before))
    tried = [b.name for b in op.inputs if _exchangeable(op, b.name)]
    moved = Memory()
    moved.allocate("moved by", _SHIFT)
    after = _outputs(artifact, Case.create(op, workload, "ordinary", seed, moved), moved)
    if after is None or not _equal(before, after):
        findings.append(
            Finding(
                rule="address-dependent",
                severity=Severity.ERROR,
                message="the same contents at other addresses give other outputs: it looks at its pointers",
                fix="compute from what the buffers hold, not from where they lie",
            )
        )
    summary = f"inputs exchanged: {', '.join(tried)}; buffers moved"
    errors = sorted({f.rule for f in findings})
    return Check(
        name="honesty/differential",
        verdict=verdict_of(findings),
        summary=summary + (f": {', '.join(errors)}" if errors else ""),
        findings=tuple(findings),
    )


def _exchangeable(op: Op, name: str) -> bool:
    """Values may be exchanged one by one; indices and state belong together."""
    b = next(b for b in op.buffers if b.name == name)
    return b.dtype.is_float and b.role in (Role.WEIGHT, Role.ACTIVATION)


def _exchanged(
    artifact: Artifact, case: Case, donor: Case, memory: Memory, other: Memory, before: Tensors
) -> Iterator[Finding]:
    for b in case.op.inputs:
        if not _exchangeable(case.op, b.name):
            continue
        kept = memory.view(b.name).copy()
        memory.view(b.name)[:] = other.view(b.name)
        try:
            changed = Case(
                case.op, case.workload, f"ordinary with other {b.name}", case.seed, memory, case.state
            )
            got = _outputs(artifact, changed, memory)
            if got is None:
                yield _ignored(b.name, "does not run to its end when it changes")
                continue
            judged = changed.judge(got, POISONS[0], diagnose=False)
            if judged.verdict is Verdict.PASS:
                continue
            how = (
                "does not change with it"
                if _equal(before, got)
                else f"changes wrongly with it: {judged.summary}"
            )
            yield _ignored(b.name, how)
        finally:
            memory.view(b.name)[:] = kept


def _ignored(name: str, how: str) -> Finding:
    return Finding(
        rule="input-ignored",
        severity=Severity.ERROR,
        message=f"when {name!r} alone is exchanged for another sample, the output {how}",
        fix=f"compute the outputs from {name!r} as it is at each call",
        buffer=name,
    )


def _outputs(artifact: Artifact, case: Case, memory: Memory) -> Tensors | None:
    mark = memory.mark()
    try:
        scratch = place_scratch(memory, case.op, artifact.buffers)
        case.restore(POISONS[0])
        reset_scratch(memory, scratch, POISONS[0])
        outcome = simulate(artifact, memory, SimulationOptions())
        return case.read_outputs() if outcome.completed else None
    finally:
        memory.release(mark)


def _equal(a: Tensors, b: Tensors) -> bool:
    return all(
        torch.equal(x.contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n, x in a.items()
    )
