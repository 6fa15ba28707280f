"""What `import workbench as wb` offers: the whole path from an op's contract to the exported winner.

Every function takes `workspace`; left out, it is the one at or above the current folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import UnknownNameError, WorkbenchError
from workbench.workspace import Workspace

if TYPE_CHECKING:
    from workbench.agent.events import OnEvent
    from workbench.agent.online import Plan
    from workbench.agent.run import RunResult
    from workbench.artifact import Artifact
    from workbench.compile import ArtifactCache
    from workbench.cost import Prediction, Roofline
    from workbench.expressions import Value
    from workbench.ops.model import Op
    from workbench.report.documents import ExportDocument, OpDocument
    from workbench.report.findings import Listing
    from workbench.simulator.trace import Dump
    from workbench.templates import Template
    from workbench.verify.ordering import AuditDocument, AuditTarget
    from workbench.verify.report import Report
    from workbench.verify.trace import TraceDocument
    from workbench.verify.verify import Verification

DEFAULT_ARCH = "sm_103a"
DEFAULT_MACHINE = "gb300"
DEVICES = ("simulator", "cuda")
"""Where a kernel can be verified; see `workbench.devices`."""
LEVELS = ("screen", "full")
"""How much is verified; see `workbench.verify.verify.Level`."""


def load_op(name: str, workspace: Workspace | None = None) -> Op:
    """Load an op's contract; raises UnknownNameError, or ContentError with file and line of what is wrong."""
    from workbench import ops

    return ops.load_op(_found(workspace), name)


def load_template(op: str, name: str, workspace: Workspace | None = None) -> Template:
    """Read a template without running it; raises UnknownNameError or ContentError."""
    from workbench import templates

    return templates.load_template(_found(workspace).template(op, name))


def describe(op: str, machine: str = DEFAULT_MACHINE, workspace: Workspace | None = None) -> OpDocument:
    """An op's contract with its workloads, their rooflines on `machine`, and its templates."""
    from workbench.report.contracts import describe_op

    return describe_op(_found(workspace), op, machine)


def default_workload(op: str, workspace: Workspace | None = None) -> str:
    """Name of the workload that is meant where none is named: the op's first."""
    return load_op(op, workspace).workloads[0].name


def compile_kernel(
    kernel: str | Path,
    *,
    op: str | None = None,
    workload: str | None = None,
    knobs: Mapping[str, Value] | None = None,
    arch: str | None = None,
    workspace: Workspace | None = None,
) -> Artifact:
    """Get a kernel as an artifact: compiled from a template, or read back from where it was exported.

    Args:
        kernel: name of one of `op`'s templates, path of a template or candidate file (`.py`), or the
            folder of an exported kernel.
        op: may be left out where the file says it.
        workload: by default the op's first.
        knobs: those left out keep the template's defaults.
        arch: by default sm_103a.

    Raises:
        UnknownNameError: for an unknown op, template, workload, knob or arch, with the nearest names.
        ContentError: if the file is wrong or does not compile (its cause is then the `CompileError`, which
            has the kind), or if an exported file is damaged.
    """
    from workbench import kernels

    where = _found(workspace)
    path = Path(kernel)
    if not str(kernel):
        raise WorkbenchError("the kernel's name is empty; give a template's name or a path")
    if path.is_dir():
        return kernels.exported(path, op, workload, knobs, arch)
    if path.suffix == ".py" or path.is_file():
        template = kernels.candidate(path, op)
    elif "/" in str(kernel):
        raise WorkbenchError(f"{kernel}: there is no such file or folder; give a template's name or a path")
    elif op is None:
        raise WorkbenchError(
            f"say of which op {kernel!r} is a template, with --op OP (`workbench ops` lists them)"
        )
    else:
        template = load_template(op, str(kernel), where)
    return kernels.compiled(template, workload, knobs or {}, arch or DEFAULT_ARCH, where)


