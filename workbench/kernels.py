"""What the KERNEL of a command can be, as an artifact: a template or candidate file, or an exported folder.

Imports stay inside the functions: most commands need one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workbench.errors import ContentError, UnknownNameError, WorkbenchError

if TYPE_CHECKING:
    from workbench.artifact import Artifact
    from workbench.expressions import Value
    from workbench.templates import Template
    from workbench.workspace import Workspace


def candidate(path: Path, op: str | None) -> Template:
    """Read a template or candidate file; raises WorkbenchError if it is not of op `op`."""
    from workbench import templates

    template = templates.load_template(path)
    if op is not None and op != template.op:
        raise WorkbenchError(
            f"{path} is a template of op {template.op!r}, not of {op!r}; leave --op out or correct it"
        )
    return template


def compiled(
    template: Template, workload: str | None, knobs: Mapping[str, Value], arch: str, workspace: Workspace
) -> Artifact:
    """Compile a template at a workload and knobs; the errors are those of `api.compile_kernel`."""
    from workbench.compile import ArtifactCache, CompileError, CompileRequest, compile_candidate
    from workbench.ops import load_op

    contract = load_op(workspace, template.op)
    for name in knobs:
        if name not in template.knobs:
            raise UnknownNameError("knob", name, template.knobs)
    chosen = contract.workload(contract.workloads[0].name if workload is None else workload)
    point = {**template.default, **knobs}
    request = CompileRequest.of(contract, chosen, template, point, arch)
    try:
        return compile_candidate(request, ArtifactCache(workspace.cache))
    except CompileError as e:
        raise ContentError(template.path, f"{e.kind}: {e.message}", e.line) from e


def exported(
    folder: Path, op: str | None, workload: str | None, knobs: Mapping[str, Value] | None, arch: str | None
) -> Artifact:
    """Read an exported kernel back; raises WorkbenchError if it is not what is asked for."""
    from workbench.export import load_exported

    artifact = load_exported(folder).artifact
    wanted: dict[Literal["op", "workload", "arch"], str | None] = {
        "op": op,
        "workload": workload,
        "arch": arch,
    }
    for name, value in wanted.items():
        if value is not None and value != getattr(artifact, name):
            raise WorkbenchError(
                f"{folder} was exported for {name} {getattr(artifact, name)!r}, not {value!r};"
                f" leave --{name} out"
            )
    if knobs:
        raise WorkbenchError(f"{folder} holds a compiled kernel, whose knobs are fixed; leave --knob out")
    return artifact
