"""The artifact cache: damage, concurrency, folders that cannot be used."""

import multiprocessing
import os
from pathlib import Path

import pytest
from candidates import copy, request

from workbench.artifact import Artifact
from workbench.compile import ArtifactCache, CompileServer, compile_candidate
from workbench.errors import WorkbenchError


@pytest.fixture(scope="module")
def artifact(server: CompileServer) -> Artifact:
    return compile_candidate(request(copy()), server=server)


def test_round_trip_with_the_source_beside(artifact: Artifact, tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "new" / "cache")
    assert cache.get(artifact.key) is None
    cache.put(artifact)
    assert cache.get(artifact.key) == artifact
    assert cache.path(artifact.key).with_suffix(".py").read_text() == artifact.source
    assert cache.damaged == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: raw.replace(b"sm_103a", b"sm_100a", 1),
        lambda raw: raw[:-3] + b"\0\0\0",
        lambda raw: raw + b" ",
        lambda raw: bytes(1000),
        lambda raw: raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:],
    ],
)
def test_damage_is_found_and_compiled_away(
    artifact: Artifact, server: CompileServer, tmp_path: Path, damage: object
) -> None:
    cache = ArtifactCache(tmp_path)
    cache.put(artifact)
    path = cache.path(artifact.key)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert cache.get(artifact.key) is None and cache.damaged == 1 and not path.exists()
    assert compile_candidate(request(copy()), cache, server=server) == artifact
    assert cache.get(artifact.key) == artifact


def test_entry_under_another_key_is_damage(artifact: Artifact, tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    cache.put(artifact)
    other = "f" * 64
    cache.path(other).parent.mkdir(exist_ok=True)
    os.link(cache.path(artifact.key), cache.path(other))
    assert cache.get(other) is None and cache.damaged == 1
    assert cache.get(artifact.key) == artifact


def test_sass_is_made_once_and_belongs_to_the_cubin(artifact: Artifact, tmp_path: Path) -> None:
    cache, calls = ArtifactCache(tmp_path), []

    def disassemble(cubin: bytes) -> str:
        calls.append(cubin)
        return f"text of {len(cubin)} bytes\n"

    first = cache.sass(artifact, disassemble)
    assert cache.sass(artifact, disassemble) == first and calls == [artifact.cubin]
    path = cache.path(artifact.key).with_suffix(".sass")
    path.write_bytes(path.read_bytes()[:-2])
    assert cache.sass(artifact, disassemble) == first and len(calls) == 2
    changed = artifact.model_copy(update={"cubin": artifact.cubin + b"x"})
    assert cache.sass(changed, disassemble) != first and len(calls) == 3


def _hammer(root: Path, data: str, n: int) -> int:
    cache, artifact = ArtifactCache(root), Artifact.model_validate_json(data)
    for _ in range(n):
        cache.put(artifact)
        assert cache.get(artifact.key) == artifact
    return cache.damaged


def test_processes_share_a_cache(artifact: Artifact, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        damaged = pool.starmap(_hammer, [(tmp_path, artifact.model_dump_json(), 15)] * 4)
    assert damaged == [0] * 4
    assert ArtifactCache(tmp_path).get(artifact.key) == artifact
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


def test_unwritable_folder_is_one_line(artifact: Artifact, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = ArtifactCache(blocked / "cache")
    assert cache.get(artifact.key) is None
    with pytest.raises(WorkbenchError, match="writable folder") as caught:
        cache.put(artifact)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_read_only_folder_is_one_line(artifact: Artifact, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorkbenchError, match="writable folder"):
        ArtifactCache(tmp_path).put(artifact)
    tmp_path.chmod(0o700)
