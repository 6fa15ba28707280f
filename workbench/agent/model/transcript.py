"""Everything that was said to a model and by it, append-only: one JSON line an exchange, on disk before use.

An exchange holds only the messages that are new since the one before it in the same chain; with the hash of
the whole request, a replay knows that it asks the same question. Keys are never part of a request, so they
cannot get in. Before each call of a server a line says that it is asked: a call without an exchange was cut
off by an interruption, and may have been charged for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from workbench.agent.model.messages import Message, Reply, Usage
from workbench.errors import ContentError


class Exchange(BaseModel):
    """One call of a model."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    chain: int
    turn: int
    """Position in its chain, from 0."""
    request_hash: str
    new_messages: tuple[Message, ...]
    """What the request has beyond the chain's last request and its answer."""
    reply: Reply | None
    """None if the call failed for good."""
    error: str = ""
    overflow: bool = False
    """True if the call failed because the conversation was too long."""
    wasted: Usage = Usage()
    """Tokens that a failed call may have cost."""
    seconds: float = 0.0
    """Wall time of the call."""
    run_seconds: float = 0.0
    """Wall time of the run so far, all sittings together."""


class Asked(BaseModel):
    """A call that is about to be made."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    asked: Usage
    """A guess at the prompt's tokens; of the answer's nothing is known."""
    chain: int
    turn: int
    request_hash: str


class Transcript:
    """The exchanges of one run, in the order they ended.

    Args:
        path: the file; it is made with the first exchange. A last line that was cut off is dropped.

    Raises:
        ContentError: if any other line cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        lines = _read(path)
        self._exchanges = [x for x in lines if isinstance(x, Exchange)]
        self.lost = _lost(lines)
        """Tokens of calls that were cut off by an interruption, as far as they can be guessed."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges so far."""
        with self._lock:
            return tuple(self._exchanges)

    def find(self, chain: int, turn: int) -> Exchange | None:
        """The answered exchange at one place, if there is one."""
        with self._lock:
            found = (e for e in self._exchanges if (e.chain, e.turn) == (chain, turn) and e.reply is not None)
            return next(found, None)

    def find_failed(self, chain: int, turn: int, request_hash: str) -> Exchange | None:
        """The last failed exchange of one request, if there is one."""
        with self._lock:
            wanted = (chain, turn, request_hash)
            failed = (e for e in reversed(self._exchanges) if e.reply is None)
            return next((e for e in failed if (e.chain, e.turn, e.request_hash) == wanted), None)

    def add(self, exchange: Exchange) -> None:
        """Put an exchange on disk; it is there for good when this returns."""
        with self._lock:
            self._append(exchange)
            self._exchanges.append(exchange)

    def ask(self, asked: Asked) -> None:
        """Put on disk that a call is about to be made."""
        with self._lock:
            self._append(asked)

    def _append(self, line: BaseModel) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(line.model_dump_json() + "\n")
            f.flush()
            os.fsync(f.fileno())


_LINE: TypeAdapter[Asked | Exchange] = TypeAdapter(Asked | Exchange)


def _lost(lines: Sequence[Asked | Exchange]) -> Usage:
    """Sum of what was asked and never answered, not even with a failure."""
    open_calls: dict[tuple[int, int, str], list[Usage]] = {}
    for x in lines:
        calls = open_calls.setdefault((x.chain, x.turn, x.request_hash), [])
        if isinstance(x, Asked):
            calls.append(x.asked)
        elif calls:
            calls.pop()
    lost = Usage()
    for usage in (u for calls in open_calls.values() for u in calls):
        lost = lost.plus(usage)
    return lost


def _read(path: Path) -> list[Asked | Exchange]:
    if not path.is_file():
        return []
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror}") from e
    whole = data.endswith(b"\n") or not data
    lines = data.split(b"\n")
    if whole:
        lines = lines[:-1]
    elif data:
        _cut(path, len(data) - len(lines[-1]))
        lines = lines[:-1]
    found: list[Asked | Exchange] = []
    for n, line in enumerate(lines, 1):
        try:
            found.append(_LINE.validate_json(line))
        except ValidationError as e:
            raise ContentError(path, "is no exchange of a transcript", n) from e
    return found


def _cut(path: Path, size: int) -> None:
    """Drop a last line that was not written whole, so that the next one starts a line of its own."""
    with path.open("r+b") as f:
        f.truncate(size)
