"""What a run tells those who watch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.agent.model.budget import Spend
from workbench.agent.model.messages import Reply
from workbench.agent.run import Candidate, Proposal, RunSettings


@dataclass(frozen=True)
class RunStarted:
    """The run's settings are on disk; `known` candidates were evaluated before it was interrupted."""

    settings: RunSettings
    known: int


@dataclass(frozen=True)
class RoundStarted:
    """A round's candidates are chosen."""

    round: int
    proposals: tuple[Proposal, ...]


@dataclass(frozen=True)
class CandidateStarted:
    """A worker took up a candidate."""

    proposal: Proposal


@dataclass(frozen=True)
class CandidateFinished:
    """A candidate was evaluated, or taken from an interrupted run's folder (`known`)."""

    candidate: Candidate
    known: bool


@dataclass(frozen=True)
class ModelAnswered:
    """A model answered in one of the run's conversations, now or when it was recorded."""

    chain: int
    turn: int
    reply: Reply
    spend: Spend
    """Of the run so far."""


@dataclass(frozen=True)
class FinalistStarted:
    """The best candidate so far goes through every check there is."""

    candidate: Candidate


@dataclass(frozen=True)
class FinalistFinished:
    """The finalist's full verification ended; if it failed the next best candidate follows."""

    candidate: Candidate


@dataclass(frozen=True)
class WinnerExported:
    """The winner lies in its folder with source, PTX, cubin, manifest and report."""

    candidate: Candidate
    folder: Path


Event = (
    RunStarted
    | RoundStarted
    | CandidateStarted
    | CandidateFinished
    | ModelAnswered
    | FinalistStarted
    | FinalistFinished
    | WinnerExported
)
OnEvent = Callable[[Event], None]
