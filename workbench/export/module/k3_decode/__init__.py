"""Kernels of Kimi K3's decode, verified by the workbench, as PyTorch custom ops with a reference behind each.

`import k3_decode` works on any machine: without a GPU, without CUDA packages, without torch. With torch it
registers `torch.ops.k3_decode.<op>`; see `ops` and `layer`. `explain("rmsnorm", parallelism=8, batch=24)`
says which kernel would run and why, or which requirement failed; `counts()` says what ran.
"""

import importlib
from typing import Any

from . import counters
from ._identity import MANIFEST_SHA256
from ._identity import VERSION as __version__  # noqa: N811
from .counters import Counts, counts, reset
from .explaining import Explanation, explain
from .table import DamagedPackage, table

__all__ = [
    "Counts", "DamagedPackage", "Explanation", "__version__", "counts", "explain", "reset", "table",
]  # fmt: skip

_LAZY = ("layer", "ops", "runtime")

try:
    if MANIFEST_SHA256:  # empty where the sources lie before an export
        importlib.import_module(f"{__name__}.ops")
except Exception as _error:  # the package must import whatever torch is there; explain() says what is missing
    counters.log.info("no custom op is registered: %s", _error)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
