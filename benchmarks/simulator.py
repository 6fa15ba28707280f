"""Lane-instructions per second of the simulator on a real kernel, memory checks on.

    python benchmarks/simulator.py [--op moe_experts] [--workload tp8_b1] [--set knob=value ...] [--repeat 5]

Prints one line for one process and one for two: best of `--repeat` runs, translation excluded.
"""

from __future__ import annotations

import argparse
import resource
import time

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="moe_experts")
    parser.add_argument("--template")
    parser.add_argument("--workload", default="tp8_b1")
    parser.add_argument("--set", nargs="*", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=SimulationOptions().chunk_lanes)
    arguments = parser.parse_args()
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
