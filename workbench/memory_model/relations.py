"""Relations over numbered events as rows of bit masks: row i has bit j if i is related to j."""

from __future__ import annotations

from collections.abc import Iterator

Rows = list[int]


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, from low to high."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def close(rows: Rows) -> Rows:
    """Transitive closure, in place; returns its argument."""
    for k, row in enumerate(rows):
        if row:
            bit = 1 << k
            for i, other in enumerate(rows):
                if other & bit:
                    rows[i] = other | row
    return rows


def acyclic(rows: Rows) -> bool:
    """True if the relation has no cycle."""
    closed = close(list(rows))
    return not any(row >> i & 1 for i, row in enumerate(closed))


def transposed(rows: Rows) -> Rows:
    """The converse relation."""
    result = [0] * len(rows)
    for i, row in enumerate(rows):
        for j in bits(row):
            result[j] |= 1 << i
    return result
