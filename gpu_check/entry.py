"""Runs the checks of the folder it lies in: `python3 run.py`. The build writes it; no checkout is needed.

Without a CUDA device it says so, claims nothing and exits with 0. Exit code 1: something that was run is
wrong; 2: a device is there and a package or a part of the folder is missing, or it is of another arch.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NEEDED = {"numpy": "numpy", "rich": "rich", "cuda.bindings.driver": "cuda-bindings"}
FOR_TEMPLATES = {"torch": "torch", "ml_dtypes": "ml_dtypes"}


def absent() -> str:
    """Why there is no CUDA device, by the driver's library alone; empty if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver"
    if code := driver.cuInit(0):
        return f"the CUDA driver cannot be used (cuInit gives {code})"
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver shows no device"
    return ""


def missing(packages: dict[str, str]) -> list[str]:
    """Packages that cannot be imported."""
    found = []
    for module, package in packages.items():
        try:
            there = importlib.util.find_spec(module) is not None
        except ImportError:
            there = False
        if not there:
            found.append(package)
    return found


def unusable(folder: Path, to: Path, seconds: float | None) -> str:
    """What is wrong with the folder or the options, before the device is used; empty if nothing is."""
    if not (folder / "plan.json").is_file():
        return f"{folder} has no plan.json; build it again with `make gpu-check` and copy all of it"
    if to.is_dir():
        return f"{to} is a folder; give a file with --to"
    if not to.absolute().parent.is_dir():
        return f"{to.absolute().parent} is no folder; give another place with --to"
    if seconds is not None and not seconds > 0:
        return f"--seconds {seconds:g} leaves no time"
    if why := damaged(folder / "plan.json"):
        return f"{folder / 'plan.json'} {why}; build it again with `make gpu-check` and copy all of it"
    return ""


def damaged(path: Path) -> str:
    """What is wrong with a plan; empty if it is what the build writes."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        return f"cannot be read ({' '.join(str(e).split()) or type(e).__name__})"
    if not isinstance(plan, dict):
        return "is no JSON object"
    built, sections = plan.get("built"), plan.get("sections")
    if not isinstance(built, dict) or not isinstance(built.get("arch"), str):
        return "does not say what was built for which arch"
    if not isinstance(sections, list) or not sections:
        return "has no sections"
    wanted: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "title": str,
        "estimate_s": (int, float),
        "limit_s": (int, float),
    }
    for n, section in enumerate(sections):
        if not isinstance(section, dict) or section.keys() != wanted.keys():
            return f"has a section {n} that is none"
        for field, kind in wanted.items():
            if not isinstance(section[field], kind) or isinstance(section[field], bool):
                return f"has a section {n} with a wrong {field}"
    return ""


def main() -> int:
    """Run, report, exit code."""
    parser = argparse.ArgumentParser(description="checks on a GPU what was simulated without one")
    parser.add_argument("--to", type=Path, default=FOLDER / "results.json", help="where the JSON report goes")
    parser.add_argument(
        "--seconds", type=float, default=None, help="time for everything; by default under 8 minutes"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    started = time.monotonic()
    if why := absent():
        print(f"no GPU: {why}; nothing was run on one and nothing is claimed")
        return 0
    if lacking := missing(NEEDED | FOR_TEMPLATES):
        print(f"a GPU is there, but {sys.executable} cannot import {', '.join(lacking)}; nothing was run")
        return 2
    if wrong := unusable(FOLDER, given.to, given.seconds):
        print(f"{wrong}; nothing was run")
        return 2
    sys.path.insert(0, str(FOLDER))
    from gpu_check import conduct

    if given.section:
        return conduct.write_records(FOLDER, given.section, given.records)
    from gpu_check.running import run_all

    return run_all(FOLDER, given.to, given.seconds, started)


if __name__ == "__main__":
    sys.exit(main())
