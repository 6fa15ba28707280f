"""Gathers what the package holds: the ops of the workspace, one verified winner for each configuration."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.artifact import BoundBuffer
from workbench.compile.checks import check_arch, check_launches, read_ptx_header
from workbench.errors import ContentError, WorkbenchError
from workbench.export.keys import check_beginnings
from workbench.export.manifest import Manifest
from workbench.export.module.infer import inference
from workbench.export.module.padding import PADDING, padding_problem
from workbench.export.module.ranking import best_of
from workbench.export.winner import KEY_LENGTH, ExportedKernel, load_exported
from workbench.isa.cubin import read_cubin
from workbench.ops import Op, Role, load_op
from workbench.ops.dtypes import DType
from workbench.workspace import Workspace

LAYOUT = "row-major"
_LARGEST_ALIGNMENT = 256
"""Bytes; what the package looks at when it keeps a decision."""


@dataclass(frozen=True)
class Contents:
    """What goes into the package."""

    ops: dict[str, Op]
    winners: tuple[ExportedKernel, ...]
    """One for each op, arch and axes."""
    passed_over: tuple[ExportedKernel, ...]
    """Winners of the same configurations with a longer predicted time."""


def collect(workspace: Workspace, pick: Collection[str] = ()) -> Contents:
    """Read the ops and the winners of a workspace.

    Args:
        workspace: whose verifiers and generated kernels travel.
        pick: keys, or beginnings of keys, of winners to take where several cannot be ranked.

    Raises:
        ContentError: naming a winner that is damaged or was verified against another contract.
        UnknownNameError: if `pick` names no winner.
        WorkbenchError: if there is no winner, several of one configuration cannot be ranked, or `pick` has an
            empty key.
    """
    found = [load_exported(path.parent) for path in sorted(workspace.generated.glob("*/*/*/manifest.json"))]
    if not found:
        raise WorkbenchError(
            f"{workspace.generated} holds no exported kernel; run `workbench propose --op OP` first"
        )
    ops = {name: load_op(workspace, name) for name in workspace.op_names()}
    groups: dict[tuple[str, str, tuple[tuple[str, int], ...]], list[ExportedKernel]] = {}
    for kernel in found:
        m = kernel.manifest
        _check(kernel, ops)
        groups.setdefault((m.op, m.arch, tuple(sorted(m.axes.items()))), []).append(kernel)
    check_beginnings("winner", pick, [k.manifest.key for k in found])
    chosen = best_of(groups.values(), pick)
    keys = {k.manifest.key for k in chosen}
    return Contents(ops, tuple(chosen), tuple(k for k in found if k.manifest.key not in keys))


def op_entry(op: Op) -> dict[str, Any]:
    """An op as the package's manifest has it."""
    inferred, given = inference(op)
    return {
        "doc": op.doc,
        "buffers": [
            {
                "name": b.name,
                "shape": list(b.shape),
                "dtype": b.dtype.value,
                "torch_dtype": _carried(b.dtype),
                "role": b.role.value,
                "doc": b.doc,
                "pad": PADDING.get((op.name, b.name)),
            }
            for b in op.buffers
        ],
        "inferred": inferred,
        "given": given,
        "shapes": shapes(op),
        "padding": padding_problem(op),
    }


def kernel_entry(kernel: ExportedKernel, op: Op) -> dict[str, Any]:
    """A winner as the package's manifest has it."""
    m = kernel.manifest
    names = {b.name for b in op.buffers}
    return {
        "key": m.key,
        "op": m.op,
        "workload": m.workload,
        "arch": m.arch,
        "parallelism": _names_of(op, m.axes),
        "batch": m.axes.get("B", 1),
        "axes": {a: n for a, n in m.axes.items() if a != "B"},
        "dtypes": {b.name: _carried(b.dtype) for b in op.buffers},
        "layout": LAYOUT,
        "template": m.template,
        "knobs": m.knobs,
        "slots": [
            {
                "name": b.name,
                "shape": list(b.shape),
                "dtype": b.dtype.value,
                "nbytes": b.nbytes,
                "align": b.align,
                "zeroed": b.zeroed,
                "own": b.name not in names,
            }
            for b in m.buffers
        ],
        "launches": [
            {
                "kernel": launch.kernel,
                "grid": launch.grid,
                "block": launch.block,
                "cluster": launch.cluster,
                "smem_bytes": launch.smem_bytes,
                "pdl": launch.pdl,
                "cooperative": launch.cooperative,
                "parameters": [
                    {"data": p.data, "pointers": [r.model_dump() for r in p.relocations]}
                    for p in launch.params
                ],
            }
            for launch in m.launches
        ],
        "cubin": cubin_path(m),
        "cubin_sha256": m.files["kernel.cubin"].sha256,
        "verified_on": m.verified_on,
        "checks": len(m.checks),
        "waived": [c.name for c in m.checks if c.waived],
        "predicted_us": m.prediction.us if m.prediction else None,
        "predicted_for": m.prediction.premises.machine if m.prediction else "",
    }


