"""How a run begins, be it the offline proposer, conversations or MCP: settings, jobs, workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from workbench.agent.evaluate import Job
from workbench.agent.run import AgentSettings, Proposal, RunSettings, new_run_id
from workbench.agent.workers import WorkerPool
from workbench.compile import ARCHITECTURES
from workbench.cost import load_machine
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.ops import load_op
from workbench.records import hash_verifier
from workbench.templates import load_template
from workbench.verify.runs import Level
from workbench.workspace import Workspace

SECONDS_A_CANDIDATE = 90.0
"""Limit for one candidate's compile and checks; compiling and simulating have tighter limits of their own."""
_MOST_WORKERS = 8


def settings_of(
    workspace: Workspace,
    op_name: str,
    workload_name: str,
    *,
    arch: str,
    machine: str,
    seed: int,
    agent: str,
    rounds: int = 1,
    batch: int = 1,
    templates: Sequence[str] = (),
    model: AgentSettings | None = None,
) -> RunSettings:
    """The settings of a new run; nothing is written.

    Args:
        workspace: holds contracts and templates.
        op_name: the op.
        workload_name: its workload.
        arch: target of the compiler.
        machine: description that times are predicted for.
        seed: of inputs and samplers.
        agent: who proposes: `offline`, `mcp`, or a model's name.
        rounds: turns or rounds.
        batch: candidates a round, or conversations side by side.
        templates: names of those that are drawn from; empty for all of the op's.
        model: how a model proposes.

    Raises:
        UnknownNameError: for an op, workload, arch, machine or template that there is not.
        WorkbenchError: if a template or verifier cannot be read, or no candidate is asked for.
    """
    if arch not in ARCHITECTURES:
        raise UnknownNameError("arch", arch, ARCHITECTURES)
    if rounds < 1 or batch < 1:
        raise WorkbenchError(f"a run needs at least one round of one candidate, not {rounds} of {batch}")
    load_op(workspace, op_name).workload(workload_name)
    described = load_machine(machine)
    names = tuple(templates) or tuple(workspace.template_names(op_name))
    return RunSettings(
        run_id=new_run_id(op_name, workload_name),
        op=op_name,
        workload=workload_name,
        arch=arch,
        machine=described.name,
        agent=agent,
        seed=seed,
        rounds=rounds,
        batch=batch,
        templates=names,
        template_hashes=_hashes(workspace, op_name, names),
        verifier_hash=hash_verifier(workspace.verifier(op_name)),
        model=model,
    )


def refuse_changed(workspace: Workspace, settings: RunSettings) -> None:
    """Refuse to go on with other templates or another contract than a run was begun with.

    Raises:
        WorkbenchError: if they have changed, or are gone.
    """
    hashes = _hashes(workspace, settings.op, settings.templates)
    verifier = hash_verifier(workspace.verifier(settings.op))
    if (hashes, verifier) != (settings.template_hashes, settings.verifier_hash):
        raise WorkbenchError(
            f"run {settings.run_id} was begun with other templates or another verifier; start a new run"
        )


def _hashes(workspace: Workspace, op: str, templates: Iterable[str]) -> tuple[str, ...]:
    return tuple(load_template(workspace.template(op, name)).source_hash for name in templates)


def job_of(
    workspace: Workspace, settings: RunSettings, proposal: Proposal, level: Level, processes: int = 1
) -> Job:
    """What a worker needs to evaluate one proposal of a run."""
    return Job(
        workspace=workspace.root,
        op=settings.op,
        workload=settings.workload,
        arch=settings.arch,
        machine=settings.machine,
        seed=settings.seed,
        level=level,
        processes=processes,
        proposal=proposal,
    )


def worker_pool(count: int | None = None, blank: Iterable[str] = ()) -> WorkerPool:
    """Evaluation processes: `count`, by default one a core, at most eight; one thread each.

    Variables in `blank` are empty in their environment, whatever they are called.
    """
    count = count or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | dict.fromkeys(blank, "")
    return WorkerPool("workbench.agent.worker", count, SECONDS_A_CANDIDATE, environment)
