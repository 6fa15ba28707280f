"""An evaluation process: `python -m workbench.agent.worker FD` answers JSON jobs from standard input."""

from __future__ import annotations

import os
import sys

from workbench.agent.evaluate import Evaluator, Job
from workbench.agent.run import Candidate, Status
from workbench.errors import WorkbenchError


def serve(answers: int) -> None:
    """Answer jobs until standard input ends."""
    import torch

    # One process a core: threads inside a worker would only compete with the other workers.
    torch.set_num_threads(1)
    evaluate = Evaluator()
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            job = Job.model_validate_json(line)
            try:
                outcome = evaluate(job)
            except (WorkbenchError, MemoryError) as e:
                outcome = Candidate(
                    proposal=job.proposal, status=Status.FAILED, reason=f"{type(e).__name__}: {e}"
                )
            out.write(outcome.model_dump_json() + "\n")
            out.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
