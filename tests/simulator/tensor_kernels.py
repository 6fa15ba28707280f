"""PTX kernels with tensor copies, and a brute-force model of what they do."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np

from workbench.isa.ptx import parse
from workbench.simulator import KernelLaunch, Memory, Outcome, SimulationOptions, simulate_module
from workbench.simulator.swizzle import Swizzle
from workbench.simulator.tensormap import TensorMap, encode

SHARED = 16384
"""Bytes of the kernels' tile area, at shared offset 0."""

HEAD = """.version 9.0
.target {arch}
.address_size 64
.visible .entry k(.param .align 64 .b8 p_m[128], .param .u64 p_out, .param .u64 p_map,
  .param .u32 p_c0, .param .u32 p_c1, .param .u32 p_c2, .param .u32 p_c3, .param .u32 p_c4)
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<40>;
.reg .b64 %d<20>;
.shared .align 1024 .b8 tile[{size}];
.shared .align 8 .b64 bar;
mov.b64 %d1, p_m;
cvta.param.u64 %d2, %d1;
ld.param.u64 %d3, [p_out];
ld.param.u64 %d4, [p_map];
ld.param.b32 %r10, [p_c0];
ld.param.b32 %r11, [p_c1];
ld.param.b32 %r12, [p_c2];
ld.param.b32 %r13, [p_c3];
ld.param.b32 %r14, [p_c4];
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
mov.u32 %r3, bar;
mov.u64 %d9, 0;
setp.eq.u32 %p1, %r1, 0;
"""
FILL = """
mov.u32 %r4, 2779096485;
shl.b32 %r5, %r1, 2;
FILL:
add.u32 %r6, %r2, %r5;
st.shared.u32 [%r6], %r4;
add.u32 %r5, %r5, 128;
setp.lt.u32 %p2, %r5, {size};
@%p2 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
DUMP = """
shl.b32 %r5, %r1, 2;
DUMP:
add.u32 %r6, %r2, %r5;
ld.shared.u32 %r7, [%r6];
cvt.u64.u32 %d5, %r5;
add.u64 %d6, %d3, %d5;
st.global.u32 [%d6], %r7;
add.u32 %r5, %r5, 128;
setp.lt.u32 %p2, %r5, {size};
@%p2 bra DUMP;
"""
READ = """
shl.b32 %r5, %r1, 2;
READ:
add.u32 %r6, %r2, %r5;
cvt.u64.u32 %d5, %r5;
add.u64 %d6, %d3, %d5;
ld.global.u32 %r7, [%d6];
st.shared.u32 [%r6], %r7;
add.u32 %r5, %r5, 128;
setp.lt.u32 %p2, %r5, {size};
@%p2 bra READ;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
INIT = """
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;
@!%p3 bra WAIT;
"""


def coordinates(rank: int) -> str:
    return "{" + ", ".join(f"%r{10 + i}" for i in range(rank)) + "}"


def load(
    rank: int,
    nbytes: int,
    base: int = 0,
    *,
    tx: int | None = None,
    wait: bool = True,
    where: str = "%d2",
    form: str = "shared::cta.global.tile.mbarrier::complete_tx::bytes",
    arch: str = "sm_103a",
) -> str:
    """One load to shared offset `base`; then `out` holds all of the tile area."""
    return (
        HEAD.format(arch=arch, size=SHARED)
        + FILL.format(size=SHARED)
        + INIT
        + f"""
add.u32 %r8, %r2, {base};
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {nbytes if tx is None else tx};
@%p1 cp.async.bulk.tensor.{rank}d.{form} [%r8], [{where}, {coordinates(rank)}], [%r3];
"""
        + (WAIT if wait else "")
        + DUMP.format(size=SHARED)
        + "ret;\n}\n"
    )


