"""A proposing run as data: settings, candidates and outcomes, kept on disk so that it can go on.

A run is a folder `<runs>/<run id>/` with `run.json` (settings) and one `candidates/<index>.json` a finished
candidate. Each file is written atomically: a run that was interrupted loses only what was being evaluated.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.agent.model.budget import Limits, Spend
from workbench.agent.model.profile import Profile
from workbench.artifact import Resources
from workbench.cost import Prediction
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.files import write_atomic
from workbench.verify.report import Report

FORMAT = 1


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")


class Status(StrEnum):
    """What became of a candidate."""

    VERIFIED = "verified"
    """Every check passed."""
    REFUSED = "refused"
    """A check failed or could not decide."""
    FAILED = "failed"
    """It did not compile, crashed, or ran out of time."""
    LOST = "lost"
    """Nothing is known of it: this machine had not enough memory to evaluate it, alone neither."""


class Proposal(_Data):
    """One candidate to evaluate."""

    index: int
    """Position in the run, from 0; the order in which candidates were asked for."""
    round: int
    """Round of the search, or turn since the run began."""
    template: str
    """Name of the template, or of the candidate itself where it brings its own source."""
    knobs: dict[str, int | str | bool]
    source: str = ""
    """The candidate's own source text; empty for a template of the workspace."""
    parents: tuple[int, ...] = ()
    """Indices of the candidates that it was made from."""
    idea: str = ""
    """What its author says it tries."""


class Candidate(_Data):
    """A proposal with what it came to."""

    proposal: Proposal
    status: Status
    reason: str = ""
    """Why it was refused, failed or lost; empty if verified."""
    source_hash: str = ""
    artifact_key: str | None = None
    object_hash: str = ""
    """Equal for candidates that compile to the same kernels, however their sources differ."""
    same_as_template: str = ""
    """The workspace's template that compiles to the same kernels at the same knobs, if one does."""
    report: Report | None = None
    prediction: Prediction | None = None
    resources: dict[str, Resources] = {}
    lane_instructions: int = 0
    """Simulated PTX instructions times active lanes, over all checks."""
    compile_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def predicted_us(self) -> float | None:
        """Predicted time in microseconds, if the candidate was verified."""
        if self.status is not Status.VERIFIED or self.prediction is None:
            return None
        return self.prediction.us

    @property
    def order(self) -> tuple[int, int]:
        """When it was proposed: among equals the first wins, whichever conversation it is of."""
        return self.proposal.round, self.proposal.index


def repeats(candidates: Iterable[Candidate]) -> dict[int, int]:
    """Candidates that compiled to the same kernels as one before them, by index, with that one's index.

    Their sources or knobs differ, their compiled code and launches do not.
    """
    first: dict[str, int] = {}
    found = {}
    for c in sorted(candidates, key=lambda c: c.order):
        if c.object_hash and first.setdefault(c.object_hash, c.proposal.index) != c.proposal.index:
            found[c.proposal.index] = first[c.object_hash]
    return found


def lost(proposal: Proposal, reason: str, detail: str) -> Candidate:
    """The outcome of a proposal whose worker did not answer: `timeout`, `crash` or `memory`."""
    status = Status.LOST if reason == "memory" else Status.FAILED
    return Candidate(proposal=proposal, status=status, reason=f"{reason}: {detail}")


class AgentSettings(_Data):
    """How a model proposes; the key is no part of it."""

    profile: Profile
    strategy: str
    chains: int
    """Conversations side by side, or candidates kept in a beam."""
    migrate_every: int
    """Turns between two exchanges of the best."""
    tune_batch: int
    """Knob settings tried of each verified variant while the model thinks."""
    limits: Limits
    prompt_hash: str
    tools_hash: str
    lessons: str = ""
    """What earlier runs left, as this run was told."""


class RunSettings(_Data):
    """Everything that decides what a run proposes; a resumed run keeps them."""

    format: int = FORMAT
    run_id: str
    op: str
    workload: str
    arch: str
    machine: str
    agent: str
    seed: int
    rounds: int
    batch: int
    """Candidates a round."""
    templates: tuple[str, ...]
    template_hashes: tuple[str, ...]
    verifier_hash: str
    model: AgentSettings | None = None
    """None if the offline proposer runs."""


