"""Reads claim files: TOML, with the workbench documents that measurements are taken from. Checked whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.files import read_toml
from workbench.report.claims.documents import measured_in
from workbench.report.claims.model import Claim, ClaimFile, Entry, Measurement
from workbench.report.claims.premises import TERMS, contradiction, problem

FORMAT = 1
BUILT_IN: Mapping[str, Path] = {"k3-published": Path(__file__).resolve().parent / "k3_published.toml"}
"""Claim files that travel with the workbench, by name."""
_LARGEST = 1 << 20
"""Bytes of a claim file."""
_Table = dict[str, Any]
_E = TypeVar("_E", bound=Entry)


def find(text: str) -> tuple[Path, str | None]:
    """The file that `FILE` or `FILE:NAME` says, and the name.

    Raises:
        WorkbenchError: if there is no such file, and no claim file of that name travels with the workbench.
    """
    whole, colon, name = text.rpartition(":")
    for file, rest in ((text, None), *([(whole, name)] if colon and whole and name else [])):
        if Path(file).exists():
            return Path(file), rest
        if file in BUILT_IN:
            return BUILT_IN[file], rest
    raise WorkbenchError(f"there is no file {text}; give a claim file's path, or {', '.join(BUILT_IN)}")


def pair(new: str, old: str, times: str | None = None) -> ClaimFile:
    """The claim that one measurement is so many times as fast as another; both `FILE` or `FILE:RECORD`.

    Args:
        new: document with the measurement that is claimed to be faster.
        old: document with the one that it is set against.
        times: the ratio as printed; without it none is claimed.

    Raises:
        WorkbenchError: if a document has no measurement, or they are the same.
    """
    measurements = {}
    for name, text in (("new", new), ("old", old)):
        path, record = find(text)
        fields = {**measured_in(path, record), "name": name}
        fields["source"] = f"{text}, {fields['source']}"
        measurements[name] = _checked(path, "its measurement", Measurement, fields)
    text = f"{new} is {times} times as fast" if times is not None else f"{new} set against {old}"
    rate = measurements["new"].unit.endswith("/s")
    of, over = ("new", "old") if rate else ("old", "new")
    entry: _Table = {"name": "pair", "text": text, "of": of, "over": over}
    claim = _checked(Path("--times"), "claim", Claim, {**entry, "ratio": times})
    file = ClaimFile(title=f"{new} against {old}", measurements=measurements, claims={"pair": claim})
    _check_references(file, claim)
    return file


def load_claims(path: Path) -> ClaimFile:
    """Read a claim file.

    Raises:
        ContentError: naming the file, the entry and what is wrong with it.
    """
    if path.is_dir() or path.suffix in (".json", ".jsonl"):
        raise ContentError(path, "is a document, not a claim file; set it against another with --over")
    data = _read(path)
    title = data.pop("title", "")
    shared = data.pop("premises", {})
    if not isinstance(title, str) or not isinstance(shared, dict):
        raise ContentError(path, "title is text and premises a table")
    raw: dict[str, _Table] = {}
    for name, entry in _entries(path, data, "measurement"):
        raw[name] = _filled(path, name, entry, raw)
    measurements = {name: _measurement(path, name, entry, shared) for name, entry in raw.items()}
    claims = {n: _checked(path, f"claim {n}", Claim, entry) for n, entry in _entries(path, data, "claim")}
    if data:
        raise ContentError(path, f"has {next(iter(data))!r}, which no claim file has")
    if not claims:
        raise ContentError(path, "claims nothing: there is no [[claim]]")
    file = ClaimFile(title=title, measurements=measurements, claims=claims)
    for claim in claims.values():
        try:
            _check_references(file, claim)
        except WorkbenchError as e:
            raise ContentError(path, f"claim {claim.name}: {e}") from e
    return file


def _read(path: Path) -> _Table:
    data = read_toml(path, _LARGEST)
    said = data.pop("format", None)
    if said != FORMAT or isinstance(said, bool):
        raise ContentError(path, f"has format {said!r}; a claim file begins with `format = {FORMAT}`")
    return data


def _entries(path: Path, data: _Table, kind: str) -> Iterator[tuple[str, _Table]]:
    """The tables of a kind with their names, which differ."""
    entries, seen = data.pop(kind, []), set()
    if not isinstance(entries, list):
        raise ContentError(path, f"{kind} is no list of tables, [[{kind}]]")
    for number, entry in enumerate(entries, 1):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise ContentError(path, f"{kind} {number} has no name")
        if name in seen:
            raise ContentError(path, f"there are two entries [[{kind}]] named {name!r}")
        seen.add(name)
        yield name, entry


def _filled(path: Path, name: str, entry: _Table, earlier: Mapping[str, _Table]) -> _Table:
    """The entry over the one that it is `like`; the value of the other is not taken over."""
    entry = dict(entry)
    model = entry.pop("like", None)
    own = entry.setdefault("premises", {})
    if not isinstance(own, dict):
        raise ContentError(path, f"measurement {name}: premises is not a table")
    if model is None:
        return entry
    if not isinstance(model, str) or model not in earlier:
        unknown = UnknownNameError("measurement above it", str(model), earlier)
        raise ContentError(path, f"measurement {name}: {unknown}")
    base = {k: v for k, v in earlier[model].items() if k not in ("name", "value", "from", "record")}
    return {**base, **entry, "premises": {**base["premises"], **own}}


def _measurement(path: Path, name: str, entry: _Table, shared: _Table) -> Measurement:
    where = f"measurement {name}"
    stated = {**shared, **entry["premises"]}
    entry = {**entry, "premises": {n: value for n, value in stated.items() if value != "unknown"}}
    if "from" in entry or "record" in entry:
        entry = _from_document(path, where, entry)
    made = _checked(path, where, Measurement, entry)
    for premise, value in made.premises.items():
        if premise not in TERMS:
            raise ContentError(path, f"{where}: {UnknownNameError('premise', premise, TERMS)}")
        wrong = problem(premise, value)
        if wrong:
            raise ContentError(path, f"{where}: {wrong}")
    wrong = contradiction(made.premises)
    if wrong:
        raise ContentError(path, f"{where}: {wrong}")
    return made


def _from_document(path: Path, where: str, entry: _Table) -> _Table:
    """The entry with what the document says; what both say must be the same."""
    entry = dict(entry)
    document, record = entry.pop("from", None), entry.pop("record", None)
    if not isinstance(document, str) or not isinstance(record, str | None):
        raise ContentError(
            path, f"{where}: `from` is the path of a document, `record` the id of a record in it"
        )
    try:
        found = measured_in(path.parent / document, record)
    except WorkbenchError as e:
        raise ContentError(path, f"{where}: {e}") from e
    found["source"] = f"{document} {found['source']}".strip()
    premises = found.pop("premises")
    for held, said in ((found, entry), (premises, entry["premises"])):
        for name, value in held.items():
            if name in said and name not in ("source", "implementation", "quantity") and said[name] != value:
                raise ContentError(
                    path,
                    f"{where}: {name} is {said[name]!r} here and {value!r} in {document}; leave it out here",
                )
    return {**found, **entry, "premises": {**premises, **entry["premises"]}}


def _checked(path: Path, where: str, model: type[_E], entry: _Table) -> _E:
    try:
        return model.model_validate(entry)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(p) for p in first["loc"] if not str(p).startswith("function-"))
        message = first["msg"].removeprefix("Value error, ")
        raise ContentError(path, f"{where}: {f'{place}: ' if place else ''}{message}") from e


def _check_references(file: ClaimFile, claim: Claim) -> None:
    for name in filter(None, (claim.of, claim.over)):
        file.measurement(name)
    for name in claim.spans:
        if file.claim(name).over is None:
            raise WorkbenchError(f"it spans {name}, which is no ratio of two measurements")
    known = {"implementation", *TERMS}
    for name in (claim.varies, *claim.alike):
        if name not in known:
            raise UnknownNameError("premise", name, known)
    if claim.varies in claim.alike:
        raise WorkbenchError(f"{claim.varies} both varies and is alike")
    if claim.over is None:
        return
    assert claim.of is not None
    of, over = file.measurement(claim.of), file.measurement(claim.over)
    if of.name == over.name:
        raise WorkbenchError(f"it compares {of.name} with itself")
    for name in claim.alike:
        a, b = of.premises.get(name), over.premises.get(name)
        if a is not None and b is not None:
            raise WorkbenchError(f"it says that {name} is alike, and both sides state it: {a}, {b}")
    sides = [
        m.implementation if claim.varies == "implementation" else m.premises.get(claim.varies)
        for m in (of, over)
    ]
    if sides[0] == sides[1] and sides[0] is not None:
        raise WorkbenchError(f"nothing varies: {claim.varies} is {sides[0]!r} on both sides")
