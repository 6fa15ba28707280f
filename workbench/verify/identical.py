"""Whether two artifacts are the same kernels: what is left of them once names, comments and lines are gone.

Two sources that differ in comments, names or layout alone compile to the same objects. Such a candidate is
nothing new, whatever its author says of it (`identical-object`).
"""

from __future__ import annotations

import re

from workbench.artifact import Artifact, stable_hash

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DEBUG_SECTION = re.compile(r"^\s*\.section\b[^{]*\{.*?^\s*\}", re.M | re.S)
_PLACE = re.compile(r"^\s*\.(?:file|loc)\b")
_DEBUG_LABEL = re.compile(r"^\s*\$L__(?!BB)\w+:\s*$")


def object_hash(artifact: Artifact) -> str:
    """Hash of an artifact's code and launches, whatever the source calls things and where it says them."""
    ptx = _DEBUG_SECTION.sub("", _COMMENT.sub("", artifact.ptx))
    lines = [
        " ".join(line.split())
        for line in ptx.splitlines()
        if line.strip() and not _PLACE.match(line) and not _DEBUG_LABEL.match(line)
    ]
    text = "\n".join(lines)
    names = list(dict.fromkeys(launch.kernel for launch in artifact.launches))
    for n in sorted(range(len(names)), key=lambda n: -len(names[n])):  # one name may begin with another
        text = text.replace(names[n], f"kernel{n}")
    launches = [x.model_copy(update={"kernel": f"kernel{names.index(x.kernel)}"}) for x in artifact.launches]
    return stable_hash({
        "arch": artifact.arch,
        "flags": list(artifact.toolchain.ptxas_flags),
        "ptx": text,
        "launches": [x.model_dump(mode="json") for x in launches],
        "buffers": [b.model_dump(mode="json") for b in artifact.buffers],
    })  # fmt: skip
