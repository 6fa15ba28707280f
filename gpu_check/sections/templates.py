"""Every template's kernels: right by the contract, the simulator's bits, measured time beside predicted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check.compare import compare
from gpu_check.family import Part
from gpu_check.machine import nvidia_smi
from workbench.devices.cuda import CudaDevice
from workbench.devices.measure import inputs
from workbench.devices.model import (
    Bytes,
    Device,
    DeviceError,
    Kernel,
    Slot,
    execute,
    hold,
    launch_from_json,
    place,
)
from workbench.devices.timing import Timing, TimingOptions, time_loaded

METHODS = (
    TimingOptions(method="events", l2="flushed", warmup=20, time_limit=10.0),
    TimingOptions(method="graph", l2="flushed", warmup=20, time_limit=10.0),
    TimingOptions(method="graph", l2="warm", warmup=20, time_limit=10.0),
)
_FORMATS = {"bf16": "bf16", "f16": "f16", "f32": "f32", "f64": "f64"}


def kernels(folder: Path) -> list[dict[str, Any]]:
    """What travels, in the order of the build."""
    found: list[dict[str, Any]] = json.loads((folder / "templates" / "templates.json").read_text())["kernels"]
    return found


def load(folder: Path, entry: Mapping[str, Any]) -> Kernel:
    """A template's kernel."""
    stem = folder / "templates" / entry["id"]
    return Kernel(
        name=entry["title"],
        arch=entry["arch"],
        launches=tuple(launch_from_json(n) for n in entry["launches"]),
        slots=tuple(Slot(**s) for s in entry["slots"]),
        cubin=stem.with_suffix(".cubin").read_bytes(),
        ptx=stem.with_suffix(".ptx").read_text(),
    )


def numerics(folder: Path, device: Device, op_name: str) -> Iterator[dict[str, Any]]:
    """One record a kernel and generator."""
    op = _op(folder, op_name)
    mine = [e for e in kernels(folder) if e["op"] == op_name]
    groups: dict[str, list[dict[str, Any]]] = {}
    for e in mine:
        groups.setdefault(e["workload"], []).append(e)
    for same in groups.values():
        for generator in same[0]["generators"]:
            axes = same[0]["axes"]
            given = inputs(op, axes, generator)
            standard = _standard(op, axes, given)
            with device.scope():
                held = hold(device, load(folder, same[0]), given)
                for e in same:
                    record = {
                        "record": "numerics",
                        "op": op_name,
                        "kernel": e["title"],
                        "generator": generator,
                    }
                    try:
                        first, second = execute(device, load(folder, e), given, repeats=2, held=held)
                    except DeviceError as error:
                        yield {**record, "passed": False, "why": str(error)}
                        raise
                    yield (
                        record
                        | _judged(op, axes, standard, first)
                        | {
                            "repeatable": all((first[n] == second[n]).all() for n in first),
                            "simulator": _against_simulator(folder, e, generator, given, first),
                        }
                    )


def _op(folder: Path, name: str) -> Any:
    from workbench.ops import load_op
    from workbench.workspace import Workspace

    return load_op(Workspace(folder), name)


def _shaped(buffer: Any, axes: Mapping[str, int], raw: Bytes) -> Any:
    import torch

    from workbench.ops.model import storage_shape

    stored = torch.from_numpy(raw).view(getattr(torch, buffer.dtype.torch_name))
    return stored.view(storage_shape(buffer, axes))


def _standard(op: Any, axes: Mapping[str, int], given: Mapping[str, Bytes]) -> Any:
    from workbench.ops.compare import standard_of

    return standard_of(op, {b.name: _shaped(b, axes, given[b.name]) for b in op.inputs}, axes)


def _judged(op: Any, axes: Mapping[str, int], standard: Any, out: Mapping[str, Bytes]) -> dict[str, Any]:
    """The contract's own judgement, as `workbench verify` makes it."""
    from workbench.ops.compare import compare as judge

    why, worst = [], {}
    for b in op.outputs:
        c = judge(
            standard.golden[b.name],
            _shaped(b, axes, out[b.name]),
            op.tolerances[b.name],
            standard.honest[b.name],
        )
        rms = c.errors.rms if math.isfinite(c.errors.rms) else sys.float_info.max  # JSON has no infinity
        worst[b.name] = {"rms": rms, "rms_limit": c.limits.rms, "exact": op.tolerances[b.name].exact}
        if not c.passed:
            why.append(f"{b.name} {c.reason}")
    return {"passed": not why, "why": "; ".join(why), "errors": worst}


def _against_simulator(
    folder: Path,
    entry: Mapping[str, Any],
    generator: str,
    given: Mapping[str, Bytes],
    out: Mapping[str, Bytes],
) -> dict[str, Any] | None:
    """Bits against what the simulator made at the build of the same inputs."""
    if generator != "ordinary" or not entry["simulated"]:
        return None
    for name, digest in entry["input_sha256"].items():
        if hashlib.sha256(given[name].tobytes()).hexdigest() != digest:
            return {"compared": False, "why": f"this machine's generator draws other numbers for {name}"}
    elements = different = 0
    largest: int | None = None
    for name, dtype in entry["simulated"].items():
        want = np.load(folder / "templates" / f"{entry['id']}-{name}.npy")
        fmt = _FORMATS.get(dtype, "u8")
        d = compare(Part(name, name, 0, want.nbytes, fmt), want, out[name])
        elements += d.elements
        different += d.different
        if d.max_ulp is not None:
            largest = max(largest or 0, d.max_ulp)
    return {"compared": True, "elements": elements, "different": different, "max_ulp": largest}


def timing(folder: Path, device: CudaDevice, op_name: str, samples: int = 200) -> Iterator[dict[str, Any]]:
    """One record a kernel at a real size: measured by both methods, predicted beside it."""
    op = _op(folder, op_name)
    mine = [e for e in kernels(folder) if e["op"] == op_name and e["predicted"] is not None]
    for workload in dict.fromkeys(e["workload"] for e in mine):
        same = [e for e in mine if e["workload"] == workload]
        given = inputs(op, same[0]["axes"])
        with device.scope():
            held = hold(device, load(folder, same[0]), given)
            for e in same:
                yield _timed(device, load(folder, e), e, given, held, samples)
    yield {"record": "clocks", "op": op_name, "after_timing": nvidia_smi()}


def _timed(
    device: CudaDevice,
    kernel: Kernel,
    entry: Mapping[str, Any],
    given: Mapping[str, Bytes],
    held: Mapping[str, int],
    samples: int,
) -> dict[str, Any]:
    kept = ("op", "workload", "template", "knobs", "predicted")
    record: dict[str, Any] = {name: entry[name] for name in kept}
    record |= {"record": "timing", "kernel": entry["title"], "launches": len(kernel.launches), "measured": {}}
    with device.scope():
        addresses = place(device, kernel, given, held=held)
        loaded = device.load(kernel)
        for method in METHODS:
            name = f"{method.method}, {method.l2}"
            try:
                options = dataclasses.replace(method, samples=samples)
                taken = time_loaded(device, kernel.name, loaded, addresses, options)
                record["measured"][name] = _measured(taken)
            except DeviceError as error:
                record["measured"][name] = {"failed": str(error)}
        loaded.unload()
    return record


def _measured(t: Timing) -> dict[str, Any]:
    return {
        "median_us": t.median_us,
        "min_us": t.min_us,
        "p10_us": t.quantile_us(0.1),
        "p90_us": t.quantile_us(0.9),
        "host_us": t.host_us,
        "premises": t.premises,
        "samples_us": [round(s, 3) for s in t.samples_us],
    }
