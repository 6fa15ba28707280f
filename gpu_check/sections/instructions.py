"""Simulator against hardware, bit by bit, one family of instructions at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check.compare import compare
from gpu_check.family import load
from workbench.devices.model import Device, execute


def run(folder: Path, device: Device, family: str) -> Iterator[dict[str, Any]]:
    """One record for a family: every form that is not equal, and counts."""
    described, simulated = load(folder / "instructions" / family)
    first, second = execute(device, described.kernel, described.inputs, repeats=2)
    found = [compare(p, simulated[p.buffer], first[p.buffer]) for p in described.parts]
    repeatable = all((first[name] == second[name]).all() for name in first)
    by_status = {s: sum(d.status == s for d in found) for s in ("equal", "allowed", "differs")}
    yield {
        "record": "family",
        "family": described.name,
        "doc": described.doc,
        "forms": len(found),
        "elements": sum(d.elements for d in found),
        **by_status,
        "repeatable": repeatable,
        "not_equal": [{**asdict(d), "status": d.status} for d in found if d.different],
    }
