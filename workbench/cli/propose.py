"""`workbench propose`: search for a kernel and export the winner."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.progress import followed
from workbench.cli.shell import (
    ArchOption,
    DebugOption,
    Exit,
    JsonOption,
    OptionalOpOption,
    QuietOption,
    SeedOption,
    Shell,
    UnsafeCompileOption,
    WorkloadOption,
    given,
    option,
)
from workbench.errors import UnknownNameError, WorkbenchError

if TYPE_CHECKING:
    from workbench.agent.model import Limits
    from workbench.agent.online import Plan
    from workbench.agent.run import RunSettings

OFFLINE = "offline"
_ANY = {"workers", "unsafe_compile", "json", "quiet", "debug", "profile"}
"""Options that go with `--resume` whatever the run was begun with."""
_OF_OFFLINE = {"batch", "template"}
_OF_MODELS = {
    "base_url", "strategy", "chains", "migrate_every", "tune_batch",
    "max_tokens", "max_usd", "max_seconds", "max_stall",
}  # fmt: skip


def command(
    context: typer.Context,
    op: OptionalOpOption = None,
    workload: WorkloadOption = None,
    arch: ArchOption = "sm_103a",
    agent: Annotated[
        str,
        typer.Option(
            "--agent", metavar="offline|MODEL", help="Who proposes; `offline` needs no model and no key."
        ),
    ] = OFFLINE,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Rounds of the search (4), or turns of a conversation (20)."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Candidates a round (offline).")] = 6,
    template: Annotated[
        list[str] | None,
        typer.Option("--template", metavar="T", help="Draw from this template only (offline). Repeatable."),
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", metavar="M", help="Machine that times are predicted for.")
    ] = "gb300",
    seed: SeedOption = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Evaluation processes; by default one a core.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue an interrupted run.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="P.toml", help="Model, server, sampling, price.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="Server that speaks the OpenAI API.")
    ] = None,
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="chain|islands|beam", help="How conversations work together.")
    ] = "chain",
    chains: Annotated[int, typer.Option("--chains", min=1, max=64, help="Conversations side by side.")] = 1,
    migrate_every: Annotated[
        int, typer.Option("--migrate-every", min=1, help="Turns between two exchanges of the best.")
    ] = 4,
    tune_batch: Annotated[
        int,
        typer.Option("--tune-batch", min=0, help="Knob settings tried of each verified source meanwhile."),
    ] = 4,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Most tokens of the model in all.")
    ] = None,
    max_usd: Annotated[
        float | None, typer.Option("--max-usd", min=0.0, help="Most money for the model in all, in USD.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", min=0.0, help="Most wall time of the conversations.")
    ] = None,
    max_stall: Annotated[
        int, typer.Option("--max-stall", min=1, help="Turns without a better candidate.")
    ] = 8,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="TRANSCRIPT", help="Answers of an earlier run instead of a model."),
    ] = None,
    unsafe_compile: UnsafeCompileOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Search for a kernel and export the winner.

    Candidates are compiled, simulated, verified and ranked; the winner is written with its evidence.
    With --agent MODEL a language model writes them, within what the options from --profile on allow.

    Exit code 1 if no candidate passed every check.
    """
    from workbench import api
    from workbench.report.tables import print_run

    shell = Shell(json, quiet, debug)
    if max_usd == 0 or max_seconds == 0:
        raise WorkbenchError("a limit of 0 allows nothing; leave it out for no limit")
    said = given(context)
    if replay is not None:
        _refuse_beside_replay(said)
    elif resume is not None:
        _refuse_other_settings(said, shell, resume)
    else:
        _refuse_of_other_proposer(said, agent != OFFLINE or profile is not None)
    plan = None
    if agent != OFFLINE or profile is not None:
        from workbench.agent.model import Limits

        limits = Limits(
            tokens=max_tokens, usd=max_usd, seconds=max_seconds, rounds=rounds or 20, stall=max_stall
        )
        plan = _plan(agent, profile, base_url, strategy, limits)
        plan = replace(plan, chains=chains, migrate_every=migrate_every, tune_batch=tune_batch)
    with followed(shell) as on_event:
        if replay is not None:
            result = api.replay_run(replay, workers=workers, on_event=on_event, workspace=shell.workspace())
        else:
            result = api.propose(
                op,
                workload,
                arch=arch,
                machine=machine,
                seed=seed,
                rounds=rounds or 4,
                batch=batch,
                templates=template or (),
                workers=workers,
                resume=resume,
                plan=plan,
                on_event=on_event,
                workspace=shell.workspace(),
            )
    shell.show(result, lambda out: print_run(result, out))
    raise typer.Exit(Exit.GOOD if result.winner is not None else Exit.FINDING)


