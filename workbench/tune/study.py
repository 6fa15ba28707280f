"""A study: ask for a point, tell how it went, resume later.

    study = Study(points, identity, make_sampler("tpe", seed), first=[template.default],
                  storage=workspace.tuning_db / "studies.sqlite")
    while study.evaluated < budget and (trial := study.ask()) is not None:
        study.tell(trial, value_us=...)      # or failure="compiler"

Determinism: a proposal depends on the seed, the trial's number and the trials known when it was asked for. A
single worker is deterministic. Several are too if they work in rounds: `ask_batch(n)`, evaluate in any order,
tell all, next round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from workbench.artifact import stable_hash
from workbench.errors import WorkbenchError
from workbench.expressions import Value
from workbench.templates import Space, Template
from workbench.tune.points import Points
from workbench.tune.samplers import Observation, Sampler
from workbench.tune.storage import open_storage, storage_errors

if TYPE_CHECKING:
    import optuna

SCHEMA = 1
"""Version of what a study stores about itself and its trials."""
ABANDONED = "abandoned"
"""Failure kind of a trial whose worker went away; its point may be tried once more."""
_DUPLICATE = "duplicate"


class StudyIdentity(BaseModel):
    """What a study is about. Its hash is part of the study's name, so that a changed space is a new study."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    op: str
    workload: str
    axes: dict[str, int]
    template: str
    source_hash: str
    knobs: dict[str, tuple[int | str | bool, ...]]
    """Declared values of each knob, in order."""
    constraints: tuple[str, ...]
    arch: str
    device: str
    """Machine description or CUDA device the objective stands for."""
    objective: Literal["predicted", "measured"]
    premises: str = ""
    """Hash of what the objective rests on (machine figures, timing protocol, verifier)."""
    run: str = ""
    """Set to keep a run's study to itself."""

    @staticmethod
    def of(
        template: Template,
        workload: str,
        space: Space,
        *,
        arch: str,
        device: str,
        objective: Literal["predicted", "measured"],
        premises: str = "",
        run: str = "",
    ) -> StudyIdentity:
        """Identity of a study over a template's space."""
        return StudyIdentity(
            op=template.op,
            workload=workload,
            axes=dict(space.axes),
            template=template.name,
            source_hash=template.source_hash,
            knobs={k: tuple(v) for k, v in space.knobs.items()},
            constraints=space.constraints,
            arch=arch,
            device=device,
            objective=objective,
            premises=premises,
            run=run,
        )

    @property
    def prefix(self) -> str:
        """Start of the names of all studies of this template, workload, target, objective and run."""
        parts = (self.op, self.workload, self.template, self.arch, self.device, self.objective, self.run)
        return "/".join(p for p in parts if p)

    @property
    def name(self) -> str:
        """Name of the study in its storage."""
        return f"{self.prefix}#{stable_hash(self.model_dump(mode='json'))[:16]}"


