"""Runs the sections one after the other, each in a process of its own, within the time there is.

A section that faults the device, hangs or dies takes nothing with it: what it has reported stays, the next
one starts afresh. A section that no longer fits is reported as not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check.sections import NotHereError
from workbench.devices.cuda import CudaDevice
from workbench.devices.model import DeviceError

DEADLINE_S = 450.0
"""Seconds for everything: under eight minutes, the start of Python and the report included."""
_NOT_HERE = 3
"""Exit code of a child whose section this machine cannot run."""
MakeDevice = Callable[[], CudaDevice]


@dataclass(frozen=True)
class Section:
    """A part of the check."""

    name: str
    """`instructions/convert`, `ordering`, ..."""
    title: str
    estimate_s: float
    """What it is expected to take on an H200; it is not begun with less time left."""
    limit_s: float
    """When it is ended."""


@dataclass
class Result:
    """What became of a section."""

    section: Section
    state: str
    """`run`, `failed` or `not run`."""
    seconds: float = 0.0
    why: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)


def sections(folder: Path) -> list[Section]:
    """What a folder holds, in the order of its run."""
    plan = json.loads((folder / "plan.json").read_text())
    return [Section(**s) for s in plan["sections"]]


def records(folder: Path, name: str, make: MakeDevice, small: bool = False) -> Iterator[dict[str, Any]]:
    """The records of one section, made in this process.

    Args:
        folder: what `build` wrote.
        name: of the section.
        make: opens the device.
        small: few trials and samples, for a device that simulates.
    """
    from gpu_check.sections import instructions, ordering, overhead, templates

    group, _, item = name.partition("/")
    if group == "overhead" and item == "package":
        yield from overhead.package(folder)
        return
    if group == "package":
        yield from overhead.judged(folder)
        return
    device = make()
    if group == "instructions":
        yield from instructions.run(folder, device, item)
    elif group == "ordering":
        yield from ordering.run(folder, device, 3 if small else None)
    elif group == "numerics":
        yield from templates.numerics(folder, device, item)
    elif group == "timing":
        yield from templates.timing(folder, device, item, 3 if small else 200)
    elif group == "overhead":
        yield from overhead.launcher(folder, device, 40 if small else 2000)
    else:
        raise DeviceError(f"there is no section {name}")
    device.close()


def conduct(
    folder: Path,
    run: Callable[[Section, float], Result],
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every section that fits.

    Args:
        folder: what `build` wrote.
        run: runs a section within so many seconds; `in_child`, or a test's own.
        deadline_s: seconds for all.
        clock: seconds.
        told: called with each result as it comes.
    """
    ends = clock() + deadline_s
    results = []
    for section in sections(folder):
        left = ends - clock()
        if left < section.estimate_s:
            why = f"needs about {section.estimate_s:.0f} s, {max(left, 0):.0f} s were left"
            result = Result(section, "not run", why=why)
        else:
            result = run(section, min(section.limit_s, left))
        results.append(result)
        told(result)
    return results


def in_child(folder: Path) -> Callable[[Section, float], Result]:
    """Runs a section in a process of its own and ends it at its limit."""

    def run(section: Section, limit_s: float) -> Result:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            target, log = Path(scratch, "records"), Path(scratch, "log")
            command = [
                sys.executable,
                str(folder / "run.py"),
                "--section",
                section.name,
                "--records",
                str(target),
            ]
            with log.open("wb") as stream:
                child = subprocess.Popen(command, stdout=stream, stderr=stream)
                try:
                    code: int | None = child.wait(limit_s)
                except subprocess.TimeoutExpired:
                    code = None
                finally:  # also where this process is asked to end
                    child.kill()
                    child.wait()
            found = _read(target)
            said = log.read_text(errors="replace").strip().splitlines()
        seconds = time.monotonic() - started
        if code == 0:
            return Result(section, "run", seconds, records=found)
        if code == _NOT_HERE:
            return Result(section, "not run", seconds, said[-1] if said else "", found)
        why = f"ended after {limit_s:.0f} s" if code is None else said[-1] if said else f"exit code {code}"
        return Result(section, "failed", seconds, why, found)

    return run


def in_process(folder: Path, make: MakeDevice) -> Callable[[Section, float], Result]:
    """Runs a section here, small, on a device that simulates."""

    def run(section: Section, limit_s: float) -> Result:
        started = time.monotonic()
        found: list[dict[str, Any]] = []
        try:
            found.extend(records(folder, section.name, make, small=True))
        except NotHereError as e:
            return Result(section, "not run", time.monotonic() - started, str(e), found)
        except DeviceError as e:
            return Result(section, "failed", time.monotonic() - started, str(e), found)
        return Result(section, "run", time.monotonic() - started, records=found)

    return run


def write_records(folder: Path, name: str, target: Path) -> int:
    """The child: write a section's records as they come, a JSON line each; 1 if the section failed, 3 if this
    machine cannot run it."""
    with target.open("w") as stream:
        try:
            for record in records(folder, name, CudaDevice):
                stream.write(json.dumps(record, allow_nan=False) + "\n")
                stream.flush()
        except NotHereError as e:
            print(e, file=sys.stderr)
            return _NOT_HERE
        except (DeviceError, ImportError, OSError) as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
            return 1
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Complete lines; a killed child may have left half of one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
