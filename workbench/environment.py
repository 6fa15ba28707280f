"""The environment of processes that the workbench starts: what they need to run, and no credentials.

An allow-list: keys and tokens have any name, so that only what is known to be needed is passed on.
"""

from __future__ import annotations

import os

KEPT = (
    "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH",
    "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONHOME",
    "PYTHONPATH", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "WORKBENCH_ROOT",
    "WORKBENCH_UNSAFE_COMPILE", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR",
)  # fmt: skip
"""Variables that helpers of the workbench inherit."""


def kept(**more: str) -> dict[str, str]:
    """The variables of this process that its helpers get, and `more`."""
    return {name: os.environ[name] for name in KEPT if name in os.environ} | more
