"""TMA kernels of CuTe DSL end to end: what they load is the tensor, read through the kernel's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from workbench.artifact import Artifact, BoundBuffer
from workbench.compile import CompileRequest, CompileServer, compile_candidate
from workbench.ops.dtypes import DType
from workbench.ops.model import Role
from workbench.simulator import Memory, Outcome, simulate

KERNEL = '''
import cutlass
import cutlass.cute as cute
from cutlass import Int64, Int32
from cutlass.cute.nvgpu import cpasync

TILE = {tile}
RANK = len(TILE)


class RoundTrip:
    """Each CTA loads a tile, writes it to `out` by ordinary stores and to `y` by a tensor copy."""

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, gx: cute.Tensor, save: cute.CopyAtom, gy: cute.Tensor,
               layout: cute.ComposedLayout, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bx, by, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        s = smem.allocate_tensor(out.element_type, layout.outer, 1024, swizzle=layout.inner)
        bar = smem.allocate_array(Int64, 1)
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        where = (by, bx) if cutlass.const_expr(RANK == 2) else (0,) * (RANK - 2) + (by, bx)
        tx = cute.local_tile(gx, TILE, where)
        ty = cute.local_tile(gy, TILE, where)
        to = cute.local_tile(out, TILE, where)
        one = cute.make_layout(1)
        flat = cute.group_modes(s, 0, RANK)
        ss, sg = cpasync.tma_partition(load, 0, one, flat, cute.group_modes(tx, 0, RANK))
        ds, dg = cpasync.tma_partition(save, 0, one, flat, cute.group_modes(ty, 0, RANK))
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(bar, {nbytes})
        cute.copy(load, sg, ss, tma_bar_ptr=bar)
        {wait}
        fo = cute.group_modes(to, 0, RANK)
        for i in range(tid, cute.size(TILE), 32):
            fo[i] = flat[i]
        if tid == 0:
            cute.copy(save, ds, dg)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, y: cute.Tensor, stream):
        layout = cute.make_composed_layout(
            cute.make_swizzle({swizzle}), 0, cute.make_layout(TILE, stride={stride})
        )
        load, gx = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, TILE)
        save, gy = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, TILE)
        self.kernel(load, gx, save, gy, layout, out).launch(grid={grid}, block=[32, 1, 1], stream=stream)


def build(axes, knobs):
    return RoundTrip()
'''
NUMPY: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.BF16: ml_dtypes.bfloat16,
    DType.E4M3: ml_dtypes.float8_e4m3fn,
}


@pytest.fixture(scope="module")
def server() -> Iterator[CompileServer]:
    with CompileServer() as s:
        yield s


def candidate(
    server: CompileServer, arch: str, dtype: DType, shape: tuple[int, ...], tile: tuple[int, ...],
    swizzle: tuple[int, int, int], *, wait: str = "cute.arch.mbarrier_wait(bar, 0)", nbytes: int = 0,
) -> Artifact:  # fmt: skip
    size = np.dtype(NUMPY[dtype]).itemsize
    stride = tuple(int(np.prod(tile[i + 1 :])) for i in range(len(tile)))
    grid = [-(-shape[-1] // tile[-1]), -(-shape[-2] // tile[-2]), 1]
    source = KERNEL.format(
        tile=tile, stride=stride, swizzle=", ".join(map(str, swizzle)), grid=grid, wait=wait,
        nbytes=nbytes or int(np.prod(tile)) * size,
    )  # fmt: skip
    buffers = tuple(
        BoundBuffer(name=n, shape=shape, dtype=dtype, role=r)
        for n, r in (("x", Role.ACTIVATION), ("out", Role.OUTPUT), ("y", Role.OUTPUT))
    )
    return compile_candidate(
        CompileRequest(
            op="tma", workload="test", axes={"N": 1}, template="test", knobs={}, arch=arch, source=source,
            constants={}, buffers=buffers,
        ),
        server=server,
    )  # fmt: skip


def run(artifact: Artifact, x: np.ndarray) -> tuple[Outcome, np.ndarray, np.ndarray]:
    memory = Memory(1 << 26)
    memory.allocate("x", x.nbytes, align=256, writable=False, initialized=True)[:] = x.view(np.uint8).ravel()
    for name in ("out", "y"):
        memory.allocate(name, x.nbytes, align=256)
    outcome = simulate(artifact, memory)
    return outcome, *(memory.view(n).view(x.dtype).reshape(x.shape) for n in ("out", "y"))


CASES = [
    (DType.F32, (10, 128), (5, 32), (0, 4, 3)),
    (DType.F32, (16, 64), (8, 32), (3, 4, 3)),
    (DType.F32, (16, 64), (16, 32), (2, 5, 2)),
    (DType.BF16, (128, 128), (64, 64), (3, 4, 3)),
    (DType.BF16, (64, 64), (64, 32), (2, 4, 3)),
    (DType.BF16, (64, 64), (32, 16), (1, 4, 3)),
    (DType.BF16, (64, 256), (32, 128), (0, 4, 3)),
    (DType.E4M3, (32, 256), (32, 128), (3, 4, 3)),
    (DType.BF16, (3, 16, 64), (3, 8, 64), (3, 4, 3)),
    (DType.F32, (2, 3, 6, 32), (2, 3, 2, 8), (1, 4, 3)),
    (DType.BF16, (2, 2, 3, 4, 64), (2, 2, 3, 2, 32), (2, 4, 3)),
]


@pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip(server: CompileServer, case: tuple, arch: str) -> None:
    dtype, shape, tile, swizzle = case
    x = np.random.default_rng(1).integers(0, 200, int(np.prod(shape))).astype(np.float32)
    x = x.astype(NUMPY[dtype]).reshape(shape)
    outcome, out, y = run(candidate(server, arch, dtype, shape, tile, swizzle), x)
    assert outcome.completed and outcome.findings == ()
    assert (out.view(np.uint8) == x.view(np.uint8)).all()
    assert (y.view(np.uint8) == x.view(np.uint8)).all()


def test_a_missing_wait_is_found(server: CompileServer) -> None:
    dtype, shape, tile, swizzle = CASES[3]
    x = np.ones(shape, np.float32).astype(NUMPY[dtype])
    outcome, _, _ = run(candidate(server, "sm_103a", dtype, shape, tile, swizzle, wait="pass"), x)
    assert "uninitialized-read" in {f.rule for f in outcome.findings}


FILL = """
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

