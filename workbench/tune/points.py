"""The valid points of a search space as an integer matrix, and the nearest of them to a wished point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.expressions import Value
from workbench.templates import Knobs, Space


@dataclass(frozen=True)
class Points:
    """All valid points. Row `r` holds, for each knob, the index of its value among the declared ones."""

    values: Mapping[str, tuple[Value, ...]]
    """Declared values of each knob, in order."""
    matrix: NDArray[np.int32]
    """[points, knobs] value indices."""

    @staticmethod
    def of(space: Space) -> Points:
        """Enumerate the valid points of a template's space at one workload."""
        return Points.of_list(space.knobs, space.all_points)

    @staticmethod
    def of_list(values: Mapping[str, tuple[Value, ...]], points: Iterable[Mapping[str, Value]]) -> Points:
        """Points given one by one.

        Raises:
            WorkbenchError: if a point sets a knob to a value that is not declared, or is listed twice.
        """
        rows = []
        for point in points:
            if point.keys() != values.keys():
                raise WorkbenchError(f"point {dict(point)} does not set the knobs {sorted(values)}")
            try:
                rows.append([_index(values[k], point[k]) for k in values])
            except ValueError as e:
                raise WorkbenchError(f"point {dict(point)}: {e}") from None
        matrix = np.array(rows, np.int32).reshape(len(rows), len(values))
        result = Points(dict(values), matrix)
        if len(result._rows) != len(rows):
            raise WorkbenchError("the search space lists a point twice")
        return result

    def __len__(self) -> int:
        return len(self.matrix)

    def row(self, knobs: Mapping[str, Value]) -> int | None:
        """Row of a point, or None if it is not one."""
        if knobs.keys() != self.values.keys():
            return None
        try:
            return self._rows.get(tuple(_index(self.values[k], knobs[k]) for k in self.values))
        except ValueError:
            return None

    def knobs(self, row: int) -> Knobs:
        """Knob values of a row."""
        return {k: v[i] for (k, v), i in zip(self.values.items(), self.matrix[row], strict=True)}

    def nearest(
        self, wish: Sequence[int], free: NDArray[np.bool_], random: np.random.Generator
    ) -> int | None:
        """The free row nearest to `wish` (value indices); None if no row is free.

        Nearest is fewest knobs that differ, then fewest steps along the declared values, each knob's steps
        scaled by its number of values. Ties are drawn with `random`.
        """
        rows = np.flatnonzero(free)
        if not len(rows):
            return None
        steps = np.abs(self.matrix[rows] - np.asarray(wish, np.int32))
        scale = np.maximum([len(v) - 1 for v in self.values.values()], 1)
        distance = (steps != 0).sum(1) + 0.5 * (steps / scale).sum(1) / max(len(self.values), 1)
        return int(random.choice(rows[distance <= distance.min() + 1e-9]))

    @cached_property
    def _rows(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): i for i, row in enumerate(self.matrix.tolist())}


def _index(values: tuple[Value, ...], value: Value) -> int:
    # True equals 1 in Python but is another knob value.
    for i, v in enumerate(values):
        if v == value and type(v) is type(value):
            return i
    raise ValueError(f"{value!r} is not one of {list(values)}")
