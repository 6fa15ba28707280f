"""The static ordering audit: PTX and SASS of every launch of a chain, or of a bare file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.artifact import Artifact, KernelParam, Relocation
from workbench.errors import MissingToolError, WorkbenchError
from workbench.findings import Finding, Severity
from workbench.isa.cubin import Cubin, read_cubin
from workbench.isa.ptx import Kernel, Module, parse
from workbench.isa.sass import SassFunction, SassModule, disassemble, parse_sass
from workbench.verify.contract import ContractKernel
from workbench.verify.ordering import rules
from workbench.verify.ordering.binding import EXTERNAL, Effects, Launch, Layout, Neighbours, neighbours
from workbench.verify.ordering.dependence import parts_by_cta
from workbench.verify.ordering.protocol import Protocols
from workbench.verify.ordering.relays import handed_on
from workbench.verify.ordering.rules.pdl import judge, sunk_prefetches
from workbench.verify.ordering.rules.trigger import early_triggers
from workbench.verify.ordering.view import UNDECIDED, PtxView, SassView
from workbench.verify.report import Check, Verdict, verdict_of

RULES = rules.decided()
"""Rules this audit decides."""


@dataclass(frozen=True)
class KernelAudit:
    """What the audit found in one launch of one kernel."""

    kernel: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    accesses: int
    """Global-memory access instructions looked at, of PTX and SASS together."""
    unknown: int
    """Those that could not be decided."""

    @property
    def proved(self) -> int:
        """Accesses that were decided."""
        return self.accesses - self.unknown


@dataclass(frozen=True)
class Forms:
    """The forms of one kernel that there are; `missing` says why there is no SASS, if there is none."""

    name: str
    ptx: tuple[Module, Kernel] | None = None
    sass: SassFunction | None = None
    sass_base: int = 0
    """Where parameters start in constant bank 0."""
    sass_layout: Layout | None = None
    missing: str | None = None
    sass_smem: int = 0
    """Static shared memory of the SASS, bytes a CTA, as the cubin has it."""

    @property
    def layout(self) -> Layout:
        """Parameter places: of the PTX where it is there."""
        if self.ptx is not None:
            return Layout(tuple((p.offset, p.size) for p in self.ptx[1].params))
        return self.sass_layout or Layout(())

    @property
    def block(self) -> tuple[int, int, int] | None:
        """The block the kernel itself asks for."""
        return None if self.ptx is None else self.ptx[1].reqntid or self.ptx[1].maxntid


def kernel_forms(
    module: Module | None, sass: SassModule | None, cubin: Cubin | None, name: str, missing: str | None
) -> Forms:
    """Gather the forms of one kernel.

    Raises:
        WorkbenchError: if neither the PTX nor the SASS has it.
    """
    ptx = next(((module, k) for k in module.kernels if k.name == name), None) if module else None
    function = next((f for f in sass.functions if f.name == name), None) if sass else None
    if ptx is None and function is None:
        raise WorkbenchError(f"kernel {name!r} is neither in the PTX nor in the SASS")
    if sass is not None and function is None:
        missing = "the cubin does not have this kernel"
    base = 0
    if sass is not None and function is not None:
        try:
            base = sass.parameter_base
        except (KeyError, ValueError):
            function, missing = None, f"the parameter layout of {sass.target} is not known"
    layout, smem = None, 0
    if cubin is not None and name in cubin.kernels:
        layout = Layout(tuple((p.offset, p.size) for p in cubin.kernels[name].params))
        smem = cubin.kernels[name].static_smem
    return Forms(name, ptx, function, base, layout, missing, smem)


@dataclass(frozen=True)
class Analyses:
    """Both forms of a kernel, solved for one launch."""

    ptx: PtxView | None
    sass: SassView | None
    missing: str | None

    @property
    def effects(self) -> Effects:
        """What the launch does, from the PTX where there is one."""
        if self.ptx is not None:
            return self.ptx.effects
        return self.sass.analysis.effects if self.sass is not None else Effects()


def analyse_forms(forms: Forms, launch: Launch, foreign: frozenset[str] = frozenset()) -> Analyses:
    """Solve both forms of a kernel for one launch; other kernels of its list are given `foreign` buffers."""
    ptx = sass = None
    if forms.ptx is not None:
        ptx = handed_on(PtxView.of(*forms.ptx, launch, forms.layout), foreign)
    if forms.sass is not None:
        layout = forms.sass_layout or forms.layout
        sass = SassView.of(forms.sass, launch, layout, forms.sass_base, ptx, forms.sass_smem)
    return Analyses(ptx, sass, forms.missing)


def audit_kernel(analyses: Analyses, near: Neighbours, extra: Sequence[Finding] = ()) -> KernelAudit:
    """Apply the rules to both forms of one launch and join what they say."""
    ptx = analyses.ptx.analysis if analyses.ptx is not None else None
    sass = analyses.sass.analysis if analyses.sass is not None else None
    findings: list[Finding] = list(extra)
    accesses = unknown = 0
    name = ""
    for view, other in ((analyses.ptx, sass), (analyses.sass, ptx)):
        if view is None:
            continue
        name = view.launch.kernel
        said = judge(view.analysis, near, other, Protocols.of(view).lamport)
        findings += said.findings
        accesses += said.accesses
        unknown += said.unknown
    if ptx is not None and sass is not None and ptx.launch.pdl is not False:
        findings += sunk_prefetches(ptx, sass)
    findings = _merged(findings + rules.apply(analyses.ptx, analyses.sass))
    verdict = verdict_of(findings)
    open_ = unknown or analyses.missing is not None or any(f.rule == UNDECIDED for f in findings)
    if verdict is Verdict.PASS and open_:
        verdict = Verdict.UNKNOWN
    if analyses.missing is not None:
        findings.append(
            Finding(
                rule="undecided",
                severity=Severity.INFO,
                message=f"the SASS was not looked at: {analyses.missing}",
                fix="ordering is decided on the SASS; give it to the audit",
                kernel=name or None,
            )
        )
    return KernelAudit(name, verdict, tuple(findings), accesses, unknown)


def _merged(findings: list[Finding]) -> list[Finding]:
    """Group what is the same, and join a finding on the PTX with the one on the SASS of the same line."""
    grouped: dict[tuple[object, ...], Finding] = {}
    for f in findings:
        form = f.sass_offset is not None
        place = f.source if f.source is not None else (f.ptx_line, f.sass_offset)
        key = (f.rule, f.severity, f.buffer, place, form, f.rule == "prefetch-sunk")
        old = grouped.get(key)
        grouped[key] = f if old is None else old.model_copy(update={"count": old.count + f.count})
    result: list[Finding] = []
    for f in grouped.values():
        twins = [n for n, o in enumerate(result) if _twins(o, f)]
        if not twins:
            result.append(f)
            continue
        n = next((n for n in twins if result[n].sass_offset is None), None)
        if n is not None:  # otherwise one more copy of a load that is reported already
            message = f.message if "moved" in f.message else result[n].message
            result[n] = result[n].model_copy(update={"sass_offset": f.sass_offset, "message": message})
    return result


def _twins(on_ptx: Finding, on_sass: Finding) -> bool:
    """True if a finding on the SASS is about the same thing as one on the PTX."""
    if on_ptx.ptx_line is None or on_sass.ptx_line is not None or on_sass.sass_offset is None:
        return False
    same = (on_ptx.rule, on_ptx.severity, on_ptx.buffer) == (on_sass.rule, on_sass.severity, on_sass.buffer)
    return same and (on_ptx.source == on_sass.source or None in (on_ptx.source, on_sass.source))


def audit_chain(
    all_forms: Sequence[Forms], launches: Sequence[Launch], literal: bool = False
) -> list[KernelAudit]:
    """Audit the launches of a chain, each with its neighbours in the stream; see `neighbours`."""
    solved: dict[object, Analyses] = {}
    analyses: list[Analyses] = []
    for forms, launch in zip(all_forms, launches, strict=True):
        key = (launch.kernel, launch.block, launch.pdl, tuple(launch.params.items()))
        if key not in solved:
            others = [other.buffers for other in launches if other.kernel != launch.kernel]
            solved[key] = analyse_forms(forms, launch, frozenset[str]().union(*others))
        analyses.append(solved[key])
    effects = [a.effects for a in analyses]
    views = [a.ptx or a.sass for a in analyses]
    return [
        audit_kernel(
            a,
            neighbours(launches, effects, n, literal),
            [*_transitivity(launches, effects, n, views[n]), *early_triggers(launches, views, n)],
        )
        for n, a in enumerate(analyses)
    ]


def together(audits: Sequence[KernelAudit]) -> KernelAudit:
    """One audit for several launches of a kernel: what any of them shows, with the worst verdict.

    Args:
        audits: one a launch, at least one.
    """
    first, *rest = audits
    if not rest:
        return first
    findings = tuple(dict.fromkeys(f for a in audits for f in a.findings))
    verdicts = {a.verdict for a in audits}
    worst = next(v for v in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS) if v in verdicts)
    return KernelAudit(
        first.kernel, worst, findings, max(a.accesses for a in audits), max(a.unknown for a in audits)
    )


def _transitivity(
    launches: Sequence[Launch], effects: Sequence[Effects], n: int, view: PtxView | SassView | None
) -> list[Finding]:
    """A PDL launch that may complete before its predecessors breaks the waits of the launches after it."""
    if not launches[n].pdl or effects[n].waits:
        return []
    before = neighbours(launches, effects, n)
    for m in range(n + 1, len(launches)):
        if not launches[m].pdl:
            break
        touched = (effects[m].reads & before.writes.keys()) | (effects[m].writes & before.uses.keys())
        if touched:
            who = sorted({before.uses.get(b, EXTERNAL) for b in touched})[0]
            open_ = view is not None and bool(view.analysis.waits) and parts_by_cta(view)
            message = (
                f"no thread of {launches[n].kernel} (launch {n}) is sure to execute griddepcontrol.wait, so "
                f"that it may complete before {who}; the wait of {launches[m].kernel} (launch {m}) then "
                f"does not cover {', '.join(sorted(touched))}"
            )
            if open_:
                message = f"whether a CTA is sure to execute griddepcontrol.wait cannot be told: if {message}"
            return [
                Finding(
                    rule=UNDECIDED if open_ else "pdl-chain-not-transitive",
                    severity=Severity.INFO if open_ else Severity.ERROR,
                    message=message,
                    fix="let at least one thread of every launch in a PDL chain execute griddepcontrol.wait",
                    kernel=launches[n].kernel,
                    buffer=", ".join(sorted(touched)),
                )
            ]
    return []


# -- artifacts -------------------------------------------------------------------------------------


def artifact_launches(artifact: Artifact) -> list[Launch]:
    """The launches of an artifact with the roles of their buffers."""
    roles = {b.name: b.role for b in artifact.buffers}
    return [
        Launch(
            launch.kernel,
            launch.block,
            dict(enumerate(launch.params)),
            roles,
            launch.pdl,
            grid=launch.grid,
            cluster=launch.cluster,
            cooperative=launch.cooperative,
            smem_bytes=launch.smem_bytes,
            sizes={b.name: b.nbytes for b in artifact.buffers},
        )
        for launch in artifact.launches
    ]


def audit(artifact: Artifact, sass: SassModule | None = None) -> Check:
    """Check `ordering/static`: the PTX and the SASS of every launch of an artifact.

    The cubin is disassembled here if `sass` is not given; without a disassembler nothing passes.

    Raises:
        PtxSyntaxError: if the artifact's PTX cannot be parsed.
        WorkbenchError: if its cubin cannot be read, or a launch names a kernel that is not there.
    """
    module = parse(artifact.ptx)
    missing: str | None = None
    if sass is None:
        try:
            sass = parse_sass(disassemble(artifact.cubin))
        except MissingToolError as e:
            missing = str(e)
    cubin = read_cubin(artifact.cubin) if artifact.cubin else None
    launches = artifact_launches(artifact)
    forms = [kernel_forms(module, sass, cubin, launch.kernel, missing) for launch in launches]
    audits = audit_chain(forms, launches)
    return _check(audits, launches, missing)


def _check(audits: list[KernelAudit], launches: list[Launch], missing: str | None) -> Check:
    findings: dict[Finding, None] = {}
    for a in audits:
        findings.update(dict.fromkeys(a.findings))
    accesses = sum(a.accesses for a in audits)
    unknown = sum(a.unknown for a in audits)
    errors = [f for f in findings if f.severity is Severity.ERROR]
    verdicts = {a.verdict for a in audits}
    verdict = Verdict.PASS
    if Verdict.FAIL in verdicts:
        verdict = Verdict.FAIL
    elif Verdict.UNKNOWN in verdicts or not audits:
        verdict = Verdict.UNKNOWN
    summary = f"{len(audits)} launches, {accesses} accesses in PTX and SASS, {accesses - unknown} decided"
    if errors:
        summary += f"; {len(errors)} errors: {', '.join(sorted({f.rule for f in errors}))}"
    elif missing is not None:
        summary += f"; undecided: {missing}"
    elif unknown:
        summary += f"; {unknown} undecided"
    return Check(
        name="ordering/static",
        verdict=verdict,
        summary=summary,
        findings=tuple(findings),
        measures={"accesses": float(accesses), "undecided": float(unknown)},
        assumptions=_assumptions(launches),
    )


def _assumptions(launches: list[Launch]) -> tuple[str, ...]:
    found = ["buffers do not overlap", f"rules decided: {', '.join(RULES)}"]
    if launches and launches[0].pdl:
        found.append(
            "the first launch is a PDL launch: what precedes it in the stream may write any buffer that is "
            "neither a weight nor metadata"
        )
    return tuple(found)


# -- contracts -------------------------------------------------------------------------------------


def contract_launch(forms: Forms, contract: ContractKernel | None) -> Launch:
    """The launch a contract describes; without one, every pointer is a buffer of unknown role.

    Raises:
        WorkbenchError: if the contract names a parameter the kernel does not have or a pointer that does not
            fit, or the block shape is not known.
    """
    places = forms.layout.places
    if contract is None:
        block = forms.block
        if block is None:
            raise WorkbenchError(f"kernel {forms.name!r} does not say its block shape; give a contract")
        params = {
            n: KernelParam(data="00" * size, relocations=(Relocation(offset=0, buffer=f"parameter {n}"),))
            for n, (_, size) in enumerate(places)
            if size >= 8
        }
        return Launch(forms.name, block, params, {}, None, frozenset())
    types: list[str | None] = [None] * len(places)
    if forms.ptx is not None:
        types = [p.type for p in forms.ptx[1].params]
    for index in [b.param for b in contract.buffer] + [s.param for s in contract.scalar]:
        if index >= len(places):
            raise WorkbenchError(
                f"the contract gives parameter {index} of {forms.name!r}, which has {len(places)}"
            )
    found: dict[int, KernelParam] = {}
    for b in contract.buffer:
        size = places[b.param][1]
        if b.offset + 8 > size:
            raise WorkbenchError(
                f"buffer {b.name!r}: parameter {b.param} of {forms.name!r} is {size} bytes, too small for a "
                f"pointer at {b.offset}"
            )
        if b.tensor_map is not None and b.offset + len(b.tensor_map.raw) > size:
            raise WorkbenchError(
                f"buffer {b.name!r}: parameter {b.param} of {forms.name!r} is {size} bytes, too small for a "
                f"tensor map at {b.offset}"
            )
        old = found.get(b.param)
        pointers = (*(old.relocations if old else ()), Relocation(offset=b.offset, buffer=b.name))
        raw = bytearray(size) if old is None else bytearray.fromhex(old.data)
        if b.tensor_map is not None:
            raw[b.offset : b.offset + len(b.tensor_map.raw)] = b.tensor_map.raw
        found[b.param] = KernelParam(data=raw.hex(), relocations=pointers)
    known: dict[int, set[int]] = {}
    for s in contract.scalar:
        whole, what = places[s.param][1], f"parameter {s.param} of {forms.name!r}"
        size = whole if s.bytes is None else s.bytes
        if s.offset + size > whole:
            raise WorkbenchError(f"{what} is {whole} bytes and has no value of {size} at byte {s.offset}")
        data = _scalar(s.value, size, types[s.param] if size == whole else None, what)
        before = found.get(s.param, KernelParam(data="00" * whole))
        raw = bytearray(bytes.fromhex(before.data))
        raw[s.offset : s.offset + size] = data
        found[s.param] = KernelParam(data=raw.hex(), relocations=before.relocations)
        if not s.step:
            known.setdefault(s.param, set()).update(range(s.offset, s.offset + size))
    literal = frozenset(known)
    roles = {b.name: b.role for b in contract.buffer}
    beyond = {b.name: f"what {b.name} leads to" for b in contract.buffer if b.leads_to is not None}
    roles |= {beyond[b.name]: b.leads_to for b in contract.buffer if b.leads_to is not None}
    return Launch(
        forms.name,
        contract.block,
        found,
        roles,
        contract.pdl,
        literal,
        grid=contract.grid,
        cluster=contract.cluster,
        cooperative=contract.cooperative,
        smem_bytes=contract.smem_bytes,
        sizes={b.name: b.size for b in contract.buffer if b.size is not None},
        settled=frozenset(b.name for b in contract.buffer if b.settled),
        beyond=beyond,
        known={n: frozenset(at) for n, at in known.items()},
    )


def _scalar(value: int | float | bool, size: int, type_: str | None, what: str) -> bytes:
    if isinstance(value, float) or (type_ in ("f32", "f64") and size in (4, 8)):
        if size not in (4, 8):
            raise WorkbenchError(f"{what} is {size} bytes and cannot hold a floating-point value")
        return struct.pack("<f" if size == 4 else "<d", float(value))
    bits = 8 * size
    if not -(1 << (bits - 1)) <= int(value) < 1 << bits:
        raise WorkbenchError(f"{what} is {size} bytes; {value} does not fit")
    return (int(value) & ((1 << bits) - 1)).to_bytes(size, "little")