class State(StrEnum):
    """State of a trial."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Trial(BaseModel):
    """One point of the space and how it went."""

    model_config = ConfigDict(frozen=True)

    number: int
    knobs: dict[str, int | str | bool]
    state: State
    value_us: float | None = None
    failure: str | None = None


class Study:
    """Ask and tell over a space, in an Optuna study.

    `notice` is None, or one line that says why this is a new study although the storage holds one of the same
    template and workload (the space, the source or the premises changed).

    Args:
        points: the valid points.
        identity: names the study.
        sampler: chooses points.
        storage: None for memory, a SQLite path, or a database URL that several machines share.
        first: points to try before the sampler is asked, such as the template's default and earlier winners;
            those that are not valid here are passed over.

    Raises:
        WorkbenchError: if the storage cannot be used; see `open_storage`.
    """

    def __init__(
        self,
        points: Points,
        identity: StudyIdentity,
        sampler: Sampler,
        *,
        storage: str | Path | None = None,
        first: Iterable[Mapping[str, Value]] = (),
    ) -> None:
        self.points, self.identity, self.sampler = points, identity, sampler
        self._first = [row for row in map(points.row, first) if row is not None]
        self._storage = open_storage(storage)
        self._study, self.notice = _open(identity, self._storage)
        self._id = self._storage.get_study_id_from_name(identity.name)
        self._distributions = _distributions(points)
        self._finished: dict[int, Trial] = {}

    @property
    def name(self) -> str:
        """Name in the storage."""
        return self._study.study_name

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials by number, except duplicates that two workers asked for at once."""
        return tuple(t for t in self._read() if t.failure != _DUPLICATE)

    @property
    def evaluated(self) -> int:
        """Number of points that were paid for: finished well or failed."""
        return sum(t.state is not State.RUNNING and t.failure != ABANDONED for t in self.trials)

    @property
    def best(self) -> Trial | None:
        """The fastest trial that did not fail; the earlier one on a tie."""
        done = [t for t in self.trials if t.state is State.DONE and t.value_us is not None]
        return min(done, key=lambda t: (t.value_us or 0.0, t.number), default=None)

    def ask(self) -> Trial | None:
        """Take the next unseen valid point; None when every point has been taken."""
        while True:
            known = self.trials
            row = self._next(known)
            if row is None:
                return None
            number = self._claim(row)
            if not self._was_taken(number, row):
                return self._read()[number]
            # Another worker took the point between our look and our claim; the lower number keeps it.
            self._fail(number, _DUPLICATE)

    def ask_batch(self, count: int) -> list[Trial]:
        """Up to `count` trials; fewer when the space runs out."""
        batch: list[Trial] = []
        while len(batch) < count and (trial := self.ask()) is not None:
            batch.append(trial)
        return batch

    def tell(self, trial: Trial, *, value_us: float | None = None, failure: str | None = None) -> Trial:
        """Say how a trial went: its time in microseconds, or the kind of its failure.

        Raises:
            WorkbenchError: if the trial has already been told, or the time is not positive and finite.
        """
        _check_outcome(value_us, failure)
        if self._read()[trial.number].state is not State.RUNNING:
            raise WorkbenchError(f"trial {trial.number} of {self.name} has already been told")
        if failure is not None:
            self._fail(trial.number, failure)
        else:
            with self._errors():
                self._study.tell(trial.number, value_us)
        return self._read()[trial.number]

    def add(
        self, knobs: Mapping[str, Value], *, value_us: float | None = None, failure: str | None = None
    ) -> bool:
        """Add a result that is already known, as from the record store, so that it is not paid for twice.

        False if the point is not valid here or has been taken.
        """
        import optuna

        _check_outcome(value_us, failure)
        row = self.points.row(knobs)
        if row is None or row in {self._row(t) for t in self._seen(self.trials)}:
            return False
        failed = failure is not None
        known = optuna.trial.create_trial(
            state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
            value=value_us,
            params=dict(knobs),
            distributions=self._distributions,
            user_attrs={"failure": failure} if failed else {},
        )
        with self._errors():
            self._study.add_trial(known)
        return True

    def reclaim(self, older_than_s: float = 0.0) -> int:
        """Give up trials that have been running for longer, as after a killed worker; returns how many.

        Their points may be taken once more; a point that was given up twice counts as failed.
        """
        limit = datetime.now() - timedelta(seconds=older_than_s)
        stale = [
            t.number
            for t in self._study.get_trials(deepcopy=False)
            if _trial(t).state is State.RUNNING and t.datetime_start is not None and t.datetime_start <= limit
        ]
        for number in stale:
            self._fail(number, ABANDONED)
        return len(stale)

    def _next(self, known: Sequence[Trial]) -> int | None:
        seen = self._seen(known)
        taken = {self._row(t) for t in seen}
        for row in self._first:
            if row not in taken:
                return row
        history = [Observation(self._row(t), t.state.value, t.value_us) for t in seen]
        return self.sampler.propose(self.points, history, len(known))

    def _seen(self, trials: Sequence[Trial]) -> list[Trial]:
        """Trials whose points are not to be taken again: all but those given up once."""
        abandoned: dict[int, int] = {}
        seen: dict[int, Trial] = {}
        for t in trials:
            row = self._row(t)
            if t.failure == ABANDONED:
                abandoned[row] = abandoned.get(row, 0) + 1
                if abandoned[row] < 2:
                    continue
            seen.setdefault(row, t)
        return list(seen.values())

    def _claim(self, row: int) -> int:
        """Write a running trial for a point, all of it at once so that no other worker sees a part."""
        import optuna

        claim = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=dict(self.points.knobs(row)),
            distributions=self._distributions,
        )
        with self._errors():
            trial_id = self._storage.create_new_trial(self._id, template_trial=claim)
            return self._storage.get_trial_number_from_id(trial_id)

    def _was_taken(self, number: int, row: int) -> bool:
        earlier = [t for t in self.trials if t.number < number]
        return row in {self._row(t) for t in self._seen(earlier)}

    def _read(self) -> list[Trial]:
        """All trials by number; finished ones never change and are converted once."""
        trials = []
        with self._errors():
            stored = self._study.get_trials(deepcopy=False)
        for t in stored:
            known = self._finished.get(t.number) or _trial(t)
            if known.state is not State.RUNNING:
                self._finished[t.number] = known
            trials.append(known)
        return trials

    def _row(self, trial: Trial) -> int:
        row = self.points.row(trial.knobs)
        if row is None:
            raise WorkbenchError(
                f"study {self.name} holds the point {trial.knobs}, which is not in its space"
            )
        return row

    def _fail(self, number: int, kind: str) -> None:
        import optuna

        with self._errors():
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
            self._storage.set_trial_user_attr(trial_id, "failure", kind)
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)

    def _errors(self) -> AbstractContextManager[None]:
        return storage_errors(f"the study {self.name}")


