"""The container of an evidence bundle: a plain tar file with exactly one form for the same members.

The first member, `SHA256SUMS`, lists every other one in order with its size and hash, and ends with a hash of
itself. From that list each byte of the file follows but for the members' own: headers, padding, end. So the
reader takes no tar header at its word, writes nothing to disk, and can say of any byte that is not as it was
written which member it belongs to, or that it belongs to the container. `tar xf` and
`sha256sum -c SHA256SUMS` read it too.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.errors import ContentError, WorkbenchError

FORMAT = 1
SUMS = "SHA256SUMS"
CONTAINER = "container"
"""What a damage names for a byte that belongs to no member."""

MOST_MEMBERS = 10_000
LARGEST_MEMBER = 64 << 20
LARGEST_BUNDLE = 256 << 20
"""Bytes."""
_LARGEST_SUMS = 4 << 20
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_LONGEST_NAME = 200

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")
_TITLE = f"# workbench evidence {FORMAT}; members in order, the bytes of each before its hash\n"
_FIRST = re.compile(r"# workbench evidence (\d{1,9}); [^\n]*\n")
_ENTRY = re.compile(r"# (0|[1-9]\d{0,11})\n([0-9a-f]{64})  ([^\n]+)\n")
_SELF = re.compile(rb"# itself ([0-9a-f]{64})\n")


@dataclass(frozen=True)
class Damage:
    """A place where a bundle is not what was written."""

    where: str
    """The member's name, or `container`."""
    what: str
    """One line: what is wrong there."""
    offset: int | None = None
    """First byte concerned in the file, where it is known."""


@dataclass(frozen=True)
class Contents:
    """What a file holds: members that are as they were written, and the damages."""

    members: Mapping[str, bytes] = field(repr=False)
    """By name, in order; without `SHA256SUMS` and without damaged ones."""
    damages: tuple[Damage, ...]
    sha256: str
    """Of the whole file."""
    nbytes: int


@dataclass(frozen=True)
class _Entry:
    name: str
    nbytes: int
    sha256: str


def pack(members: Mapping[str, bytes]) -> bytes:
    """The bundle's bytes: the same members give the same bytes, on any machine and day.

    Raises:
        WorkbenchError: for a name or a size that a bundle cannot hold.
    """
    entries = []
    for name in sorted(members):
        data = members[name]
        if name == SUMS or not is_name(name):
            raise WorkbenchError(f"{name!r} cannot be the name of a member of a bundle")
        if len(data) > LARGEST_MEMBER:
            raise WorkbenchError(f"{name} has {len(data)} bytes; a member may have {LARGEST_MEMBER}")
        entries.append(_Entry(name, len(data), hashlib.sha256(data).hexdigest()))
    if len(entries) > MOST_MEMBERS:
        raise WorkbenchError(f"{len(entries)} files are too many for one bundle; it may have {MOST_MEMBERS}")
    sums = _sums(entries)
    parts = [*_framed(SUMS, sums)]
    for entry in entries:
        parts += _framed(entry.name, members[entry.name])
    whole = b"".join((*parts, _END))
    if len(whole) > LARGEST_BUNDLE:
        raise WorkbenchError(f"the bundle would have {len(whole)} bytes; it may have {LARGEST_BUNDLE}")
    return whole


def is_name(name: str) -> bool:
    """True for a relative path of plain words: nothing that leaves a folder or hides in it."""
    return len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) is not None


def read_file(path: Path) -> bytes:
    """The bytes of a bundle's file; raises ContentError if it cannot be read or is too large for a bundle."""
    try:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "there is no such file"
            raise ContentError(path, f"{reason}; give a bundle that `workbench evidence make` wrote")
        with path.open("rb") as f:
            data = f.read(LARGEST_BUNDLE + 1)
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror or e}") from e
    if len(data) > LARGEST_BUNDLE:
        raise ContentError(path, f"is larger than a bundle may be ({LARGEST_BUNDLE >> 20} MiB)")
    return data


def unpack(data: bytes, place: object) -> Contents:
    """Read a bundle and find every byte that is not as it was written.

    Args:
        data: the file's bytes.
        place: the file, for messages.

    Raises:
        ContentError: if it is no bundle, or one of a newer format. Damage is no error; see `damages`.
    """
    whole = hashlib.sha256(data).hexdigest()
    damages: list[Damage] = []
    sums = _find_sums(data, place, damages)
    entries = _read_sums(sums, place, damages)
    if entries is None:
        return Contents({}, tuple(damages), whole, len(data))
    members: dict[str, bytes] = {}
    position = _past(_BLOCK + len(sums))
    for n, entry in enumerate(entries):
        if position >= len(data):
            lost = f"the file ends before {entry.name}: {len(entries) - n} members are missing"
            damages.append(Damage(CONTAINER, lost, len(data)))
            return Contents(members, tuple(damages), whole, len(data))
        position = _header(data, position, entry.name, entry.nbytes, damages)
        content = data[position : position + entry.nbytes]
        if len(content) < entry.nbytes:
            damages.append(Damage(entry.name, f"is cut off after {len(content)} of {entry.nbytes} bytes"))
        elif hashlib.sha256(content).hexdigest() != entry.sha256:
            damages.append(Damage(entry.name, f"is not what {SUMS} says: its hash differs", position))
        else:
            members[entry.name] = content
        position = _padding(data, position + entry.nbytes, entry.name, damages)
    end = data[position : position + len(_END)]
    if end != _END:
        damages.append(_differs(end, _END, position, "the end of the archive"))
    if len(data) > position + len(_END):
        more = len(data) - position - len(_END)
        damages.append(Damage(CONTAINER, f"{more} bytes after the end of the archive", position + len(_END)))
    return Contents(members, tuple(damages), whole, len(data))


