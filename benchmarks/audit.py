"""What the ordering audit costs: static audits, checks in the simulator, dynamic audits of small contracts.

    python benchmarks/audit.py [--repeat 3] [--every 1] [--part corpus|templates|checks|dynamic]

- corpus, templates: the static audit of one kernel, PTX and SASS, with and without nvdisasm: median and 95th
  percentile of wall and of CPU time. The corpus is what `make external` compiled; the templates are compiled
  at the first workload of each op.
- checks: the same run of a template in the simulator with no checks, with those of memory, and with
  happens-before too, taken in turns in one process; the best of each.
- dynamic: `workbench audit` on pairs of `tests/verify/ordering` whose contract is enough to run the kernel.

`--every N` takes every Nth kernel of the corpus and every Nth pair. CPU time says more than wall time on a
machine that others use: the load before each part is printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from simulator import prepare

from workbench.artifact import Artifact
from workbench.compile import ArtifactCache, CompileRequest, compile_candidate
from workbench.isa.sass import disassemble, parse_sass
from workbench.ops.loader import load_op
from workbench.simulator import SimulationOptions, simulate
from workbench.templates import load_template
from workbench.verify.ordering import audit, audit_file
from workbench.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]


def cpu() -> float:
    """CPU seconds of this process and of those that it waited for (nvdisasm)."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def timed(work: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Best wall and CPU seconds."""
    wall = busy = float("inf")
    for _ in range(repeat):
        start, used = time.perf_counter(), cpu()
        work()
        wall, busy = min(wall, time.perf_counter() - start), min(busy, cpu() - used)
    return wall, busy


def line(name: str, values: Sequence[tuple[float, float]]) -> str:
    """A row of the table on static audits."""
    wall, busy = np.array(values).T
    cells = [f"{np.median(x):.3f} | {np.percentile(x, 95):.3f} | {x.max():.3f}" for x in (wall, busy)]
    return f"| {name} | {len(values)} | {' | '.join(cells)} |"


HEAD = """| static audit of one kernel | kernels | wall s: median | p95 | most | CPU s: median | p95 | most |
|---|---:|---:|---:|---:|---:|---:|---:|"""


def load() -> str:
    """How busy the machine is."""
    one, five, _ = os.getloadavg()
    return f"load {one:.1f} (1 minute), {five:.1f} (5 minutes), {os.cpu_count()} CPUs"


def corpus(repeat: int, every: int) -> None:
    """Static audits of the kernels that `make external` compiled, under their contracts if written."""
    folders = sorted((ROOT / ".workbench" / "external").glob("vllm-[0-9]*"))
    names = [p for p in sorted(folders[-1].iterdir()) if (p / "kernel.ptx").is_file()] if folders else []
    if not names:
        print("corpus skipped: run `make external` first")
        return
    whole, alone = [], []
    for at in names[::every]:
        contract = at / "contract.toml" if (at / "contract.toml").is_file() else None
        whole.append(timed(lambda a=at, c=contract: audit_file(a / "kernel.ptx", c), repeat))
        data = (at / "kernel.cubin").read_bytes()
        alone.append(timed(lambda d=data: disassemble(d), repeat))
    print(line("corpus, all of it", whole))
    print(line("corpus, nvdisasm alone", alone), flush=True)


def artifacts() -> Iterator[tuple[str, Artifact, object, object]]:
    """Every template at its op's first workload: name, artifact, op, workload."""
    workspace = Workspace.find()
    for folder in sorted(p for p in workspace.templates.iterdir() if p.is_dir()):
        op = load_op(workspace, folder.name)
        workload = op.workloads[0]
        for path in sorted(folder.glob("*.py")):
            if path.stem.startswith("_"):
                continue
            template = load_template(path)
            request = CompileRequest.of(op, workload, template, dict(template.default))
            made = compile_candidate(request, ArtifactCache(workspace.cache))
            yield f"{op.name}/{template.name} {workload.name}", made, op, workload


def templates(repeat: int, _: int) -> None:
    """Static audits of the templates' artifacts."""
    whole, alone = [], []
    for _, artifact, _, _ in artifacts():
        whole.append(timed(lambda a=artifact: audit(a), repeat))
        sass = parse_sass(disassemble(artifact.cubin))
        alone.append(timed(lambda a=artifact, s=sass: audit(a, s), repeat))
    print(line("templates, all of it (an artifact with all its launches)", whole))
    print(line("templates, without nvdisasm and its text", alone), flush=True)


def checks(repeat: int, _: int) -> None:
    """The simulator with no checks, with those of memory, and with happens-before too, in turns."""
    print("| template | M lane-instr. | no checks: CPU s | memory | and happens-before | ratio | findings |")
    print("|---|---:|---:|---:|---:|---:|---|", flush=True)
    modes = ((False, False), (True, False), (True, True))
    ratios = []
    for name, artifact, op, workload in artifacts():
        memory, inputs, _ = prepare(artifact, op, workload)
        written = [b for b in artifact.buffers if b.name not in inputs]
        best = [float("inf")] * len(modes)
        for n in range(repeat + 1):
            for mode, (of_memory, races) in enumerate(modes):
                for b in written:
                    if b.zeroed:
                        memory.view(b.name)[:] = 0
                    else:
                        memory.poison(b.name, 0xFF)
                options = SimulationOptions(check_memory=of_memory, check_races=races)
                used = cpu()
                outcome = simulate(artifact, memory, options)
                if n:  # the first of each is translation and warming up
                    best[mode] = min(best[mode], cpu() - used)
        ratios.append(best[2] / best[0])
        times = " | ".join(f"{b:.3f}" for b in best)
        print(
            f"| {name} | {outcome.lane_instructions / 1e6:.1f} | {times} | {ratios[-1]:.2f} | "
            f"{len(outcome.findings) or 'none'} |",
            flush=True,
        )
    if ratios:
        print(f"\nall checks against none: median {np.median(ratios):.2f}, most {max(ratios):.2f}")


def dynamic(repeat: int, every: int) -> None:
    """Whole audits of small contracts: the static rules and the runs under every schedule."""
    sys.path.insert(0, str(ROOT / "tests" / "verify" / "ordering"))
    import pairing

    values: dict[str, list[tuple[float, float]]] = {"wrong": [], "right": []}
    for pair in pairing.pairs()[::every]:
        if pair.contract is None or pair.wrong.suffix != ".ptx" or "bytes" not in pair.contract:
            continue
        for side, source in (("wrong", pair.wrong), ("right", pair.right)):
            with tempfile.TemporaryDirectory() as folder:
                path, toml = Path(folder) / "kernel.ptx", Path(folder) / "contract.toml"
                path.write_text(source.text)
                toml.write_text(pair.contract)
                values[side].append(timed(lambda p=path, t=toml: audit_file(p, t), repeat))
    for side, found in values.items():
        print(line(f"pairs, {side}: static and dynamic, ptxas and nvdisasm included", found), flush=True)


PARTS = {"corpus": corpus, "templates": templates, "checks": checks, "dynamic": dynamic}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--part", choices=tuple(PARTS), action="append")
    arguments = parser.parse_args()
    for name in arguments.part or PARTS:
        print(f"\n{name}: {load()}\n")
        if name != "checks":
            print(HEAD, flush=True)
        PARTS[name](arguments.repeat, arguments.every)


if __name__ == "__main__":
    main()
