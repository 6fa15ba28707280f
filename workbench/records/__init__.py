"""Tuning records: what was compiled, verified and timed, under a key that holds everything it depends on.

The store is loaded on first use, so that importing the package does not import SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.records.model import (
    SCHEMA,
    BufferKey,
    Objective,
    Record,
    RecordKey,
    differences,
    hash_file,
    hash_tolerances,
    hash_verifier,
)

if TYPE_CHECKING:
    from workbench.records.store import BadLine, ImportResult, RecordStore

__all__ = [
    "SCHEMA",
    "BadLine",
    "BufferKey",
    "ImportResult",
    "Objective",
    "Record",
    "RecordKey",
    "RecordStore",
    "differences",
    "hash_file",
    "hash_tolerances",
    "hash_verifier",
]


def __getattr__(name: str) -> Any:
    if name in ("BadLine", "ImportResult", "RecordStore"):
        from workbench.records import store

        return getattr(store, name)
    raise AttributeError(name)
