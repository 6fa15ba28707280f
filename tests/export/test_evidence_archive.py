from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import ContentError, WorkbenchError
from workbench.export.evidence import archive
from workbench.export.evidence.archive import CONTAINER, SUMS, Contents, pack, unpack

MEMBERS = {
    "bundle.json": b"{}\n",
    "kernels/op/w-sm_103a/0123/kernel.cubin": bytes(range(256)) * 5,
    "kernels/op/w-sm_103a/0123/kernel.py": b"#" * 512,
    "kernels/op/w-sm_103a/0123/records.jsonl": b"",
}
WHOLE = pack(MEMBERS)


def read(data: bytes) -> Contents:
    return unpack(data, "b.tar")


def owner(position: int) -> str:
    """Whose byte it is, by what Python's own reader of tar files says."""
    with tarfile.open(fileobj=io.BytesIO(WHOLE)) as tar:
        for info in tar:
            if info.offset_data <= position < info.offset_data + info.size:
                return info.name
    return CONTAINER


OWNERS = [owner(n) for n in range(len(WHOLE))]


def test_what_was_packed_is_read() -> None:
    contents = read(WHOLE)
    assert dict(contents.members) == MEMBERS and contents.damages == ()
    assert contents.sha256 == hashlib.sha256(WHOLE).hexdigest() and contents.nbytes == len(WHOLE)


def test_the_order_of_members_does_not_matter() -> None:
    assert pack(dict(reversed(MEMBERS.items()))) == WHOLE


def test_tar_and_sha256sum_read_it(tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_bytes(WHOLE)
    subprocess.run(["tar", "xf", "b.tar"], cwd=tmp_path, check=True)
    assert {n: (tmp_path / n).read_bytes() for n in MEMBERS} == MEMBERS
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.count(": OK") == len(MEMBERS) and done.stderr == ""
    (tmp_path / "bundle.json").write_bytes(b"{ }")
    assert subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path, capture_output=True).returncode != 0


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_one_changed_byte_anywhere_is_named(position: int, flip: int) -> None:
    changed = bytearray(WHOLE)
    changed[position] ^= flip
    (damage,) = read(bytes(changed)).damages
    assert damage.where == OWNERS[position]
    if damage.where == CONTAINER:
        assert damage.offset == position
    assert damage.where not in read(bytes(changed)).members


def test_a_changed_byte_is_named_all_over_the_file() -> None:
    for position in range(0, len(WHOLE), 8):
        changed = bytearray(WHOLE)
        changed[position] ^= 1
        assert [d.where for d in read(bytes(changed)).damages] == [OWNERS[position]], position


@given(st.integers(512, len(WHOLE) - 1))
def test_a_file_that_is_cut_off_is_damaged(length: int) -> None:
    assert read(WHOLE[:length]).damages


@given(st.integers(0, 511))
def test_less_than_the_first_header_is_no_bundle(length: int) -> None:
    with pytest.raises(ContentError, match="no evidence bundle"):
        read(WHOLE[:length])


@given(st.binary(min_size=1, max_size=2000))
def test_bytes_after_the_end_are_named(more: bytes) -> None:
    (damage,) = read(WHOLE + more).damages
    assert damage.where == CONTAINER and f"{len(more)} bytes after" in damage.what


@given(st.binary(max_size=3000))
def test_any_other_file_is_no_bundle(data: bytes) -> None:
    with pytest.raises(ContentError, match="no evidence bundle"):
        read(data)


def test_several_damages_are_all_named() -> None:
    changed = bytearray(WHOLE)
    for name in ("bundle.json", "kernels/op/w-sm_103a/0123/kernel.cubin"):
        changed[OWNERS.index(name)] ^= 1
    changed[-1] ^= 1
    assert [d.where for d in read(bytes(changed)).damages] == [
        "bundle.json", "kernels/op/w-sm_103a/0123/kernel.cubin", CONTAINER,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../b", "a//b", ".hidden", "a/.b", "a b", "a\nb", "", "x" * 201, SUMS, "ä"]
)
def test_a_name_that_could_leave_a_folder_is_not_packed(name: str) -> None:
    with pytest.raises(WorkbenchError, match="cannot be the name"):
        pack({name: b""})


def forged(change: Callable[[str], str]) -> bytes:
    """The bundle with its list of members rewritten and signed by itself, as an attacker would."""
    sums = WHOLE[512 : 512 + archive._size_in(WHOLE[:512])]  # type: ignore[operator]
    body = change(sums[:-74].decode()).encode()
    new = body + f"# itself {hashlib.sha256(body).hexdigest()}\n".encode()
    rest = WHOLE[archive._past(512 + len(sums)) :]
    return b"".join(archive._framed(SUMS, new)) + rest


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("bundle.json", "../bundle.json"),
        lambda t: t.replace("bundle.json", "/etc/passwd"),
        lambda t: t.replace("  bundle.json", "  zzz"),
        lambda t: t.replace("kernel.py", "kernel.cubin"),
        lambda t: t.replace("# 3\n", "# 99999999999\n"),
        lambda t: t.replace("# 3\n", "# -3\n"),
        lambda t: t.replace("# 3\n", ""),
        lambda t: t + "more\n",
        lambda t: "",
    ],
)
def test_a_forged_list_is_refused(change: Callable[[str], str]) -> None:
    data = forged(change)
    assert data != WHOLE
    contents = read(data)
    assert [d.where for d in contents.damages] == [SUMS] and not contents.members


def test_a_forged_size_does_not_make_a_reader_read_past_the_end() -> None:
    data = forged(lambda t: t.replace("# 3\n", f"# {archive.LARGEST_MEMBER}\n"))
    contents = read(data)
    assert contents.damages and not contents.members


def test_a_symbolic_link_in_the_container_is_a_damage() -> None:
    position = OWNERS.index("bundle.json") - 512
    info = tarfile.TarInfo("bundle.json")
    info.type, info.linkname, info.mode = tarfile.SYMTYPE, "/etc/passwd", 0o644
    data = WHOLE[:position] + info.tobuf(tarfile.USTAR_FORMAT) + WHOLE[position + 512 :]
    assert [d.where for d in read(data).damages] == [CONTAINER]


def test_a_newer_format_is_said() -> None:
    with pytest.raises(ContentError, match=r"format 2.*newer workbench"):
        read(forged(lambda t: t.replace("evidence 1;", "evidence 2;")))


def test_a_folder_and_an_absent_file_are_said(tmp_path: Path) -> None:
    with pytest.raises(ContentError, match="is a folder"):
        archive.read_file(tmp_path)
    with pytest.raises(ContentError, match="no such file"):
        archive.read_file(tmp_path / "b.tar")


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "LARGEST_MEMBER", 4)
    with pytest.raises(WorkbenchError, match="may have 4"):
        pack({"a": b"12345"})
    monkeypatch.setattr(archive, "MOST_MEMBERS", 1)
    with pytest.raises(WorkbenchError, match="too many"):
        pack({"a": b"", "b": b""})
    monkeypatch.setattr(archive, "LARGEST_BUNDLE", 100)
    with pytest.raises(WorkbenchError, match="it may have 100"):
        pack({"a": b""})
    (tmp_path / "b.tar").write_bytes(WHOLE)
    with pytest.raises(ContentError, match="larger than a bundle"):
        archive.read_file(tmp_path / "b.tar")
