"""Prompts: text files with `{fields}`; their hash is part of a run's settings."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources

NAMES = ("system", "task", "nudge", "improve", "migrant", "not_yet")
_FIELD = re.compile(r"\{([a-z_]+)\}")


@cache
def text(name: str) -> str:
    """Return a prompt as it stands in its file."""
    return (resources.files("workbench.agent.prompts") / f"{name}.md").read_text()


def fill(name: str, **fields: object) -> str:
    """Return a prompt with its fields filled in; other braces stay. Raises KeyError for a field not given."""
    return _FIELD.sub(lambda m: str(fields[m[1]]), text(name)).strip()


def prompt_hash() -> str:
    """Return a hash of all prompts."""
    return hashlib.sha256("\0".join(f"{n}\0{text(n)}" for n in NAMES).encode()).hexdigest()