def _carried(dtype: DType) -> str:
    """Name of the torch dtype that an op takes: eight-bit floats are bytes, as in caches (torch lacks
    arithmetic for them, which the checks of custom ops use)."""
    return "uint8" if dtype in (DType.E4M3, DType.E5M2) else dtype.torch_name


def cubin_path(manifest: Manifest) -> str:
    """Where a winner's cubin lies, relative to the package."""
    return f"kernels/{manifest.arch}/{manifest.op}-{manifest.key[:KEY_LENGTH]}.cubin"


def shapes(op: Op) -> dict[str, dict[str, int]]:
    """Axes, B left out, by the name of the shape: a workload's name without its batch.

    Axes that only states have (the slots of a cache) may differ between batches of one name and are left out.
    """
    found: dict[str, dict[str, int]] = {}
    free = _state_axes(op)
    for workload in op.workloads:
        axes = {a: n for a, n in workload.axes.items() if a != "B" and a not in free}
        found.setdefault(shape_name(op, workload.name), axes)
    return found


def shape_name(op: Op, workload: str) -> str:
    """Name of a workload's shape; the workload's own name where its axes are not those of the name without
    the batch."""
    free = _state_axes(op)

    def rest(name: str) -> dict[str, int]:
        return {a: n for a, n in op.workload(name).axes.items() if a != "B" and a not in free}

    short = _short(workload)
    first = next(w.name for w in op.workloads if _short(w.name) == short)
    return short if rest(first) == rest(workload) else workload


def _short(workload: str) -> str:
    return re.sub(r"_?b\d+$", "", workload) or workload


def _state_axes(op: Op) -> set[str]:
    """Axes in the shapes of states and of no other buffer."""
    words = {b: set(re.findall(r"[A-Za-z_]\w*", " ".join(map(str, b.shape)))) for b in op.buffers}
    states = set().union(*(words[b] for b in op.buffers if b.role is Role.STATE))
    return states - set().union(*(words[b] for b in op.buffers if b.role is not Role.STATE))


def _names_of(op: Op, axes: Mapping[str, int]) -> list[str]:
    rest = {a: n for a, n in axes.items() if a != "B"}
    free = _state_axes(op)
    bare = {a: n for a, n in rest.items() if a not in free}
    return [name for name, theirs in shapes(op).items() if theirs == bare]


def _check(kernel: ExportedKernel, ops: Mapping[str, Op]) -> None:
    """The winner must fit the op's contract as it is today."""
    m = kernel.manifest
    op = ops.get(m.op)
    if op is None:
        raise ContentError(kernel.folder, f"is a kernel of {m.op}, for which there is no verifier")
    try:
        header, cubin = read_ptx_header(kernel.artifact.ptx), read_cubin(kernel.artifact.cubin)
        check_arch(header, cubin, m.arch)
        check_launches(m.launches, header, cubin)
    except WorkbenchError as e:
        raise ContentError(kernel.folder, f"is not what its manifest says: {e}; export it again") from e
    held = {b.name: b for b in m.buffers}
    for problem in _differences(op, m.axes, held):
        raise ContentError(
            kernel.folder, f"was verified against another contract of {m.op}: {problem}; export it again"
        )
    for buffer in m.buffers:
        if buffer.align > _LARGEST_ALIGNMENT:
            raise ContentError(kernel.folder, f"wants {buffer.name} aligned to {buffer.align} bytes")
        if buffer.name not in {b.name for b in op.buffers} and buffer.role is Role.MAILBOX:
            raise ContentError(
                kernel.folder, f"has the mailbox {buffer.name}, which crosses ranks: not in the package"
            )


def _differences(op: Op, axes: Mapping[str, int], held: Mapping[str, BoundBuffer]) -> Iterable[str]:
    for b in op.buffers:
        there = held.get(b.name)
        if there is None:
            yield f"it has no {b.name}"
            continue
        try:
            shape: tuple[int, ...] | None = b.resolve(axes)
        except ValueError:
            shape = None
        facts: tuple[tuple[str, Any, Any], ...] = (
            ("shape", there.shape, shape),
            ("dtype", there.dtype, b.dtype),
            ("role", there.role, b.role),
        )
        for what, was, now in facts:
            if was != now:
                yield f"{b.name} had the {what} {_plain(was)}, now {_plain(now)}"


def _plain(value: DType | Role | tuple[int, ...] | None) -> str:
    return "unknown" if value is None else str(list(value) if isinstance(value, tuple) else value.value)
