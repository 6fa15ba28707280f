"""What threads hold in PTX registers, against NumPy, and where pointers come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.isa.ptx import Instruction, parse
from workbench.isa.ptx.cfg import build
from workbench.isa.ptx.values import PtxValues
from workbench.isa.values import ParameterBlock, RootKind, Threads

BLOCK = (32, 4, 2)
tid = np.arange(256)
x, y, z = tid % 32, tid // 32 % 4, tid // 128


def values_at(body: str, parameters: ParameterBlock | None = None) -> tuple[PtxValues, Instruction]:
    """Values that stand before the last instruction but one (the last is `ret`)."""
    text = (
        ".version 9.4\n.target sm_103a\n.address_size 64\n"
        ".entry k(.param .u64 P, .param .u64 Q, .param .s32 n) {\n"
        ".reg .b32 a<20>; .reg .b64 d<20>; .reg .pred p<9>; .shared .align 8 .b8 sm[64];\n"
        f"mov.u32 a0, %tid.x; mov.u32 a1, %tid.y; mov.u32 a2, %tid.z;\n{body}\nret;\n}}"
    )
    module = parse(text)
    kernel = module.kernels[0]
    graph = build(kernel)
    values = PtxValues(module, kernel, graph, Threads(BLOCK), parameters or ParameterBlock())
    for at in values.walk(graph.block_of[-2]):
        if at == len(graph.instructions) - 2:
            break
    return values, graph.instructions[-2]


def known(body: str, parameters: ParameterBlock | None = None) -> np.ndarray | None:
    """The value that the last `mov` moves."""
    values, last = values_at(body, parameters)
    return values.operand(last.operands[1]).known


def s32(v: np.ndarray) -> np.ndarray:
    return (v.astype(np.int64) + (1 << 31)) % (1 << 32) - (1 << 31)


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 40))
def test_arithmetic_is_that_of_32_bit_integers(k: int, n: int) -> None:
    cases = {
        f"mad.lo.s32 a3, a1, {k}, a0;": y * k + x,
        f"sub.s32 a3, a0, {k};": x - k,
        f"add.s32 a4, a0, {k}; shr.s32 a3, a4, {n};": s32(x + k) >> min(n, 31),
        f"add.s32 a4, a0, {k}; shr.u32 a3, a4, {n};": np.where(
            n > 31, 0, ((x + k) % (1 << 32)) >> min(n, 31)
        ),
        f"shl.b32 a3, a0, {n};": np.where(n > 31, 0, x << min(n, 31)),
        f"and.b32 a4, a0, {k}; xor.b32 a3, a4, a2;": (x & k) ^ z,
        f"max.s32 a3, a0, {k};": np.maximum(x, k),
        f"max.u32 a3, a0, {k};": np.maximum(x, k % (1 << 32)),
        f"not.b32 a4, a0; neg.s32 a3, a4; add.s32 a3, a3, {k};": x + 1 + k,
        f"setp.lt.s32 p1, a0, {k}; selp.b32 a3, a1, a2, p1;": np.where(x < k, y, z),
        f"setp.lt.u32 p1, a0, {k}; selp.b32 a3, a1, a2, p1;": np.where(x < k % (1 << 32), y, z),
        f"bfe.u32 a3, a0, 1, {min(n, 31)};": (x >> 1) & ((1 << min(n, 31)) - 1),
    }
    for body, expected in cases.items():
        got = known(body + " mov.b32 a9, a3;")
        assert got is not None, body
        assert (got == expected % (1 << 32)).all(), body


def test_wide_products_and_conversions_keep_the_sign() -> None:
    got = known("sub.s32 a3, a0, 5; mul.wide.s32 d1, a3, 4; mov.b64 d2, d1;")
    assert got is not None
    assert (got.view(np.int64) == (x - 5) * 4).all()
    got = known("sub.s32 a3, a0, 5; cvt.s64.s32 d1, a3; mov.b64 d2, d1;")
    assert got is not None
    assert (got.view(np.int64) == x - 5).all()
    got = known("sub.s32 a3, a0, 5; cvt.u64.u32 d1, a3; mov.b64 d2, d1;")
    assert got is not None
    assert (got == (x - 5) % (1 << 32)).all()


def test_what_a_cta_does_not_decide_is_unknown() -> None:
    for body in (
        "mov.u32 a3, %ctaid.x;",
        "ld.global.b32 a3, [d1];",
        "ld.param.b32 a3, [n];",
        "mov.u32 a4, %ctaid.x; add.s32 a3, a4, a0;",
        "mov.b32 a3, 0; L: add.s32 a3, a3, 1; setp.lt.s32 p1, a3, a0; @p1 bra L;",
        "mov.u32 a4, %ctaid.x; setp.eq.s32 p1, a4, 0; mov.b32 a3, 1; @p1 mov.b32 a3, 2;",
    ):
        assert known(body + " mov.b32 a9, a3;") is None, body


def test_registers_that_are_written_twice_have_a_value_for_each_place() -> None:
    got = known("mov.b32 a3, a0; add.s32 a3, a3, 1; mov.b32 a4, a3; mov.b32 a3, 0; mov.b32 a9, a4;")
    assert got is not None
    assert (got == x + 1).all()
    got = known("setp.eq.s32 p1, a1, 2; mov.b32 a3, 7; @p1 mov.b32 a3, a0; mov.b32 a9, a3;")
    assert got is not None
    assert (got == np.where(y == 2, x, 7)).all()


def test_scalars_of_the_launch() -> None:
    block = ParameterBlock(bytes(16) + (-3 & 0xFFFFFFFF).to_bytes(4, "little"), frozenset(range(16, 20)))
    got = known("ld.param.s32 a3, [n]; add.s32 a3, a3, a0; mov.b32 a9, a3;", block)
    assert got is not None
    assert (s32(got) == x - 3).all()


@pytest.mark.parametrize(
    ("body", "offsets"),
    [
        ("ld.param.b64 d1, [P]; mad.wide.s32 d3, a0, 4, d1;", {0}),
        ("ld.param.b64 d1, [P]; cvta.to.global.u64 d2, d1; add.s64 d3, d2, 16;", {0}),
        (
            "ld.param.b64 d1, [P]; ld.param.b64 d2, [Q]; setp.eq.s32 p1, a0, 0; selp.b64 d3, d1, d2, p1;",
            {0, 8},
        ),
        ("ld.param.v2.b64 {d1, d2}, [P]; add.s64 d3, d2, d4;", {8}),
        ("ld.param.b64 d1, [P]; mov.b64 {a3, a4}, d1; mov.b64 d3, {a3, a4};", {0}),
        ("ld.param.b64 d3, [P]; L: add.s64 d3, d3, 16; setp.eq.s32 p1, a9, 0; @p1 bra L;", {0}),
        ("ld.param.b64 d3, [P]; setp.eq.s32 p1, a9, 0; @p1 ld.param.b64 d3, [Q];", {0, 8}),
        ("ld.param.b64 d1, [P]; ld.global.b64 d3, [d1];", set()),
        ("mov.b64 d1, P; ld.param.b64 d3, [d1+8];", {8}),
    ],
)
def test_pointers_come_from_parameters(body: str, offsets: set[int]) -> None:
    values, last = values_at(body + " mov.b64 d9, d3;")
    roots = values.operand(last.operands[1]).roots
    assert {r.offset for r in roots if r.kind is RootKind.PARAM} == offsets
    assert any(r.kind is RootKind.LOADED for r in roots) == (not offsets)
