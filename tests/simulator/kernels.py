"""Runs small PTX kernels on NumPy arrays."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from workbench.isa.ptx import parse
from workbench.simulator import KernelLaunch, Memory, Outcome, SimulationOptions, simulate_module

HEADER = ".version 9.0\n.target sm_103a\n.address_size 64\n"


def kernel(body: str, parameters: list[str], variables: str = "", module: str = "") -> str:
    """Return a module with one entry `k`; pointers are loaded to `%<name>` from `.param .u64 p_<name>`."""
    declared = ",\n".join(
        f".param .{'u64' if ':' not in p else p.split(':')[1]} p_{p.split(':')[0]}" for p in parameters
    )
    loads = "\n".join(
        f"ld.param.u64 %{p}, [p_{p}];"
        if ":" not in p
        else f"ld.param.{p.split(':')[1]} %{p.split(':')[0]}, [p_{p.split(':')[0]}];"
        for p in parameters
    )
    registers = "\n".join(
        f".reg .b{'64' if ':' not in p else p.split(':')[1][1:]} %{p.split(':')[0]};" for p in parameters
    )
    return f"""{HEADER}{module}
.visible .entry k(
{declared}
)
{{
.reg .pred %p<20>;
.reg .b16 %h<40>;
.reg .b32 %r<60>;
.reg .f32 %f<40>;
.reg .b64 %d<60>;
{registers}
{variables}
{loads}
{body}
ret;
}}
"""


# Every lane's global index in %r0, its 4-byte slot of `out` in %d0.
INDEX = """
mov.u32 %r50, %ctaid.x;
mov.u32 %r51, %ntid.x;
mov.u32 %r52, %tid.x;
mad.lo.s32 %r0, %r50, %r51, %r52;
mul.wide.u32 %d50, %r0, 4;
add.s64 %d0, %out, %d50;
"""


class Result:
    """Buffers after a run, and its outcome."""

    def __init__(self, outcome: Outcome, memory: Memory, kinds: dict[str, Any]) -> None:
        self.outcome, self.memory, self._kinds = outcome, memory, kinds

    def __getitem__(self, name: str) -> Any:
        return self.memory.view(name).view(self._kinds[name])

    @property
    def rules(self) -> list[str]:
        return [f.rule for f in self.outcome.findings]


def run(
    text: str,
    buffers: dict[str, Any],
    scalars: tuple[Any, ...] = (),
    grid: Any = 1,
    block: Any = 32,
    smem: int = 0,
    cluster: tuple[int, int, int] = (1, 1, 1),
    **options: Any,
) -> Result:
    """Run entry `k`. A buffer is an input array, or (count, dtype) for an output that starts unwritten."""
    memory = Memory(1 << 28)
    kinds: dict[str, Any] = {}
    raw = b""
    for name, what in buffers.items():
        if isinstance(what, tuple):
            count, kinds[name] = what
            memory.allocate(name, count * np.dtype(kinds[name]).itemsize)
        else:
            array = np.ascontiguousarray(what)
            kinds[name] = array.dtype
            view = memory.allocate(name, array.nbytes, initialized=True)
            view[:] = array.view(np.uint8).ravel()
        raw += struct.pack("<Q", memory.address(name))
    for value in scalars:
        raw += struct.pack("<f" if isinstance(value, float) else "<I", value)

    def triple(x: Any) -> tuple[int, int, int]:
        return x if isinstance(x, tuple) else (x, 1, 1)

    launch = KernelLaunch("k", triple(grid), triple(block), raw, cluster, smem)
    outcome = simulate_module(
        parse(text), [launch], memory, SimulationOptions(**{"parallel_work": 0, **options})
    )
    return Result(outcome, memory, kinds)


def lanes(
    body: str,
    count: int = 64,
    block: int = 32,
    kind: Any = np.uint32,
    inputs: dict[str, Any] | None = None,
    **more: Any,
) -> Result:
    """Run `body` with one lane an element: it has its index in %r0 and stores %r1 to `out`."""
    inputs = inputs or {}
    text = kernel(
        INDEX + body + "\nst.global.b32 [%d0], %r1;",
        ["out", *inputs],
        **{k: more.pop(k) for k in ("variables", "module") if k in more},
    )
    return run(text, {"out": (count, kind), **inputs}, grid=-(-count // block), block=block, **more)
