"""Whether a bundle is as it was written, and whether what it says holds together. Offline; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from workbench.compile.checks import check_arch, check_launches, read_ptx_header
from workbench.compile.request import CompileError
from workbench.cost.machine import parse_machine
from workbench.errors import ContentError, WorkbenchError
from workbench.export.evidence.archive import SUMS, Contents, read_file, unpack
from workbench.export.evidence.bundle import (
    EXPORTED,
    MACHINES,
    MANIFEST,
    README,
    RECORDS,
    TIMING,
    VERIFIERS,
    BundledKernel,
    BundleManifest,
    KernelEntry,
    entry_of,
    kernel_folder,
    read_kernel,
    read_manifest,
)
from workbench.export.evidence.documents import kernel_documents, readme
from workbench.export.waivers import waivers_for
from workbench.export.winner import KEY_LENGTH
from workbench.isa.cubin import CubinError, read_cubin
from workbench.report.evidence import EvidenceCheckDocument, EvidenceProblem
from workbench.report.evidence_text import shown
from workbench.report.markdown import kernel_markdown
from workbench.verify.report import Verdict

SIGNATURES = {"minisign": ".minisig", "sigstore": ".sigstore.json"}
"""What is added to a bundle's name for its signature, by tool."""
Signature = Callable[[Path], str]
"""Checks a signature of a file and says who signed; raises WorkbenchError if it does not hold."""


class _Problems:
    """What is wrong, in the order found."""

    def __init__(self) -> None:
        self.found: list[EvidenceProblem] = []

    def add(self, where: str, what: str, offset: int | None = None) -> None:
        self.found.append(EvidenceProblem(where=shown(where), what=shown(what), offset=offset))

    def unless(self, right: bool, where: str, what: str) -> None:
        if not right:
            self.add(where, what)


def check_bundle(
    path: Path, *, sha256: str | None = None, signature: Signature | None = None
) -> EvidenceCheckDocument:
    """Check a bundle: every byte, that its parts agree with each other, and what was asked for besides.

    Args:
        path: the bundle.
        sha256: what the file's hash is said to be, for instance in a pull request.
        signature: checks a signature of the file.

    Raises:
        ContentError: if the file is no bundle, or of a newer format. Whatever is wrong with a bundle is no
            error but a problem in the document.
    """
    contents = unpack(read_file(path), path)
    problems = _Problems()
    for d in contents.damages:
        problems.add(d.where, d.what, d.offset)
    if sha256 is not None:
        wanted = sha256.strip().lower()
        right = contents.sha256 == wanted
        problems.unless(right, "file", f"its SHA-256 is {contents.sha256}, not {wanted}")
    signed = _unchecked(path)
    if signature is not None:
        try:
            signed = signature(path)
        except SignatureError as e:
            signed = "does not hold"
            problems.add("signature", str(e))
    manifest = None
    if not contents.damages:
        manifest = _read(contents, problems)
    return EvidenceCheckDocument(
        bundle=str(path),
        sha256=contents.sha256,
        nbytes=contents.nbytes,
        verdict=Verdict.FAIL if problems.found else Verdict.PASS,
        problems=tuple(problems.found),
        signature=signed,
        members=len(contents.members) + (not any(d.where == SUMS for d in contents.damages)),
        kernels=kernel_documents(manifest) if manifest is not None else (),
        notes=tuple(_notes(manifest, contents.members))
        if manifest is not None and not problems.found
        else (),
    )


class SignatureError(WorkbenchError):
    """A signature that does not hold."""


def _unchecked(path: Path) -> str:
    there = [s for s in SIGNATURES.values() if path.with_name(path.name + s).is_file()]
    if not there:
        return "none beside the bundle"
    return f"{path.name}{there[0]} was not checked; give --public-key, or --signer and --issuer"


def load_bundle(path: Path) -> tuple[tuple[BundledKernel, ...], Contents]:
    """Read a bundle that is to be used; raises ContentError with the first thing that is wrong with it."""
    contents = unpack(read_file(path), path)
    problems = _Problems()
    for d in contents.damages:
        problems.add(d.where, d.what, d.offset)
    manifest = _read(contents, problems) if not problems.found else None
    if problems.found or manifest is None:
        first = problems.found[0]
        more = f" and {len(problems.found) - 1} more problems" if len(problems.found) > 1 else ""
        raise ContentError(
            path, f"{first.where}: {first.what}{more}; `workbench evidence check` lists all, get it anew"
        )
    kernels = tuple(read_kernel(k, contents.members) for k in manifest.kernels)
    return kernels, contents


def _read(contents: Contents, problems: _Problems) -> BundleManifest | None:
    """The bundle's manifest, if it can be read; what does not hold together becomes a problem."""
    members = contents.members
    try:
        manifest = read_manifest(members)
    except ContentError as e:
        problems.add(str(e.path), e.message)
        return None
    for entry in manifest.kernels:
        place = f"{MANIFEST}: {entry.key[:KEY_LENGTH]}"
        folder = kernel_folder(entry.op, entry.workload, entry.arch, entry.key[:KEY_LENGTH])
        if entry.folder != folder:
            problems.add(place, f"lies in {entry.folder}, not in {folder}")
            continue
        try:
            kernel = read_kernel(entry, members)
        except ContentError as e:
            problems.add(str(e.path), e.message)
            continue
        _check_kernel(kernel, manifest, problems)
    _check_context(manifest, members, problems)
    known = set(_expected(manifest, members))
    for name in members:
        problems.unless(name in known, name, "belongs to nothing that the bundle lists")
    return manifest


