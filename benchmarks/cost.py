"""How well floors and predictions order measured GB300 latencies of Kimi K3's kernels.

    python benchmarks/cost.py [--data ../shared/data/gb300] [--predict]

The data (ai-dynamo/aiconfigurator, Apache-2.0) lies beside the project; without it the script says
so and ends well. Prints, for each kernel measured there, the rank correlation (Spearman) between
the roofline at that shape and the measured microseconds, over all shapes and over those whose
roofline is above the launch floor, and the median of measured over roofline. `--predict` also
compiles and simulates the experts' template at the workloads that have a measured counterpart.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from workbench.cost import Machine, load_machine

FLOOR_US = 5.0
Row = dict[str, str]


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, ties sharing their mean."""
    array = np.asarray(values, float)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; NaN where one side does not vary."""
    x, y = ranks(a), ranks(b)
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def floor(machine: Machine, nbytes: float, flops: float, rate: str) -> float:
    return max(nbytes / machine.chip.hbm_tb_s, flops / machine.peak_tflops[rate]) / 1e6


def moe_us(row: Row, machine: Machine) -> float:
    """One rank of the routed experts: the distinct experts it holds that are drawn, in MXFP4, once each."""
    tokens, experts, k = (int(row[n]) for n in ("num_tokens", "num_experts", "topk"))
    hidden = int(row["hidden_size"])
    inter = int(row["inter_size"]) / int(row["moe_tp_size"])
    share = int(row["moe_ep_size"])
    distinct = experts * (1 - (1 - k / experts) ** tokens) / share
    weights = distinct * 3 * hidden * inter * (0.5 + 1 / 32)
    flops = 2 * tokens * k / share * 3 * hidden * inter
    rate = "fp8" if "mxfp8" in row["moe_dtype"] else "bf16"
    return floor(machine, weights + tokens * hidden * 4, flops, rate)


def gemm_us(row: Row, machine: Machine) -> float:
    m, n, k = (int(row[x]) for x in "mnk")
    width, rate = {"bfloat16": (2, "bf16"), "nvfp4": (0.5625, "fp4")}.get(row["gemm_dtype"], (1, "fp8"))
    return floor(machine, n * k * width + m * k * width + m * n * 2, 2.0 * m * n * k, rate)


def kda_us(row: Row, machine: Machine) -> float:
    """State of every head read and written in float32, 128 x 128."""
    state = int(row["batch_size"]) * int(row["num_k_heads"]) * 128 * 128 * 4
    return floor(machine, 2.0 * state, 0.0, "fp32")


def compare(
    title: str, rows: Sequence[Row], name: Callable[[Row], str], model: Callable[[Row, Machine], float],
    machine: Machine,
) -> None:  # fmt: skip
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        groups[name(row)].append((model(row, machine), float(row["us"])))
    print(
        f"\n{title}\n{'kernel':<64} {'shapes':>6} {'rank':>6} {'above':>6} {'rank':>6} {'measured/floor':>15}"
    )
    for kernel, pairs in sorted(groups.items()):
        above = [p for p in pairs if p[0] > FLOOR_US]
        ratio = np.median([m / r for r, m in (above or pairs)])
        print(
            f"{kernel[:64]:<64} {len(pairs):>6} {spearman(*zip(*pairs, strict=True)):>6.3f} {len(above):>6} "
            f"{spearman(*zip(*above, strict=True)) if len(above) > 2 else float('nan'):>6.3f} {ratio:>15.2f}"
        )


def predictions(rows: Sequence[Row], machine: Machine) -> None:
    """Our experts' template, predicted, next to the measured kernels at the same shapes."""
    import torch

    from workbench.compile import ArtifactCache, CompileRequest, compile_candidate
    from workbench.cost import predict, roofline
    from workbench.isa.sass.parser import parse_sass
    from workbench.isa.sass.tool import disassemble
    from workbench.ops.loader import load_op
    from workbench.simulator import Memory, simulate
    from workbench.templates import load_template
    from workbench.workspace import Workspace

    kinds = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}
    workspace = Workspace.find()
    op = load_op(workspace, "moe_experts")
    template = load_template(workspace.template(op.name, workspace.template_names(op.name)[0]))
    print(f"\nrouted experts: {template.name} at its default (predicted), fastest measured kernel, floor; us")
    measured, predicted = [], []
    for name, tp, tokens in (("tp8_b1", "8", "1"), ("tp8_b8", "8", "8"), ("tp16_b1", "16", "1")):
        workload = op.workload(name)
        request = CompileRequest.of(op, workload, template, template.default)
        artifact = compile_candidate(request, ArtifactCache(workspace.cache))
        memory = Memory()
        views = {}
        for b in artifact.buffers:
            given = any(b.name == x.name for x in op.inputs)
            array = memory.allocate(b.name, b.nbytes, align=b.align, writable=not given, initialized=given)
            views[b.name] = torch.from_numpy(array).view(kinds.get(str(b.dtype), torch.uint8))
            views[b.name] = views[b.name].reshape(*b.shape[:-1], -1)
        op.generators["ordinary"](workload.axes, 0, views.__getitem__)
        outcome = simulate(artifact, memory)
        sass = parse_sass(disassemble(artifact.cubin))
        guess = predict(artifact, outcome.counters, machine, sass)
        here = [
            float(r["us"]) for r in rows
            if (r["moe_tp_size"], r["moe_ep_size"], r["num_tokens"]) == (tp, "1", tokens)
        ]  # fmt: skip
        predicted.append(guess.us)
        measured.append(min(here))
        print(f"{name:<10} {guess.us:>8.2f} {min(here):>8.2f} {roofline(op, workload, machine).us:>8.2f}")
        print("\n".join(guess.explain().splitlines()[1:]))
    print(f"rank correlation over these: {spearman(predicted, measured):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "gb300"
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--predict", action="store_true")
    arguments = parser.parse_args()
    files = {n: arguments.data / f"k3_gb300_{n}.csv" for n in ("moe", "gemm_small_m", "kda_decode")}
    if missing := [f.name for f in files.values() if not f.exists()]:
        print(f"skipped: {', '.join(missing)} not in {arguments.data}")
        return 0
    data = {n: list(csv.DictReader(f.open())) for n, f in files.items()}
    machine = load_machine("gb300")

    def name(dtype: str) -> Callable[[Row], str]:
        return lambda r: " ".join((r["framework"], r["kernel_source"][:40], r.get(dtype, "")))

    compare("routed experts", data["moe"], name("moe_dtype"), moe_us, machine)
    compare("small GEMMs", data["gemm_small_m"], name("gemm_dtype"), gemm_us, machine)
    decode = [r for r in data["kda_decode"] if "fused" in r["kernel_source"] and r["phase"] == "generation"]
    compare("KDA decode", decode, name(""), kda_us, machine)
    if arguments.predict:
        predictions(data["moe"], machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
