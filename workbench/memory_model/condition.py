"""Conditions on final states, evaluated with what is known so far: true, false or not known yet (None)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Known = Callable[["Term"], "int | Hung | None"]
"""Value of a register or location: an integer, None if it is not known yet, or `HUNG`."""


class Hung:
    """Stands for every register of a thread that never finished: no comparison with it holds."""


HUNG = Hung()


@dataclass(frozen=True)
class Term:
    """A register of thread number `thread`, or (thread None) a location, `index` within an array."""

    name: str
    thread: int | None = None
    index: int | None = None


@dataclass(frozen=True)
class Compare:
    """`left relation right`; relation is one of == != < <= > >=, unsigned."""

    left: Term | int
    relation: str
    right: Term | int


@dataclass(frozen=True)
class Not:
    """Negation."""

    operand: Condition


@dataclass(frozen=True)
class Every:
    """Conjunction; without parts it is true."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Some:
    """Disjunction; without parts it is false."""

    parts: tuple[Condition, ...]


Condition = Compare | Not | Every | Some

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def evaluate(condition: Condition, known: Known) -> bool | None:
    """Value of `condition` as far as it follows from what is known."""
    if isinstance(condition, Compare):
        left = condition.left if isinstance(condition.left, int) else known(condition.left)
        right = condition.right if isinstance(condition.right, int) else known(condition.right)
        if isinstance(left, Hung) or isinstance(right, Hung):
            return False
        if left is None or right is None:
            return None
        return RELATIONS[condition.relation](left, right)
    if isinstance(condition, Not):
        inner = evaluate(condition.operand, known)
        return None if inner is None else not inner
    decisive = isinstance(condition, Some)
    unknown = False
    for part in condition.parts:
        value = evaluate(part, known)
        if value is decisive:
            return decisive
        unknown = unknown or value is None
    return None if unknown else not decisive


def terms(condition: Condition) -> Iterator[Term]:
    """Every register and location that the condition names."""
    if isinstance(condition, Compare):
        yield from (side for side in (condition.left, condition.right) if isinstance(side, Term))
    elif isinstance(condition, Not):
        yield from terms(condition.operand)
    else:
        for part in condition.parts:
            yield from terms(part)
