"""`workbench export --to module`: the installable package `k3_decode`, which needs no workbench.

`k3_decode/` holds the package's own files as they are copied; the contracts, the manifest and the cubins are
generated.
"""

from workbench.export.module.write import write_module

__all__ = ["write_module"]
