"""Compiles every template for sm_90a, simulates it, predicts its time, and writes what travels."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.probes.builder import ARCH, normal
from workbench.artifact import Artifact
from workbench.compile import ArtifactCache, CompileError, CompileRequest, compile_candidate
from workbench.cost import Prediction, load_machine, predict
from workbench.devices import kernel_of
from workbench.devices.model import launch_to_json
from workbench.errors import WorkbenchError
from workbench.isa.ptx import parse
from workbench.isa.sass import disassemble, parse_sass
from workbench.ops import Op, Workload, load_op
from workbench.simulator import Memory, SimulationOptions, simulate
from workbench.templates import Template, load_template
from workbench.verify.inputs import Case, place_scratch
from workbench.verify.report import Report, Verdict
from workbench.verify.verify import Level, verify_artifact
from workbench.workspace import Workspace

MACHINE = "h200"
_SETTINGS: tuple[dict[str, Any], ...] = ({}, {"math": "f32"}, {"decode": "bits", "math": "f32"})
"""Knob values that a template's default may need for this arch: sm_90a lacks mixed and packed f32 arithmetic
and the conversion of E8M0."""
_HASHED = 64 << 20
"""Bytes; larger inputs are mostly untouched zeros, which reading would make real."""
_KEPT = 256 << 10
"""Bytes; of kernels beside the first only smaller outputs travel."""


@dataclass(frozen=True)
class Choice:
    """What is built; a test takes less."""

    families: frozenset[str] | None = None
    ops: frozenset[str] | None = None
    workloads: tuple[str, ...] = ("small", "small_b1", "small_b3", "tp8_b1", "tp8_b8", "tp16_b1")
    """Those of them that an op has."""
    timed: tuple[str, ...] = ("tp8_b1", "tp8_b8")
    varied: tuple[str, ...] = ("tp8_b1",)
    variants: int = 3
    """Points beside the first at the varied workloads: their predicted and measured order can be compared."""
    winners: tuple[tuple[str, str], ...] = (
        ("rmsnorm", "tp8_b1"),
        ("moe_topk", "tp8_b1"),
        ("skinny_gemm", "tp8_b1"),
    )
    """Op and workload of the kernels that are verified and go into the package."""


@dataclass
class Built:
    """What was made of the templates."""

    kernels: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    winners: list[tuple[Artifact, Report, Prediction | None]] = field(default_factory=list)


def build_templates(workspace: Workspace, out: Path, say: Callable[[str], None], choice: Choice) -> Built:
    """Write kernels, what the simulator makes of them, and `templates.json`."""
    out.mkdir(parents=True, exist_ok=True)
    built = Built()
    cache = ArtifactCache(workspace.cache)
    for op_name in workspace.op_names():
        if choice.ops is not None and op_name not in choice.ops:
            continue
        for template_name in workspace.template_names(op_name):
            op = load_op(workspace, op_name)
            template = load_template(workspace.template(op_name, template_name))
            _template(op, template, out, built, cache, say, choice)
    (out / "templates.json").write_text(json.dumps({"kernels": built.kernels}, indent=1) + "\n")
    return built


def opcodes(built: Built) -> set[str]:
    """Instructions of all kernels, modifiers sorted."""
    found = set()
    for artifact in built.artifacts:
        for kernel in parse(artifact.ptx).kernels:
            found |= {normal(".".join((i.opcode, *i.modifiers))) for i in kernel.instructions}
    return found


def _template(
    op: Op,
    template: Template,
    out: Path,
    built: Built,
    cache: ArtifactCache,
    say: Callable[[str], None],
    choice: Choice,
) -> None:
    settings = list(_SETTINGS)
    for name in choice.workloads:
        workload = next((w for w in op.workloads if w.name == name), None)
        if workload is None:
            continue
        wanted = 1 + (choice.variants if name in choice.varied else 0)
        made = list(itertools.islice(_compiled(op, template, workload, built, cache, settings), wanted))
        memory = Memory()
        case = Case.create(op, workload, "ordinary", 0, memory)
        started = time.monotonic()
        case.standard  # noqa: B018
        standard_s = time.monotonic() - started
        for n, artifact in enumerate(made):
            mark = memory.mark()
            _kernel(case, memory, artifact, n, out, built, choice, standard_s)
            memory.release(mark)
        if made:
            say(f"{op.name} {name} {template.name}: {len(made)} kernels")
    for op_name, name in choice.winners:
        if op_name == op.name:
            _winner(op, name, built, cache, say)


def _compiled(
    op: Op,
    template: Template,
    workload: Workload,
    built: Built,
    cache: ArtifactCache,
    settings: list[dict[str, Any]],
) -> Iterator[Artifact]:
    """The first point that builds for the arch, then its neighbours by one knob, spread over the knobs.

    Settings that no point builds with are taken out of `settings`.
    """
    space = template.space(workload.axes)
    points = [dict(p) for p in space.points()]
    if not points:
        return
    base: dict[str, Any] | None = None
    while base is None and settings:
        setting = settings[0]
        wish = {**template.default, **{k: v for k, v in setting.items() if k in template.default}}
        nearest = min(points, key=lambda p: sum(p[k] != wish[k] for k in p))
        artifact = _compile(op, template, workload, nearest, built, cache)
        if artifact is not None:
            base = nearest
            yield artifact
        else:
            settings.pop(0)
    if base is None:
        return
    neighbours = [p for p in points if sum(p[k] != base[k] for k in p) == 1]
    by_knob: dict[str, list[dict[str, Any]]] = {}
    for p in neighbours:
        by_knob.setdefault(next(k for k in p if p[k] != base[k]), []).append(p)
    for turn in itertools.zip_longest(*by_knob.values()):
        for p in turn:
            if p is not None:
                artifact = _compile(op, template, workload, p, built, cache)
                if artifact is not None:
                    yield artifact


def _compile(
    op: Op, template: Template, workload: Workload, point: dict[str, Any], built: Built, cache: ArtifactCache
) -> Artifact | None:
    try:
        return compile_candidate(CompileRequest.of(op, workload, template, point, arch=ARCH), cache)
    except CompileError as e:
        told = ", ".join(f"{k}={v}" for k, v in point.items())
        built.failed[f"{op.name} {workload.name} {template.name} {told}"] = str(e).splitlines()[0][:200]
        return None


def _kernel(
    case: Case,
    memory: Memory,
    artifact: Artifact,
    number: int,
    out: Path,
    built: Built,
    choice: Choice,
    standard_s: float,
) -> None:
    """Simulate on ordinary inputs, predict, and write one kernel.

    Raises:
        WorkbenchError: if the simulator finds it wrong: it would prove nothing on a device.
    """
    kernel = kernel_of(artifact)
    op, workload = case.op, case.workload
    case.restore()
    given = {}
    for b in op.inputs:
        if memory.view(b.name).nbytes <= _HASHED:
            given[b.name] = hashlib.sha256(memory.view(b.name).tobytes()).hexdigest()
    place_scratch(memory, op, artifact.buffers)
    outcome = simulate(artifact, memory, SimulationOptions(count_sectors=True))
    check = case.judge(case.read_outputs()) if outcome.completed else None
    title = f"{op.name} {workload.name} {artifact.template}" + (f" #{number}" if number else "")
    if check is None or check.verdict is not Verdict.PASS:
        why = check.summary if check is not None else "the run did not end"
        raise WorkbenchError(f"{title} is wrong in the simulator: {why}")
    prediction = None
    if workload.name in choice.timed:
        sass = parse_sass(disassemble(artifact.cubin))
        prediction = predict(artifact, outcome.counters, load_machine(MACHINE), sass)
    stem = f"{op.name}-{workload.name}-{artifact.template}-{number}"
    (out / f"{stem}.cubin").write_bytes(kernel.cubin)
    (out / f"{stem}.ptx").write_text(kernel.ptx)
    simulated = {}
    for b in op.outputs:
        if not number or memory.view(b.name).nbytes <= _KEPT:
            np.save(out / f"{stem}-{b.name}.npy", memory.view(b.name).copy())
            simulated[b.name] = b.dtype.value
    built.artifacts.append(artifact)
    built.kernels.append(
        {
            "id": stem,
            "title": title,
            "op": op.name,
            "workload": workload.name,
            "real": workload.real,
            "axes": dict(workload.axes),
            "template": artifact.template,
            "knobs": artifact.knobs,
            "arch": artifact.arch,
            "key": artifact.key,
            "launches": [launch_to_json(n) for n in kernel.launches],
            "slots": [dataclasses.asdict(s) for s in kernel.slots],
            "generators": ["ordinary"] if workload.real else list(op.generators),
            "input_sha256": given,
            "simulated": simulated,
            "predicted": _predicted(prediction),
            "standard_s": round(standard_s, 2),
        }
    )


def _predicted(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    p = prediction.premises
    return {"us": prediction.us, "machine": p.machine, "premises": p.hash, "assumptions": p.assumptions}


def _winner(op: Op, name: str, built: Built, cache: ArtifactCache, say: Callable[[str], None]) -> None:
    """Verify the first kernel of an op at a workload as `workbench verify` does, for the package."""
    artifact = next((a for a in built.artifacts if (a.op, a.workload) == (op.name, name)), None)
    if artifact is None:
        return
    verification = verify_artifact(artifact, op, level=Level.SCREEN, cache=cache)
    report = verification.report
    if report.verdict is not Verdict.PASS:
        say(f"{op.name} {name} does not go into the package: it is {report.verdict.value}")
        return
    prediction = predict(artifact, verification.counters, load_machine(MACHINE), verification.sass)
    built.winners.append((artifact, report, prediction))