def store(
    rank: int, base: int = 0, *, reduce: str = "", end: str = "wait_group 0", arch: str = "sm_103a"
) -> str:
    """`out` is copied to the tile area, from which one tensor copy goes to global memory."""
    name = "cp.reduce.async.bulk.tensor" if reduce else "cp.async.bulk.tensor"
    op = f".{reduce}" if reduce else ""
    finish = f"@%p1 cp.async.bulk.{end};\n" if end else ""
    return (
        HEAD.format(arch=arch, size=SHARED)
        + READ.format(size=SHARED)
        + f"""
add.u32 %r8, %r2, {base};
@%p1 {name}.{rank}d.global.shared::cta{op}.tile.bulk_group [%d2, {coordinates(rank)}], [%r8];
@%p1 cp.async.bulk.commit_group;
{finish}ret;
}}
"""
    )


class Run:
    """One launch of a kernel of this module on tensor `x` and 32-bit words `out`."""

    def __init__(
        self, text: str, tensor: Any, origin: tuple[int, ...], x: np.ndarray, out: np.ndarray | None = None,
        *,
        writable: bool = True, in_memory: bool = False, raw: bytes | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.memory = Memory(1 << 26)
        view = self.memory.allocate("x", x.nbytes, align=1024, writable=writable, initialized=True)
        view[:] = x.view(np.uint8).ravel()
        target = self.memory.allocate("out", SHARED, initialized=out is not None)
        if out is not None:
            target[:] = out.view(np.uint8).ravel()
        self.tensor: TensorMap = tensor(self.memory.address("x"))
        raw = encode(self.tensor) if raw is None else raw
        held = self.memory.allocate("map", 128, align=128, initialized=True)
        held[:] = np.frombuffer(raw, np.uint8)
        numbers = [c & 0xFFFFFFFF for c in (*origin, 0, 0, 0, 0, 0)[:5]]
        block = (bytes(128) if in_memory else raw) + struct.pack(
            "<QQ5I", self.memory.address("out"), self.memory.address("map"), *numbers
        )
        self.outcome: Outcome = simulate_module(
            parse(text),
            [KernelLaunch("k", (1, 1, 1), (32, 1, 1), block)],
            self.memory,
            SimulationOptions(**options),
        )

    @property
    def rules(self) -> list[str]:
        return [f.rule for f in self.outcome.findings]

    @property
    def out(self) -> np.ndarray:
        return self.memory.view("out").copy()

    @property
    def x(self) -> np.ndarray:
        return self.memory.view("x").copy()


def physical(swizzle: Swizzle, address: int) -> int:
    """The swizzles, bit by bit, by their CuTe names."""
    if not swizzle.span:
        return address
    bits, base, shift = {
        (32, 16): (1, 4, 3),
        (64, 16): (2, 4, 3),
        (128, 16): (3, 4, 3),
        (128, 32): (2, 5, 2),
        (128, 64): (1, 6, 1),
    }[swizzle.span, swizzle.atom]
    out = address
    for b in range(bits):
        out ^= (address >> (base + shift + b) & 1) << (base + b)
    if swizzle.flip and address >> 7 & 1:
        out ^= 8
    return out


def walk(m: TensorMap, origin: tuple[int, ...], base: int) -> list[tuple[int, int | None, int]]:
    """For each byte of a box: its shared offset, its offset in the tensor (None: out of bounds), its place in
    its element (whole-byte element types only).
    """
    size = m.element.data
    counts = [-(-b // s) for b, s in zip(m.box, m.steps, strict=True)]
    pitch = max(counts[0] * size, m.swizzle.span)
    found = []
    for row, outer in enumerate(itertools.product(*(range(c) for c in reversed(counts[1:])))):
        ks = outer[::-1]
        for k0 in range(counts[0]):
            place = [origin[0] + k0]
            place += [origin[i + 1] + k * m.steps[i + 1] for i, k in enumerate(ks)]
            inside = all(0 <= c < d for c, d in zip(place, m.dims, strict=True))
            offset = place[0] * size + sum(c * s for c, s in zip(place[1:], m.strides, strict=True))
            for b in range(size):
                at = physical(m.swizzle, base + row * pitch + k0 * size + b)
                found.append((at, offset + b if inside else None, b))
    return found