def _plan(agent: str, path: Path | None, base_url: str | None, strategy: str, limits: Limits) -> Plan:
    """The plan that the options describe; flags go before the profile."""
    from workbench.agent.model import Profile, load_profile
    from workbench.agent.online import Plan
    from workbench.agent.strategies import Strategy

    if not agent or (agent != OFFLINE and difflib.get_close_matches(agent, [OFFLINE], cutoff=0.8)):
        raise UnknownNameError("agent", agent, [OFFLINE])  # a slip, no model
    if strategy not in list(Strategy):
        raise UnknownNameError("strategy", strategy, list(Strategy))
    profile = load_profile(path) if path is not None else Profile(model=agent)
    if agent != OFFLINE:
        profile = profile.changed(model=agent)
    if base_url is not None:
        profile = profile.changed(base_url=base_url)
    return Plan(profile, Strategy(strategy), limits=limits)


def _refuse_beside_replay(said: dict[str, object]) -> None:
    for name in said:
        if name not in _ANY - {"profile"} | {"replay"}:
            raise WorkbenchError(
                f"{option(name)} does not go with --replay, which repeats a run with its own settings; "
                "leave it out"
            )


def _refuse_of_other_proposer(said: dict[str, object], with_model: bool) -> None:
    """Refuse options that the proposer of this run would not look at."""
    for name in said:
        if with_model and name in _OF_OFFLINE:
            raise WorkbenchError(f"{option(name)} is of the offline proposer; leave it out, or --agent MODEL")
        if not with_model and name in _OF_MODELS:
            raise WorkbenchError(
                f"{option(name)} is of language models; name one with --agent MODEL or --profile, "
                "or leave it out"
            )


def _refuse_other_settings(said: dict[str, object], shell: Shell, run_id: str) -> None:
    """Refuse settings that differ from those that the run was begun with and goes on with."""
    from workbench.agent.run import RunStore

    begun = _begun_with(RunStore.open(shell.workspace().runs, run_id)[1])
    for name, value in said.items():
        if name not in _ANY | {"resume"} and begun.get(name) != value:
            was = f"{option(name)} {begun[name]}" if begun.get(name) is not None else f"no {option(name)}"
            raise WorkbenchError(
                f"run {run_id} was begun with {was} and goes on with its own settings; "
                f"leave {option(name)} out"
            )


def _begun_with(settings: RunSettings) -> dict[str, object]:
    """Settings of a run by the name of the option that says them."""
    begun: dict[str, object] = {
        "op": settings.op, "workload": settings.workload, "arch": settings.arch, "machine": settings.machine,
        "agent": settings.agent, "seed": settings.seed, "rounds": settings.rounds,
    }  # fmt: skip
    model = settings.model
    if model is None:
        return {**begun, "batch": settings.batch, "template": list(settings.templates)}
    limits = model.limits
    return {
        **begun, "agent": model.profile.model, "base_url": model.profile.base_url, "strategy": model.strategy,
        "chains": model.chains, "migrate_every": model.migrate_every, "tune_batch": model.tune_batch,
        "max_tokens": limits.tokens, "max_usd": limits.usd, "max_seconds": limits.seconds,
        "max_stall": limits.stall,
    }  # fmt: skip
