"""Which build this is; the export writes this file anew."""

VERSION = "0"
"""Version of the package, its content's hash included."""
MANIFEST_SHA256 = ""
"""Hash of `manifest.json`; a manifest of another hash is not used."""
