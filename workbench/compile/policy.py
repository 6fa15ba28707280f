"""Which fences must hold before untrusted code is compiled, and what stands in for which.

Nothing is compiled where one of `REQUIRED` does not hold, unless the user says so: `--unsafe-compile`, or
`WORKBENCH_UNSAFE_COMPILE=1`, which is how it reaches the processes that evaluate candidates.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

REQUIRED: Mapping[str, tuple[str, ...]] = {
    # Without system calls that make sockets there is no network either.
    "network": ("network", "bwrap", "seccomp"),
    "files": ("landlock", "bwrap"),
    "system calls": ("seccomp",),
    "limits": ("rlimits",),
}
"""What must be fenced, with the fences of which each one will do."""

VARIABLE = "WORKBENCH_UNSAFE_COMPILE"


def lacking(held: Collection[str]) -> list[str]:
    """What is not fenced, such as `files (landlock or bwrap)`."""
    return [
        f"{what} ({' or '.join(fences)})" for what, fences in REQUIRED.items() if not set(fences) & set(held)
    ]


def refusal(missing: Collection[str]) -> str:
    """Why nothing is compiled here, in one line."""
    return (
        f"this machine does not fence in: {', '.join(missing)}; nothing is compiled without "
        "(`workbench doctor` says more; --unsafe-compile compiles what you trust)"
    )


def allow_unsafe() -> None:
    """Compile even where required fences do not hold, in this process and those that it starts."""
    os.environ[VARIABLE] = "1"


def is_unsafe_allowed() -> bool:
    """Whether the user has said that candidates are to be compiled without fences."""
    return os.environ.get(VARIABLE) == "1"
