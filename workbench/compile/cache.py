"""Artifacts on disk by content key: safe for several processes at once, damage found and compiled away."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from workbench.artifact import Artifact
from workbench.errors import WorkbenchError
from workbench.files import write_atomic

_MAGIC = b"workbench-artifact-1 "


class ArtifactCache:
    """Folder of artifacts: `<root>/<first two>/<key>.artifact`, beside it `<key>.py` and `<key>.sass`.

    An entry is written whole or not at all (`workbench.files.write_atomic`), holds a checksum, and is read
    back only if checksum, schema and key agree. Deleting the folder is always safe.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged = 0
        """Entries that were found damaged and dropped."""

    def path(self, key: str) -> Path:
        """Path of an entry, whether or not it exists."""
        return self.root / key[:2] / f"{key}.artifact"

    def get(self, key: str) -> Artifact | None:
        """The artifact with this key, or None. A damaged entry is removed and counted in `damaged`.

        Raises:
            WorkbenchError: if the entry exists and cannot be read.
        """
        data = self._read(self.path(key))
        if data is None:
            return None
        try:
            artifact = Artifact.model_validate_json(data)
        except ValidationError:
            artifact = None
        if artifact is None or artifact.key != key:
            self._drop(self.path(key))
            return None
        return artifact

    def put(self, artifact: Artifact) -> None:
        """Store an artifact and its source; raises WorkbenchError if the folder cannot be written."""
        path = self.path(artifact.key)
        write_atomic(path, _seal(artifact.model_dump_json().encode()))
        write_atomic(path.with_suffix(".py"), artifact.source)

    def sass(self, artifact: Artifact, disassemble: Callable[[bytes], str]) -> str:
        """SASS text of an artifact's cubin: the stored one, else made by `disassemble(cubin)` and stored."""
        path = self.path(artifact.key).with_suffix(".sass")
        # The text belongs to these very bytes, whatever the key says.
        digest = hashlib.sha256(artifact.cubin).hexdigest().encode()
        data = self._read(path)
        if data is not None and data.startswith(digest):
            return data[len(digest) :].decode(errors="replace")
        text = disassemble(artifact.cubin)
        write_atomic(path, _seal(digest + text.encode()))
        return text

    def _read(self, path: Path) -> bytes | None:
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise WorkbenchError(f"cannot read {path}: {e.strerror}; fix its permissions or delete it") from e
        digest, _, data = raw.removeprefix(_MAGIC).partition(b"\n")
        if not raw.startswith(_MAGIC) or hashlib.sha256(data).hexdigest().encode() != digest:
            self._drop(path)
            return None
        return data

    def _drop(self, path: Path) -> None:
        self.damaged += 1
        try:
            path.unlink(missing_ok=True)
        except OSError as e:
            raise WorkbenchError(f"{path} is damaged and cannot be removed: {e.strerror}; delete it") from e


def _seal(data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n" + data
