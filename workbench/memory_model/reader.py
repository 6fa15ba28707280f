"""Reads a litmus test: header, declarations, a table with one thread a column, filter and condition.

docs/memory-model.md describes the dialect.
"""

from __future__ import annotations

import re
from pathlib import Path

from workbench.memory_model.assembler import Assembler
from workbench.memory_model.condition import Compare, Condition, Every, Not, Some, Term
from workbench.memory_model.program import (
    MASK,
    GridEdge,
    Instruction,
    Label,
    Litmus,
    Location,
    Mbarrier,
    Place,
    Proxy,
    Quantifier,
    Thread,
)
from workbench.memory_model.text import Cursor, LitmusError, Source, shown

_SPACE = re.compile(r"(?:\s|\(\*.*?\*\))*", re.S)
_STRING = re.compile(r'"([^"]*)"')
_QUANTIFIER = re.compile(r"(filter|forall|(?:~|not\s)?\s*exists)\b")
_MAX_ELEMENTS = 64
_MAX_DEPTH = 60


def parse(text: str, source: str = "<text>") -> Litmus:
    """Read a litmus test.

    Args:
        text: the test.
        source: what errors call it, usually the path.

    Raises:
        LitmusError: with the line of what cannot be understood.
    """
    return _Reader(Source(source, text)).test()


