"""An evaluation process: `python -m workbench.agent.worker FD` answers JSON jobs from standard input.

It ends with whoever started it, in the middle of a job too: nobody would read the answer.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading

from workbench.agent.evaluate import Evaluator, Job
from workbench.agent.run import Candidate, Status
from workbench.agent.workers import OUT_OF_MEMORY
from workbench.errors import MemoryShortageError, WorkbenchError


def serve(answers: int) -> None:
    """Answer jobs until standard input ends."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    import torch

    # One process a core: threads inside a worker would only compete with the other workers.
    torch.set_num_threads(1)
    evaluate = Evaluator()
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            job = Job.model_validate_json(line)
            try:
                outcome = evaluate(job)
            except Exception as e:
                if is_shortage(e):
                    os._exit(OUT_OF_MEMORY)
                if not isinstance(e, WorkbenchError):
                    raise
                outcome = Candidate(
                    proposal=job.proposal, status=Status.FAILED, reason=f"{type(e).__name__}: {e}"
                )
            out.write(outcome.model_dump_json() + "\n")
            out.flush()


def is_shortage(error: Exception) -> bool:
    """Whether an error says that the machine has no memory left, which is not the candidate's fault."""
    if isinstance(error, (MemoryError, MemoryShortageError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch has no type of its own for this on the CPU
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _end_with_parent() -> None:
    """Wait until nobody holds the other end of standard input, then end this process with all it started."""
    other_end = select.poll()
    other_end.register(0, 0)  # that it hangs up is always told
    other_end.poll()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
