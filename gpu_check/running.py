"""The whole run on a machine with a device: sections, report, exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from gpu_check import conduct, machine, report
from workbench.devices.cuda import available


def run_all(folder: Path, to: Path, seconds: float | None, started: float) -> int:
    """Run every section in a process of its own, print and write the report; the exit code."""
    built = json.loads((folder / "plan.json").read_text())["built"]
    there = available()
    if not there:
        print(f"no GPU: {there.reason}; nothing was run on one and nothing is claimed")
        return 0
    info = there.devices[0]
    if info.arch != built["arch"]:
        print(f"the cubins are for {built['arch']}, {info.name} is {info.arch}; nothing was run")
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False)
    deadline = (seconds or conduct.DEADLINE_S) - (time.monotonic() - started)

    def told(r: conduct.Result) -> None:
        # What a killed run has found so far is on disk.
        done.append(r)
        print(f"[{time.monotonic() - started:6.1f} s] {report.lines([r])[0]}", flush=True)
        report.write(to, report.document(done, told_of, built, time.monotonic() - started))

    done: list[conduct.Result] = []
    told_of = info.asdict() | machine.facts()
    results = conduct.conduct(folder, conduct.in_child(folder), deadline, told=told)
    report.show(console, results, told_of, built)
    report.write(to, report.document(results, told_of, built, time.monotonic() - started))
    console.print(f"{time.monotonic() - started:.0f} s; all records: {to}", markup=False, highlight=False)
    return 1 if report.faults(results) else 0
