"""`python -m gpu_check FOLDER`: builds what travels to a GPU; `python3 FOLDER/run.py` runs it there."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_check.build import build
from workbench.errors import WorkbenchError
from workbench.workspace import Workspace


def main() -> int:
    """Build; exit code 2 and one line if that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m gpu_check", description="builds the GPU check on a CPU")
    parser.add_argument("folder", type=Path, help="new, or written by an earlier build")
    given = parser.parse_args()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    try:
        plan = build(Workspace(Path(__file__).resolve().parents[1]), given.folder.resolve(), say)
    except WorkbenchError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    built = plan["built"]
    say(
        f"{given.folder}: {len(plan['sections'])} sections; of {built['opcodes']} instructions that the"
        f" templates use, without a kernel of their own: {', '.join(built['uncovered']) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
