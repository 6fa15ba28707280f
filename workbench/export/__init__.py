"""Winners on disk: a verified kernel with its evidence, and new workspaces."""

from workbench.export.layout import content_root, lay_out
from workbench.export.manifest import CheckVerdict, FileEntry, Manifest, RunInfo
from workbench.export.provenance import Provenance
from workbench.export.waivers import Waiver, read_waivers
from workbench.export.winner import (
    ExportedKernel,
    ExportRefused,
    export_winner,
    exported_from,
    load_exported,
    load_manifest,
)

__all__ = [
    "CheckVerdict",
    "ExportRefused",
    "ExportedKernel",
    "FileEntry",
    "Manifest",
    "Provenance",
    "RunInfo",
    "Waiver",
    "content_root",
    "export_winner",
    "exported_from",
    "lay_out",
    "load_exported",
    "load_manifest",
    "read_waivers",
]
