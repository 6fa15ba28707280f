"""Which model to talk to and how: a TOML file, flags, or both.

model = "some-model"
base_url = "https://host/v1"     # of any server that speaks the OpenAI chat API
api_key_env = "OPENAI_API_KEY"   # the variable that holds the key; the key itself is never in a file
context_tokens = 200000
max_output_tokens = 16000
[sampling]
temperature = 0.7
[price]                          # USD a million tokens; overrides the table that comes with the workbench
input = 2.5
cached = 0.25
output = 10.0
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from workbench.errors import ContentError, WorkbenchError
from workbench.files import read_toml


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class Price(_Data):
    """USD a million tokens."""

    input: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Of input read from the server's cache; as `input` if it is left out."""
    output: float = Field(ge=0)


class Profile(_Data):
    """A model and how it is called."""

    model: str = Field(min_length=1)
    base_url: str | None = None
    """Of the server; the client's default (or OPENAI_BASE_URL) if it is left out."""
    api_key_env: str = "OPENAI_API_KEY"
    context_tokens: int = Field(default=128_000, ge=1000)
    """What the model can read and write in one call."""
    max_output_tokens: int = Field(default=16_000, ge=1)
    stream: bool = True
    timeout_seconds: float = Field(default=600.0, gt=0)
    """For one call."""
    retries: int = Field(default=4, ge=0)
    """Attempts after the first, for answers such as 429 and 500 and broken connections."""
    sampling: dict[str, Any] = {}
    """Passed on to the server: temperature, top_p, seed, reasoning_effort, …"""
    price: Price | None = None

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"https?://[^/\s]", value) is None:
            raise ValueError(f"{value!r} is no address of a server; give http://HOST/v1 or https://HOST/v1")
        return value

    def changed(self, **fields: str) -> Profile:
        """This profile with some fields set anew.

        Raises:
            WorkbenchError: if a value is not one that the field may have.
        """
        try:
            return Profile.model_validate({**self.model_dump(), **fields})
        except ValidationError as e:
            first = e.errors()[0]
            raise WorkbenchError(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from e

    def api_key(self) -> str:
        """Return the key from the environment.

        Raises:
            WorkbenchError: if the variable is not set.
        """
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise WorkbenchError(
                f"no key for {self.model}: set {self.api_key_env}, or name another variable with api_key_env "
                "in the profile (a local server that needs none takes any text)"
            )
        return key


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ContentError: if the file cannot be read or a field is wrong; says which.
    """
    try:
        return Profile.model_validate(read_toml(path))
    except ValidationError as e:
        first = e.errors()[0]
        raise ContentError(path, f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from e
