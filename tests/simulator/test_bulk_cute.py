"""CuTe DSL kernels with bulk copies, mbarrier pipelines and clusters, run from their PTX, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import CompileRequest, CompileServer, compile_candidate
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.simulator import Memory, Outcome, SimulationOptions, simulate

PIPELINE = '''
"""A CTA adds up rows of 512 floats: warp 4 loads them in stages, four warps add, a bulk copy stores."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

ROWS, WIDTH, STAGES = 7, 512, 3
C = cute.arch


class Sum:
    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = C.thread_idx()
        block, _, _ = C.block_idx()
        sm = cutlass.memory.SmemAllocator()
        stage = sm.allocate_tensor(Float32, cute.make_layout((STAGES, WIDTH), stride=(WIDTH, 1)), 128)
        out = sm.allocate_tensor(Float32, cute.make_layout(WIDTH), 128)
        full = sm.allocate_array(Int64, STAGES)
        empty = sm.allocate_array(Int64, STAGES)
        if tid == 0:
            for k in cutlass.range_constexpr(STAGES):
                C.mbarrier_init(full + k, 1)
                C.mbarrier_init(empty + k, 128)
            C.mbarrier_init_fence()
        C.sync_threads()
        load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        save = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32)
        if tid == 128:
            for i in cutlass.range(ROWS):
                k = i % STAGES
                C.mbarrier_wait(empty + k, ((i // STAGES) & 1) ^ 1)
                C.mbarrier_arrive_and_expect_tx(full + k, {nbytes})
                cute.copy(load, x[(block, i, None)], stage[(k, None)], mbar_ptr=full + k)
        if tid < 128:
            acc = cute.make_rmem_tensor(4, Float32)
            acc.fill(0.0)
            for i in cutlass.range(ROWS):
                k = i % STAGES
                {wait}
                for j in cutlass.range_constexpr(4):
                    acc[j] = acc[j] + stage[(k, tid + 128 * j)]
                C.mbarrier_arrive(empty + k)
            for j in cutlass.range_constexpr(4):
                out[tid + 128 * j] = acc[j]
        C.fence_proxy("async.shared", space="cta")
        C.sync_threads()
        if tid == 0:
            cute.copy(save, out, y[(block, None)])
            C.cp_async_bulk_commit_group()
            C.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=[cute.size(y, mode=[0]), 1, 1], block=[160, 1, 1], stream=stream)


def build(axes, knobs):
    return Sum()
'''

EXCHANGE = '''
"""Each CTA of a cluster sends its sum of a row to all the others; they add what they receive."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

SIZE = {size}
C = cute.arch


class Exchange:
    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = C.thread_idx()
        block, _, _ = C.block_idx()
        rank = C.block_idx_in_cluster()
        sm = cutlass.memory.SmemAllocator()
        box = sm.allocate_array(Int32, 8)
        bar = sm.allocate_array(Int64, 1)
        if tid == 0:
            C.mbarrier_init(bar, 1)
            C.mbarrier_arrive_and_expect_tx(bar, {nbytes})
        C.mbarrier_init_fence()
        C.cluster_arrive()
        C.cluster_wait()
        value = C.warp_reduction_sum(x[(block, tid)])
        if tid < SIZE:
            C.store_async_dsmem(box + rank, Int32(value), bar, tid)
        {wait}
        total = Int32(0)
        inbox = cute.make_tensor(box, cute.make_layout(SIZE))
        for k in cutlass.range_constexpr(SIZE):
            total = total + inbox[k]
        y[(block, tid)] = Float32(total)
        C.cluster_arrive()
        C.cluster_wait()

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(
            grid=[cute.size(y, mode=[0]), 1, 1], block=[32, 1, 1], cluster=[SIZE, 1, 1], stream=stream
        )


def build(axes, knobs):
    return Exchange()
'''


@pytest.fixture(scope="module")
def server() -> Iterator[CompileServer]:
    with CompileServer() as s:
        yield s


def candidate(
    server: CompileServer, source: str, x: tuple[int, ...], y: tuple[int, ...], arch: str = "sm_103a"
) -> Artifact:
    buffers = (
        BoundBuffer(name="x", shape=x, dtype=DType.F32, role=Role.ACTIVATION),
        BoundBuffer(name="y", shape=y, dtype=DType.F32, role=Role.OUTPUT),
    )
    return compile_candidate(
        CompileRequest(
            op="async", workload="test", axes={"N": 1}, template="test", knobs={}, arch=arch, source=source,
            constants={}, buffers=buffers,
        ),
        server=server,
    )  # fmt: skip


def run(artifact: Artifact, x: np.ndarray, y: tuple[int, ...], seed: int = 0) -> tuple[Outcome, np.ndarray]:
    memory = Memory(1 << 26)
    memory.allocate("x", x.nbytes, writable=False, initialized=True)[:] = x.view(np.uint8).ravel()
    memory.allocate("y", int(np.prod(y)) * 4)
    outcome = simulate(artifact, memory, SimulationOptions(seed=seed))
    return outcome, memory.view("y").view(np.float32).reshape(y)


WAIT = "C.mbarrier_wait(full + k, (i // STAGES) & 1)"
ROWS = np.random.default_rng(4).integers(-99, 99, (6, 7, 512)).astype(np.float32)


@pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
def test_pipeline_of_bulk_copies(server: CompileServer, arch: str) -> None:
    source = PIPELINE.format(nbytes=2048, wait=WAIT)
    artifact = candidate(server, source, (6, 7, 512), (6, 512), arch)
    assert "cp.async.bulk.shared::cluster.global.mbarrier" in artifact.ptx
    for seed in (0, 1, 2):
        outcome, y = run(artifact, ROWS, (6, 512), seed)
        assert outcome.findings == () and outcome.completed
        np.testing.assert_array_equal(y, ROWS.sum(axis=1))


def test_pipeline_without_its_wait(server: CompileServer) -> None:
    source = PIPELINE.format(nbytes=2048, wait="pass")
    outcome, _ = run(candidate(server, source, (6, 7, 512), (6, 512)), ROWS, (6, 512))
    assert "uninitialized-read" in {f.rule for f in outcome.findings}


def test_pipeline_with_a_wrong_parity(server: CompileServer) -> None:
    source = PIPELINE.format(nbytes=2048, wait=WAIT.replace("& 1", "& 1 ^ 1"))
    outcome, _ = run(candidate(server, source, (6, 7, 512), (6, 512)), ROWS, (6, 512))
    assert {"uninitialized-read", "mbarrier-phase"} & {f.rule for f in outcome.findings}


def test_pipeline_that_expects_too_much(server: CompileServer) -> None:
    source = PIPELINE.format(nbytes=2064, wait=WAIT)
    outcome, _ = run(candidate(server, source, (6, 7, 512), (6, 512)), ROWS, (6, 512))
    assert not outcome.completed
    assert "mbarrier-phase" in {f.rule for f in outcome.findings}
    assert any("0 of 1 arrivals pending, tx-count 16" in f.message for f in outcome.findings)


@pytest.mark.parametrize("size", [2, 8])
def test_exchange_in_a_cluster(server: CompileServer, size: int) -> None:
    source = EXCHANGE.format(size=size, nbytes=4 * size, wait="C.mbarrier_wait(bar, 0)")
    shape = (16, 32)
    artifact = candidate(server, source, shape, shape)
    assert "st.async" in artifact.ptx
    x = np.random.default_rng(5).integers(-99, 99, shape).astype(np.float32)
    want = x.reshape(16 // size, size * 32).sum(axis=1)
    for seed in (0, 1):
        outcome, y = run(artifact, x, shape, seed)
        assert outcome.findings == () and outcome.completed
        np.testing.assert_array_equal(y, np.repeat(want, size)[:, None] * np.ones((1, 32), np.float32))


def test_exchange_without_its_wait(server: CompileServer) -> None:
    source = EXCHANGE.format(size=2, nbytes=8, wait="pass")
    outcome, _ = run(candidate(server, source, (4, 32), (4, 32)), np.ones((4, 32), np.float32), (4, 32))
    assert {f.rule for f in outcome.findings} == {"uninitialized-read"}
