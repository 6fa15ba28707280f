"""Makes an evidence bundle of exported kernels: the same exports and records give the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.cost.machine import load_machine, machine_file, machine_names
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.export.evidence.archive import SUMS, pack
from workbench.export.evidence.bundle import (
    MACHINES,
    MANIFEST,
    README,
    RECORDS,
    TIMING,
    VERIFIERS,
    BundledKernel,
    BundleManifest,
    MeasuredTime,
    OpEntry,
    entry_of,
    kernel_folder,
    records_text,
    sha256,
)
from workbench.export.evidence.documents import kernel_documents, readme
from workbench.export.keys import check_beginnings
from workbench.export.provenance import hash_op, hash_workbench
from workbench.export.winner import KEY_LENGTH, ExportedKernel, load_exported, load_manifest
from workbench.files import write_atomic
from workbench.ops import load_op
from workbench.records.model import Record, hash_tolerances, hash_verifier
from workbench.records.store import RecordStore
from workbench.report.evidence import EvidenceMakeDocument
from workbench.workspace import Workspace

Measure = Callable[[ExportedKernel], MeasuredTime]
"""Takes raw samples of a kernel on this machine's CUDA device."""


def make_bundle(
    workspace: Workspace,
    out: Path,
    kernels: Sequence[Path] = (),
    measure: Measure | None = None,
) -> EvidenceMakeDocument:
    """Write a bundle to `out`, whole or not at all.

    Args:
        workspace: whose contracts and tuning records travel.
        out: a new file, or an earlier bundle, which is replaced.
        kernels: folders of exported kernels; by default every one in `generated_kernels/`.
        measure: takes raw samples to put beside the prediction; without it nothing is measured.

    Raises:
        ContentError: naming an exported kernel that is damaged, or a verifier that cannot be used.
        WorkbenchError: if there is no kernel, one comes twice, or `out` is another file or cannot be written.
    """
    from workbench import __version__

    _refuse_other_file(out)
    folders = list(kernels) or [p.parent for p in sorted(workspace.generated.glob("*/*/*/manifest.json"))]
    if not folders:
        raise WorkbenchError(
            f"{workspace.generated} holds no exported kernel; run `workbench propose --op OP` first"
        )
    members: dict[str, bytes] = {}
    bundled: dict[str, BundledKernel] = {}
    for folder in folders:
        kernel = load_exported(folder)
        m = kernel.manifest
        where = kernel_folder(m.op, m.workload, m.arch, m.key[:KEY_LENGTH])
        if where in bundled:
            raise WorkbenchError(f"{folder} is the same kernel as one before it; name each kernel once")
        records = _records_of(workspace, kernel)
        timing = measure(kernel) if measure is not None else None
        bundled[where] = BundledKernel(entry_of(where, kernel, records, timing), kernel, records, timing)
        for name in ("manifest.json", *m.files):
            members[f"{where}/{name}"] = _read(kernel.folder / name)
        if records:
            members[f"{where}/{RECORDS}"] = records_text(records)
        if timing is not None:
            members[f"{where}/{TIMING}"] = (timing.model_dump_json(indent=1) + "\n").encode()
    ordered = [bundled[n] for n in sorted(bundled)]
    ops = {name: _add_op(workspace, name, members) for name in sorted({k.entry.op for k in ordered})}
    machines, notes = _add_machines(ordered, members)
    manifest = BundleManifest(
        workbench=__version__,
        workbench_hash=hash_workbench(),
        kernels=tuple(k.entry for k in ordered),
        ops=ops,
        machines=machines,
        notes=tuple(notes),
    )
    members[MANIFEST] = (manifest.model_dump_json(indent=1) + "\n").encode()
    members[README] = readme(manifest)
    _refuse_machine_paths(workspace, members)
    data = pack(members)
    write_atomic(out, data)
    return EvidenceMakeDocument(
        bundle=str(out),
        sha256=sha256(data),
        nbytes=len(data),
        members=(SUMS, *sorted(members)),
        kernels=kernel_documents(manifest),
        notes=manifest.notes,
    )


