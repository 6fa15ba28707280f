"""What a call costs the host: the launcher alone, and the exported package's op in front of it."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_check.sections import NotHereError
from gpu_check.sections.templates import kernels, load
from workbench.devices.cuda import CudaDevice
from workbench.devices.model import place

_BATCH = 32
"""Calls between two waits for the device; its queue never fills."""


def launcher(folder: Path, device: CudaDevice, calls: int = 2000) -> Iterator[dict[str, Any]]:
    """The launcher, with kernels of one launch and of several; no tensor, no dispatch."""
    seen: set[int] = set()
    for e in kernels(folder):
        kernel = load(folder, e)
        if e["real"] or len(kernel.launches) in seen:
            continue
        seen.add(len(kernel.launches))
        import numpy as np

        given = {
            s.name: np.zeros(s.nbytes, np.uint8)
            for s in kernel.slots
            if s.role in ("weight", "activation", "state", "metadata")
        }
        with device.scope():
            addresses = place(device, kernel, given)
            loaded = device.load(kernel)
            took = _timed(lambda: device.run(loaded, addresses), device.synchronize, calls)  # noqa: B023
            loaded.unload()
        n = len(kernel.launches)
        yield {
            "record": "overhead",
            "what": f"launcher, {n} launch{'es' if n > 1 else ''}: {kernel.name}",
            **took,
        }


def package(folder: Path, calls: int = 2000, where: str = "cuda") -> Iterator[dict[str, Any]]:
    """The exported package's op on CUDA tensors, and torch's own cheapest op beside it.

    `where` is the device of the tensors; a test without a GPU says `cpu`.
    """
    import torch

    k3, wait = _package(folder, where)
    arch = k3.ops.pretended_arch or importlib.import_module("k3_decode.device").current_arch()
    x = torch.zeros(64, dtype=torch.bfloat16, device=where)
    y = torch.empty_like(x)
    took = _timed(lambda: torch.add(x, x, out=y), wait, calls)
    yield {
        "record": "overhead",
        "what": f"torch.add, out given (torch {torch.__version__}), for scale",
        **took,
    }
    for kernel in k3.table().kernels:
        if kernel.arch != arch:
            continue
        tensors, given = _tensors(k3, kernel, where)
        call = getattr(torch.ops.k3_decode, kernel.op)
        call(*tensors.values(), *given)
        before = k3.counts()
        took = _timed(lambda: call(*tensors.values(), *given), wait, calls)  # noqa: B023
        after = k3.counts()
        answered = after.kernels.get((kernel.op, kernel.key), 0) - before.kernels.get(
            (kernel.op, kernel.key), 0
        )
        if answered < calls:
            yield {"record": "overhead", "what": f"k3_decode.{kernel.op}", "failed": str(after.fallbacks)}
            continue
        yield {"record": "overhead", "what": f"torch.ops.k3_decode.{kernel.op} ({kernel.workload})", **took}


def judged(folder: Path, where: str = "cuda") -> Iterator[dict[str, Any]]:
    """`python -m k3_decode --check`: the package's kernels by their contracts, a replayed graph by a call."""
    import torch

    k3, _ = _package(folder, where)
    arch = k3.ops.pretended_arch or importlib.import_module("k3_decode.device").current_arch()
    check = importlib.import_module("k3_decode.check")
    for r in check.check(torch.device(where), arch):
        yield {
            "record": "package", "op": r.op, "kernel": r.kernel[:12], "batch": r.batch, "case": r.case,
            "buffer": r.buffer, "problem": r.problem,
        }  # fmt: skip


def _package(folder: Path, where: str) -> tuple[Any, Callable[[], Any]]:
    """The package, and what waits for the device; raises NotHereError where torch sees none."""
    import torch

    if where == "cuda" and not torch.cuda.is_available():
        raise NotHereError(f"torch {torch.__version__} sees no CUDA device")
    sys.path.insert(0, str(folder / "module"))
    wait = torch.cuda.synchronize if where == "cuda" else lambda: None
    return importlib.import_module("k3_decode"), wait


def _tensors(k3: Any, kernel: Any, where: str) -> tuple[dict[str, Any], list[int]]:
    import torch

    contracts = importlib.import_module("k3_decode.contracts")
    op = k3.table().ops[kernel.op]
    axes = {**kernel.axes, "B": kernel.batch}
    tensors = {
        b.name: torch.zeros(
            contracts.storage_shape(b, axes), dtype=getattr(torch, b.torch_dtype), device=where
        )
        for b in op.buffers
    }
    return tensors, [axes[a] for a in op.given]


def _timed(call: Callable[[], Any], wait: Callable[[], Any], calls: int) -> dict[str, Any]:
    samples = []
    for _ in range(50):
        call()
    wait()
    for n in range(calls):
        started = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started) * 1e6)
        if n % _BATCH == _BATCH - 1:
            wait()
    wait()
    ordered = sorted(samples)
    return {
        "calls": calls,
        "median_us": statistics.median(samples),
        "min_us": ordered[0],
        "p90_us": ordered[int(0.9 * len(ordered))],
    }
