"""A worker for tests: does what its job says."""

import os
import subprocess
import sys
import time
from pathlib import Path

with os.fdopen(int(sys.argv[1]), "w") as out:
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "hang":
            time.sleep(600)
        if verb == "die":
            os._exit(7)
        if verb == "starve":  # FILE: dies the first time; then says how many workers there are
            if not Path(rest).exists():
                Path(rest).touch()
                os.kill(os.getpid(), 9)
            siblings = subprocess.run(
                ["pgrep", "-cfP", str(os.getppid()), "echo_worker"], capture_output=True, text=True
            )
            rest = siblings.stdout.strip()
        if verb == "starve-always":
            os._exit(71)
        if verb == "wait":
            time.sleep(float(rest))
        if verb == "fork-and-hang":
            if os.fork() == 0:
                time.sleep(600)
            time.sleep(600)
        if verb == "long":
            rest = "x" * int(rest)
        out.write(f"{verb} {rest}\n")
        out.flush()
