"""What runs leave for those after them: what failed and why, by op, in `tuning_db/lessons.jsonl`.

A lesson is a sentence of an author, or a way to fail that was met; equal ones are counted, not repeated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.agent.run import Candidate, Status
from workbench.files import write_atomic

_MOST_KEPT, _MOST_TOLD = 400, 12
_OWN_FILE = re.compile(r"\bc\d+_\d+\.py(:\d+)?:? ?")
_NUMBER = re.compile(r"\b\d[\d.e+-]*\b")


class Lesson(BaseModel):
    """One lesson."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    op: str
    template: str = ""
    """Template that the failing source began from, where that is known."""
    text: str
    kind: str
    """`author`, or the status of the candidates that failed so."""
    count: int = 1
    runs: tuple[str, ...] = ()
    """Ids of the runs that met it, the latest last."""


class Lessons:
    """The lessons in one file; a line that cannot be read is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Lesson]:
        """Every lesson, oldest first."""
        if not self.path.is_file():
            return []
        found = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                found.append(Lesson.model_validate_json(line))
            except ValidationError:
                continue
        return found

    def told(self, op: str) -> str:
        """What the next author of an op is told; empty if there is nothing."""
        mine = [x for x in self.all() if x.op == op]
        ranked = sorted(mine, key=lambda x: (x.kind != "author", -x.count))[:_MOST_TOLD]
        if not ranked:
            return ""
        lines = [f"- {x.text}" + (f" (met {x.count} times)" if x.count > 1 else "") for x in ranked]
        return "What earlier runs left:\n" + "\n".join(lines) + "\n"

    def add(self, op: str, run: str, candidates: Iterable[Candidate], said: Sequence[str]) -> None:
        """Add what a run met and what its authors said; adding the same run again changes nothing."""
        old = self.all()
        if any(x.op == op and run in x.runs for x in old):
            return
        counted: Counter[tuple[str, str]] = Counter()
        for c in candidates:
            if c.status not in (Status.VERIFIED, Status.LOST) and c.reason:
                counted[c.status.value, _general(c.reason)] += 1
        counted.update({("author", " ".join(text.split())[:400]): 1 for text in said if text.strip()})
        for (kind, text), count in counted.items():
            at = next((n for n, x in enumerate(old) if (x.op, x.kind, x.text) == (op, kind, text)), None)
            if at is None:
                old.append(Lesson(op=op, text=text, kind=kind, count=count, runs=(run,)))
            else:
                more = {"count": old[at].count + count, "runs": (*old[at].runs[-4:], run)}
                old[at] = old[at].model_copy(update=more)
        lines = [x.model_dump_json() for x in old[-_MOST_KEPT:]]
        write_atomic(self.path, "\n".join(lines) + "\n")


def _general(reason: str) -> str:
    """A reason without the file and the numbers of its own case."""
    return _NUMBER.sub("N", _OWN_FILE.sub("", " ".join(reason.split())))[:300]
