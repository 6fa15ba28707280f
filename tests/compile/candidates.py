"""Small CuTe DSL candidates for the compile tests, and requests that bind them."""

from __future__ import annotations

from typing import Any

from workbench.artifact import BoundBuffer
from workbench.compile import CompileRequest
from workbench.ops.dtypes import DType
from workbench.ops.model import Role

SCALE = '''
"""Scales row 0 into a scratch row, then writes it shifted into each row: PDL, scalars, slices, loops."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


class Scale:
    def __init__(self, axes, knobs):
        self.n, self.rows, self.threads = axes["N"], axes["B"], knobs["threads"]
        self.factor = axes["factor"]

    @cute.kernel
    def scale(self, x: cute.Tensor, y: cute.Tensor, factor: Float32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        i = bid * self.threads + tid
        y[i] = x[i] * factor
        cute.arch.griddepcontrol_launch_dependents()

    @cute.kernel
    def shift(self, y: cute.Tensor, out: cute.Tensor, shift: Float32, row: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        i = bid * self.threads + tid
        out[i] = y[i] + shift * Float32(row)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream):
        shape = dict(grid=[self.n // self.threads, 1, 1], block=[self.threads, 1, 1], stream=stream)
        self.scale(x[0, None], y, self.factor).launch(**shape)
        for r in cutlass.range_constexpr(2):
            self.shift(y, out[r, None], Float32(1.0), r).launch(use_pdl=True, smem=1024 * (r + 1), **shape)
        for r in cutlass.range(2, self.rows):
            self.shift(y, out[r, None], Float32(0.5), r).launch(use_pdl=True, **shape)


def build(axes, knobs):
    return Scale(axes, knobs)
'''

COPY = """
import cutlass.cute as cute

@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    y[tid] = x[0, tid] * {factor}

@cute.jit
def host(x: cute.Tensor, y: cute.Tensor, stream):
    {host}
    kernel(x, y).launch(grid={grid}, block={block}, stream=stream{more})

def build(axes, knobs):
    {build}
    return host
"""


def copy(
    factor: str = "1.0",
    host: str = "pass",
    build: str = "pass",
    more: str = "",
    block: str = "[64, 1, 1]",
    grid: str = "[1, 1, 1]",
    head: str = "",
) -> str:
    """A one-kernel candidate with holes for what a test wants in it."""
    return head + COPY.format(factor=factor, host=host, build=build, more=more, block=block, grid=grid)


def request(source: str, arch: str = "sm_103a", **changes: Any) -> CompileRequest:
    """A request over buffers x [B, N] f32, y [N] f32 scratch, out [B, N] f32 with B=5, N=256."""

    def buffer(name: str, shape: tuple[int, ...], role: Role) -> BoundBuffer:
        return BoundBuffer(name=name, shape=shape, dtype=DType.F32, role=role)

    fields: dict[str, Any] = {
        "op": "scale", "workload": "test", "axes": {"N": 256, "B": 5}, "template": "test",
        "knobs": {"threads": 64}, "arch": arch, "source": source, "constants": {"factor": 2.5},
        "buffers": (buffer("x", (5, 256), Role.ACTIVATION), buffer("y", (256,), Role.SCRATCH),
                    buffer("out", (5, 256), Role.OUTPUT)),
    }  # fmt: skip
    return CompileRequest(**{**fields, **changes})
