"""Lane-instructions per second of the simulator on a real kernel, memory checks on.

    python benchmarks/simulator.py [--op moe_experts] [--workload tp8_b1] [--set knob=value ...] [--repeat 5]
    python benchmarks/simulator.py --table    several kernels with peak memory
    python benchmarks/simulator.py --peers    side by side with Triton's interpreter and Numba's simulator

Prints one line for one process and one for two: best of `--repeat` runs, translation excluded. The peers are
installed into a folder of their own when first asked for; they are no dependencies.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import gemv
import torch

from workbench.compile import ArtifactCache, CompileRequest, compile_candidate
from workbench.ops.loader import load_op
from workbench.simulator import Memory, SimulationOptions, simulate
from workbench.templates import load_template
from workbench.workspace import Workspace

TORCH = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "f16": torch.float16}


def cpu_seconds() -> float:
    """CPU time of this process and of the workers that have ended; tells what a busy machine hides."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def prepare(artifact, op, workload):
    """Place an artifact's buffers in simulated memory and fill the inputs; return memory and inputs."""
    memory = Memory()
    views = {}
    for b in artifact.buffers:
        is_input = any(b.name == x.name for x in op.inputs)
        changes = any(b.name == x.name for x in op.outputs)
        array = memory.allocate(
            b.name, b.nbytes, align=b.align, writable=changes or not is_input, initialized=is_input
        )
        kind = TORCH.get(str(b.dtype), torch.uint8)
        tensor = torch.from_numpy(array).view(kind)
        views[b.name] = tensor.reshape(*b.shape[:-1], -1)
        if b.zeroed:
            memory.mark_written(b.name)
    inputs = op.generators["ordinary"](workload.axes, 0, lambda name: views[name])
    return memory, inputs, views


KERNELS = (
    "moe_experts/tp8_b1", "moe_experts/tp8_b8", "moe/tp8_b1", "moe_topk/tp8_b8", "rmsnorm/tp8_b8",
    "gemv/1536x7168", "gemv/6288x7168", "kda/tp8_b16", "kda/tp8_b16/races-off",
)  # fmt: skip
EXTERNAL = Path(__file__).resolve().parents[1] / ".venv-external" / "bin" / "python"
"""KDA is vLLM's kernel: its rows need the virtual environment of `make external`."""


def row(name: str, repeat: int) -> None:
    """Run one kernel of the table in this process and print its line."""
    op_name, _, size = name.partition("/")
    if op_name == "kda":
        kda_row(name, repeat)
        return
    if op_name == "gemv":
        rows, columns = map(int, size.split("x"))
        artifact = gemv.compiled(rows, columns, "bf16")
        memory, _ = gemv.placed(rows, columns, "bf16")
        written = ["y"]
    else:
        workspace = Workspace.find()
        op = load_op(workspace, op_name)
        template = load_template(sorted((workspace.templates / op.name).glob("*.py"))[0])
        artifact = compile_candidate(
            CompileRequest.of(op, op.workload(size), template, dict(template.default)),
            ArtifactCache(workspace.cache),
        )
        memory, inputs, _ = prepare(artifact, op, op.workload(size))
        written = [b.name for b in artifact.buffers if b.name not in inputs]
    zeroed = {b.name for b in artifact.buffers if b.zeroed}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = float("inf")
    for _ in range(repeat):
        for buffer in written:
            if buffer in zeroed:
                memory.view(buffer)[:] = 0
            else:
                memory.poison(buffer, 0xFF)
        outcome = simulate(artifact, memory, SimulationOptions())
        best = min(best, outcome.seconds)
    report(name, outcome, best, before)


