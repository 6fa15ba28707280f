"""Occupancy against NVIDIA's own calculator, compiled from `cuda_occupancy.h` where it is installed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.cost import load_machine, occupancy

THREADS = (1, 32, 33, 64, 96, 128, 160, 256, 288, 384, 512, 640, 768, 1000, 1024)
REGISTERS = (
    0,
    8,
    16,
    24,
    25,
    32,
    33,
    40,
    41,
    48,
    56,
    64,
    65,
    72,
    80,
    94,
    96,
    104,
    128,
    160,
    168,
    192,
    224,
    255,
)
SMEM = (0, 1, 100, 1023, 1024, 2000, 7168, 7169, 16384, 40000, 49152, 65536, 99999, 113000, 115712, 115713,
        200000, 231424, 232448)  # fmt: skip

PROGRAM = """
#include <cstddef>
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  int major, minor, threads, registers; unsigned long smem;
  while (scanf("%d %d %d %d %lu", &major, &minor, &threads, &registers, &smem) == 5) {
    cudaOccDeviceProp p; p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = 2048; p.regsPerBlock = 65536; p.regsPerMultiprocessor = 65536;
    p.warpSize = 32;
    p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = 233472; p.numSms = 132;
    p.sharedMemPerBlockOptin = 232448; p.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes a; a.maxThreadsPerBlock = 1024; a.numRegs = registers; a.sharedSizeBytes = 0;
    a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = 232448; a.numBlockBarriers = 1;
    cudaOccDeviceState s; cudaOccResult r;
    cudaOccError e = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, smem);
    printf("%d %d\\n", (int)e, e == CUDA_OCC_SUCCESS ? r.activeBlocksPerMultiprocessor : -1);
  }
}
"""


def header() -> Path | None:
    found = (Path(p) / "nvidia" / "cu13" / "include" / "cuda_occupancy.h" for p in sys.path)
    return next((p for p in found if p.is_file()), None)


def test_matches_nvidias_calculator(tmp_path: Path) -> None:
    include, compiler = header(), shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("needs g++ and cuda_occupancy.h (package nvidia-cuda-runtime)")
    source, program = tmp_path / "o.cpp", tmp_path / "o"
    source.write_text(PROGRAM)
    subprocess.run([compiler, "-O1", "-w", f"-I{include.parent}", "-o", program, source], check=True)
    cases = list(itertools.product((("h200", 9, 0), ("gb300", 10, 3)), THREADS, REGISTERS, SMEM))
    lines = "".join(f"{m[1]} {m[2]} {t} {r} {s}\n" for m, t, r, s in cases)
    out = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    machines = {name: load_machine(name) for name in ("h200", "gb300")}
    checked = 0
    for (m, threads, registers, smem), line in zip(cases, out, strict=False):
        error, expected = map(int, line.split())
        assert error == 0
        got = occupancy(machines[m[0]], threads=threads, registers=registers, smem_bytes=smem)
        assert got.ctas_per_sm == expected, (m, threads, registers, smem, got)
        checked += 1
    assert checked == len(cases) > 10_000


@pytest.mark.parametrize(
    ("threads", "registers", "smem", "ctas", "limited_by"),
    [
        (128, 32, 0, 16, ("registers", "warps")),
        (32, 16, 0, 32, ("CTAs",)),
        (256, 64, 0, 4, ("registers",)),
        (256, 255, 0, 1, ("registers",)),
        (128, 32, 100_000, 2, ("shared memory",)),
        (1024, 80, 0, 0, ("registers",)),
        (1025, 32, 0, 0, ("warps",)),
        (128, 32, 232_449, 0, ("shared memory",)),
        (128, 256, 0, 0, ("registers",)),
    ],
)
def test_known_cases(threads: int, registers: int, smem: int, ctas: int, limited_by: tuple[str, ...]) -> None:
    got = occupancy(load_machine("gb300"), threads=threads, registers=registers, smem_bytes=smem)
    assert (got.ctas_per_sm, got.limited_by) == (ctas, limited_by)
    assert got.warps_per_sm == ctas * -(-threads // 32) and got.fraction == got.warps_per_sm / 64
