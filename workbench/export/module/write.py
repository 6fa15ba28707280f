"""Writes the installable package `k3_decode` from the winners of a workspace: whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from workbench.devices import launch as launcher
from workbench.errors import WorkbenchError
from workbench.export.layout import content_root
from workbench.export.module.collect import Contents, collect, cubin_path, kernel_entry, op_entry
from workbench.export.module.travel import contract_files
from workbench.export.winner import KEY_LENGTH
from workbench.report.documents import ModuleDocument, ModuleKernel
from workbench.workspace import Workspace

PACKAGE = "k3_decode"
FORMAT = 1
RELEASE = "0.1.0"
PLUGIN = "k3_decode_plugin.py"
ENTRY_POINTS = "[vllm.general_plugins]\nk3_decode = k3_decode_plugin:register\n"
_HERE = Path(__file__).resolve().parent
_PROJECT = {
    "backend.py", "pyproject.toml", "README.md", "LICENSE", PACKAGE, "dist", "entry_points.txt", PLUGIN,
}  # fmt: skip
"""What an export may find in its folder and replace."""


def write_module(
    workspace: Workspace, out: Path, pick: Collection[str] = (), plugin: bool = False
) -> ModuleDocument:
    """Write the package to `out`, its wheel to `out/dist`. The same winners give the same bytes.

    Args:
        workspace: whose winners and contracts travel.
        out: a new folder, an empty one, or one that an earlier export wrote.
        pick: keys of winners to take where several of one configuration cannot be ranked.
        plugin: with the vLLM plugin and its entry point.

    Raises:
        ContentError: naming a winner or a verifier that cannot travel.
        WorkbenchError: if there is no winner, `out` holds other files, or it cannot be written.
    """
    shown, out = out, out.resolve()
    _refuse_other_files(out)
    contents = collect(workspace, pick)
    files, version = _files(workspace, contents, plugin)
    wheel, nbytes = _replace(out, files)
    return ModuleDocument(
        folder=str(shown),
        package=PACKAGE,
        version=version,
        wheel=wheel,
        wheel_nbytes=nbytes,
        kernels=tuple(
            ModuleKernel(
                key=k.manifest.key,
                op=k.manifest.op,
                workload=k.manifest.workload,
                arch=k.manifest.arch,
                batch=k.manifest.axes.get("B", 1),
                predicted_us=k.manifest.prediction.us if k.manifest.prediction else None,
                waived=tuple(c.name for c in k.manifest.checks if c.waived),
            )
            for k in contents.winners
        ),
        passed_over=tuple(k.manifest.key for k in contents.passed_over),
        by_reference=_by_reference(contents),
    )


def _files(workspace: Workspace, contents: Contents, plugin: bool) -> tuple[dict[str, bytes], str]:
    """All files by path relative to the project, and the version, which holds a hash of the others."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "ops": {name: op_entry(op) for name, op in contents.ops.items()},
        "kernels": [kernel_entry(k, contents.ops[k.manifest.op]) for k in contents.winners],
    }
    package = {p.name: p.read_bytes() for p in sorted((_HERE / PACKAGE).glob("*.py"))}
    if plugin:
        package |= {f"vllm/{p.name}": p.read_bytes() for p in sorted((_HERE / PACKAGE / "vllm").glob("*.py"))}
    package["launch.py"] = Path(launcher.__file__).read_bytes()  # in place of the one that imports it
    package |= {f"contract/{n}": data for n, data in contract_files(workspace, contents.ops).items()}
    for kernel in contents.winners:
        package[cubin_path(kernel.manifest)] = kernel.artifact.cubin
    package["manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    beside = {}
    if plugin:
        beside = {PLUGIN: (_HERE / PLUGIN).read_bytes(), "entry_points.txt": ENTRY_POINTS.encode()}
    digest = hashlib.sha256()
    for name, data in sorted({**package, **{f"../{n}": data for n, data in beside.items()}}.items()):
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    version = f"{RELEASE}+{digest.hexdigest()[:KEY_LENGTH]}"
    identity = package["_identity.py"].decode()
    identity = identity.replace('VERSION = "0"', f'VERSION = "{version}"')
    identity = identity.replace(
        'MANIFEST_SHA256 = ""', f'MANIFEST_SHA256 = "{hashlib.sha256(package["manifest.json"]).hexdigest()}"'
    )
    package["_identity.py"] = identity.encode()
    files = {f"{PACKAGE}/{name}": data for name, data in package.items()} | beside
    project = _HERE / "project"
    filled = {"VERSION": version, "TABLE": _table(contents), "REFERENCE": ", ".join(_by_reference(contents))}
    filled["PLUGIN"] = (project / "README.vllm.md.in").read_text() if plugin else ""
    for name in ("pyproject.toml", "README.md"):
        files[name] = _fill((project / f"{name}.in").read_text(), filled).encode()
    files["backend.py"] = (project / "backend.py").read_bytes()
    files["LICENSE"] = _licence()
    return files, version


def _fill(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _table(contents: Contents) -> str:
    lines = ["| op | workload | arch | batch | template | predicted |", "|---|---|---|---|---|---|"]
    for k in contents.winners:
        m = k.manifest
        time = f"{m.prediction.us:.2f} us for {m.prediction.premises.machine}" if m.prediction else "none"
        batch = m.axes.get("B", 1)
        lines.append(f"| {m.op} | {m.workload} | {m.arch} | {batch} | {m.template} | {time} |")
    return "\n".join(lines)


def _by_reference(contents: Contents) -> tuple[str, ...]:
    return tuple(sorted(set(contents.ops) - {k.manifest.op for k in contents.winners}))


def _licence() -> bytes:
    """The Apache licence's text, of the repository or of the installed workbench."""
    path = content_root() / "LICENSE"
    if path.is_file():
        return path.read_bytes()
    text = importlib.metadata.distribution("workbench").read_text("licenses/LICENSE")
    return (text or "Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0\n").encode()


def _refuse_other_files(out: Path) -> None:
    """Nothing but an earlier export is replaced."""
    if out.exists() and not out.is_dir():
        raise WorkbenchError(f"{out} is a file; give a folder")
    try:
        others = sorted(p.name for p in out.iterdir() if p.name not in _PROJECT) if out.exists() else []
    except OSError as e:
        raise WorkbenchError(f"cannot read {out}: {e.strerror}; choose another folder") from e
    if others:
        raise WorkbenchError(f"{out} holds {others[0]}, which no export wrote; choose a new folder")


def _replace(out: Path, files: Mapping[str, bytes]) -> tuple[str, int]:
    """Write the files and the wheel beside `out`, then put them in its place; the wheel's path and size."""
    staging: Path | None = None
    old: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        staging.chmod(0o755)
        for name, data in files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (staging / "dist").mkdir()
        wheel = _backend(staging).build_wheel(staging / "dist")
        nbytes = (staging / "dist" / wheel).stat().st_size
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
            out.rename(old / out.name)
        staging.rename(out)
        staging = None
    except OSError as e:
        if old is not None and not out.exists():
            (old / out.name).rename(out)
        raise WorkbenchError(
            f"cannot write {out}: {e.strerror or e}; free space or choose a writable folder"
        ) from e
    finally:
        for leftover in (staging, old):
            if leftover is not None:
                shutil.rmtree(leftover, ignore_errors=True)
    return f"dist/{wheel}", nbytes


def _backend(project: Path) -> Any:
    spec = importlib.util.spec_from_file_location("k3_decode_backend", project / "backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module