class RunResult(_Data):
    """Outcome of a run."""

    settings: RunSettings
    candidates: tuple[Candidate, ...]
    winner: int | None
    """Index of the winning candidate."""
    exported: str | None
    """Folder of the exported winner, relative to the workspace."""
    roofline_us: float
    seconds: float
    """Wall time of the proposing, set-up included."""
    seconds_to_export: float = 0.0
    """Of which the winner's full verification and its export."""
    identical: dict[int, int] = {}
    """Indices of candidates that compiled to the same kernels as one before them, of whatever conversation,
    and that one's index."""

    spend: Spend | None = None
    """What the model cost; None for the offline proposer."""
    ends: tuple[str, ...] = ()
    """Why each conversation ended, in the order of the chains."""

    @property
    def run_id(self) -> str:
        """The run's name, for `--resume`."""
        return self.settings.run_id

    def best(self) -> Candidate | None:
        """The winner."""
        return next((c for c in self.candidates if c.proposal.index == self.winner), None)


_runs_begun = itertools.count()


def new_run_id(op: str, workload: str) -> str:
    """Return a name for a new run that no other run has: op, workload, time, process, and number in it."""
    number = next(_runs_begun)
    return f"{op}-{workload}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}" + (
        f"-{number}" if number else ""
    )


class RunStore:
    """The folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def create(runs: Path, settings: RunSettings) -> RunStore:
        """Start a new run's folder."""
        store = RunStore(runs / settings.run_id)
        write_atomic(store.root / "run.json", settings.model_dump_json(indent=1))
        return store

    @staticmethod
    def open(runs: Path, run_id: str) -> tuple[RunStore, RunSettings]:
        """Open an earlier run.

        Raises:
            UnknownNameError: if there is no such run.
            ContentError: if its settings cannot be read or come from a newer version.
        """
        path = runs / run_id / "run.json"
        if not path.is_file():
            known = [p.parent.name for p in runs.glob("*/run.json")] if runs.is_dir() else []
            raise UnknownNameError("run", run_id, known)
        try:
            settings = RunSettings.model_validate_json(path.read_text())
        except (ValidationError, OSError, UnicodeDecodeError) as e:
            raise ContentError(
                path, "is damaged or from another version; start a new run without --resume"
            ) from e
        if settings.format != FORMAT:
            raise ContentError(
                path, f"has format {settings.format}, this version reads {FORMAT}; it is left as it is"
            )
        return RunStore(runs / run_id), settings

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from working on this run; the hold ends with the process, however that ends.

        Raises:
            WorkbenchError: if another process works on it.
        """
        with (self.root / "lock").open("a") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise WorkbenchError(
                    f"run {self.root.name} is being worked on by another process; wait for it or end it first"
                ) from e
            yield

    @property
    def transcript(self) -> Path:
        """Everything said to the model and by it."""
        return self.root / "transcript.jsonl"

    def add(self, candidate: Candidate, checked: bool = False) -> None:
        """Keep a finished candidate; `checked` if it went through every check."""
        folder = self.root / ("checked" if checked else "candidates")
        write_atomic(folder / f"{candidate.proposal.index:05d}.json", candidate.model_dump_json())

    def candidates(self, checked: bool = False) -> dict[int, Candidate]:
        """Finished candidates by index; a damaged file is as if the candidate had not been evaluated."""
        found: dict[int, Candidate] = {}
        for path in sorted((self.root / ("checked" if checked else "candidates")).glob("*.json")):
            try:
                candidate = Candidate.model_validate_json(path.read_text())
            except (ValidationError, OSError, UnicodeDecodeError):
                continue
            found[candidate.proposal.index] = candidate
        return found

    def finish(self, result: RunResult) -> None:
        """Keep the outcome beside the settings."""
        write_atomic(self.root / "result.json", result.model_dump_json())


def load_result(runs: Path, run_id: str) -> RunResult:
    """Read a finished run's outcome.

    Raises:
        UnknownNameError: if there is no such run.
        WorkbenchError: if the run did not finish.
        ContentError: if the file is damaged.
    """
    store, _ = RunStore.open(runs, run_id)
    path = store.root / "result.json"
    if not path.is_file():
        raise WorkbenchError(
            f"run {run_id} has not finished; continue it with `workbench propose --resume {run_id}`"
        )
    try:
        return RunResult.model_validate_json(path.read_text())
    except (ValidationError, UnicodeDecodeError) as e:
        raise ContentError(path, "is damaged or from another version") from e
