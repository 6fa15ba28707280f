"""y = W x in bf16 or f32, a warp a row, as a CuTe DSL kernel and in two other simulators' languages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = '''
"""A warp adds up one row of W times x, 8 or 4 elements a load."""
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import CopyG2ROp

KIND, COLUMNS, VECTOR = {kind}, {columns}, {vector}


class Gemv:
    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        row = block * 8 + thread // 32
        atom = cute.make_copy_atom(CopyG2ROp(), KIND, num_bits_per_copy=128)
        total = Float32(0.0)
        for step in cutlass.range(COLUMNS // (32 * VECTOR), unroll=4):
            a = cute.make_rmem_tensor(VECTOR, KIND)
            b = cute.make_rmem_tensor(VECTOR, KIND)
            cute.copy(atom, cute.local_tile(w[row, None], (VECTOR,), (step * 32 + lane,)), a)
            cute.copy(atom, cute.local_tile(x, (VECTOR,), (step * 32 + lane,)), b)
            for k in cutlass.range_constexpr(VECTOR):
                total = total + Float32(a[k]) * Float32(b[k])
        total = cute.arch.warp_reduction_sum(total)
        if lane == 0:
            y[row] = total

    @cute.jit
    def __call__(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(w, x, y).launch(
            grid=[cute.size(y) // 8, 1, 1], block=[256, 1, 1], stream=stream
        )


def build(axes, knobs):
    return Gemv()
'''

TRITON = """
import json, os, sys, time
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl

@triton.jit
def gemv(w, x, y, K, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS,), tl.float32)
    for k in range(0, K, COLS):
        c = k + tl.arange(0, COLS)
        a = tl.load(w + r[:, None] * K + c[None, :]).to(tl.float32)
        acc += tl.sum(a * tl.load(x + c)[None, :].to(tl.float32), axis=1)
    tl.store(y + r, acc)

m, k, rows, columns, repeat = map(int, sys.argv[1:])
w, x, y = torch.randn(m, k).bfloat16(), torch.randn(k).bfloat16(), torch.zeros(m)
best = 1e9
for _ in range(repeat):
    start = time.perf_counter()
    gemv[(m // rows,)](w, x, y, k, rows, columns)
    best = min(best, time.perf_counter() - start)
error = float((y - w.float() @ x.float()).abs().max())
print(json.dumps({"version": triton.__version__, "seconds": best, "error": error}))
"""

NUMBA = """
import json, os, sys, time
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
import numba, numpy as np
from numba import cuda

@cuda.jit
def gemv(w, x, y):
    part = cuda.shared.array(32, numba.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = numba.float32(0)
    for k in range(t, w.shape[1], 32):
        total += w[row, k] * x[k]
    part[t] = total
    cuda.syncthreads()
    if t == 0:
        total = numba.float32(0)
        for k in range(32):
            total += part[k]
        y[row] = total

m, k, repeat = map(int, sys.argv[1:])
rng = np.random.default_rng(0)
w, x, y = rng.random((m, k), np.float32), rng.random(k, np.float32), np.zeros(m, np.float32)
best = 1e9
for _ in range(repeat):
    start = time.perf_counter()
    gemv[m, 32](w, x, y)
    best = min(best, time.perf_counter() - start)
error = float(np.abs(y - w @ x).max())
print(json.dumps({"version": numba.__version__, "seconds": best, "error": error}))
"""


def compiled(rows: int, columns: int, kind: str):
    """Compile the GEMV for sm_103a; `kind` is `bf16` or `f32`, y is f32."""
    from workbench.artifact import BoundBuffer
    from workbench.compile import ArtifactCache, CompileRequest, compile_candidate
    from workbench.ops.dtypes import DType
    from workbench.ops.model import Role
    from workbench.workspace import Workspace

    source = SOURCE
    values = {
        "kind": {"bf16": "BFloat16", "f32": "Float32"}[kind],
        "columns": columns,
        "vector": {"bf16": 8, "f32": 4}[kind],
    }
    for name, value in values.items():
        source = source.replace("{" + name + "}", str(value))
    dtype = DType(kind)
    buffers = (
        BoundBuffer(name="w", shape=(rows, columns), dtype=dtype, role=Role.WEIGHT),
        BoundBuffer(name="x", shape=(columns,), dtype=dtype, role=Role.ACTIVATION),
        BoundBuffer(name="y", shape=(rows,), dtype=DType.F32, role=Role.OUTPUT),
    )
    request = CompileRequest(
        op="gemv", workload=f"{rows}x{columns}", axes={"N": rows}, template="gemv", knobs={}, arch="sm_103a",
        source=source, constants={}, buffers=buffers,
    )  # fmt: skip
    return compile_candidate(request, ArtifactCache(Workspace.find().cache))


def placed(rows: int, columns: int, kind: str):
    """Return a memory with random w and x, and the product in float64."""
    import ml_dtypes
    import numpy as np

    from workbench.simulator import Memory

    rng = np.random.default_rng(0)
    memory = Memory()
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float32
    values = {}
    for name, shape in (("w", (rows, columns)), ("x", (columns,))):
        values[name] = rng.standard_normal(shape, np.float32).astype(dtype)
        view = memory.allocate(name, values[name].nbytes, writable=False, initialized=True)
        view[:] = values[name].view(np.uint8).ravel()
    memory.allocate("y", rows * 4)
    return memory, values["w"].astype(np.float64) @ values["x"].astype(np.float64)


def ours(rows: int, columns: int, kind: str, repeat: int, processes: int = 1) -> float:
    """Best time in seconds, translation included from the second run on as it is kept."""
    import numpy as np

    from workbench.simulator import SimulationOptions, simulate

    artifact = compiled(rows, columns, kind)
    memory, golden = placed(rows, columns, kind)
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        outcome = simulate(artifact, memory, SimulationOptions(processes=processes))
        best = min(best, time.perf_counter() - start)
        assert outcome.findings == (), outcome.findings
    error = np.abs(memory.view("y").view(np.float32) - golden).max()
    assert error < 1e-2, error
    return best


def packages(folder: Path) -> str:
    """Install triton and numba into a folder of their own; return why not, or nothing."""
    if all((folder / name).is_dir() for name in ("triton", "numba", "llvmlite")):
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "--no-deps"]
    done = subprocess.run([*command, "triton", "numba", "llvmlite"], capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def peer(code: str, folder: Path, *arguments: int) -> dict[str, object]:
    """Run a peer's program in a process of its own; returns its result, or `reason`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # Triton reads the source of its kernels
        file.write(code)
        file.flush()
        try:
            done = subprocess.run(
                [sys.executable, file.name, *map(str, arguments)], env=environment, capture_output=True,
                text=True, timeout=300,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"reason": "no result in 300 s"}
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])
