"""Counts which kernels ran and which calls fell back to the reference, with the reason."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass

log = logging.getLogger("k3_decode")
_lock = threading.Lock()
_kernels: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[tuple[str, str]] = Counter()
_padded: Counter[tuple[str, int, int]] = Counter()


@dataclass(frozen=True)
class Counts:
    """Calls so far in this process."""

    kernels: dict[tuple[str, str], int]
    """By op and the kernel's key."""
    fallbacks: dict[tuple[str, str], int]
    """By op and reason."""
    padded: dict[tuple[str, int, int], int]
    """Calls of a batch that was not verified, answered at the next larger that was: by op, rows and rows of
    the kernel. They are among `kernels` too."""


def ran(op: str, key: str, rows: int, of: int) -> None:
    """Count a call of `rows` rows answered by a kernel of `of` rows; new paddings are logged."""
    with _lock:
        _kernels[op, key] += 1
        if rows != of:
            _padded[op, rows, of] += 1
        first = rows != of and _padded[op, rows, of] == 1
    if first:
        log.info("%s: %d rows run as %d, for which a kernel was verified", op, rows, of)


def fell_back(op: str, reason: str) -> None:
    """Count a call that the reference answered; the first of each reason is logged."""
    with _lock:
        _fallbacks[op, reason] += 1
        first = _fallbacks[op, reason] == 1
    if first:
        log.warning("%s runs by reference: %s", op, reason)


def counts() -> Counts:
    """A copy of the counts."""
    with _lock:
        return Counts(dict(_kernels), dict(_fallbacks), dict(_padded))


def reset() -> None:
    """Start counting anew."""
    with _lock:
        _kernels.clear()
        _fallbacks.clear()
        _padded.clear()
