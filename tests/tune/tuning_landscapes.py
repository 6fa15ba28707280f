"""Synthetic spaces with known outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.expressions import Value
from workbench.templates import Space
from workbench.tune import Points, StudyIdentity

KNOBS: dict[str, tuple[Value, ...]] = {
    "threads": (32, 64, 128, 256, 512),
    "rows": (1, 2, 4, 8, 16),
    "vec": (2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
    "fused": (False, True),
    "order": ("row", "column"),
}
SPACE = Space(KNOBS, ("threads * rows <= 1024", "vec * rows <= 64"), {"N": 7168})


def time_us(knobs: Mapping[str, Value]) -> float | None:
    """A rugged bowl with interactions; None where the kernel would not compile."""
    threads, rows, vec, stages = (int(knobs[k]) for k in ("threads", "rows", "vec", "stages"))
    if vec == 16 and stages == 4:
        return None
    a, b, c = math.log2(threads) - 7, math.log2(rows) - 2, math.log2(vec) - 3
    cost = 4 + a * a + 0.7 * (b + 0.5 * a) ** 2 + 1.5 * c * c + 0.4 * abs(stages - 3) * (1 + 0.3 * b * b)
    return cost * (1.0 if knobs["fused"] else 1.3) * (1.0 if knobs["order"] == "row" else 1.15)


def points(space: Space = SPACE) -> Points:
    return Points.of(space)


def identity(space: Space = SPACE, **changes: object) -> StudyIdentity:
    fields: dict[str, object] = {
        "op": "toy", "workload": "w", "axes": dict(space.axes), "template": "t", "source_hash": "s",
        "knobs": {k: tuple(v) for k, v in space.knobs.items()}, "constraints": space.constraints,
        "arch": "sm_103a", "device": "gb300", "objective": "predicted",
    }  # fmt: skip
    return StudyIdentity.model_validate(fields | changes)
