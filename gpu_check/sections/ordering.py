"""Whether loads issue past ACQBULK (`griddepcontrol.wait`): many trials of two kernels under PDL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workbench.devices.model import Device, Kernel, Slot, launch_from_json

_MARGIN_NS = 2_000
"""How long before the primary's first store a secondary must have begun; the timer ticks coarsely."""


def run(folder: Path, device: Device, trials: int | None = None) -> Iterator[dict[str, Any]]:
    """One record a variant, then the verdict."""
    plan = json.loads((folder / "ordering" / "pdl.json").read_text())
    records = []
    for n, v in enumerate(plan["variants"]):
        record = _variant(folder / "ordering" / str(n), device, plan, v, trials or plan["trials"])
        records.append(record)
        yield record
    yield verdict(records)


def _variant(
    stem: Path, device: Device, plan: dict[str, Any], v: dict[str, Any], trials: int
) -> dict[str, Any]:
    threads = plan["threads"] * plan["ctas"]
    sizes = {"data": 4, "stored": 8, "seen": 4, "times": 24}
    kernel = Kernel(
        name=v["variant"]["name"],
        arch=plan["arch"],
        launches=tuple(launch_from_json(x) for x in v["launches"]),
        slots=tuple(Slot(name, size * threads, "output") for name, size in sizes.items()),
        cubin=stem.with_suffix(".cubin").read_bytes(),
        ptx=stem.with_suffix(".ptx").read_text(),
    )
    with device.scope():
        base = {name: device.allocate(size * threads * trials, name) for name, size in sizes.items()}
        for name, size in sizes.items():
            device.fill(base[name], size * threads * trials, 0)
        loaded = device.load(kernel)
        for t in range(trials):
            # Every trial has memory of its own: nothing it loads has been loaded before.
            device.run(loaded, {name: base[name] + t * sizes[name] * threads for name in sizes})
        back = {name: device.read(base[name], size * threads * trials) for name, size in sizes.items()}
        loaded.unload()
    seen = back["seen"].view(np.uint32).reshape(trials, threads)
    stored = back["stored"].view(np.uint64).reshape(trials, threads).astype(np.int64)
    times = back["times"].view(np.uint64).reshape(trials, threads, 3).astype(np.int64)
    return _record(plan, v, seen, stored, times)


def _record(plan: dict[str, Any], v: dict[str, Any], seen: Any, stored: Any, times: Any) -> dict[str, Any]:
    # A thread's trial counts if it began before the first store of the primary, by a margin.
    early = times[:, :, 0] + _MARGIN_NS < stored.min(axis=1)[:, None]
    old, new = seen == 0, seen == plan["value"]
    waited, loaded = times[:, :, 1][early], times[:, :, 2][early]
    return {
        "record": "variant",
        "variant": v["variant"]["name"],
        "place": v["variant"]["place"],
        "doc": v["variant"]["doc"],
        "clock_between": v["variant"]["clock_between"],
        "sass": v["sass"],
        "trials": int(seen.shape[0]),
        "loads": int(seen.size),
        "overlapped": int(early.sum()),
        "old_values": int((old & early).sum()),
        "wrong_values": int((~old & ~new).sum()),
        "wait_cycles": _spread(waited),
        "load_cycles": _spread(loaded),
    }


def _spread(values: Any) -> dict[str, int] | None:
    if not values.size:
        return None
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


def verdict(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the variants say together: `no`, `yes` or `undecided`, and why."""
    controls = [r for r in records if r["place"] == "before"]
    after = [r for r in records if r["place"] == "after" and r["sass"]["load_after_wait"]]
    behind = [r for r in after if r["sass"]["load_after_barrier"] is not False]
    base: dict[str, Any] = {"record": "verdict", "question": "do loads issue past ACQBULK?"}
    blind = [
        r["variant"]
        for r in controls
        if r["old_values"] < 0.99 * max(r["overlapped"], 1) or not r["overlapped"]
    ]
    if not controls or blind:
        why = "the grids did not overlap: a load before the wait did not bring the old value"
        return {**base, "answer": "undecided", "why": f"{why} ({', '.join(blind)})"}
    thin = [r["variant"] for r in behind if r["overlapped"] < 1000]
    ran = [r for r in behind if r["old_values"]]
    if ran:
        names = ", ".join(f"{r['variant']} ({r['old_values']} of {r['overlapped']})" for r in ran)
        return {**base, "answer": "yes", "why": f"old values although the load stands after ACQBULK: {names}"}
    if not behind or thin:
        return {
            **base,
            "answer": "undecided",
            "why": f"too few overlapped loads: {', '.join(thin) or 'none'}",
        }
    loads = sum(r["overlapped"] for r in behind)
    clocks = [r["wait_cycles"]["min"] for r in behind if r["clock_between"] and r["wait_cycles"]]
    return {
        **base,
        "answer": "no",
        "why": f"no old value in {loads} loads that stand after ACQBULK in the SASS; controls before it"
        f" brought the old one; the next instruction came at least {min(clocks, default=0)} cycles later",
    }