def simulate(
    artifact: Artifact, *, level: str = "screen", seed: int = 0, workspace: Workspace | None = None
) -> Verification:
    """Run an artifact on the CPU with its op's inputs; returns the checks with the counters of each launch.

    Args:
        artifact: the compiled kernel.
        level: `screen` for a first look, `full` for every check there is.
        seed: of inputs and scheduler.
        workspace: holds the op's verifier.
    """
    from workbench.compile import ArtifactCache
    from workbench.verify.verify import Level, verify_artifact

    check_level(level)
    where = _found(workspace)
    cache = ArtifactCache(where.cache)
    return verify_artifact(artifact, load_op(artifact.op, where), level=Level(level), seed=seed, cache=cache)


def check_device(device: str) -> str | None:
    """The arch that kernels for `device` are built for, None if any will do.

    Raises:
        UnknownNameError: if `device` is neither `simulator` nor `cuda`.
        DeviceError: if there is no CUDA device; the message says why.
    """
    if device == "simulator":
        return None
    if device != "cuda":
        raise UnknownNameError("device", device, DEVICES)
    from workbench.devices import DeviceError, available

    if not (there := available()):
        raise DeviceError(f"{there.reason}; leave --device out to use the simulator")
    return there.devices[0].arch


def check_level(level: str) -> None:
    """Raise UnknownNameError if `level` is not a level of verification."""
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)


def verify_kernel(
    artifact: Artifact, *, level: str = "full", seed: int = 0, device: str = "simulator",
    workspace: Workspace | None = None,
) -> Report:  # fmt: skip
    """Check an artifact's numerics, memory accesses and ordering; the arguments are those of `simulate`.

    With `device="cuda"` its cubin runs on the first CUDA device, which must be of its arch, else DeviceError;
    such a report leaves memory accesses undecided.
    """
    check_device(device)
    if device == "simulator":
        return simulate(artifact, level=level, seed=seed, workspace=workspace).report
    from workbench.devices import CudaDevice
    from workbench.verify.on_device import verify_on_device
    from workbench.verify.verify import Level

    check_level(level)
    op = load_op(artifact.op, _found(workspace))
    cuda = CudaDevice()
    try:
        return verify_on_device(artifact, op, cuda, level=Level(level), seed=seed)
    finally:
        cuda.close()


def trace_kernel(
    artifact: Artifact, what: str, *, generator: str = "ordinary", seed: int = 0,
    workspace: Workspace | None = None,
) -> TraceDocument:  # fmt: skip
    """Run an artifact once on its op's inputs and record one thread or one address.

    Args:
        artifact: the compiled kernel.
        what: `thread=CTA:THREAD` or `address=BUFFER+OFFSET`.
        generator: name of the op's inputs.
        seed: of the inputs.
        workspace: holds the op's verifier.
    """
    from workbench.simulator import Trace
    from workbench.verify.trace import trace_artifact

    op = load_op(artifact.op, _found(workspace))
    return trace_artifact(artifact, op, Trace.parse(what), what, generator=generator, seed=seed)


def dump_finding(
    artifact: Artifact, report: Report, *, seed: int = 0, workspace: Workspace | None = None
) -> Dump | None:
    """The first thread that a simulated run found fault with, at that instruction: registers, last steps.

    The run is repeated on ordinary inputs; None if nothing was found or it does not show with them.
    """
    from workbench.simulator import Trace
    from workbench.verify.trace import trace_artifact, witness

    found = witness(report)
    if found is None:
        return None
    op = load_op(artifact.op, _found(workspace))
    document = trace_artifact(artifact, op, Trace(thread=found[1], limit=0), found[0].rule, seed=seed)
    dumps = [d for d in document.trace.dumps if (d.rule, d.ptx_line) == (found[0].rule, found[0].ptx_line)]
    return dumps[0] if dumps else None


def predict(artifact: Artifact, verification: Verification, machine: str = DEFAULT_MACHINE) -> Prediction:
    """Predicted time of a simulated artifact on a machine, with its premises. Nothing is measured."""
    from workbench import cost

    return cost.predict(artifact, verification.counters, cost.load_machine(machine), verification.sass)