def _check_kernel(kernel: BundledKernel, manifest: BundleManifest, problems: _Problems) -> None:
    entry, exported = kernel.entry, kernel.exported
    m, report, artifact = exported.manifest, exported.report, exported.artifact
    again = entry_of(entry.folder, exported, kernel.records, kernel.timing)
    for name in KernelEntry.model_fields:
        same = getattr(entry, name) == getattr(again, name)
        problems.unless(same, MANIFEST, f"{entry.key[:KEY_LENGTH]}: {name} is not that of its files")
    where = f"{entry.folder}/manifest.json"
    told = f"{entry.folder}/report.json"
    for name in ("op", "workload", "template", "knobs", "arch"):
        problems.unless(getattr(report, name) == getattr(m, name), told, f"is of another {name}")
    problems.unless(report.artifact_key == m.key, told, "is of another artifact")
    stated = [(c.name, c.verdict) for c in m.checks]
    problems.unless(
        stated == [(c.name, c.verdict) for c in report.checks], where, "has other checks than report.json"
    )
    for check, verdict in zip(report.checks, m.checks, strict=False):
        if check.verdict is Verdict.FAIL:
            problems.add(told, f"check {check.name} failed; such a kernel is not exported")
        elif check.verdict is Verdict.UNKNOWN:
            problems.unless(verdict.waived, where, f"check {check.name} could not decide and is not waived")
            if verdict.waivers:
                covered = waivers_for(check, m.source_hash, verdict.waivers)
                problems.unless(
                    covered == verdict.waivers,
                    where,
                    f"the waivers of check {check.name} are not of its findings, or for another source",
                )
        elif verdict.waived or verdict.waivers:
            problems.add(where, f"check {check.name} is waived, though it passed")
    if m.prediction is not None:
        p = m.prediction.premises
        mine = (p.artifact_key, p.op, p.workload, p.axes, p.arch)
        right = mine == (m.key, m.op, m.workload, m.axes, m.arch)
        problems.unless(right, where, "its prediction is of another kernel")
        described = manifest.machines.get(p.machine) == p.machine_hash
        problems.unless(
            described or bool(manifest.notes),
            where,
            f"its prediction rests on a description of {p.machine} that is not in the bundle",
        )
    if kernel.timing is not None:
        right = kernel.timing.artifact_key == m.key
        problems.unless(right, f"{entry.folder}/{TIMING}", "is of another artifact")
    for r in kernel.records:
        right = (r.artifact_key, r.key.op, r.key.source_hash) == (m.key, m.op, m.source_hash)
        problems.unless(right, f"{entry.folder}/{RECORDS}", f"record {r.id[:8]} is of another kernel")
    try:
        header, cubin = read_ptx_header(artifact.ptx), read_cubin(artifact.cubin)
        check_arch(header, cubin, artifact.arch)
        check_launches(artifact.launches, header, cubin)
        held = {n: (r.registers, r.static_smem, r.stack_bytes) for n, r in m.resources.items()}
        real = {n: (k.registers, k.static_smem, k.frame_bytes) for n, k in cubin.kernels.items()}
        problems.unless(held == real, where, "states other resources than the cubin's")
    except (CompileError, CubinError) as e:
        problems.add(where, f"PTX, cubin and launches do not fit: {getattr(e, 'message', e)}")


def _check_context(manifest: BundleManifest, members: Mapping[str, bytes], problems: _Problems) -> None:
    used = {k.op for k in manifest.kernels}
    right = used == manifest.ops.keys()
    problems.unless(right, MANIFEST, "the ops that it lists are not those of its kernels")
    for name, op in manifest.ops.items():
        problems.unless(op.file == f"{VERIFIERS}/{name}.py" and op.file in members, MANIFEST,
                        f"the verifier of {name} is missing")  # fmt: skip
    for name, figures in manifest.machines.items():
        member = f"{MACHINES}/{name}.toml"
        if member not in members:
            problems.add(MANIFEST, f"the description of machine {name} is missing")
            continue
        try:
            described = parse_machine(members[member].decode(), Path(member))
        except UnicodeDecodeError:
            problems.add(member, "is no text")
        except ContentError as e:
            problems.add(str(e.path), e.message)
        else:
            problems.unless(described.hash == figures, member, f"has other figures than {MANIFEST} says")


def _expected(manifest: BundleManifest, members: Mapping[str, bytes]) -> Iterator[str]:
    yield from (MANIFEST, README)
    yield from (o.file for o in manifest.ops.values())
    yield from (f"{MACHINES}/{n}.toml" for n in manifest.machines)
    for k in manifest.kernels:
        yield from (f"{k.folder}/{n}" for n in (*EXPORTED, RECORDS, TIMING))


def _notes(manifest: BundleManifest, members: Mapping[str, bytes]) -> Iterator[str]:
    """The bundle's own notes, and prose that is not what this version writes of the same data."""
    yield from manifest.notes
    if members.get(README) != readme(manifest):
        yield f"{README} is not what this workbench writes of {MANIFEST}, which counts"
    for entry in manifest.kernels:
        kernel = read_kernel(entry, members).exported
        m = kernel.manifest
        prose = kernel_markdown(kernel.artifact, kernel.report, m.prediction, m.run)
        if members.get(f"{entry.folder}/REPORT.md") != prose.encode():
            yield (f"{entry.folder}/REPORT.md is not what this workbench writes of report.json, which counts")
