"""What compiling costs: seconds of processor and wall-clock time per stage, and resident memory.

    python benchmarks/compile.py [--op moe] [--template chain] [--workload tp8_b1] [--repeat 5]

Stages of one compile: the child (fork, fences, trace, libNVVM), launch recovery, ptxas, reading the cubin.
Wall-clock times suffer from whatever else the machine does; the least of the repeats is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.compile import CompileRequest, CompileServer, Limits, recover_launches
from workbench.compile.checks import scrub_paths
from workbench.compile.ptxas import assemble
from workbench.isa.cubin import read_cubin
from workbench.ops import load_op
from workbench.templates import load_template
from workbench.workspace import Workspace


def least(repeat: int, f: Callable[[], Any]) -> tuple[float, Any]:
    """Least wall-clock seconds of `repeat` calls, and the last result."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        result = f()
        best = min(best, time.perf_counter() - start)
    return best, result


def processor_seconds(pid: int) -> float:
    """Processor time of a process's children that have ended, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[13]) + int(fields[14])) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description="what compiling costs")
    parser.add_argument("--op", default="moe")
    parser.add_argument("--template")
    parser.add_argument("--workload", default="tp8_b1")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    workspace = Workspace.find(Path(__file__))
    op = load_op(workspace, args.op)
    name = args.template or workspace.template_names(args.op)[0]
    template = load_template(workspace.template(args.op, name))
    request = CompileRequest.of(op, args.workload, template, template.default)
    limits = Limits()
    with CompileServer() as server:
        cold, _ = least(1, lambda: server.trace(request, limits))
        assert server.pid is not None
        before = processor_seconds(server.pid)
        warm, traced = least(args.repeat, lambda: server.trace(request, limits))
        processor = (processor_seconds(server.pid) - before) / args.repeat
        resident = int(Path(f"/proc/{server.pid}/status").read_text().split("VmRSS:")[1].split()[0]) >> 10
    recover, launches = least(
        args.repeat,
        lambda: recover_launches(traced.mlir, traced.function, traced.parameters, request.buffers),
    )
    ptx = scrub_paths(traced.ptx)
    ptxas, made = least(args.repeat, lambda: assemble(ptx, request.arch, request.ptxas_flags, limits))
    read, _ = least(args.repeat, lambda: read_cubin(made.cubin))
    print(f"{args.op}/{name} at {args.workload} for {request.arch}")
    print(f"{len(launches)} launches, {len(ptx)} bytes of PTX")
    print(f"child, server cold  {cold:8.3f} s")
    print(f"child, server warm  {warm:8.3f} s  ({processor:.3f} s of processor time)")
    print(f"launch recovery     {recover:8.3f} s")
    print(f"ptxas               {ptxas:8.3f} s")
    print(f"cubin               {read:8.3f} s")
    print(f"resident: server {resident} MiB, child {traced.rss_bytes >> 20} MiB, mostly shared with it")


if __name__ == "__main__":
    main()
