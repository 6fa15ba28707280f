"""Proposing with a model: conversations write kernels against the verifiers for as long as a budget allows.

A run's settings, its transcript and every evaluated candidate are on disk as soon as they are known. To
resume is to run again from the start: recorded answers and outcomes are taken from there, the rest is new.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from workbench.agent.begin import job_of, refuse_changed, settings_of, worker_pool
from workbench.agent.chain import Chain
from workbench.agent.desk import Desk
from workbench.agent.evaluate import Job, load_artifact
from workbench.agent.evaluations import Evaluations
from workbench.agent.events import ModelAnswered, OnEvent, RunStarted
from workbench.agent.feedback import describe
from workbench.agent.finals import choose
from workbench.agent.lessons import Lessons
from workbench.agent.model import (
    Ledger,
    Limits,
    Message,
    Profile,
    Provider,
    RecordedProvider,
    Reply,
    Transcript,
    load_prices,
)
from workbench.agent.prompts import fill, prompt_hash
from workbench.agent.record import record_of
from workbench.agent.run import (
    AgentSettings,
    Candidate,
    Proposal,
    RunResult,
    RunSettings,
    RunStore,
    Status,
    repeats,
)
from workbench.agent.strategies import Strategy, run_chains
from workbench.agent.tools import specs
from workbench.agent.tuning import Tuner
from workbench.artifact import stable_hash
from workbench.cost import load_machine, roofline
from workbench.errors import WorkbenchError
from workbench.ops import load_op
from workbench.records import RecordStore
from workbench.verify.runs import Level
from workbench.workspace import Workspace


@dataclass(frozen=True)
class Plan:
    """How a model is to propose; see `workbench.agent.run.AgentSettings`."""

    profile: Profile
    strategy: Strategy = Strategy.CHAIN
    chains: int = 1
    migrate_every: int = 4
    tune_batch: int = 4
    limits: Limits = field(default_factory=Limits)


def propose(
    workspace: Workspace,
    op_name: str,
    workload_name: str,
    plan: Plan,
    *,
    arch: str = "sm_103a",
    machine: str = "gb300",
    seed: int = 0,
    workers: int | None = None,
    export: bool = True,
    on_event: OnEvent = lambda event: None,
    provider: Provider | None = None,
) -> RunResult:
    """Let a model propose kernels for one op at one workload; export the winner with its evidence.

    Args:
        workspace: holds contracts and templates, receives the winner.
        op_name: the op.
        workload_name: its workload.
        plan: which model, how, and what it may cost.
        arch: target of the compiler.
        machine: description that times are predicted for.
        seed: of inputs and samplers.
        workers: evaluation processes; by default one a core, at most eight.
        export: whether the winner is written.
        on_event: is told what happens.
        provider: answers instead of the profile's server.

    Raises:
        WorkbenchError: for an unknown name, a missing key, or a folder that cannot be written.
    """
    settings = settings_of(
        workspace,
        op_name,
        workload_name,
        arch=arch,
        machine=machine,
        seed=seed,
        agent=plan.profile.model,
        rounds=plan.limits.rounds,
        batch=plan.chains,
        model=AgentSettings(
            profile=plan.profile,
            strategy=plan.strategy.value,
            chains=plan.chains,
            migrate_every=plan.migrate_every,
            tune_batch=plan.tune_batch,
            limits=plan.limits,
            prompt_hash=prompt_hash(),
            tools_hash=_tools_hash(),
            lessons=_lessons(workspace).told(op_name),
        ),
    )
    live = provider if provider is not None else _client(plan.profile)
    ledger = _ledger(settings, None)
    store = RunStore.create(workspace.runs, settings)
    with store.held():
        return _run(workspace, store, settings, live, ledger, workers, export, on_event)


def resume(
    workspace: Workspace,
    run_id: str,
    *,
    workers: int | None = None,
    export: bool = True,
    on_event: OnEvent = lambda event: None,
    provider: Provider | None = None,
) -> RunResult:
    """Continue an interrupted run with the settings that it was begun with, paying for nothing twice.

    Raises:
        UnknownNameError: if there is no such run.
        WorkbenchError: if templates, verifier, prompts or tools have changed since, or the key is missing.
    """
    store, settings = RunStore.open(workspace.runs, run_id)
    _unchanged(workspace, settings)
    assert settings.model is not None
    live = provider if provider is not None else _client(settings.model.profile)
    with store.held():
        ledger = _ledger(settings, Transcript(store.transcript))
        return _run(workspace, store, settings, live, ledger, workers, export, on_event)


def replay(
    workspace: Workspace,
    transcript: Path,
    *,
    workers: int | None = None,
    export: bool = False,
    on_event: OnEvent = lambda event: None,
) -> RunResult:
    """Run the loop again with recorded answers, offline; candidates are evaluated anew.

    Args:
        workspace: holds contracts and templates.
        transcript: `transcript.jsonl` of a run, with its `run.json` beside it.
        workers: evaluation processes.
        export: whether the winner is written.
        on_event: is told what happens.

    Raises:
        ContentError: if the transcript or the run's settings cannot be read.
        ReplayError: if the run asks something else than what was recorded.
    """
    if not transcript.is_file():
        raise WorkbenchError(f"{transcript}: there is no such transcript")
    folder = transcript.resolve().parent
    if not (folder / "run.json").is_file():
        raise WorkbenchError(
            f"{transcript}: there is no run.json beside it; give transcript.jsonl in the folder of its run"
        )
    _, settings = RunStore.open(folder.parent, folder.name)
    _unchanged(workspace, settings)
    run_id = f"{settings.run_id}-replay-{os.getpid()}"
    store = RunStore.create(workspace.runs, settings.model_copy(update={"run_id": run_id}))
    with store.held():
        store.transcript.write_bytes(transcript.read_bytes())
        ledger = _ledger(settings, Transcript(store.transcript), time_too=False)
        return _run(workspace, store, settings, None, ledger, workers, export, on_event)


def _unchanged(workspace: Workspace, settings: RunSettings) -> None:
    """Refuse to go on with other templates, contracts, prompts or tools than the run was begun with."""
    if settings.model is None:
        raise WorkbenchError(f"run {settings.run_id} was made by the offline proposer, without a model")
    refuse_changed(workspace, settings)
    if (prompt_hash(), _tools_hash()) != (settings.model.prompt_hash, settings.model.tools_hash):
        raise WorkbenchError(f"run {settings.run_id} was begun with other prompts or tools; start a new run")


def _tools_hash() -> str:
    return stable_hash([t.model_dump(mode="json") for t in specs()])


def _lessons(workspace: Workspace) -> Lessons:
    return Lessons(workspace.tuning_db / "lessons.jsonl")


def _client(profile: Profile) -> Provider:
    from workbench.agent.model.client import OpenAIProvider

    return OpenAIProvider(profile)


def _ledger(settings: RunSettings, earlier: Transcript | None, time_too: bool = True) -> Ledger:
    """The run's account: what is recorded is charged when it is answered again, what was lost at once."""
    assert settings.model is not None
    profile = settings.model.profile
    price = profile.price or load_prices().get(profile.model)
    if earlier is None:
        return Ledger(settings.model.limits, price)
    before = max((e.run_seconds for e in earlier.exchanges), default=0.0) if time_too else 0.0
    return Ledger(settings.model.limits, price, before, earlier.lost)


