"""Honesty of the compiled code: what numerics and ordering cannot see because the result is right today.

Decided on the artifact alone, so that it holds for a candidate however it came here:

- `wrong-target`: PTX or cubin are for another architecture than the artifact says.
- `dtype-downgrade`: values are converted to, or multiplied in, a type narrower than any that the contract
declares.
- `hidden-input`: the code reads a clock, a timer or its place on the machine, so that it can tell a test from
use.
- `input-unread`: an input of the contract that no launch is given.
- `identical-launches`: nothing is launched at all.

From what a run counted, that it moved enough of memory to have computed the op:

- `impossible-speed`: less than half the bytes that the op must move; no kernel is so fast honestly.

State that outlives a launch is the ordering rule `persistent-device-state`; shapes and data that the author
does not see are `held-out` checks; `workbench.verify.differential` has what needs runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from workbench.artifact import Artifact
from workbench.errors import WorkbenchError
from workbench.findings import Finding, Severity
from workbench.isa.cubin import read_cubin
from workbench.isa.ptx import Instruction, Kernel, Module, Special, parse
from workbench.ops.dtypes import DType
from workbench.ops.model import Op, Workload
from workbench.simulator.counters import Counters
from workbench.verify.report import Check, verdict_of

_CLOCKS = re.compile(r"%(clock(64|_hi)?|globaltimer(_lo|_hi)?|pm\d+(_64)?)$")
_PLACES = re.compile(r"%(gridid|envreg\d+)$")
_SPOTS = re.compile(r"%(smid|nsmid|warpid|nwarpid)$")
_NARROW = {
    "e4m3x2": 8, "e5m2x2": 8, "e4m3x4": 8, "e5m2x4": 8, "e4m3": 8, "e5m2": 8, "e2m1x2": 4, "e2m1x4": 4,
    "e2m3x2": 6, "e3m2x2": 6, "e2m3x4": 6, "e3m2x4": 6, "e2m1": 4, "e2m3": 6, "e3m2": 6,
}  # fmt: skip
"""Bits of the small floating-point types of conversions and of mma operands."""
_WIDE = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "tf32")) | frozenset(
    f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)
)
"""Types of a conversion that are not narrow floats; the first type of `cvt` is its target."""
_MMA = ("mma", "wgmma", "tcgen05")
_KINDS = {"kind::f8f6f4": 8, "kind::mxf8f6f4": 8, "kind::mxf4": 4, "kind::mxf4nvf4": 4, "kind::i8": 8}
_SECTOR = 32
_INTEGER_MMA = frozenset(("s8", "u8", "s4", "u4", "b1"))


def check_honesty(artifact: Artifact, op: Op) -> Check:
    """Check `honesty`: the artifact's PTX, cubin and launches.

    Raises:
        PtxSyntaxError: if the PTX cannot be parsed.
    """
    module = parse(artifact.ptx)
    launched = {launch.kernel for launch in artifact.launches}
    kernels = [k for k in module.kernels if k.name in launched]
    findings = [
        *_target(artifact, module),
        *_launches(artifact, op),
        *(f for k in kernels for f in _downgrades(k, op)),
        *(f for k in kernels for f in _hidden(k)),
    ]
    looked = sum(len(k.instructions) for k in kernels)
    errors = sorted({f.rule for f in findings if f.severity is Severity.ERROR})
    summary = f"{len(launched)} kernels, {looked} instructions: " + (", ".join(errors) or "nothing hidden")
    return Check(
        name="honesty", verdict=verdict_of(findings), summary=summary, findings=tuple(_grouped(findings))
    )


_LEAST_MOVED = 0.5
"""Share of the compulsory bytes below which work was left out. Where tokens choose experts the contract has
the bytes that are expected; the inputs at hand may need fewer."""


def check_moved(op: Op, workload: Workload, counters: Sequence[Counters]) -> Check:
    """Check `honesty/floor`: that the launches of a run on ordinary inputs moved what the op must move.

    A time below the floor of the memory is what a benchmark refuses; here the reason for it is looked at.

    Args:
        op: the contract, which states compulsory bytes.
        workload: the one that ran.
        counters: one a launch, with sectors counted.
    """
    least = op.compulsory_bytes(workload.axes)
    moved = sum(c.unique_load_bytes + c.unique_store_bytes for c in counters)
    # Sectors that atomics touch are not counted; each may have been one.
    moved += sum(_SECTOR * c.atomics for c in counters)
    summary = f"{moved} bytes are touched of at least {least} that the op must move"
    findings: tuple[Finding, ...] = ()
    if moved < _LEAST_MOVED * least:
        findings = (
            Finding(
                rule="impossible-speed",
                severity=Severity.ERROR,
                message=f"the launches touch {moved} bytes of memory, whoever computes the op must move "
                f"{least}: a time below the floor of the memory is bought by leaving work out",
                fix="read every input that the outputs depend on, and write every output",
            ),
        )
    return Check(name="honesty/floor", verdict=verdict_of(findings), summary=summary, findings=findings)


def _grouped(findings: Iterable[Finding]) -> list[Finding]:
    found: dict[tuple[str, str | None, str], Finding] = {}
    for f in findings:
        key = (f.rule, f.kernel, f.message)
        old = found.get(key)
        found[key] = f if old is None else old.model_copy(update={"count": old.count + 1})
    return list(found.values())


def _target(artifact: Artifact, module: Module) -> Iterator[Finding]:
    targets = {"PTX": module.target}
    if artifact.cubin:
        try:
            targets["cubin"] = f"sm_{read_cubin(artifact.cubin).sm}"
        except WorkbenchError as e:
            yield Finding(
                rule="wrong-target", severity=Severity.ERROR, message=f"the cubin cannot be read: {e}",
                fix="compile the candidate again",
            )  # fmt: skip
    for what, target in targets.items():
        if _number(target) != _number(artifact.arch):
            yield Finding(
                rule="wrong-target",
                severity=Severity.ERROR,
                message=f"the {what} is for {target}, not for {artifact.arch}: it cannot be loaded there",
                fix="compile for the architecture that is asked for",
            )


def _number(arch: str) -> str:
    return "".join(c for c in arch if c.isdigit())


def _launches(artifact: Artifact, op: Op) -> Iterator[Finding]:
    if not artifact.launches:
        yield Finding(
            rule="identical-launches", severity=Severity.ERROR, message="the candidate launches no kernel",
            fix="launch at least one kernel from the host function",
        )  # fmt: skip
    given = {r.buffer for launch in artifact.launches for p in launch.params for r in p.relocations}
    for b in op.inputs:
        if b.name not in given:
            yield Finding(
                rule="input-unread",
                severity=Severity.ERROR,
                message=f"no launch is given {b.name!r}, so that the outputs cannot depend on it",
                fix=f"pass {b.name!r} to the kernel that needs it",
                buffer=b.name,
            )


def _downgrades(kernel: Kernel, op: Op) -> Iterator[Finding]:
    declared = [b.dtype for b in op.buffers if b.dtype.is_float]
    narrowest = min((d.bits for d in declared), default=64)
    declared_f32 = all(d.bits >= 32 for d in declared)
    for i in kernel.instructions:
        bits, what = _width(i)
        if bits is not None and bits < narrowest:
            yield _downgrade(
                kernel, i, f"{what} has {bits} bits, the narrowest type of the contract has {narrowest}"
            )
        if declared_f32 and i.opcode in _MMA and ("tf32" in i.modifiers or "kind::tf32" in i.modifiers):
            yield _downgrade(kernel, i, "tf32 keeps 10 bits of the mantissa of float32 operands")
        if i.opcode in _MMA and _INTEGER_MMA & set(i.modifiers) and not _has_integers(op):
            yield _downgrade(kernel, i, "an integer product stands for one of floating-point operands")


def _has_integers(op: Op) -> bool:
    return any(b.dtype in (DType.I8, DType.U8) for b in op.buffers)


def _width(i: Instruction) -> tuple[int | None, str]:
    """Bits of the narrowest small type that an instruction converts to or multiplies in, and its name."""
    if i.opcode == "cvt":
        target = next((m for m in i.modifiers if m in _NARROW or m in _WIDE), None)
        return (_NARROW[target], f"conversion to {target}") if target in _NARROW else (None, "")
    if i.opcode not in _MMA:
        return None, ""
    found = [(_NARROW[m], f"a product of {m}") for m in i.modifiers if m in _NARROW]
    found += [(_KINDS[m], f"a product of {m}") for m in i.modifiers if m in _KINDS]
    return min(found, default=(None, ""), key=lambda x: x[0] or 0)


def _downgrade(kernel: Kernel, i: Instruction, why: str) -> Finding:
    return Finding(
        rule="dtype-downgrade",
        severity=Severity.ERROR,
        message=f"{i.name}: {why}; precision is given up that the contract asks for",
        fix="compute in the declared types",
        kernel=kernel.name,
        ptx_line=i.line,
        source=None if i.loc is None else f"{i.loc.file}:{i.loc.line}",
    )


def _hidden(kernel: Kernel) -> Iterator[Finding]:
    for i in kernel.instructions:
        for o in i.operands:
            if not isinstance(o, Special):
                continue
            if _CLOCKS.match(o.name) or _PLACES.match(o.name):
                severity = Severity.ERROR
            elif _SPOTS.match(o.name):
                severity = Severity.WARNING
            else:
                continue
            yield Finding(
                rule="hidden-input",
                severity=severity,
                message=f"the kernel reads {o.name}: its result may depend on when or where it runs",
                fix="compute from the op's inputs alone",
                kernel=kernel.name,
                ptx_line=i.line,
                source=None if i.loc is None else f"{i.loc.file}:{i.loc.line}",
            )
