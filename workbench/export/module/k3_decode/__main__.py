"""`python -m k3_decode`: the table, what each op would do here, and whether every cubin is intact.

Exit code 1 if a file is not what was exported.
"""

from __future__ import annotations

import sys

from . import __version__, explain
from .device import current_arch, launcher
from .table import DamagedPackage, table


def main() -> int:
    """Print and check; the exit code."""
    print(f"k3_decode {__version__}")
    print(f"device: {current_arch() or 'no CUDA device'}; launcher: {launcher().detail}")
    try:
        held = table()
    except DamagedPackage as e:
        print(f"damaged: {e}")
        return 1
    damaged = 0
    print(f"\n{len(held.kernels)} kernels")
    for k in held.kernels:
        try:
            k.load()
            state = "intact"
        except DamagedPackage as e:
            state, damaged = f"damaged: {e}", damaged + 1
        predicted = (
            f"{k.predicted_us:.2f} us predicted for {k.predicted_for}" if k.predicted_us else "no time"
        )
        print(
            f"  {k.op} {'/'.join(k.parallelism)} batch {k.batch} {k.arch}: {k.template} {k.key[:12]},"
            f" {predicted}, {state}"
        )
    print(f"\n{len(held.ops)} ops, first shape of each, batch 1")
    for name in held.ops:
        print(explain(name))
    return 1 if damaged else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
