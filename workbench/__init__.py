"""Proves, tunes and exports CuTe DSL decode kernels for Kimi K3, without a GPU.

    import workbench as wb

    report = wb.verify_kernel(wb.compile_kernel("row", op="rmsnorm"))

Names are loaded when they are first used: the import costs nothing and needs neither torch nor cutlass.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from workbench.api import (
        audit,
        compile_kernel,
        describe,
        export_kernel,
        load_op,
        load_template,
        predict,
        propose,
        roofline,
        simulate,
        tune_template,
        verify_kernel,
    )
    from workbench.cost import load_machine
    from workbench.export import load_exported
    from workbench.report.plots import plot_progress, plot_roofline
    from workbench.report.show import show
    from workbench.workspace import Workspace

_HOMES = {
    "Workspace": "workbench.workspace",
    "load_exported": "workbench.export",
    "load_machine": "workbench.cost",
    "plot_progress": "workbench.report.plots",
    "plot_roofline": "workbench.report.plots",
    "show": "workbench.report.show",
}

__all__ = [
    "Workspace",
    "__version__",
    "audit",
    "compile_kernel",
    "describe",
    "export_kernel",
    "load_exported",
    "load_machine",
    "load_op",
    "load_template",
    "plot_progress",
    "plot_roofline",
    "predict",
    "propose",
    "roofline",
    "show",
    "simulate",
    "tune_template",
    "verify_kernel",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "workbench.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
