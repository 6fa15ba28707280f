"""Real bundles for the tests, and bundles forged from them the way an attacker would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.export.conftest import REPOSITORY
from workbench import api
from workbench.export import export_winner
from workbench.export.evidence import bundle as bundles
from workbench.export.evidence.archive import pack, read_file, unpack
from workbench.export.evidence.documents import readme
from workbench.export.evidence.make import make_bundle
from workbench.verify.verify import Verification
from workbench.workspace import Workspace

Members = dict[str, bytes]


@dataclass(frozen=True)
class Evidence:
    """A bundle and where it was made."""

    workspace: Workspace
    kernel: Path
    """Folder of the exported kernel."""
    path: Path
    """The bundle."""
    members: Members
    verification: Verification
    """Behind the kernel's report."""

    @property
    def folder(self) -> str:
        """Folder of the kernel inside the bundle."""
        return bundles.read_manifest(self.members).kernels[0].folder

    def inside(self, name: str) -> str:
        """A member of the kernel."""
        return f"{self.folder}/{name}"


def clone(root: Path, *ops: str) -> Workspace:
    """A workspace of its own with the repository's contracts and templates, and nothing exported."""
    for op in ops:
        (root / "verifiers").mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY.root / "verifiers" / f"{op}.py", root / "verifiers")
        shutil.copytree(REPOSITORY.root / "templates" / op, root / "templates" / op,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    return Workspace(root)


def made(root: Path) -> Evidence:
    """Export the first template of rmsnorm at its smallest workload and bundle it."""
    workspace = clone(root / "space", "rmsnorm")
    artifact = api.compile_kernel(
        workspace.template_names("rmsnorm")[0], op="rmsnorm", workload="small_b1", workspace=workspace
    )
    found = api.simulate(artifact, level="full", seed=3, workspace=workspace)
    folder = export_winner(workspace, artifact, found.report, api.predict(artifact, found), seed=3)
    path = root / "b.tar"
    make_bundle(workspace, path)
    return Evidence(workspace, folder, path, dict(unpack(read_file(path), path).members), found)


def written(path: Path, members: Mapping[str, bytes]) -> Path:
    """A bundle of these members: what someone makes who knows the format."""
    path.write_bytes(pack(members))
    return path


def with_manifest(members: Members, folder: str, change: Callable[[dict[str, Any]], None]) -> Members:
    """Members whose kernel manifest was changed."""
    name = f"{folder}/manifest.json"
    manifest = json.loads(members[name])
    change(manifest)
    return {**members, name: json.dumps(manifest).encode()}


def with_report(members: Members, folder: str, change: Callable[[dict[str, Any]], None]) -> Members:
    """Members whose report was changed; the manifest is made to fit."""
    report = json.loads(members[f"{folder}/report.json"])
    change(report)
    return with_file(members, folder, "report.json", json.dumps(report).encode())


def with_file(members: Members, folder: str, name: str, data: bytes) -> Members:
    """Members with another file of the kernel, its hash in the manifest made to fit."""

    def fit(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = {"sha256": bundles.sha256(data), "nbytes": len(data)}
        if name == "kernel.py":
            manifest["source_hash"] = bundles.sha256(data)

    return with_manifest({**members, f"{folder}/{name}": data}, folder, fit)


def consistent(members: Members) -> Members:
    """Members whose `bundle.json` says what the kernels' files say: a forgery that holds together."""
    manifest = bundles.read_manifest(members)
    entries = []
    for k in manifest.kernels:
        found = bundles.read_kernel(k, members)
        entries.append(bundles.entry_of(k.folder, found.exported, found.records, found.timing))
    manifest = manifest.model_copy(update={"kernels": tuple(entries)})
    text = manifest.model_dump_json(indent=1) + "\n"
    return {**members, bundles.MANIFEST: text.encode(), bundles.README: readme(manifest)}
