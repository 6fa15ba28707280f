"""Builds the wheel and the source archive of this package with the standard library: offline, the same bytes
every time."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PACKAGE = "k3_decode"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build_wheel(
    wheel_directory: str | Path, config_settings: object = None, metadata_directory: str | None = None
) -> str:
    """PEP 517: write the wheel and return its name."""
    tag = "py3-none-any"
    name = f"{PACKAGE}-{_project()['version']}-{tag}.whl"
    info = f"{PACKAGE}-{_project()['version']}.dist-info"
    files = {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in _sources()}
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: k3_decode\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    )
    if (ROOT / "entry_points.txt").exists():
        files[f"{info}/entry_points.txt"] = (ROOT / "entry_points.txt").read_bytes()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = "".join(f"{n},sha256={_digest(data)},{len(data)}\n" for n, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return name


def build_sdist(sdist_directory: str | Path, config_settings: object = None) -> str:
    """PEP 517: write the source archive and return its name."""
    top = f"{PACKAGE}-{_project()['version']}"
    extra = ["pyproject.toml", "backend.py", "README.md", "LICENSE", "entry_points.txt"]
    files = {n: (ROOT / n).read_bytes() for n in extra if (ROOT / n).exists()}
    files |= {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in _sources()}
    files["PKG-INFO"] = _metadata().encode()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    (Path(sdist_directory) / f"{top}.tar.gz").write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return f"{top}.tar.gz"


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _metadata() -> str:
    p = _project()
    lines = [
        "Metadata-Version: 2.4", f"Name: {p['name']}", f"Version: {p['version']}",
        f"Summary: {p['description']}",
        f"Requires-Python: {p['requires-python']}", f"License-Expression: {p['license']}",
        "License-File: LICENSE", "Description-Content-Type: text/markdown",
        *(f"Requires-Dist: {d}" for d in p["dependencies"]),
    ]  # fmt: skip
    for extra, wanted in p.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {d}; extra == "{extra}"' for d in wanted]
    return "\n".join(lines) + "\n\n" + (ROOT / "README.md").read_text()


def _sources() -> list[Path]:
    found = [*(ROOT / PACKAGE).rglob("*"), *ROOT.glob(f"{PACKAGE}_*.py")]
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
