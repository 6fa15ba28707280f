"""Writes a verified kernel with its evidence to `generated_kernels/`, and reads it back, hashes checked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from workbench.artifact import Artifact
from workbench.cost import Prediction
from workbench.errors import ContentError, MissingToolError, UnknownNameError, WorkbenchError
from workbench.export.manifest import FORMAT, CheckVerdict, FileEntry, Manifest, RunInfo
from workbench.export.provenance import Provenance, provenance
from workbench.export.waivers import Waiver, uncovered, waivers_for
from workbench.report.markdown import kernel_markdown
from workbench.verify.report import Report, Verdict
from workbench.workspace import Workspace

MANIFEST = "manifest.json"
KEY_LENGTH = 12


class ExportRefused(WorkbenchError):  # noqa: N818
    """The kernel may not be exported; the message says which check stands in the way."""


@dataclass(frozen=True)
class ExportedKernel:
    """An exported kernel read back from its folder; every file had the hash that the manifest states."""

    folder: Path
    manifest: Manifest
    artifact: Artifact
    report: Report


def export_winner(
    workspace: Workspace,
    artifact: Artifact,
    report: Report,
    prediction: Prediction | None = None,
    *,
    run_id: str | None = None,
    candidates: int = 0,
    waive: Collection[str] = (),
    waivers: Collection[Waiver] = (),
    seed: int | None = None,
) -> Path:
    """Write the kernel to `generated_kernels/<op>/<workload>-<arch>/<short key>/` and return that folder.

    The folder appears whole or not at all. Exporting the same kernel and evidence again changes nothing.

    Args:
        workspace: receives the folder.
        artifact: the compiled kernel.
        report: its verification; all checks must have passed.
        prediction: predicted time, if there is one.
        run_id: the search that found it, if there was one.
        candidates: how many candidates that search evaluated.
        waive: names of checks that could not decide and that a person accepts nonetheless. A check that
            failed cannot be waived.
        waivers: of single findings, see `workbench.export.waivers`; they let a check pass whose every
            undecided finding has one for this source.
        seed: of the verification; with it the manifest says what the report rests on.

    Raises:
        ExportRefused: if a check failed, or could not decide and is not waived, if the report is of another
            artifact, or if a file would carry a path of this machine.
        UnknownNameError: if `waive` names a check that is not in the report.
        WorkbenchError: if the folder cannot be written.
    """
    checks = _admit(artifact, report, waive, waivers)
    run = RunInfo(run_id=run_id, candidates=candidates) if run_id is not None else None
    rests_on = provenance(workspace, artifact.op, seed) if seed is not None else None
    files = _contents(artifact, report, prediction, run)
    manifest = _manifest(artifact, report, prediction, run, checks, rests_on, files)
    files[MANIFEST] = (manifest.model_dump_json(indent=1) + "\n").encode()
    _refuse_machine_paths(workspace, files)
    short = artifact.key[:KEY_LENGTH]
    folder = workspace.generated / artifact.op / f"{artifact.workload}-{artifact.arch}" / short
    if not _holds(folder, files):
        _write(folder, files)
    return folder


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of an exported kernel and check the hash of every file it lists.

    Args:
        path: the kernel's folder or its `manifest.json`.

    Raises:
        ContentError: naming the file that is missing, damaged or of a newer format.
    """
    return _read_folder(path)[1]


def load_exported(path: Path) -> ExportedKernel:
    """Read an exported kernel back with its report; raises ContentError like `load_manifest`."""
    return _exported(*_read_folder(path))


def exported_from(files: Mapping[str, bytes], folder: Path) -> ExportedKernel:
    """An exported kernel from its files' contents, as `load_exported` has it; nothing is read from disk.

    Args:
        files: contents by name, `manifest.json` among them.
        folder: where they are said to come from, in messages alone.

    Raises:
        ContentError: naming the file that is missing, damaged or of a newer format.
    """
    if MANIFEST not in files:
        raise ContentError(folder / MANIFEST, "is missing")
    manifest = _parse_manifest(folder / MANIFEST, files[MANIFEST])
    for name, entry in manifest.files.items():
        _check_contents(folder, name, entry, files.get(name))
    return _exported(folder, manifest, files)


def _read_folder(path: Path) -> tuple[Path, Manifest, dict[str, bytes]]:
    path = path / MANIFEST if path.is_dir() else path
    try:
        raw = path.read_bytes()
    except FileNotFoundError as e:
        raise ContentError(path, "there is no such manifest; give the folder of an exported kernel") from e
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror or e}; export the kernel again") from e
    manifest = _parse_manifest(path, raw)
    folder, files = path.parent, {MANIFEST: raw}
    for name, entry in manifest.files.items():
        if Path(name).name != name:
            raise ContentError(path, f"lists {name!r}, which is outside the folder; export the kernel again")
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as e:
            raise ContentError(folder / name, "is missing or cannot be read; export the kernel again") from e
        _check_contents(folder, name, entry, files[name])
    return folder, manifest, files


