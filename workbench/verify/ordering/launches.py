"""The audit of an artifact as a document: one target a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.artifact import Artifact
from workbench.errors import MissingToolError
from workbench.isa.cubin import read_cubin
from workbench.isa.ptx import parse
from workbench.isa.sass import SassModule, disassemble, parse_sass
from workbench.ops.model import Role
from workbench.verify.ordering.files import AuditDocument, target_of
from workbench.verify.ordering.joining import joined, run_artifact
from workbench.verify.ordering.joining import premises as runs_rest_on
from workbench.verify.ordering.premises import assumptions as premises
from workbench.verify.ordering.premises import toolchain
from workbench.verify.ordering.static import artifact_launches, audit_chain, kernel_forms


def audit_launches(
    artifact: Artifact,
    target: str,
    roles: Mapping[str, Role | None] | None = None,
    assumptions: Sequence[str] = (),
) -> AuditDocument:
    """Audit every launch of an artifact with its neighbours in the stream.

    Args:
        artifact: the compiled kernels with their launches and buffers.
        target: what the document calls the file, for instance its path as it was given.
        roles: where they differ from the artifact's own; None for a buffer of which nobody said.
        assumptions: what more the audit rests on.

    Raises:
        WorkbenchError: if the PTX or the cubin cannot be read.
    """
    module = parse(artifact.ptx)
    sass: SassModule | None = None
    missing: str | None = None
    try:
        sass = parse_sass(disassemble(artifact.cubin))
    except MissingToolError as e:
        missing = str(e)
    cubin = read_cubin(artifact.cubin)
    launches = [
        replace(launch, roles={**launch.roles, **(roles or {})}) for launch in artifact_launches(artifact)
    ]
    forms = [kernel_forms(module, sass, cubin, launch.kernel, missing) for launch in launches]
    ran = run_artifact(module, artifact, launches, cubin)
    targets = [
        target_of(
            target,
            a.kernel,
            artifact.arch,
            joined(a, ran),
            toolchain(artifact.toolchain),
            (*premises([launch], artifact.arch), *assumptions, *runs_rest_on(ran)),
        )
        for launch, a in zip(launches, audit_chain(forms, launches), strict=True)
    ]
    return AuditDocument(targets=tuple(targets))
