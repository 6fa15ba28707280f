"""Kernels for several ranks: Lamport mailboxes, in which the data is its own flag."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from tests.simulator.kernels import kernel
from workbench.isa.ptx import parse
from workbench.isa.ptx.model import Module
from workbench.simulator import KernelLaunch
from workbench.simulator.ranks import Domain, RankLaunch

EMPTY = 0x80000000
"""A word that nobody has written: a pair of bf16 whose sum is never looked for, -0 in the high half."""


LANES = 64
SLOT = LANES * 16
"""Bytes that one rank publishes: 64 lanes of 16."""


def _sum(order: str, ranks: int) -> str:
    """PTX that adds the words %r(10+4*rank+w) as bf16 pairs; sums of each word in %f10 (low), %f11 (high)."""
    size = max(1, ranks // 4) if order == "grouped" else ranks
    lines = []
    for w in range(4):
        for half, to in ((0, 10), (1, 11)):
            for first in range(0, ranks, size):
                group = "%f20" if first else f"%f{to}"
                for r in range(first, first + size):
                    word = f"%r{10 + 4 * r + w}"
                    lines.append(
                        f"shl.b32 %r9, {word}, 16;" if not half else f"and.b32 %r9, {word}, 0xffff0000;"
                    )
                    lines.append("mov.b32 %f21, %r9;")
                    lines.append(
                        f"mov.f32 {group}, %f21;" if r == first else f"add.f32 {group}, {group}, %f21;"
                    )
                if first:
                    lines.append(f"add.f32 %f{to}, %f{to}, %f20;")
        lines.append(f"cvt.rn.bf16x2.f32 %r{2 + w}, %f11, %f10;")
    return "\n".join(lines)


def all_reduce_text(
    ranks: int, order: str = "grouped", test_words: int = 4, rearm: bool = True, publish: str = "multimem"
) -> str:
    """All-reduce of bf16 rows: publish 16 bytes a lane to slot `rank` of everybody's mailbox, poll all slots,
    add them, put the empty word back.

    Args:
        ranks: how many publish.
        order: `grouped` sums four groups of ranks/4, then the groups; `sequential` one after the other.
        test_words: words of a fragment that the poll looks at; fewer than 4 is a fault.
        rearm: put the empty word back after reading; without it the next use of the slot reads old data.
        publish: `multimem`, or `peers`: a store to each peer, whose mailbox addresses are in `box`.
    """
    stores = "multimem.st.relaxed.sys.global.v4.f32 [%d3], {%f1, %f2, %f3, %f4};"
    if publish == "peers":
        stores = "".join(
            f"ld.global.u64 %d5, [%box+{8 * r}];\nadd.s64 %d5, %d5, %d2;\n"
            "st.relaxed.sys.global.v4.f32 [%d5], {%f1, %f2, %f3, %f4};\n"
            for r in range(ranks)
        )
    polls = []
    for r in range(ranks):
        words = [f"%r{10 + 4 * r + w}" for w in range(4)]
        tests = "".join(
            f"setp.eq.u32 %p2, {word}, {EMPTY};\nor.pred %p1, %p1, %p2;\n" for word in words[:test_words]
        )
        polls.append(
            f"POLL{r}:\nld.volatile.global.v4.u32 {{{', '.join(words)}}}, [%d4+{r * SLOT}];\n"
            f"setp.ne.u32 %p1, 0, 0;\n{tests}@%p1 bra POLL{r};"
        )
        if rearm:
            polls.append(
                f"mov.u32 %r8, {EMPTY};\nst.volatile.global.v4.u32 [%d4+{r * SLOT}], {{%r8, %r8, %r8, %r8}};"
            )
    body = f"""
mov.u32 %r50, %ctaid.x;
mov.u32 %r51, %ntid.x;
mov.u32 %r52, %tid.x;
mad.lo.s32 %r0, %r50, %r51, %r52;
mul.wide.u32 %d0, %r0, 16;
add.s64 %d1, %x, %d0;
ld.global.v4.f32 {{%f1, %f2, %f3, %f4}}, [%d1];
mul.wide.u32 %d2, %rank, %SLOT%;
add.s64 %d2, %d2, %d0;
add.s64 %d3, %box, %d2;
{stores}
add.s64 %d4, %mine, %d0;
{chr(10).join(polls)}
{_sum(order, ranks)}
add.s64 %d1, %out, %d0;
st.global.v4.u32 [%d1], {{%r2, %r3, %r4, %r5}};
"""
    text = kernel(body, ["x", "box", "mine", "out", "rank:u32"]).replace("%r<60>", "%r<90>")
    return text.replace("%SLOT%", str(SLOT))


@cache
def all_reduce(ranks: int, order: str = "grouped", **options: Any) -> Module:
    """The module of `all_reduce_text`."""
    return parse(all_reduce_text(ranks, order, **options))


def row(values: np.ndarray) -> np.ndarray:
    """Return float32 numbers as the bits of bf16 ones (they must be representable), -0 turned into +0."""
    values = values.astype(np.float32) + np.float32(0)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


class Reduction:
    """A domain with the buffers of `all_reduce`: mailboxes of two parities, inputs and outputs a call."""

    def __init__(self, ranks: int, calls: int = 1, parities: int = 2, publish: str = "multimem") -> None:
        self.domain = Domain(ranks)
        self.calls, self.parities, self.publish = calls, parities, publish
        for view in self.domain.symmetric("box", parities * ranks * SLOT, initialized=True):
            view.view(np.uint32)[:] = EMPTY
        for r in range(ranks):
            for c in range(calls):
                self.domain.allocate(r, f"x{c}", SLOT, writable=False, initialized=True)
                self.domain.allocate(r, f"out{c}", SLOT)
            for p in range(parities):
                table = self.domain.allocate(r, f"peers{p}", 8 * ranks, initialized=True).view(np.uint64)
                for other in range(ranks):
                    table[other] = self.domain.address(other, "box") + p * ranks * SLOT

    def fill(self, rank: int, call: int, values: np.ndarray) -> None:
        """Set a rank's input of one call, 512 numbers."""
        self.domain.view(rank, f"x{call}").view(np.uint16)[:] = row(values)

    def launches(self, module: Module) -> list[list[RankLaunch]]:
        """Return the launches of every rank."""
        d = self.domain
        result = []
        for r in range(d.ranks):
            mine = []
            for c in range(self.calls):
                at = c % self.parities * d.ranks * SLOT
                box = d.multicast("box") + at
                if self.publish == "peers":
                    box = d.address(r, f"peers{c % self.parities}")
                raw = struct.pack(
                    "<4QI", d.address(r, f"x{c}"), box, d.address(r, "box") + at, d.address(r, f"out{c}"), r
                )
                mine.append(RankLaunch(module, KernelLaunch("k", (2, 1, 1), (32, 1, 1), raw)))
            result.append(mine)
        return result

    def output(self, rank: int, call: int = 0) -> np.ndarray:
        """Return a rank's result as float32."""
        bits = self.domain.view(rank, f"out{call}").view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)


def expected(rows: np.ndarray, order: str = "grouped") -> np.ndarray:
    """Sum (ranks, n) float32 rows in float32 in the stated order and round once to bf16."""
    ranks = len(rows)
    size = max(1, ranks // 4) if order == "grouped" else ranks
    total = None
    for first in range(0, ranks, size):
        group = rows[first]
        for r in range(first + 1, first + size):
            group = (group + rows[r]).astype(np.float32)
        total = group if total is None else (total + group).astype(np.float32)
    return total.astype(ml_dtypes.bfloat16).astype(np.float32)
