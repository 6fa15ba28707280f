"""Knobs of verified variants, tuned in the background by the same study that the offline proposer uses."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path

from workbench.agent.desk import MAX_POINTS, Desk
from workbench.agent.run import Candidate
from workbench.templates import Template, parse_template
from workbench.tune import Points, Study, StudyIdentity, Trial, make_sampler


class Tuner:
    """Tries a few knob settings of each verified source, and more of those that stay the best.

    Args:
        batch: settings tried each time; 0 to tune nothing.
        seed: of the sampler.
    """

    def __init__(self, batch: int, seed: int) -> None:
        self._batch, self._seed = batch, seed
        self._studies: dict[str, tuple[Study, list[tuple[Trial, Future[Candidate]]]]] = {}

    def start(self, desk: Desk, candidate: Candidate, round_: int) -> list[Future[Candidate]]:
        """Begin to tune a candidate's knobs, if it passed; returns what is being evaluated."""
        if self._batch == 0 or candidate.predicted_us is None or not candidate.proposal.source:
            return []
        template = parse_template(candidate.proposal.source, Path(f"{candidate.proposal.template}.py"))
        if math.prod(map(len, template.knobs.values())) > MAX_POINTS:
            return []
        points = Points.of(template.space(desk.workload.axes))
        if len(points) < 2:
            return []
        study, told = self._study(desk, template, points, candidate)
        self._tell(study, told)
        started = []
        for trial in study.ask_batch(self._batch):
            if trial.knobs == candidate.proposal.knobs:
                study.tell(trial, value_us=candidate.predicted_us, failure=None)
                continue
            future = desk.variant(candidate, trial.knobs, round_)
            told.append((trial, future))
            started.append(future)
        return started

    def _study(
        self, desk: Desk, template: Template, points: Points, candidate: Candidate
    ) -> tuple[Study, list[tuple[Trial, Future[Candidate]]]]:
        key = candidate.source_hash
        if key not in self._studies:
            identity = StudyIdentity.of(
                template,
                desk.workload.name,
                template.space(desk.workload.axes),
                arch=desk.settings.arch,
                device=desk.settings.machine,
                objective="predicted",
                run=f"{desk.settings.run_id}-{desk.chain}",
            )
            sampler = make_sampler("tpe", self._seed)
            self._studies[key] = Study(points, identity, sampler, first=[candidate.proposal.knobs]), []
        return self._studies[key]

    @staticmethod
    def _tell(study: Study, told: list[tuple[Trial, Future[Candidate]]]) -> None:
        """Give the study the outcomes of the settings tried before."""
        for trial, future in told:
            outcome = future.result()
            failure = None if outcome.predicted_us is not None else outcome.status.value
            study.tell(trial, value_us=outcome.predicted_us, failure=failure)
        told.clear()