def _check_outcome(value_us: float | None, failure: str | None) -> None:
    if (value_us is None) == (failure is None):
        raise WorkbenchError("a trial's outcome is either a time or a failure")
    if value_us is not None and not (math.isfinite(value_us) and value_us > 0):
        raise WorkbenchError(f"{value_us} us is not a positive finite time")


def _trial(t: optuna.trial.FrozenTrial) -> Trial:
    import optuna

    failure = t.user_attrs.get("failure")
    state = State.RUNNING
    if t.state is optuna.trial.TrialState.COMPLETE:
        state = State.DONE
    elif t.state.is_finished():
        state, failure = State.FAILED, failure or "unknown"
    else:
        failure = None
    value = t.value if state is State.DONE else None
    return Trial(number=t.number, knobs=t.params, state=state, value_us=value, failure=failure)


def _distributions(points: Points) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna.distributions import CategoricalDistribution

    return {k: CategoricalDistribution(v) for k, v in points.values.items()}


def _open(identity: StudyIdentity, storage: optuna.storages.BaseStorage) -> tuple[optuna.Study, str | None]:
    import optuna

    names = optuna.get_all_study_names(storage)
    notice = None
    others = sorted(n for n in names if n.startswith(f"{identity.prefix}#") and n != identity.name)
    if identity.name not in names and others:
        notice = _why_new(optuna.load_study(study_name=others[-1], storage=storage), identity)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=identity.name,
            direction="minimize",
            load_if_exists=True,
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    stored = study.user_attrs.get("workbench_schema")
    if stored is None:
        study.set_user_attr("workbench_schema", SCHEMA)
        study.set_user_attr("identity", identity.model_dump(mode="json"))
    elif stored != SCHEMA:
        raise WorkbenchError(
            f"study {identity.name} has schema {stored}, this workbench reads {SCHEMA}; it was left as it is"
        )
    return study, notice


def _why_new(other: optuna.Study, identity: StudyIdentity) -> str:
    old: dict[str, Any] = other.user_attrs.get("identity") or {}
    new = identity.model_dump(mode="json")
    changes: list[str] = []
    for field in sorted(old.keys() | new.keys()):
        before, after = old.get(field), new.get(field)
        if before == after:
            continue
        if field == "knobs" and isinstance(before, dict) and isinstance(after, dict):
            changes += [
                f"knob {k}: {before.get(k)} -> {after.get(k)}"
                for k in sorted(before.keys() | after.keys())
                if before.get(k) != after.get(k)
            ]
        else:
            changes.append(field)
    what = "; ".join(changes) or "an unknown part"
    return f"new study {identity.name}: differs from {other.study_name} in {what}; its trials are not reused"
