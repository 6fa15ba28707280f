"""Repeats what a bundle states: compile, assemble, verify, audit, predict and, on a GPU, measure.

Everything comes from the bundle but the contract: a verifier is code that runs in this process, so that the
workspace's own is used and its hash compared. The kernel's source runs in the compile child alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from workbench.artifact import Artifact, stable_hash
from workbench.compile import CompileError, CompileRequest, compile_candidate
from workbench.compile.ptxas import assemble, toolchain_identity
from workbench.compile.request import Limits
from workbench.cost import Machine, Prediction, load_machine, machine_names, predict
from workbench.cost.machine import parse_machine
from workbench.errors import MissingToolError, WorkbenchError
from workbench.export.evidence.agreement import (
    Points,
    compare_predictions,
    compare_provenance,
    compare_reports,
    compare_timings,
    measured_text,
    short,
)
from workbench.export.evidence.archive import Contents
from workbench.export.evidence.bundle import MACHINES, BundledKernel, MeasuredTime, sha256
from workbench.export.evidence.check import load_bundle
from workbench.export.evidence.documents import kernel_document
from workbench.export.keys import check_beginnings
from workbench.export.provenance import DISASSEMBLER, Provenance, provenance
from workbench.export.winner import KEY_LENGTH
from workbench.isa.sass import disassemble
from workbench.ops import load_op
from workbench.ops.model import Op
from workbench.report.evidence import EvidencePoint, EvidenceRunDocument
from workbench.templates import parse_template
from workbench.verify.report import Verdict
from workbench.verify.runs import check_artifact
from workbench.verify.verify import Level, Verification, verify_artifact
from workbench.workspace import Workspace

Note = Callable[[str], None]


@dataclass(frozen=True)
class Gpu:
    """What takes times, or why nothing does."""

    name: str
    """The device, or why there is none."""
    arch: str | None
    """None where there is no device."""
    take: Callable[[BundledKernel, Op], MeasuredTime] | None = None


def find_gpu() -> Gpu:
    """The CUDA device of this machine."""
    from workbench.export.evidence.timing import first_device, take

    device, why = first_device()
    if device is None:
        return Gpu(f"no CUDA device here ({why.split(': ')[0]})", None)
    return Gpu(device.name, device.arch, lambda kernel, op: take(kernel.exported, op, kernel.timing))


def run_bundle(
    workspace: Workspace,
    path: Path,
    pick: Collection[str] = (),
    note: Note = lambda text: None,
    gpu: Gpu | None = None,
) -> EvidenceRunDocument:
    """Repeat a bundle's kernels and compare.

    Args:
        workspace: whose contracts are used; nothing in it is changed, not even its cache.
        path: the bundle.
        pick: beginnings of the keys of kernels to repeat; by default all.
        note: is told what is being done.
        gpu: takes times; by default this machine's CUDA device, if it has one.

    Raises:
        ContentError: if the file is no bundle, is damaged or contradicts itself.
        UnknownNameError: if `pick` names no kernel of it, or the workspace lacks an op.
        WorkbenchError: if `pick` has an empty key.
    """
    started = time.monotonic()
    kernels, contents = load_bundle(path)
    check_beginnings("kernel", pick, [k.entry.key for k in kernels])
    chosen = [k for k in kernels if not pick or any(k.entry.key.startswith(p) for p in pick)]
    ops = {k.entry.op: load_op(workspace, k.entry.op) for k in chosen}
    gpu = gpu or find_gpu()
    points: list[EvidencePoint] = []
    for kernel in chosen:
        entry = kernel.entry
        note(f"{entry.op} {entry.workload} {entry.arch} {entry.key[:KEY_LENGTH]}")
        rerun = _Rerun(workspace, kernel, ops[entry.op], contents, gpu, note)
        points += rerun.all()
    results = [p.status for p in points if p.kind == "result"]
    verdict = Verdict.UNKNOWN if "not repeated" in results or not results else Verdict.PASS
    return EvidenceRunDocument(
        bundle=str(path),
        sha256=contents.sha256,
        device=gpu.name,
        verdict=Verdict.FAIL if "differ" in results else verdict,
        timing=_timing_line(chosen, gpu, points),
        points=tuple(points),
        kernels=tuple(kernel_document(k.entry) for k in chosen),
        seconds=time.monotonic() - started,
    )


class _Rerun:
    """One kernel being repeated."""

    def __init__(
        self, workspace: Workspace, kernel: BundledKernel, op: Op, contents: Contents, gpu: Gpu, note: Note
    ) -> None:
        self.workspace, self.kernel, self.op, self.contents = workspace, kernel, op, contents
        self.gpu, self.note = gpu, note
        self.manifest, self.shipped = kernel.exported.manifest, kernel.exported.artifact
        self.points = Points(kernel.entry.key[:KEY_LENGTH])
        self.odd_tools: list[str] = []
        """What of the toolchain differs."""

    def all(self) -> list[EvidencePoint]:
        """Every point of this kernel."""
        m, points = self.manifest, self.points
        recorded = m.provenance
        found = provenance(self.workspace, m.op, recorded.seed if recorded is not None else 0)
        odd = compare_provenance(points, recorded, found)
        points.equal("source", short(m.source_hash), short(sha256(self.shipped.source.encode())))
        request = self._request()
        if request is None:
            return points.all
        again = self._compile(request)
        identical = again is not None and self._compare_code(again, found)
        if not identical:
            self._compare_assembly()
        verification = self._verify(self.shipped, found.seed, again is not None)
        if verification is not None:
            report = verification.report
            compare_reports(points, self.kernel.exported.report, m.checks, m.source_hash, report, odd)
            self._predict(verification)
        if again is not None and not identical:
            self._verify_other(again, found.seed)
        self._measure()
        return points.all

    def _request(self) -> CompileRequest | None:
        """What to compile, if this workspace's contract has such a kernel; its buffers are compared."""
        m, points = self.manifest, self.points
        try:
            template = parse_template(self.shipped.source, Path(f"{m.template}.py"))
            workload = self.op.workload(m.workload)
            if template.op != m.op or template.name != m.template or dict(workload.axes) != m.axes:
                points.differ(
                    "contract", f"{m.op} {m.workload} {m.axes}", f"{template.op} {dict(workload.axes)}"
                )
                return None
            request = CompileRequest.of(self.op, workload, template, m.knobs, m.arch, m.toolchain.ptxas_flags)
        except WorkbenchError as e:
            points.differ("contract", f"{m.op} {m.workload}", str(e))
            return None
        except ValueError as e:
            points.differ("contract", f"{m.op} {m.workload}", f"{m.arch} or its flags: {e}")
            return None
        stated, found = _hash_of(m.buffers), _hash_of(request.buffers)
        if not points.equal("buffers", short(stated), short(found)):
            return None
        return request

    def _compile(self, request: CompileRequest) -> Artifact | None:
        points, t = self.points, self.manifest.toolchain
        self.note("  compiling")
        try:
            identity = toolchain_identity()
            self.odd_tools += [n for n, same in (
                ("CuTe DSL", points.premise("CuTe DSL", t.dsl, identity["nvidia-cutlass-dsl"])),
                ("ptxas", points.premise("ptxas", t.ptxas, identity["ptxas"])),
            ) if not same]  # fmt: skip
            again = compile_candidate(request)
        except MissingToolError as e:
            points.left("compile", short(self.manifest.key), str(e))
            return None
        except CompileError as e:
            if e.kind in ("tool", "timeout", "memory"):
                points.left("compile", short(self.manifest.key), str(e))
            else:
                points.differ("compile", short(self.manifest.key), "does not compile", str(e))
            return None
        found = again.toolchain
        same = points.premise(
            "CUDA flavour", f"{t.flavour}, PTX ISA {t.ptx_isa}", f"{found.flavour}, PTX ISA {found.ptx_isa}"
        )
        self.odd_tools += [] if same else ["CUDA flavour"]
        if self.manifest.fences is not None:
            points.premise("fences", ", ".join(self.manifest.fences), ", ".join(again.fences or ()))
        return again

    def _compare_code(self, again: Artifact, found: Provenance) -> bool:
        """Compare what was compiled here with what the bundle holds; True if all of the code is the same."""
        points, entry, m, odd = self.points, self.kernel.entry, self.manifest, self.odd_tools
        points.equal("key", short(m.key), short(again.key), odd)
        same = [
            points.equal("PTX", short(entry.ptx_sha256), short(sha256(again.ptx.encode())), odd),
            points.equal("cubin", short(entry.cubin_sha256), short(sha256(again.cubin)), odd),
            points.equal("launches", short(_hash_of(m.launches)), short(_hash_of(again.launches)), odd),
        ]
        stated = {n: r.model_dump() for n, r in m.resources.items()}
        here = {n: r.model_dump() for n, r in again.resources.items()}
        points.equal("resources", short(stable_hash(stated)), short(stable_hash(here)), odd)
        if entry.sass_sha256 is None:
            points.left("SASS", "none", "the bundle has no SASS")
            return all(same)
        try:
            text = disassemble(self.shipped.cubin)
        except WorkbenchError as e:
            points.left("SASS", short(entry.sass_sha256), str(e))
            return all(same)
        recorded = m.provenance.libraries.get(DISASSEMBLER) if m.provenance is not None else None
        other = [] if recorded == found.libraries.get(DISASSEMBLER) else ["nvdisasm"]
        points.equal("SASS", short(entry.sass_sha256), short(sha256(text.encode())), other)
        return all(same)

    def _compare_assembly(self) -> None:
        """Whether the bundle's cubin is what its PTX assembles to, where it was not compiled to the same."""
        m = self.manifest
        stated = short(self.kernel.entry.cubin_sha256)
        try:
            made = assemble(self.shipped.ptx, m.arch, m.toolchain.ptxas_flags, Limits())
        except (MissingToolError, CompileError) as e:
            self.points.left("cubin of the bundle's PTX", stated, str(e))
            return
        odd = [n for n in self.odd_tools if n == "ptxas"]
        self.points.equal("cubin of the bundle's PTX", stated, short(sha256(made.cubin)), odd)

    def _verify(self, artifact: Artifact, seed: int, compiles: bool = True) -> Verification | None:
        """Every check there is; those at held-out shapes only where this machine compiles."""
        self.note("  verifying and auditing (full)")
        check = verify_artifact if compiles else check_artifact
        try:
            return check(artifact, self.op, level=Level.FULL, seed=seed)
        except WorkbenchError as e:
            self.points.left("verification", self.kernel.entry.verdict.value, str(e))
        except (KeyError, ValueError) as e:
            self.points.differ("verification", self.kernel.entry.verdict.value, f"cannot be run: {e!r}")
        return None

    def _verify_other(self, again: Artifact, seed: int) -> None:
        """The code compiled here is other code than the bundle's: it must hold as well."""
        verification = self._verify(again, seed)
        if verification is not None:
            found = verification.report.verdict
            stated = self.kernel.entry.verdict.value
            bad = ", ".join(c.name for c in verification.report.checks if c.verdict is Verdict.FAIL)
            name = "verdict on the code compiled here"
            if found is Verdict.FAIL:
                self.points.differ(name, stated, found.value, bad)
            else:
                self.points.agree(name, stated, found.value)

    def _predict(self, verification: Verification) -> None:
        stated = self.manifest.prediction
        if stated is None:
            return
        found: Prediction | None = None
        machine = self._machine(stated.premises.machine, stated.premises.machine_hash)
        why = f"neither the bundle nor this workbench has the description of {stated.premises.machine}"
        if machine is not None:
            why = "the runs did not come to their end"
            if verification.counters:
                found = predict(self.shipped, verification.counters, machine, verification.sass)
        compare_predictions(self.points, stated, found, why)

    def _machine(self, name: str, wanted: str) -> Machine | None:
        member = f"{MACHINES}/{name}.toml"
        if member in self.contents.members:
            described = parse_machine(self.contents.members[member].decode(), Path(member))
            if described.hash == wanted:
                return described
        return load_machine(name) if name in machine_names() else None

    def _measure(self) -> None:
        stated, points = self.kernel.timing, self.points
        for f in self.kernel.entry.figures:
            if f.kind == "measured" and f.premises.get("from") == "tuning record":
                points.left("measured record", f"{f.us:.3f} us", "a record's protocol is not in the bundle")
        m = self.manifest
        why = "" if self.gpu.arch == m.arch else f"{self.gpu.name} is {self.gpu.arch}, the kernel {m.arch}"
        if self.gpu.take is None:
            why = self.gpu.name
        if why:
            if stated is not None:
                points.left("measured time", measured_text(stated), why)
            else:
                points.unstated("measured time", "", why)
            return
        assert self.gpu.take is not None
        self.note(f"  timing on {self.gpu.name}")
        try:
            found = self.gpu.take(self.kernel, self.op)
        except WorkbenchError as e:
            points.left("measured time", measured_text(stated) if stated is not None else "none", str(e))
            return
        if stated is None:
            points.unstated("measured time", measured_text(found), "the bundle states none")
        else:
            compare_timings(points, stated, found)


def _timing_line(kernels: Collection[BundledKernel], gpu: Gpu, points: Collection[EvidencePoint]) -> str:
    stated = sum(k.timing is not None for k in kernels)
    claims = f"the bundle states {stated or 'no'} measured time{'s' if stated > 1 else ''}"
    fitting = sum(k.entry.arch == gpu.arch for k in kernels)
    if gpu.take is not None and fitting:
        return f"timing repeated on {gpu.name} for {fitting} of {len(kernels)} kernels; {claims}"
    why = gpu.name if gpu.take is None else f"{gpu.name} is {gpu.arch}"
    left = [p for p in points if p.kind == "result" and p.status == "not repeated"]
    rest = all(p.name.startswith("measured ") for p in left)
    return f"timing not repeated{', everything else was' if rest else ''}: {why}; {claims}"


def _hash_of(models: Collection[object]) -> str:
    return stable_hash([m.model_dump(mode="json") for m in models])  # type: ignore[attr-defined]
