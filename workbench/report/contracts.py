"""Describes ops: their contracts, workloads and rooflines, as documents."""

from __future__ import annotations

import inspect

from workbench.cost import load_machine, roofline
from workbench.errors import ContentError, WorkbenchError
from workbench.ops import load_op
from workbench.ops.model import Op, Workload
from workbench.report.documents import (
    BufferContract,
    BufferSize,
    OpDocument,
    OpsDocument,
    OpSummary,
    TemplateContract,
    ToleranceContract,
    WorkloadContract,
)
from workbench.templates import Template, load_template
from workbench.workspace import Workspace


def list_ops(workspace: Workspace) -> OpsDocument:
    """All ops of the workspace; a verifier that cannot be used is listed with its error."""
    return OpsDocument(ops=tuple(_summary(workspace, name) for name in workspace.op_names()))


def describe_op(workspace: Workspace, name: str, machine: str = "gb300") -> OpDocument:
    """One op's contract with rooflines on `machine`.

    Raises:
        UnknownNameError: if there is no such op or machine.
        ContentError: if the verifier or one of its templates cannot be used.
    """
    op = load_op(workspace, name)
    described = load_machine(machine)
    templates = [load_template(workspace.template(name, t)) for t in workspace.template_names(name)]
    workloads = []
    for w in op.workloads:
        limit = roofline(op, w, described)
        workloads.append(_workload(op, w, limit.us, limit.bound))
    return OpDocument(
        name=op.name,
        doc=inspect.cleandoc(op.doc),
        machine=machine,
        buffers=tuple(
            BufferContract(
                name=b.name,
                shape=tuple(str(e) for e in b.shape),
                dtype=b.dtype.value,
                role=b.role.value,
                align=b.align,
                doc=b.doc,
            )
            for b in op.buffers
        ),
        constants=dict(op.constants),
        tolerances={
            n: ToleranceContract(
                exact=t.exact,
                factor=t.factor,
                floor_rms=t.floor_rms,
                floor_worst=t.floor_worst,
                cap_rms=t.cap_rms,
                cap_worst=t.cap_worst,
            )
            for n, t in op.tolerances.items()
        },
        generators=tuple(op.generators),
        workloads=tuple(workloads),
        templates=tuple(_template(op, t) for t in templates),
    )


def _summary(workspace: Workspace, name: str) -> OpSummary:
    templates = tuple(workspace.template_names(name))
    try:
        op = load_op(workspace, name)
    except (ContentError, WorkbenchError) as e:
        return OpSummary(name=name, summary="", workloads=(), templates=templates, error=str(e))
    first = inspect.cleandoc(op.doc).split("\n\n")[0].split(". ")[0]
    return OpSummary(
        name=name,
        summary=" ".join(first.split()).rstrip("."),
        workloads=tuple(w.name for w in op.workloads),
        templates=templates,
    )


def _workload(op: Op, workload: Workload, us: float, bound: str) -> WorkloadContract:
    sizes = []
    for b in op.buffers:
        shape = b.resolve(workload.axes)
        elements = 1
        for extent in shape:
            elements *= extent
        sizes.append(BufferSize(name=b.name, shape=shape, nbytes=b.dtype.nbytes(elements)))
    return WorkloadContract(
        name=workload.name,
        doc=workload.doc,
        real=workload.real,
        axes=dict(workload.axes),
        buffers=tuple(sizes),
        flops=op.flops(workload.axes),
        compulsory_bytes=op.compulsory_bytes(workload.axes),
        roofline_us=us,
        bound=bound,
    )


def _template(op: Op, template: Template) -> TemplateContract:
    return TemplateContract(
        name=template.name,
        summary=template.summary,
        knobs={k: tuple(v) for k, v in template.knobs.items()},
        default=dict(template.default),
        points={w.name: len(template.space(w.axes).all_points) for w in op.workloads},
    )