def _run(
    workspace: Workspace,
    store: RunStore,
    settings: RunSettings,
    live: Provider | None,
    ledger: Ledger,
    workers: int | None,
    export: bool,
    on_event: OnEvent,
) -> RunResult:
    started = time.monotonic()
    model = settings.model
    assert model is not None
    op = load_op(workspace, settings.op)
    workload, machine = op.workload(settings.workload), load_machine(settings.machine)
    limit = roofline(op, workload, machine)
    records = RecordStore(workspace.tuning_db / "records.sqlite")
    provider = RecordedProvider(Transcript(store.transcript), ledger, live)
    on_event(RunStarted(settings, len(store.candidates())))

    def job(proposal: Proposal, level: Level) -> Job:
        return job_of(workspace, settings, proposal, level, pool.count if level is Level.FULL else 1)

    def record(candidate: Candidate) -> None:
        if candidate.artifact_key is not None and candidate.status is not Status.FAILED:
            artifact = load_artifact(workspace, candidate.artifact_key)
            records.add(record_of(op, settings, artifact, candidate))

    def answered(chain: int, turn: int, reply: Reply) -> None:
        on_event(ModelAnswered(chain, turn, reply, ledger.spend))

    with (
        worker_pool(workers, blank=(model.profile.api_key_env,)) as pool,
        Evaluations(pool, store, job, on_event, record) as evaluations,
    ):
        task = _task(workspace, settings, limit.us, limit.bound)

        def new_chain(number: int, improve: Candidate | None) -> Chain:
            desk = Desk(workspace, op, workload, settings, limit.us, evaluations, number)
            opening = [Message(role="system", content=fill("system")), Message(role="user", content=task)]
            if improve is not None:
                desk.keep(improve)
                report = describe(improve, limit.us)
                text = fill("improve", report=report, source=improve.proposal.source)
                opening.append(Message(role="user", content=text))
            tuner = Tuner(model.tune_batch, settings.seed)
            stall = model.limits.stall
            return Chain(number, provider, model.profile, desk, tuner, opening, stall, answered)

        strategy = Strategy(model.strategy)
        chains = run_chains(strategy, new_chain, model.chains, model.limits.rounds, model.migrate_every)
        candidates = {i: c for chain in chains for i, c in chain.desk.candidates.items()}
        searched = time.monotonic()
        outcomes, winner, exported = choose(
            workspace,
            settings,
            candidates,
            lambda p: evaluations.submit(p, Level.FULL).result(),
            export,
            on_event,
        )
    result = RunResult(
        settings=settings,
        candidates=tuple(outcomes[i] for i in sorted(outcomes)),
        identical=repeats(outcomes.values()),
        winner=winner.proposal.index if winner else None,
        exported=exported,
        roofline_us=limit.us,
        seconds=time.monotonic() - started,
        seconds_to_export=time.monotonic() - searched,
        spend=ledger.spend,
        ends=tuple(c.ended or "" for c in chains),
    )
    store.finish(result)
    said = [text for chain in chains for text in chain.lessons]
    if live is not None:
        _lessons(workspace).add(settings.op, settings.run_id, result.candidates, said)
    return result


def _task(workspace: Workspace, settings: RunSettings, roofline_us: float, bound: str) -> str:
    from workbench.report.contracts import describe_op
    from workbench.report.texts import contract_text

    assert settings.model is not None
    document = describe_op(workspace, settings.op, settings.machine)
    workload = next(w for w in document.workloads if w.name == settings.workload)
    return fill(
        "task",
        op=settings.op,
        workload=settings.workload,
        axes=", ".join(f"{k}={v}" for k, v in workload.axes.items()),
        arch=settings.arch,
        machine=settings.machine,
        roofline=f"{roofline_us:.2f}",
        bound=bound,
        contract=contract_text(document),
        templates=", ".join(settings.templates) or "none",
        lessons=settings.model.lessons,
        rounds=settings.model.limits.rounds,
    )
