"""Artifact keys as people give them: by their beginning."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from workbench.errors import UnknownNameError, WorkbenchError
from workbench.export.winner import KEY_LENGTH


def check_beginnings(kind: str, wanted: Iterable[str], keys: Collection[str]) -> None:
    """Refuse a beginning that no key has, and the empty one, which every key has.

    Args:
        kind: what the keys are of, for the message.
        wanted: beginnings of keys.
        keys: those that there are.

    Raises:
        WorkbenchError: for an empty beginning.
        UnknownNameError: for one that no key has.
    """
    for text in wanted:
        if not text:
            known = f", for instance {min(keys)[:KEY_LENGTH]}" if keys else ""
            raise WorkbenchError(
                f"the key of the {kind} is empty, as every key begins; give the beginning of one{known}"
            )
        if not any(key.startswith(text) for key in keys):
            raise UnknownNameError(kind, text, [key[:KEY_LENGTH] for key in keys])