def report(name: str, outcome, best: float, before: int) -> None:
    """Print a line of the table; `before` is the peak (KiB) before the first run."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = outcome.lane_instructions
    findings = len(outcome.findings) or "none"
    print(
        f"| {name} | {sum(c.ctas for c in outcome.counters)} | {count / 1e6:.1f} | {best * 1e3:.1f} | "
        f"{count / best / 1e6:.0f} | {peak / 1024:.0f} | {max(0, peak - before) / 1024:.0f} | {findings} |"
    )


def kda_row(name: str, repeat: int) -> None:
    """vLLM's KDA decode step: 16 sequences, 12 heads; judged by the op's contract after each run."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "external"))
    import contracts
    import corpus

    size, _, mode = name.removeprefix("kda/").partition("/")
    if not (corpus.folder() / f"kda_{size}").is_dir():
        subprocess.run(
            [sys.executable, corpus.__file__, f"kda_{size}"], stdout=subprocess.DEVNULL, check=True
        )
    op = contracts.contract("kda")
    axes = dict(op.workload(size).axes)
    axes["S"] = axes["B"] + 9  # the slots that the corpus is compiled for
    given = contracts.generated(op, axes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best, options = float("inf"), SimulationOptions(check_races=mode != "races-off")
    for _ in range(repeat):
        outcome, after = contracts.run_kda(f"kda_{size}", axes, given, options)
        best = min(best, outcome.seconds)
    report(name, outcome, best, before)
    contracts.judge(op, axes, given, after)


def table(repeat: int) -> None:
    """Print a table over kernels, each in a process of its own."""
    print("| kernel | CTAs | M lane-instr. | ms | M lane-instr./s | peak MiB | for the run | findings |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in KERNELS:
        python = str(EXTERNAL) if name.startswith("kda/") else sys.executable
        if not Path(python).exists():
            print(f"| {name} | skipped: run `make external` first |", flush=True)
            continue
        command = [python, __file__, "--row", name, "--repeat", str(repeat)]
        done = subprocess.run(command, capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        print(done.stdout.strip() if done.returncode == 0 else f"| {name} | {last} |", flush=True)


def peers(repeat: int) -> None:
    """Print how long the same GEMV takes here and in two other simulators."""
    folder = Workspace.find().cache.parent / "peers"
    reason = gemv.packages(folder)
    if reason:
        print(f"peers skipped: they cannot be installed: {reason}")
        return
    cases = (
        ("Triton interpreter, tile 64x1024", gemv.TRITON, 1536, 7168, "bf16", (64, 1024), 2),
        ("Triton interpreter, tile 8x256", gemv.TRITON, 256, 1024, "bf16", (8, 256), 2),
        ("Numba CUDA simulator", gemv.NUMBA, 16, 512, "f32", (), 1),
    )
    print("| peer | GEMV | peer ms | here ms | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for name, code, rows, columns, kind, tile, times in cases:
        result = gemv.peer(code, folder, rows, columns, *tile, times)
        if "reason" in result:
            print(f"| {name} | {rows}x{columns} {kind} | skipped: {result['reason']} | | |", flush=True)
            continue
        here = gemv.ours(rows, columns, kind, repeat)
        there = float(result["seconds"])
        size = f"{rows}x{columns} {kind}"
        print(
            f"| {name} ({result['version']}) | {size} | {there * 1e3:.1f} | {here * 1e3:.2f} | "
            f"{there / here:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="moe_experts")
    parser.add_argument("--template")
    parser.add_argument("--workload", default="tp8_b1")
    parser.add_argument("--set", nargs="*", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=SimulationOptions().chunk_lanes)
    parser.add_argument("--table", action="store_true", help="several kernels, one process, peak memory")
    parser.add_argument("--peers", action="store_true", help="the same GEMV in other simulators")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        row(arguments.row, arguments.repeat)
    elif arguments.table:
        table(arguments.repeat)
    elif arguments.peers:
        peers(arguments.repeat)
    else:
        one(arguments)


def one(arguments: argparse.Namespace) -> None:
    """Run one template with one process and with two, and print its errors."""
    workspace = Workspace.find()
    op = load_op(workspace, arguments.op)
    path = sorted((workspace.templates / op.name).glob("*.py"))[0]
    template = load_template(
        workspace.templates / op.name / f"{arguments.template}.py" if arguments.template else path
    )
    workload = op.workload(arguments.workload)
    knobs = dict(template.default)
    for text in arguments.set:
        name, _, value = text.partition("=")
        knobs[name] = type(knobs[name])(value)
    artifact = compile_candidate(
        CompileRequest.of(op, workload, template, knobs), ArtifactCache(workspace.cache)
    )
    memory, inputs, views = prepare(artifact, op, workload)
    written = [b.name for b in artifact.buffers if b.name not in inputs]
    for processes in (1, 2):
        best = total = busy = float("inf")
        outcome = None
        for _ in range(arguments.repeat):
            for name in written:
                if not artifact.buffer(name).zeroed:
                    memory.poison(name, 0xFF)
                else:
                    memory.view(name)[:] = 0
            start, cpu = time.perf_counter(), cpu_seconds()
            outcome = simulate(
                artifact, memory, SimulationOptions(processes=processes, chunk_lanes=arguments.chunk)
            )
            total = min(total, time.perf_counter() - start)
            best = min(best, outcome.seconds)
            busy = min(busy, cpu_seconds() - cpu)
        rate = outcome.lane_instructions / best
        print(
            f"{op.name}/{template.name} {workload.name}: {processes} process{'es' if processes > 1 else ''}: "
            f"{outcome.lane_instructions / 1e6:.0f} M lane-instructions in {best * 1e3:.0f} ms "
            f"({total * 1e3:.0f} ms with translation) = {rate / 1e6:.0f} M lane-instructions/s; "
            f"{outcome.lane_instructions / busy / 1e6:.0f} M per second of CPU time"
        )
        for finding in outcome.findings:
            print("  ", finding.rule, finding.message, finding.count, finding.source)
    for b in op.outputs:
        golden = op.reference(inputs, workload.axes)[b.name].double()
        got = views[b.name].double()
        error = (got - golden).norm() / golden.norm()
        print(f"{b.name}: relative error {float(error):.2e}")


if __name__ == "__main__":
    main()