def _parse_manifest(path: Path, data: bytes) -> Manifest:
    try:
        raw = json.loads(data)
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise ContentError(path, "cannot be read as JSON; export the kernel again") from e
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise ContentError(
            path, f"has format {raw['format']}, this version reads {FORMAT}; use a newer workbench"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its start"
        raise ContentError(path, f"is damaged at {place}: {first['msg']}; export the kernel again") from e


def _check_contents(folder: Path, name: str, entry: FileEntry, data: bytes | None) -> None:
    if data is None:
        raise ContentError(folder / name, "is missing or cannot be read; export the kernel again")
    if len(data) != entry.nbytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ContentError(folder / name, "differs from what was exported; export the kernel again")


def _exported(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> ExportedKernel:
    for name in ("kernel.py", "kernel.ptx", "kernel.cubin", "report.json"):
        if name not in manifest.files:
            raise ContentError(folder / MANIFEST, f"lists no {name}; export the kernel again")
    if hashlib.sha256(files["kernel.py"]).hexdigest() != manifest.source_hash:
        raise ContentError(
            folder / "kernel.py", "is not the source that the manifest names; export the kernel again"
        )
    text = {}
    for name in ("kernel.py", "kernel.ptx", "report.json"):
        try:
            text[name] = files[name].decode()
        except UnicodeDecodeError as e:
            raise ContentError(folder / name, "is no text; export the kernel again") from e
    artifact = Artifact(
        **{name: getattr(manifest, name) for name in Artifact.model_fields if name in Manifest.model_fields},
        source=text["kernel.py"],
        ptx=text["kernel.ptx"],
        cubin=files["kernel.cubin"],
    )
    try:
        report = Report.model_validate_json(text["report.json"])
    except ValidationError as e:
        raise ContentError(folder / "report.json", "is damaged; export the kernel again") from e
    return ExportedKernel(folder, manifest, artifact, report)


def _admit(
    artifact: Artifact, report: Report, waive: Collection[str], waivers: Collection[Waiver]
) -> tuple[CheckVerdict, ...]:
    """The checks as the manifest has them, waivers and all."""
    if report.artifact_key != artifact.key:
        raise ExportRefused(
            f"the report is of artifact {report.artifact_key[:KEY_LENGTH]}, not of"
            f" {artifact.key[:KEY_LENGTH]}; verify this artifact"
        )
    if not report.checks:
        raise ExportRefused("the report holds no check; verify the kernel first")
    undecided = [c for c in report.checks if c.verdict is Verdict.UNKNOWN]
    for check in report.checks:
        if check.verdict is Verdict.FAIL:
            waived = " (a failed check cannot be waived)" if check.name in waive else ""
            raise ExportRefused(f"check {check.name} failed: {check.summary}{waived}; mend the kernel")
    for name in waive:
        if name not in {c.name for c in undecided}:
            raise UnknownNameError("undecided check", name, [c.name for c in undecided])
    source = artifact.source_hash
    covered = {c.name: found for c in undecided if (found := waivers_for(c, source, waivers)) is not None}
    for check in undecided:
        if check.name not in waive and check.name not in covered:
            findings = uncovered(check, source, waivers)
            raise ExportRefused(
                f"check {check.name} could not decide: {check.summary}; mend it, or waive it by name"
                + (f", or its findings in a file of waivers: {findings}" if findings else "")
            )
    return tuple(
        CheckVerdict(
            name=c.name,
            verdict=c.verdict,
            waived=c.name in waive or c.name in covered,
            waivers=covered.get(c.name, ()),
        )
        for c in report.checks
    )


def _contents(
    artifact: Artifact, report: Report, prediction: Prediction | None, run: RunInfo | None
) -> dict[str, bytes]:
    files = {
        "kernel.py": artifact.source.encode(),
        "kernel.ptx": artifact.ptx.encode(),
        "kernel.cubin": artifact.cubin,
        "report.json": (report.model_dump_json(indent=1) + "\n").encode(),
        "REPORT.md": kernel_markdown(artifact, report, prediction, run).encode(),
    }
    sass = _disassembly(artifact)
    if sass is not None:
        files["kernel.sass"] = sass.encode()
    return files


def _disassembly(artifact: Artifact) -> str | None:
    from workbench.isa.sass import disassemble

    try:
        return disassemble(artifact.cubin)
    except MissingToolError:
        return None


def _manifest(
    artifact: Artifact,
    report: Report,
    prediction: Prediction | None,
    run: RunInfo | None,
    checks: tuple[CheckVerdict, ...],
    rests_on: Provenance | None,
    files: dict[str, bytes],
) -> Manifest:
    shared = {
        name: getattr(artifact, name) for name in Artifact.model_fields if name in Manifest.model_fields
    }
    return Manifest(
        **shared,
        verified_on=report.device,
        checks=checks,
        provenance=rests_on,
        prediction=prediction,
        run=run,
        files={
            name: FileEntry(sha256=hashlib.sha256(data).hexdigest(), nbytes=len(data))
            for name, data in files.items()
        },
    )


def _refuse_machine_paths(workspace: Workspace, files: dict[str, bytes]) -> None:
    """What is exported is published: it must not say where on this machine it was made."""
    places = {str(workspace.root.resolve()), str(Path.home()), str(Path(tempfile.gettempdir()).resolve())}
    for name, data in files.items():
        for place in sorted(places - {"/"}):
            if f"{place}/".encode() in data:
                raise ExportRefused(f"{name} would carry the path {place} of this machine; compile it again")


def _holds(folder: Path, files: dict[str, bytes]) -> bool:
    """True if the folder holds exactly these files already."""
    try:
        present = {p.name for p in folder.iterdir()}
        return present == files.keys() and all((folder / n).read_bytes() == data for n, data in files.items())
    except OSError:
        return False


def _write(folder: Path, files: dict[str, bytes]) -> None:
    staging: Path | None = None
    old: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        staging.chmod(0o755)
        for name, data in files.items():
            with (staging / name).open("wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(old / folder.name)
        staging.rename(folder)
        staging = None
    except OSError as e:
        if old is not None and not folder.exists():
            (old / folder.name).rename(folder)
        reason = e.strerror or str(e)
        raise WorkbenchError(
            f"cannot write {folder}: {reason}; free space or choose a writable workspace"
        ) from e
    finally:
        for leftover in (staging, old):
            if leftover is not None:
                shutil.rmtree(leftover, ignore_errors=True)
