"""Tuning records of evaluated candidates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from workbench.agent.run import Candidate, RunSettings, Status
from workbench.artifact import Artifact
from workbench.ops.model import Op
from workbench.records import Objective, Record, RecordKey, hash_tolerances


def record_of(op: Op, settings: RunSettings, artifact: Artifact, candidate: Candidate) -> Record:
    """The record of a candidate that compiled; without an artifact there is no full key and so no record."""
    key = RecordKey.of(
        artifact,
        device=settings.machine,
        objective=Objective.PREDICTED,
        premises=candidate.prediction.premises.hash if candidate.prediction else "",
        tolerance_hash=hash_tolerances(op),
        verifier_hash=settings.verifier_hash,
    )
    finished = datetime.now(UTC)
    return Record(
        key=key,
        value_us=candidate.predicted_us,
        verdict=candidate.report.verdict.value if candidate.report else None,
        failure=None if candidate.status is Status.VERIFIED else candidate.status.value,
        message=candidate.reason,
        resources=candidate.resources,
        artifact_key=artifact.key,
        seed=settings.seed,
        run=settings.run_id,
        started=finished - timedelta(seconds=candidate.compile_seconds + candidate.verify_seconds),
        finished=finished,
    )