TILE = (32, 64)


class Fill:
    @cute.kernel
    def kernel(self, save: cute.CopyAtom, gy: cute.Tensor, layout: cute.ComposedLayout, x: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bx, by, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        s = smem.allocate_tensor(x.element_type, layout.outer, 1024, swizzle=layout.inner)
        tx = cute.group_modes(cute.local_tile(x, TILE, (by, bx)), 0, 2)
        ty = cute.local_tile(gy, TILE, (by, bx))
        flat = cute.group_modes(s, 0, 2)
        for i in range(tid, cute.size(TILE), 32):
            flat[i] = tx[i]
        {fence}
        cute.arch.sync_threads()
        ds, dg = cpasync.tma_partition(save, 0, cute.make_layout(1), flat, cute.group_modes(ty, 0, 2))
        if tid == 0:
            cute.copy(save, ds, dg)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        plain = cute.make_layout(TILE, stride=(64, 1))
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)
        save, gy = cpasync.make_tiled_tma_atom({atom}, y, layout, TILE)
        self.kernel(save, gy, layout, x).launch(grid=[2, 3, 1], block=[32, 1, 1], stream=stream)


def build(axes, knobs):
    return Fill()
"""


def fill(server: CompileServer, fence: str, atom: str = "cpasync.CopyBulkTensorTileS2GOp()") -> Artifact:
    buffers = tuple(
        BoundBuffer(name=n, shape=(80, 128), dtype=DType.BF16, role=r)
        for n, r in (("x", Role.ACTIVATION), ("y", Role.OUTPUT))
    )
    source = FILL.format(fence=fence, atom=atom)
    return compile_candidate(
        CompileRequest(
            op="tma", workload="test", axes={"N": 1}, template="test", knobs={}, arch="sm_103a",
            source=source, constants={}, buffers=buffers,
        ),
        server=server,
    )  # fmt: skip


@pytest.mark.parametrize("fence", ["cute.arch.fence_view_async_shared()", "pass"])
def test_a_tile_is_stored_after_a_proxy_fence(server: CompileServer, fence: str) -> None:
    """80 rows in tiles of 32: the last tile is half outside, and what is outside is not written."""
    x = np.random.default_rng(2).integers(0, 200, (80, 128)).astype(np.float32).astype(ml_dtypes.bfloat16)
    memory = Memory(1 << 24)
    memory.allocate("x", 96 * 256, initialized=True)[: x.nbytes] = x.view(np.uint8).ravel()
    memory.allocate("y", x.nbytes)
    outcome = simulate(fill(server, fence), memory)
    assert (memory.view("y").view(np.uint16) == x.view(np.uint16).ravel()).all()
    assert {f.rule for f in outcome.findings} == (set() if fence != "pass" else {"proxy-fence-missing"})


def test_a_tile_is_added(server: CompileServer) -> None:
    x = np.random.default_rng(2).integers(0, 20, (80, 128)).astype(np.float32).astype(ml_dtypes.bfloat16)
    y = np.random.default_rng(3).integers(0, 20, (80, 128)).astype(np.float32).astype(ml_dtypes.bfloat16)
    memory = Memory(1 << 24)
    memory.allocate("x", 96 * 256, initialized=True)[: x.nbytes] = x.view(np.uint8).ravel()
    memory.allocate("y", x.nbytes, initialized=True)[:] = y.view(np.uint8).ravel()
    atom = "cpasync.CopyReduceBulkTensorTileS2GOp()"
    outcome = simulate(fill(server, "cute.arch.fence_view_async_shared()", atom), memory)
    assert outcome.findings == ()
    assert (memory.view("y").view(ml_dtypes.bfloat16).reshape(80, 128) == x + y).all()
