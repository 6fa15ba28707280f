"""`python -m k3_decode`: the table, what each op would do here, and whether every cubin is intact.

With `--check` every kernel for this GPU is run and judged too; see `check`. Exit code 1 if a file is
not what was exported or a kernel is wrong, 2 for other arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import __version__, explain
from .device import current_arch, launcher
from .table import DamagedPackage, table


def main(arguments: Sequence[str]) -> int:
    """Print and check; the exit code."""
    if list(arguments) not in ([], ["--check"]):
        print("usage: python -m k3_decode [--check]", file=sys.stderr)
        return 2
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
    wrong = _check() if arguments else 0
    return 1 if damaged or wrong else 0


def _check() -> int:
    """Run the kernels of this machine's arch; how many comparisons failed."""
    arch = current_arch()
    if arch is None:
        print("\nno CUDA device: no kernel was run, nothing is claimed")
        return 0
    import torch

    from .check import check

    results = list(check(torch.device("cuda"), arch))
    for result in results:
        print(result)
    wrong = sum(bool(r.problem) for r in results)
    print(f"\n{len(results)} comparisons on {torch.cuda.get_device_name()} ({arch}), {wrong} failed")
    return wrong


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