def read(path: Path) -> Litmus:
    """Read a litmus test from a file; raises LitmusError, also where the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise LitmusError(path, f"cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise LitmusError(path, "is not UTF-8 text") from e
    return parse(text, str(path))


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.text = source, source.text
        self.locations: dict[str, Location] = {}
        self.mbarriers: dict[str, Mbarrier] = {}
        self.grids: list[GridEdge] = []
        self.initial: list[tuple[str, str, int, int]] = []
        """Thread, register, value and offset of each initial register."""
        self.threads: dict[str, int] = {}

    def test(self) -> Litmus:
        name, comments, offset = self._header()
        offset = self._declarations(offset)
        threads, offset = self._table(offset)
        registers = []
        for thread, register, value, at in self.initial:
            if thread not in self.threads:
                self.source.fail(at, f"there is no thread {thread}")
            registers.append((self.threads[thread], register, value))
        restriction, quantifier, condition = self._conditions(offset)
        return Litmus(
            name=name,
            locations=tuple(self.locations.values()),
            threads=threads,
            quantifier=quantifier,
            condition=condition,
            registers=tuple(registers),
            mbarriers=tuple(self.mbarriers.values()),
            grids=tuple(self.grids),
            filter=restriction,
            comments=comments,
        )

    def _header(self) -> tuple[str, tuple[str, ...], int]:
        offset = self._skip(0)
        match = re.compile(r"PTX[ \t]+(\S+)[ \t]*(?:\n|$)").match(self.text, offset)
        if match is None:
            self.source.fail(offset, "a litmus test begins with the line `PTX NAME`")
        comments = []
        offset = self._skip(match.end())
        while string := _STRING.match(self.text, offset):
            comments.append(string.group(1))
            offset = self._skip(string.end())
        return match.group(1), tuple(comments), offset

    def _skip(self, offset: int) -> int:
        match = _SPACE.match(self.text, offset)
        return match.end() if match else offset

    # -- declarations ---------------------------------------------------------------------------------

    def _declarations(self, offset: int) -> int:
        if not self.text.startswith("{", offset):
            self.source.fail(offset, "expected `{` and the declarations")
        depth, end = 0, offset
        while True:
            if end >= len(self.text):
                self.source.fail(offset, "the declarations have no closing `}`")
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            if depth == 0:
                break
            end += 1
        start = offset + 1
        while start < end:
            stop = self.text.find(";", start, end)
            stop = end if stop < 0 else stop
            cursor = Cursor(self.source, start, stop)
            if cursor.peek():
                self._declaration(cursor)
                cursor.end()
            start = stop + 1
        for location in self.locations.values():
            if location.aliases is not None and location.aliases not in self.locations:
                target = location.aliases
                self.source.fail(offset, f"{location.name} is an alias of {target}, which is not declared")
        self._check_aliases(offset)
        return end + 1

    def _check_aliases(self, offset: int) -> None:
        for location in self.locations.values():
            seen, at = {location.name}, location
            while at.aliases is not None:
                if at.aliases in seen:
                    self.source.fail(offset, f"{location.name} is an alias of itself")
                seen.add(at.aliases)
                at = self.locations[at.aliases]

    def _declaration(self, cursor: Cursor) -> None:
        at = cursor.offset
        what = "a location or a register"
        name = f"P{cursor.integer()}" if cursor.at_integer() else cursor.word(what)
        if cursor.accept(":"):
            register = cursor.word("a register")
            cursor.expect("=")
            self.initial.append((name, register, cursor.integer(), at))
            return
        if name == "grid" and cursor.at_integer():
            self._grid(cursor)
            return
        if name in self.locations or name in self.mbarriers:
            self.source.fail(at, f"{name} is declared twice")
        if cursor.accept("@"):
            self._alias(name, cursor)
            return
        length = None
        if cursor.accept("["):
            length = cursor.integer("the number of elements")
            cursor.expect("]")
            if not 1 <= length <= _MAX_ELEMENTS:
                self.source.fail(at, f"an array has 1 to {_MAX_ELEMENTS} elements")
        values: tuple[int, ...] = (0,) * (length or 1)
        if cursor.accept("="):
            if length is not None and cursor.accept("{"):
                given = [cursor.integer()]
                while cursor.accept(","):
                    given.append(cursor.integer())
                cursor.expect("}")
                if len(given) != length:
                    self.source.fail(at, f"{name} has {length} elements, {len(given)} are given")
                values = tuple(given)
            else:
                values = (cursor.integer(),) * (length or 1)
        self.locations[name] = Location(name, values, array=length is not None)

    def _alias(self, name: str, cursor: Cursor) -> None:
        kind = cursor.word("a proxy or `mbarrier`")
        if kind == "mbarrier":
            count = cursor.integer("the number of arrivals")
            if not 1 <= count < 1 << 20:
                cursor.fail("an mbarrier counts 1 to 1048575 arrivals")
            self.mbarriers[name] = Mbarrier(name, count)
            return
        if kind.upper() not in Proxy.__members__:
            cursor.fail(f"unknown proxy {kind!r}; there are {', '.join(p.name.lower() for p in Proxy)}")
        if not cursor.accept("aliases"):
            cursor.fail(f"expected `aliases` and a location, found {cursor.found()}")
        target = cursor.word("a location")
        self.locations[name] = Location(name, (), aliases=target, proxy=Proxy[kind.upper()])

    def _grid(self, cursor: Cursor) -> None:
        at = cursor.offset
        later = cursor.integer("a grid's number")
        cursor.expect("@")
        kind = cursor.word("`stream` or `programmatic`")
        if kind not in ("stream", "programmatic"):
            cursor.fail(f"a grid is launched by `stream` or `programmatic`, not {kind!r}")
        cursor.expect("after")
        earlier = cursor.integer("the earlier grid's number")
        if earlier >= later:
            self.source.fail(at, "a grid comes after one with a lower number")
        self.grids.append(GridEdge(later, earlier, kind == "programmatic"))

    # -- the table ------------------------------------------------------------------------------------

    def _table(self, offset: int) -> tuple[tuple[Thread, ...], int]:
        places: list[tuple[str, Place]] = []
        columns: list[list[Instruction]] = []
        while True:
            offset = self._skip(offset)
            if offset >= len(self.text):
                self.source.fail(offset, "the test has no condition (exists, ~exists or forall)")
            if _QUANTIFIER.match(self.text, offset):
                break
            end = self.text.find(";", offset)
            if end < 0:
                self.source.fail(offset, "a row of the table ends with `;`")
            cells = self._cells(offset, end)
            if not places:
                places = [self._place(Cursor(self.source, a, b)) for a, b in cells]
                columns = [[] for _ in places]
            else:
                if len(cells) != len(places):
                    counts = f"this row has {len(cells)} columns, the first has {len(places)}"
                    self.source.fail(offset, counts)
                self._row(cells, columns)
            offset = end + 1
        if not places:
            self.source.fail(offset, "the test has no threads")
        threads = tuple(Thread(n, p, tuple(c)) for (n, p), c in zip(places, columns, strict=True))
        self._check_labels(threads)
        return threads, offset

    def _cells(self, start: int, end: int) -> list[tuple[int, int]]:
        cells = []
        while (bar := self.text.find("|", start, end)) >= 0:
            cells.append((start, bar))
            start = bar + 1
        return [*cells, (start, end)]

    def _place(self, cursor: Cursor) -> tuple[str, Place]:
        at = cursor.offset
        name = cursor.word("a thread, for instance `P0@cta 0,gpu 0`")
        if name in self.threads:
            self.source.fail(at, f"thread {name} is there twice")
        cursor.expect("@")
        given: dict[str, int] = {}
        while True:
            key = cursor.word("cta, gpu, cluster, warp or grid")
            if key not in ("cta", "gpu", "cluster", "warp", "grid") or key in given:
                known = "cta, gpu, cluster, warp and grid, each once"
                self.source.fail(at, f"a thread's place says {known}; not {key!r}")
            given[key] = cursor.integer()
            if not cursor.accept(","):
                break
        cursor.end()
        if "cta" not in given or "gpu" not in given:
            self.source.fail(at, f"say the cta and the gpu of {name}, for instance `{name}@cta 0,gpu 0`")
        self.threads[name] = len(self.threads)
        grid = given.get("grid", 0)
        return name, Place(given["cta"], given["gpu"], given.get("cluster"), grid, given.get("warp"))

    def _row(self, cells: list[tuple[int, int]], columns: list[list[Instruction]]) -> None:
        for (start, end), column in zip(cells, columns, strict=True):
            label = re.compile(r"\s*([A-Za-z_]\w*)\s*:(?!:)").match(self.text, start, end)
            if label:
                column.append(Label(label.group(1), line=self.source.line(label.start(1))))
                start = label.end()
            if self.text[start:end].strip():
                assembler = Assembler(self.source, start, end, self.locations, self.mbarriers)
                column.append(assembler.instruction())

    def _check_labels(self, threads: tuple[Thread, ...]) -> None:
        for thread in threads:
            labels = [i.name for i in thread.code if isinstance(i, Label)]
            for instruction in thread.code:
                target = getattr(instruction, "target", None)
                wrong = None
                if isinstance(target, str) and target not in labels:
                    wrong = f"{thread.name} has no label {target}"
                if isinstance(instruction, Label) and labels.count(instruction.name) > 1:
                    wrong = f"label {instruction.name} is there twice in {thread.name}"
                if wrong:
                    raise LitmusError(self.source.name, wrong, instruction.line)

    # -- conditions -----------------------------------------------------------------------------------

    def _conditions(self, offset: int) -> tuple[Condition | None, Quantifier, Condition]:
        cursor = Cursor(self.source, offset, len(self.text))
        restriction = None
        if cursor.accept("filter"):
            restriction = self._disjunction(cursor, 0)
        negated = cursor.accept("~", "not")
        word = cursor.peek()
        if word not in ("exists", "forall") or (negated and word == "forall"):
            cursor.fail(f"expected exists, ~exists or forall, found {cursor.found()}")
        cursor.take()
        condition = self._disjunction(cursor, 0)
        cursor.accept(";")
        cursor.end()
        if word == "forall":
            return restriction, Quantifier.ALWAYS, condition
        return restriction, Quantifier.NEVER if negated else Quantifier.EXISTS, condition

    def _disjunction(self, cursor: Cursor, depth: int) -> Condition:
        parts = [self._conjunction(cursor, depth)]
        while cursor.accept("\\/", "||"):
            parts.append(self._conjunction(cursor, depth))
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def _conjunction(self, cursor: Cursor, depth: int) -> Condition:
        parts = [self._factor(cursor, depth)]
        while cursor.accept("/\\", "&&"):
            parts.append(self._factor(cursor, depth))
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _factor(self, cursor: Cursor, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            cursor.fail("the condition is nested too deeply")
        if cursor.accept("~", "not"):
            return Not(self._factor(cursor, depth + 1))
        if cursor.accept("("):
            inner = self._disjunction(cursor, depth + 1)
            cursor.expect(")")
            return inner
        if cursor.accept("true"):
            return Every(())
        if cursor.accept("false"):
            return Some(())
        left = self._term(cursor)
        relation = cursor.take()
        if relation == "=":
            relation = "=="
        if relation not in ("==", "!=", "<", "<=", ">", ">="):
            cursor.fail(f"expected a comparison such as == or !=, found {shown(relation)}")
        return Compare(left, relation, self._term(cursor))

    def _term(self, cursor: Cursor) -> Term | int:
        at = cursor.offset
        if cursor.at_integer() and cursor.peek(1) == ":":
            name = f"P{cursor.integer()}"
        elif cursor.at_integer():
            return cursor.integer() & MASK
        else:
            name = cursor.word("a register such as P0:r0, a location or an integer")
        if cursor.accept(":"):
            if name not in self.threads:
                self.source.fail(at, f"there is no thread {name}")
            return Term(cursor.word("a register"), self.threads[name])
        if name not in self.locations:
            self.source.fail(at, f"location {name} is not declared; a register is written P0:{name}")
        index = None
        size, array = extent(self.locations, name)
        if cursor.accept("["):
            index = cursor.integer("an element's number")
            cursor.expect("]")
            if not array or index >= size:
                self.source.fail(at, f"{name} has no element {index}")
        elif array:
            self.source.fail(at, f"{name} is an array; say which element, for instance {name}[0]")
        return Term(name, None, index)


def extent(locations: dict[str, Location], name: str) -> tuple[int, bool]:
    """Number of elements of a location, through its aliases, and whether it is an array."""
    location = locations[name]
    while location.aliases is not None:
        location = locations[location.aliases]
    return len(location.initial), location.array