def roofline(
    op: str, workload: str | None = None, machine: str = DEFAULT_MACHINE, workspace: Workspace | None = None
) -> Roofline:
    """Least time that an op can take on a machine: compulsory bytes and operations against its limits."""
    from workbench import cost

    contract = load_op(op, workspace)
    return cost.roofline(
        contract,
        contract.workload(contract.workloads[0].name if workload is None else workload),
        cost.load_machine(machine),
    )


def audit(
    file: str | Path | Artifact,
    contract: Path | None = None,
    *,
    workload: str | None = None,
    knobs: Mapping[str, Value] | None = None,
    arch: str | None = None,
    workspace: Workspace | None = None,
) -> AuditDocument:
    """Check the memory ordering of compiled code, statically, on the PTX and on the SASS.

    Args:
        file: a PTX file or cubin; a Python file with a template or any CuTe DSL kernel, `FILE.py`, or
            `FILE.py:NAME` for the launches of one kernel or host function; an exported kernel's folder; a
            folder of such files, each with its contract `NAME.toml` beside it; or an artifact.
        contract: launch and buffers of a bare PTX file or cubin, arguments of a Python file. Without it only
            what holds for any launch passes.
        workload: of a template file; by default its op's first.
        knobs: of a template file; those left out keep their defaults.
        arch: of a Python file; by default sm_103a.
        workspace: holds the op of a template file.

    Raises:
        ContentError: if a file cannot be read or used, or a Python file does not compile.
        UnknownNameError: for an unknown workload, knob, arch or kernel.
    """
    return audit_with_code(file, contract, workload=workload, knobs=knobs, arch=arch, workspace=workspace)[0]


def audit_with_code(
    file: str | Path | Artifact,
    contract: Path | None = None,
    *,
    workload: str | None = None,
    knobs: Mapping[str, Value] | None = None,
    arch: str | None = None,
    workspace: Workspace | None = None,
) -> tuple[AuditDocument, tuple[Listing, ...]]:
    """As `audit`, with the code that the findings of each target point into."""
    from workbench.artifact import Artifact
    from workbench.report.findings import Listing
    from workbench.verify.ordering.launches import audit_launches

    if isinstance(file, Artifact):
        document = audit_launches(file, f"{file.op}/{file.template}")
        return document, (Listing.of(file),) * len(document.targets)
    path, name = _split(str(file))
    if path.is_dir() and not (path / "manifest.json").is_file():
        if contract is not None or workload or knobs:
            raise WorkbenchError(
                f"{path} is a folder: each of its files takes its contract from NAME.toml beside it; leave "
                "contract, workload and knobs out"
            )
        return _audit_folder(path, arch, workspace)
    return _audit_one(path, name, contract, workload, knobs, arch, workspace)


def _audit_one(
    path: Path,
    name: str | None,
    contract: Path | None,
    workload: str | None,
    knobs: Mapping[str, Value] | None,
    arch: str | None,
    workspace: Workspace | None,
) -> tuple[AuditDocument, tuple[Listing, ...]]:
    from workbench.compile.plain import declares_template
    from workbench.report.findings import Listing
    from workbench.verify.ordering import AuditDocument, audit_file
    from workbench.verify.ordering.launches import audit_launches
    from workbench.verify.ordering.lint import linted
    from workbench.verify.ordering.python import audit_python

    if path.suffix != ".py" and not path.is_dir():
        if workload or knobs or arch:
            raise WorkbenchError(f"{path} is compiled already; leave workload, knobs and arch out")
        document = audit_file(path, contract)
        return document, (Listing.beside(path),) * len(document.targets)
    if path.suffix == ".py" and not declares_template(path):
        if workload or knobs:
            raise WorkbenchError(f"{path} declares no TEMPLATE, so that it has no workload and no knobs")
        cache = _cache(workspace)
        hosts = audit_python(path, contract, name=name, arch=arch or DEFAULT_ARCH, cache=cache)
        targets = [(t, Listing.of(h.artifact, path.name)) for h in hosts for t in h.document.targets]
        return AuditDocument(targets=tuple(t for t, _ in targets)), tuple(code for _, code in targets)
    if contract is not None:
        raise WorkbenchError(f"{path} says itself how it is launched; leave the contract out")
    artifact = compile_kernel(path, workload=workload, knobs=knobs, arch=arch, workspace=workspace)
    document = audit_launches(artifact, str(path))
    if path.suffix == ".py" and path.is_file():
        document = linted(document, path.read_text(), path.name)
    if name is not None:
        document = _only(document, name)
    return document, (Listing.of(artifact),) * len(document.targets)


