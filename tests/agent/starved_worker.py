"""An evaluation process that has no memory for candidate 1, and for candidate 2 only once it is alone."""

import os
import sys
from pathlib import Path

from workbench.agent import worker
from workbench.agent.evaluate import Evaluator


class Starved(Evaluator):
    def __call__(self, job):
        mark = Path(job.workspace) / f"starved-{job.proposal.index}"
        with mark.open("a") as f:
            f.write(f"{os.getpid()}\n")
        if job.proposal.index == 1 or (job.proposal.index == 2 and len(mark.read_text().split()) == 1):
            raise MemoryError
        return super().__call__(job)


worker.Evaluator = Starved
worker.serve(int(sys.argv[1]))