def _find_sums(data: bytes, place: object, damages: list[Damage]) -> bytes:
    """The list of members: as long as its header says, or, if that is damaged, as its last line says."""
    last = _SELF.search(data, _BLOCK, _BLOCK + _LARGEST_SUMS)
    lengths = [_size_in(data[:_BLOCK])]
    if last is not None:
        lengths.append(last.end() - _BLOCK)
    for size in lengths:
        if size is not None and size <= _LARGEST_SUMS and data[:_BLOCK] == _tar_header(SUMS, size):
            _padding(data, _BLOCK + size, SUMS, damages)
            return data[_BLOCK : _BLOCK + size]
    if last is None or not data[_BLOCK:].startswith(_TITLE.encode()[:20]):
        raise ContentError(place, "is no evidence bundle; give a file that `workbench evidence make` wrote")
    size = last.end() - _BLOCK
    damages.append(_differs(data[:_BLOCK], _tar_header(SUMS, size), 0, f"the header of {SUMS}"))
    _padding(data, _BLOCK + size, SUMS, damages)
    return data[_BLOCK : _BLOCK + size]


def _read_sums(sums: bytes, place: object, damages: list[Damage]) -> tuple[_Entry, ...] | None:
    """The entries, or None with the damage noted if the list itself cannot be trusted."""
    body, last = sums[:-74], sums[-74:]
    m = _SELF.fullmatch(last)
    if m is None or hashlib.sha256(body).hexdigest() != m[1].decode():
        what = "its hash of itself is not right, so that what the other members should be is unknown"
        damages.append(Damage(SUMS, what, _BLOCK))
        return None
    try:
        text = body.decode("ascii")
    except UnicodeDecodeError:
        damages.append(Damage(SUMS, "is not plain ASCII"))
        return None
    first = _FIRST.match(text)
    if first is not None and int(first[1]) > FORMAT:
        raise ContentError(
            place, f"is a bundle of format {first[1]}, this version reads {FORMAT}; use a newer workbench"
        )
    entries: list[_Entry] = []
    at = len(_TITLE) if text.startswith(_TITLE) else -1
    while 0 <= at < len(text):
        e = _ENTRY.match(text, at)
        in_order = e is not None and (not entries or entries[-1].name < e[3])
        if e is None or not (in_order and is_name(e[3]) and int(e[1]) <= LARGEST_MEMBER):
            at = -1
        else:
            entries.append(_Entry(e[3], int(e[1]), e[2]))
            at = e.end() if len(entries) <= MOST_MEMBERS else -1
    if at < 0 or sum(e.nbytes for e in entries) > LARGEST_BUNDLE or any(e.name == SUMS for e in entries):
        damages.append(Damage(SUMS, "is no list of members: a line, a name, a size or their order is wrong"))
        return None
    return tuple(entries)


def _sums(entries: list[_Entry]) -> bytes:
    body = (_TITLE + "".join(f"# {e.nbytes}\n{e.sha256}  {e.name}\n" for e in entries)).encode()
    return body + f"# itself {hashlib.sha256(body).hexdigest()}\n".encode()


def _framed(name: str, content: bytes) -> tuple[bytes, bytes, bytes]:
    return _tar_header(name, len(content)), content, bytes(_past(len(content)) - len(content))


def _tar_header(name: str, nbytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = nbytes, 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _size_in(header: bytes) -> int | None:
    m = re.fullmatch(rb"([0-7]{11})\0", header[124:136])
    return int(m[1], 8) if m else None


def _header(data: bytes, position: int, name: str, nbytes: int, damages: list[Damage]) -> int:
    found, wanted = data[position : position + _BLOCK], _tar_header(name, nbytes)
    if found != wanted:
        damages.append(_differs(found, wanted, position, f"the header of {name}"))
    return position + _BLOCK


def _padding(data: bytes, position: int, name: str, damages: list[Damage]) -> int:
    end = _past(position)
    found = data[position:end]
    if found != bytes(end - position):
        damages.append(_differs(found, bytes(end - position), position, f"the padding after {name}"))
    return end


def _differs(found: bytes, wanted: bytes, position: int, what: str) -> Damage:
    at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found))
    if at == len(found):
        return Damage(CONTAINER, f"the file ends within {what}", position + at)
    return Damage(CONTAINER, f"{what} is changed", position + at)


def _past(position: int) -> int:
    return -(-position // _BLOCK) * _BLOCK