def _records_of(workspace: Workspace, kernel: ExportedKernel) -> tuple[Record, ...]:
    path = workspace.tuning_db / "records.sqlite"
    if not path.exists():
        return ()
    m = kernel.manifest
    found = RecordStore(path).query(op=m.op, workload=m.workload, arch=m.arch, history=True)
    mine = {r.id: r for r in found if r.artifact_key == m.key}
    return tuple(mine[n] for n in sorted(mine))


def _add_op(workspace: Workspace, name: str, members: dict[str, bytes]) -> OpEntry:
    op, path = load_op(workspace, name), workspace.verifier(name)
    member = f"{VERIFIERS}/{name}.py"
    members[member] = _read(path)
    return OpEntry(
        file=member,
        op_hash=hash_op(op),
        tolerance_hash=hash_tolerances(op),
        verifier_hash=hash_verifier(path),
        generators=tuple(op.generators),
    )


def _add_machines(
    kernels: Sequence[BundledKernel], members: dict[str, bytes]
) -> tuple[dict[str, str], list[str]]:
    """The descriptions that predictions rest on, and a note on each that has changed since."""
    hashes: dict[str, str] = {}
    notes: dict[str, None] = {}
    for k in kernels:
        prediction = k.exported.manifest.prediction
        if prediction is None:
            continue
        name, wanted = prediction.premises.machine, prediction.premises.machine_hash
        if name not in machine_names():
            notes[f"this workbench has no description of machine {name}, so that none is in the bundle"] = (
                None
            )
            continue
        hashes[name] = load_machine(name).hash
        members[f"{MACHINES}/{name}.toml"] = _read(machine_file(name))
        if hashes[name] != wanted:
            text = (
                f"the description of {name} has changed since {k.entry.key[:KEY_LENGTH]} was exported; "
                "its prediction rests on other figures than those in the bundle"
            )
            notes[text] = None
    return hashes, list(notes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror or e}") from e


def _refuse_other_file(out: Path) -> None:
    """Nothing but an earlier bundle is replaced."""
    if not out.exists():
        return
    if not out.is_file():
        raise WorkbenchError(f"{out} is no file; give the name of a file to write")
    try:
        with out.open("rb") as f:
            start = f.read(len(SUMS) + 1)
    except OSError as e:
        raise WorkbenchError(f"cannot read {out}: {e.strerror}; choose another file") from e
    if start != f"{SUMS}\0".encode():
        raise WorkbenchError(f"{out} exists and is no evidence bundle; choose another file")


def _refuse_machine_paths(workspace: Workspace, members: dict[str, bytes]) -> None:
    """A bundle is published: it must not say where on this machine it was made."""
    places = {str(workspace.root.resolve()), str(Path.home()), str(Path(tempfile.gettempdir()).resolve())}
    for name, data in members.items():
        for place in sorted(places - {"/"}):
            if f"{place}/".encode() in data:
                raise WorkbenchError(f"{name} would carry the path {place} of this machine; export it again")


def find_kernels(workspace: Workspace, names: Sequence[str]) -> list[Path]:
    """Folders of exported kernels by path, or by the beginning of their key.

    Raises:
        UnknownNameError: for a name that is neither.
        WorkbenchError: if several keys begin so, or a name is empty.
    """
    known = {p.parent.name: p.parent for p in workspace.generated.glob("*/*/*/manifest.json")}
    found = []
    for name in names:
        if not name:
            check_beginnings("exported kernel", [name], known)
        path = Path(name)
        if path.is_dir() or path.name == "manifest.json":
            found.append(path if path.is_dir() else path.parent)
            continue
        matches = [folder for key, folder in known.items() if key.startswith(name[:KEY_LENGTH])]
        if len(name) > KEY_LENGTH:  # a folder bears the beginning of its key
            matches = [f for f in matches if load_manifest(f / "manifest.json").key.startswith(name)]
        if not matches:
            raise UnknownNameError("exported kernel", name, known)
        if len(matches) > 1:
            raise WorkbenchError(f"{name} begins the keys of {len(matches)} kernels; give more of it")
        found += matches
    return found