def _audit_folder(
    folder: Path, arch: str | None, workspace: Workspace | None
) -> tuple[AuditDocument, tuple[Listing, ...]]:
    """Audit every kernel file of a folder and its subfolders; one that cannot be audited is named."""
    from workbench.verify.ordering import AuditDocument
    from workbench.verify.ordering.files import Unreadable
    from workbench.verify.ordering.folder import kernel_files

    targets: list[AuditTarget] = []
    listings: list[Listing] = []
    unreadable: list[Unreadable] = []
    for path in kernel_files(folder):
        beside = path.with_suffix(".toml")
        contract = beside if beside.is_file() else None
        try:
            document, code = _audit_one(
                path, None, contract, None, None, arch if path.suffix == ".py" else None, workspace
            )
        except WorkbenchError as e:
            unreadable.append(Unreadable(target=str(path), message=str(e)))
            continue
        targets += document.targets
        listings += code
    return AuditDocument(targets=tuple(targets), unreadable=tuple(unreadable)), tuple(listings)


def _cache(workspace: Workspace | None) -> ArtifactCache | None:
    """The artifact cache of the workspace; None outside of one."""
    from workbench.compile import ArtifactCache

    try:
        return ArtifactCache(_found(workspace).cache)
    except WorkbenchError:
        return None


def propose(
    op: str | None = None,
    workload: str | None = None,
    *,
    arch: str = DEFAULT_ARCH,
    machine: str = DEFAULT_MACHINE,
    seed: int = 0,
    rounds: int = 4,
    batch: int = 6,
    templates: Sequence[str] = (),
    workers: int | None = None,
    resume: str | None = None,
    plan: Plan | None = None,
    on_event: OnEvent = lambda event: None,
    workspace: Workspace | None = None,
) -> RunResult:
    """Search for a kernel and export the winner with its evidence.

    Args:
        op: what to find a kernel for; left out only with `resume`.
        workload: by default the op's first.
        arch: target of the compiler.
        machine: description that times are predicted for.
        seed: same seed, same winner.
        rounds: rounds of the search.
        batch: candidates a round.
        templates: names of the templates to draw from; empty for all of the op's.
        workers: evaluation processes; by default one a core, at most eight.
        resume: id of an interrupted run to continue with its own settings.
        plan: lets a language model propose; `rounds`, `batch` and `templates` are then not used.
        on_event: is told what happens, see `workbench.agent.events`.
        workspace: holds verifiers and templates and receives the winner.

    Raises:
        WorkbenchError: for an unknown name, or if nothing can be searched or written.
    """
    from workbench.agent import offline, online
    from workbench.agent.run import RunStore

    where = _found(workspace)
    if resume is not None and RunStore.open(where.runs, resume)[1].model is not None:
        return online.resume(where, resume, workers=workers, on_event=on_event)
    if resume is None:
        if op is None:
            raise WorkbenchError(
                "say what to propose for with --op OP (`workbench ops` lists them), or --resume RUN"
            )
        workload = default_workload(op, where) if workload is None else workload
        if plan is not None:
            return online.propose(
                where,
                op,
                workload,
                plan,
                arch=arch,
                machine=machine,
                seed=seed,
                workers=workers,
                on_event=on_event,
            )
    return offline.propose(
        where,
        op or "",
        workload or "",
        arch=arch,
        machine=machine,
        seed=seed,
        rounds=rounds,
        batch=batch,
        templates=templates,
        workers=workers,
        resume=resume,
        on_event=on_event,
    )


def replay_run(
    transcript: Path,
    *,
    workers: int | None = None,
    on_event: OnEvent = lambda event: None,
    workspace: Workspace | None = None,
) -> RunResult:
    """Run a model's proposing again with its recorded answers, offline; exports nothing.

    Args:
        transcript: `transcript.jsonl` in the folder of a run.
        workers: evaluation processes.
        on_event: is told what happens.
        workspace: as the run had it.

    Raises:
        WorkbenchError: if the transcript cannot be read, or what it was recorded with has changed since.
    """
    from workbench.agent import online

    return online.replay(_found(workspace), transcript, workers=workers, on_event=on_event)


