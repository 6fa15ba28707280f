"""The end of a run: the best candidates go through every check, the first that passes is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workbench.agent.evaluate import load_artifact
from workbench.agent.events import FinalistFinished, FinalistStarted, OnEvent, WinnerExported
from workbench.agent.run import Candidate, Proposal, RunSettings, Status
from workbench.export import export_winner
from workbench.workspace import Workspace

FINALISTS = 5
"""How many of the best are put through every check before the run gives up."""


def choose(
    workspace: Workspace,
    settings: RunSettings,
    candidates: Mapping[int, Candidate],
    check: Callable[[Proposal], Candidate],
    export: bool,
    on_event: OnEvent,
) -> tuple[dict[int, Candidate], Candidate | None, str | None]:
    """Put the best through every check and export the first that passes.

    Args:
        workspace: receives the winner.
        settings: of the run.
        candidates: all that were evaluated, by index.
        check: evaluates a proposal with every check.
        export: whether the winner is written.
        on_event: is told of each step.

    Returns:
        The candidates with their new outcomes, the winner, and its folder relative to the workspace.
    """
    outcomes = dict(candidates)
    ranked = sorted(
        (c for c in candidates.values() if c.predicted_us is not None),
        key=lambda c: (c.predicted_us, c.order),
    )
    for finalist in ranked[:FINALISTS]:
        on_event(FinalistStarted(finalist))
        checked = check(finalist.proposal)
        outcomes[checked.proposal.index] = checked
        on_event(FinalistFinished(checked))
        if checked.status is not Status.VERIFIED or not checked.artifact_key:
            continue
        if checked.report is None or checked.prediction is None:
            continue
        if not export:
            return outcomes, checked, None
        folder = export_winner(
            workspace,
            load_artifact(workspace, checked.artifact_key),
            checked.report,
            checked.prediction,
            run_id=settings.run_id,
            candidates=len(candidates),
            seed=settings.seed,
        )
        on_event(WinnerExported(checked, folder))
        return outcomes, checked, str(folder.relative_to(workspace.root))
    return outcomes, None, None
