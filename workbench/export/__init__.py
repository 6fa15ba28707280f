"""Winners on disk: a verified kernel with its evidence, and new workspaces."""

from workbench.export.layout import content_root, lay_out
from workbench.export.manifest import CheckVerdict, FileEntry, Manifest, RunInfo
from workbench.export.winner import ExportedKernel, ExportRefused, export_winner, load_exported, load_manifest

__all__ = [
    "CheckVerdict",
    "ExportRefused",
    "ExportedKernel",
    "FileEntry",
    "Manifest",
    "RunInfo",
    "content_root",
    "export_winner",
    "lay_out",
    "load_exported",
    "load_manifest",
]
