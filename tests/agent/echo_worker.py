"""A worker for tests: does what its job says."""

import os
import sys
import time

with os.fdopen(int(sys.argv[1]), "w") as out:
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "hang":
            time.sleep(600)
        if verb == "die":
            os._exit(7)
        if verb == "fork-and-hang":
            if os.fork() == 0:
                time.sleep(600)
            time.sleep(600)
        if verb == "long":
            rest = "x" * int(rest)
        out.write(f"{verb} {rest}\n")
        out.flush()
