"""The offline proposer: no model and no key, seeded, in rounds over an op's templates and their knobs.

Each round asks the study of every template for its share of candidates, evaluates them in workers and
tells the outcomes back in the order they were asked. So a seed decides the whole run, whatever the number of
workers; and an interrupted run is continued by asking again and taking the outcomes that are already on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from workbench.agent.begin import job_of, refuse_changed, settings_of, worker_pool
from workbench.agent.evaluate import load_artifact
from workbench.agent.events import (
    CandidateFinished,
    CandidateStarted,
    OnEvent,
    RoundStarted,
    RunStarted,
)
from workbench.agent.finals import choose
from workbench.agent.record import record_of
from workbench.agent.run import Candidate, Proposal, RunResult, RunSettings, RunStore, Status, lost, repeats
from workbench.agent.workers import Lost, WorkerPool
from workbench.cost import Machine, load_machine, roofline
from workbench.errors import WorkbenchError
from workbench.ops import load_op
from workbench.ops.model import Op, Workload
from workbench.records import RecordStore
from workbench.templates import Template, load_template
from workbench.tune import Points, Study, StudyIdentity, Trial, make_sampler
from workbench.verify.runs import Level
from workbench.workspace import Workspace


@dataclass(frozen=True)
class _Context:
    workspace: Workspace
    op: Op
    workload: Workload
    templates: tuple[Template, ...]
    machine: Machine
    settings: RunSettings
    store: RunStore
    on_event: OnEvent


def propose(
    workspace: Workspace,
    op_name: str,
    workload_name: str,
    *,
    arch: str = "sm_103a",
    machine: str = "gb300",
    seed: int = 0,
    rounds: int = 4,
    batch: int = 6,
    templates: Sequence[str] = (),
    workers: int | None = None,
    resume: str | None = None,
    export: bool = True,
    on_event: OnEvent = lambda event: None,
) -> RunResult:
    """Propose, evaluate and rank candidates for one op at one workload; export the winner with its evidence.

    Args:
        templates: template names to draw from; empty for all of the op's.
        workers: evaluation processes; by default one a core, at most eight.
        resume: id of an interrupted run to continue; the other settings are then that run's own.
        export: whether the winner is written to the workspace's generated kernels.

    Raises:
        WorkbenchError: for an unknown name, a template or verifier that changed since the run began, a
            template without a valid point, or a folder that cannot be written.
    """
    started = time.monotonic()
    if resume is not None:
        context = _resume(workspace, resume, on_event)
    else:
        context = _begin(
            workspace, op_name, workload_name, arch, machine, seed, rounds, batch, tuple(templates), on_event
        )
    settings, described = context.settings, context.machine
    records = RecordStore(workspace.tuning_db / "records.sqlite")
    with context.store.held(), worker_pool(workers) as pool:
        candidates = _search(context, pool, records)
        searched = time.monotonic()
        outcomes, winner, exported = choose(
            workspace,
            settings,
            {c.proposal.index: c for c in candidates},
            lambda proposal: next(_in_workers(context, pool, [proposal], Level.FULL)),
            export,
            on_event,
        )
    result = RunResult(
        settings=settings,
        candidates=tuple(outcomes[i] for i in sorted(outcomes)),
        identical=repeats(outcomes.values()),
        winner=winner.proposal.index if winner else None,
        exported=exported,
        roofline_us=roofline(context.op, context.workload, described).us,
        seconds=time.monotonic() - started,
        seconds_to_export=time.monotonic() - searched,
    )
    context.store.finish(result)
    return result


def _begin(
    workspace: Workspace,
    op_name: str,
    workload_name: str,
    arch: str,
    machine: str,
    seed: int,
    rounds: int,
    batch: int,
    templates: tuple[str, ...],
    on_event: OnEvent,
) -> _Context:
    """A new run, its settings on disk."""
    settings = settings_of(
        workspace,
        op_name,
        workload_name,
        arch=arch,
        machine=machine,
        seed=seed,
        agent="offline",
        rounds=rounds,
        batch=batch,
        templates=templates,
    )
    if not settings.templates:
        raise WorkbenchError(f"op {op_name!r} has no template; add {workspace.templates / op_name}/NAME.py")
    return _context(workspace, settings, RunStore.create(workspace.runs, settings), on_event)


def _resume(workspace: Workspace, run_id: str, on_event: OnEvent) -> _Context:
    """An earlier run with the settings it was begun with."""
    store, settings = RunStore.open(workspace.runs, run_id)
    refuse_changed(workspace, settings)
    return _context(workspace, settings, store, on_event)


def _context(workspace: Workspace, settings: RunSettings, store: RunStore, on_event: OnEvent) -> _Context:
    op = load_op(workspace, settings.op)
    loaded = tuple(load_template(workspace.template(settings.op, name)) for name in settings.templates)
    workload, described = op.workload(settings.workload), load_machine(settings.machine)
    return _Context(workspace, op, workload, loaded, described, settings, store, on_event)


def _search(context: _Context, pool: WorkerPool, records: RecordStore) -> list[Candidate]:
    """Run all rounds; return the candidates in the order they were proposed."""
    settings = context.settings
    studies = {t.name: _study(context, t) for t in context.templates}
    trials: dict[int, Trial] = {}
    # What was lost for want of memory is tried anew: this time there may be more.
    known = {i: c for i, c in context.store.candidates().items() if c.status is not Status.LOST}
    context.on_event(RunStarted(settings, len(known)))
    candidates: list[Candidate] = []
    for number in range(settings.rounds):
        proposals = _ask(context, studies, trials, candidates, number)
        if not proposals:
            break
        context.on_event(RoundStarted(number, proposals))
        for candidate in _evaluate(context, pool, proposals, known, records):
            failure = None if candidate.predicted_us is not None else candidate.status.value
            trial = trials[candidate.proposal.index]
            studies[candidate.proposal.template].tell(trial, value_us=candidate.predicted_us, failure=failure)
            candidates.append(candidate)
    if not candidates:
        raise WorkbenchError(
            f"no template of {settings.op} has a valid point at {settings.workload}; check their constraints"
        )
    return candidates


def _study(context: _Context, template: Template) -> Study:
    """A study in memory: an interrupted run is asked again from its start, so nothing else need be stored."""
    space = template.space(context.workload.axes)
    settings = context.settings
    identity = StudyIdentity.of(
        template,
        settings.workload,
        space,
        arch=settings.arch,
        device=settings.machine,
        objective="predicted",
        run=settings.run_id,
    )
    return Study(Points.of(space), identity, make_sampler("tpe", settings.seed), first=[template.default])


def _ask(
    context: _Context,
    studies: dict[str, Study],
    trials: dict[int, Trial],
    candidates: Sequence[Candidate],
    number: int,
) -> tuple[Proposal, ...]:
    """The next round's proposals: one a template first, the rest to the template that did best so far.

    `trials` receives the study's trial of each proposal.
    """
    batch = context.settings.batch
    best: dict[str, float] = {}
    for c in candidates:
        if c.predicted_us is not None:
            name = c.proposal.template
            best[name] = min(best.get(name, float("inf")), c.predicted_us)
    ranked = sorted(studies, key=lambda name: (best.get(name, float("inf")), name))
    shares = {name: min(1, batch) for name in ranked}
    spare = max(0, batch - sum(shares.values()))
    if best:
        shares[ranked[0]] += spare
    else:
        for i in range(spare):
            shares[ranked[i % len(ranked)]] += 1
    proposals: list[Proposal] = []
    for name in ranked:
        for trial in studies[name].ask_batch(shares[name]):
            index = len(candidates) + len(proposals)
            trials[index] = trial
            proposals.append(Proposal(index=index, round=number, template=name, knobs=trial.knobs))
    return tuple(proposals)


def _evaluate(
    context: _Context,
    pool: WorkerPool,
    proposals: Sequence[Proposal],
    known: dict[int, Candidate],
    records: RecordStore,
) -> list[Candidate]:
    """Evaluate one round; outcomes in the order of the proposals."""
    done: dict[int, Candidate] = {}
    for p in proposals:
        if p.index in known and known[p.index].proposal == p:
            done[p.index] = known[p.index]
            context.on_event(CandidateFinished(known[p.index], known=True))
    open_proposals = [p for p in proposals if p.index not in done]

    def started(proposal: Proposal) -> None:
        context.on_event(CandidateStarted(proposal))

    for candidate in _in_workers(context, pool, open_proposals, Level.SCREEN, started):
        context.store.add(candidate)
        if candidate.artifact_key is not None:
            artifact = load_artifact(context.workspace, candidate.artifact_key)
            records.add(record_of(context.op, context.settings, artifact, candidate))
        done[candidate.proposal.index] = candidate
        context.on_event(CandidateFinished(candidate, known=False))
    return [done[p.index] for p in proposals]


def _in_workers(
    context: _Context,
    pool: WorkerPool,
    proposals: Sequence[Proposal],
    level: Level,
    on_start: Callable[[Proposal], None] = lambda proposal: None,
) -> Iterator[Candidate]:
    # A finalist has the machine to itself; candidates of a round share it.
    processes = pool.count if len(proposals) == 1 else 1
    jobs = [
        job_of(context.workspace, context.settings, p, level, processes).model_dump_json() for p in proposals
    ]
    for i, answer in pool.run(jobs, lambda i: on_start(proposals[i])):
        if isinstance(answer, Lost):
            yield lost(proposals[i], answer.reason, answer.detail)
        else:
            yield Candidate.model_validate_json(answer)