def tune_template(
    op: str,
    template: str | None = None,
    workload: str | None = None,
    *,
    trials: int = 32,
    arch: str = DEFAULT_ARCH,
    machine: str = DEFAULT_MACHINE,
    seed: int = 0,
    workers: int | None = None,
    on_event: OnEvent = lambda event: None,
    workspace: Workspace | None = None,
) -> RunResult:
    """Search the knobs of one template, or of all of an op's, at one workload; exports nothing.

    The arguments are those of `propose`; `trials` is the number of points to evaluate.
    """
    from workbench.agent import offline

    where = _found(workspace)
    batch = _batch(trials)
    return offline.propose(
        where,
        op,
        default_workload(op, where) if workload is None else workload,
        arch=arch,
        machine=machine,
        seed=seed,
        rounds=trials // batch,
        batch=batch,
        templates=() if template is None else (template,),
        workers=workers,
        on_event=on_event,
        export=False,
    )


def _batch(trials: int) -> int:
    """The largest round of at most eight trials that divides their number."""
    return max(size for size in range(1, 9) if trials % size == 0)


def export_kernel(
    artifact: Artifact,
    *,
    waive: Collection[str] = (),
    waivers: Path | None = None,
    draft_waivers: Path | None = None,
    machine: str = DEFAULT_MACHINE,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> ExportDocument:
    """Verify an artifact in full and write it to generated_kernels/ with its evidence.

    Args:
        artifact: the compiled kernel.
        waive: names of checks that could not decide and that a person accepts.
        waivers: a file of waivers of single findings; see `workbench.export.waivers`.
        draft_waivers: receives such a file, to be filled in, of all that the audits leave undecided.
        machine: description that the time is predicted for.
        seed: of inputs and schedules.
        workspace: receives the folder.

    Raises:
        ExportRefused: if a check failed, or could not decide and neither `waive` nor `waivers` covers it.
    """
    from workbench.cost import load_machine
    from workbench.export import export_winner, load_manifest, read_waivers
    from workbench.export.waivers import draft
    from workbench.files import check_destination, write_atomic
    from workbench.report.documents import ExportDocument

    where = _found(workspace)
    entries = read_waivers(waivers) if waivers is not None else ()
    load_machine(machine)
    if draft_waivers is not None:
        check_destination(draft_waivers, *([waivers] if waivers is not None else []))
    verification = simulate(artifact, level="full", seed=seed, workspace=where)
    report = verification.report
    if draft_waivers is not None:
        write_atomic(draft_waivers, draft(report, artifact.source_hash))
    prediction = predict(artifact, verification, machine) if verification.counters else None
    folder = export_winner(where, artifact, report, prediction, waive=waive, waivers=entries, seed=seed)
    manifest = load_manifest(folder)
    return ExportDocument(
        folder=folder.relative_to(where.root).as_posix(),
        key=artifact.key,
        files=("manifest.json", *manifest.files),
        waived=tuple(c.name for c in manifest.checks if c.waived),
    )


def _split(file: str) -> tuple[Path, str | None]:
    """`FILE.py:NAME` as path and name."""
    head, colon, name = file.rpartition(":")
    return (Path(head), name) if colon and head.endswith(".py") else (Path(file), None)


def _only(document: AuditDocument, name: str) -> AuditDocument:
    from workbench.report.tables import kernel_name

    readable = {t.kernel: kernel_name(t.kernel) for t in document.targets}
    chosen = [
        t for t in document.targets if name in (t.kernel, *readable[t.kernel].split("."), readable[t.kernel])
    ]
    if not chosen:
        raise UnknownNameError("kernel", name, set(readable.values()))
    return document.model_copy(update={"targets": tuple(chosen)})


def _found(workspace: Workspace | None) -> Workspace:
    return workspace if workspace is not None else Workspace.find()
