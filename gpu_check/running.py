"""The whole run on a machine with a device: sections, report, exit code."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_check import conduct, report
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
        report.write(to, report.document(done, machine, built, time.monotonic() - started))

    done: list[conduct.Result] = []
    machine = info.asdict() | machine_facts()
    results = conduct.conduct(folder, conduct.in_child(folder), deadline, told=told)
    report.show(console, results, machine, built)
    report.write(to, report.document(results, machine, built, time.monotonic() - started))
    console.print(f"{time.monotonic() - started:.0f} s; all records: {to}", markup=False, highlight=False)
    return 1 if report.faults(results) else 0


def machine_facts() -> dict[str, Any]:
    """What the numbers rest on beside the device."""
    packages = {}
    for name in ("numpy", "torch", "ml_dtypes", "rich", "cuda-bindings", "cuda-core"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "absent"
    facts: dict[str, Any] = {"python": platform.python_version(), "packages": packages}
    query = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu,driver_version"
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        facts["nvidia_smi"] = dict(zip(query.split(","), asked.stdout.strip().split(", "), strict=False))
    except (OSError, subprocess.TimeoutExpired):
        facts["nvidia_smi"] = {}
    return facts
