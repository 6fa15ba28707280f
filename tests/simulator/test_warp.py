"""Warp-synchronous instructions against plain Python, on whole, partial and divided warps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import lanes

RNG = np.random.default_rng(3)
VALUES = RNG.integers(0, 2**32, 512, dtype=np.uint32)
LOAD = "mul.wide.u32 %d1, %r0, 4;\nadd.s64 %d1, %d1, %x;\nld.global.u32 %r2, [%d1];\n"


def clean(result):
    assert result.rules == [], result.outcome.findings
    return result


def reference_shuffle(mode, values, b, c, active):
    """PTX ISA 9.7.9.6, lane by lane; returns values and predicates of one warp."""
    out, preds = [], []
    for lane in range(32):
        bval, cval = b[lane] & 31, c & 31
        mask = (c >> 8) & 31
        highest, lowest = (lane & mask) | (cval & ~mask), lane & mask
        if mode == "up":
            j, p = lane - bval, lane - bval >= highest
        elif mode == "down":
            j, p = lane + bval, lane + bval <= highest
        elif mode == "bfly":
            j, p = lane ^ bval, (lane ^ bval) <= highest
        else:
            j = lowest | (bval & ~mask)
            p = j <= highest
        if not p:
            j = lane
        out.append(values[j] if active[j] else values[lane])
        preds.append(p)
    return out, preds


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [31, 0, 0x181F, 0x1C1F, 0x1000, 0x0C07])
@pytest.mark.parametrize("b", [0, 1, 3, 16, 31, "lane"])
def test_shuffle(mode, c, b):
    source = "%r7" if b == "lane" else b
    body = LOAD + "mul.lo.u32 %r7, %r0, 5;\nadd.u32 %r7, %r7, 3;\nand.b32 %r7, %r7, 31;\n"
    body += (
        f"shfl.sync.{mode}.b32 %r3|%p1, %r2, {source}, {c}, -1;\nselp.u32 %r4, 1, 0, %p1;\n"
        "xor.b32 %r1, %r3, %r4;"
    )
    result = clean(lanes(body, 128, 64, inputs={"x": VALUES[:128]}))
    for w in range(4):
        amount = [(n * 5 + 3) & 31 for n in range(w * 32, w * 32 + 32)] if b == "lane" else [b] * 32
        want, preds = reference_shuffle(mode, VALUES[w * 32 : w * 32 + 32], amount, c, [True] * 32)
        np.testing.assert_array_equal(result["out"][w * 32 : w * 32 + 32], np.array(want) ^ np.array(preds))


def test_shuffle_of_a_value_that_is_the_same_in_all_lanes():
    body = "mov.u32 %r2, %ctaid.x;\nshfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1;\n@!%p1 add.u32 %r1, %r1, 100;"
    n = np.arange(96)
    np.testing.assert_array_equal(clean(lanes(body, 96))["out"], n // 32 + np.where(n % 32 == 0, 100, 0))


def test_shuffle_in_the_halves_of_a_divided_warp():
    body = (
        LOAD
        + """
    and.b32 %r5, %r0, 1;
    setp.eq.u32 %p1, %r5, 0;
    @%p1 bra EVEN;
    shfl.sync.bfly.b32 %r1, %r2, 2, 31, 0xaaaaaaaa;
    bra OUT;
    EVEN:
    shfl.sync.bfly.b32 %r1, %r2, 4, 31, 0x55555555;
    OUT:
    """
    )
    n = np.arange(64)
    np.testing.assert_array_equal(
        clean(lanes(body, 64, inputs={"x": VALUES[:64]}))["out"],
        np.where(n % 2, VALUES[n ^ 2], VALUES[n ^ 4]),
    )


def test_shuffle_from_a_lane_that_is_absent_is_found():
    body = LOAD + "mov.u32 %r1, 0;\nshfl.sync.down.b32 %r1, %r2, 8, 31, 0xffffff;"
    result = lanes(body, 24, 24, inputs={"x": VALUES[:24]})
    assert result.rules == ["inactive-lane"]
    assert result.outcome.findings[0].count == 8


def test_lane_outside_its_own_member_mask_is_found():
    assert "membermask" in lanes("bar.warp.sync 0xffff;\nmov.u32 %r1, 0;", 32).rules


def test_lanes_that_the_mask_names_but_never_come_are_found():
    body = """
    mov.u32 %r1, 0;
    setp.lt.u32 %p1, %r0, 16;
    @%p1 bra SKIP;
    shfl.sync.idx.b32 %r1, %r0, 16, 31, 0xffffffff;
    bar.sync 1, 32;
    SKIP:
    setp.lt.u32 %p2, %r0, 16;
    @%p2 bar.sync 2, 32;
    """
    assert "warp-divergence" in lanes(body, 32).rules


@pytest.mark.parametrize("threads", [64, 40])
def test_votes(threads):
    body = (
        LOAD
        + """
    and.b32 %r3, %r2, 1;
    setp.eq.u32 %p1, %r3, 1;
    shr.u32 %r5, %r0, 5;
    vote.sync.ballot.b32 %r1, %p1, 0xffffffff;
    vote.sync.any.pred %p2, %p1, 0xffffffff;
    vote.sync.all.pred %p3, %p1, 0xffffffff;
    vote.sync.uni.pred %p4, %p1, 0xffffffff;
    mul.wide.u32 %d2, %r0, 4;
    add.s64 %d2, %d2, %y;
    selp.u32 %r6, 1, 0, %p2;
    selp.u32 %r7, 2, 0, %p3;
    selp.u32 %r8, 4, 0, %p4;
    or.b32 %r6, %r6, %r7;
    or.b32 %r6, %r6, %r8;
    st.global.u32 [%d2], %r6;
    """
    )
    x = VALUES[: 5 * threads].copy()
    x[:threads] |= 1
    x[threads : 2 * threads] &= ~np.uint32(1)
    result = clean(lanes(body, 5 * threads, threads, inputs={"x": x, "y": np.zeros(5 * threads, np.uint32)}))
    odd = (x & 1).astype(bool).reshape(5, threads)
    for cta in range(5):
        for start in range(0, threads, 32):
            warp = odd[cta, start : start + 32]
            ballot = sum(int(b) << k for k, b in enumerate(warp))
            flags = int(warp.any()) | 2 * int(warp.all()) | 4 * int(warp.all() or not warp.any())
            at = slice(cta * threads + start, cta * threads + min(start + 32, threads))
            np.testing.assert_array_equal(result["out"][at], ballot)
            np.testing.assert_array_equal(result["y"][at], flags)


@pytest.mark.parametrize("threads", [64, 40])
@pytest.mark.parametrize("mode", ["any", "all"])
def test_match(threads, mode):
    x = (VALUES[: 4 * threads] % 5).astype(np.uint32)
    x[:32] = 3
    body = LOAD + f"match.{mode}.sync.b32 %r1{'|%p1' if mode == 'all' else ''}, %r2, 0xffffffff;"
    if mode == "all":
        body += "\nselp.u32 %r3, 1, 0, %p1;\nadd.u32 %r1, %r1, %r3;"
    result = clean(lanes(body, 4 * threads, threads, inputs={"x": x}))
    for start in [c * threads + k for c in range(4) for k in range(0, threads, 32)]:
        end = min(start + 32, start - start % threads + threads)
        warp = x[start:end]
        for k, v in enumerate(warp):
            if mode == "any":
                want = sum(1 << j for j, other in enumerate(warp) if other == v)
            else:
                everyone = (1 << len(warp)) - 1
                want = (everyone + 1) & 0xFFFFFFFF if (warp == warp[0]).all() else 0
            assert result["out"][start + k] == want


@pytest.mark.parametrize("threads", [64, 40])
@pytest.mark.parametrize(
    "op", ["add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"]
)
def test_redux_of_integers(op, threads):
    name, kind = op.split(".")
    result = clean(
        lanes(
            LOAD + f"redux.sync.{op} %r1, %r2, 0xffffffff;",
            2 * threads,
            threads,
            inputs={"x": VALUES[: 2 * threads]},
        )
    )
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]
    typed = VALUES[: 2 * threads].view(np.int32 if kind == "s32" else np.uint32).reshape(2, threads)
    for cta in range(2):
        for start in range(0, threads, 32):
            warp = typed[cta, start : start + 32]
            got = result["out"].view(typed.dtype).reshape(2, threads)[cta, start : start + 32]
            np.testing.assert_array_equal(got, function.reduce(warp, dtype=warp.dtype))


def test_redux_with_masks_of_its_own_for_each_half():
    body = (
        LOAD
        + """
    setp.lt.u32 %p1, %r0, 8;
    selp.b32 %r5, 0xff, 0xffffff00, %p1;
    redux.sync.add.u32 %r1, %r2, %r5;
    """
    )
    result = clean(lanes(body, 32, inputs={"x": VALUES[:32]}))
    want = [VALUES[:8].sum(dtype=np.uint32)] * 8 + [VALUES[8:32].sum(dtype=np.uint32)] * 24
    np.testing.assert_array_equal(result["out"], want)


@pytest.mark.parametrize("op", ["min", "max", "min.NaN", "max.abs", "max.abs.NaN"])
def test_redux_of_floats(op):
    x = np.array([[1, -2, 0.0, -0.0] * 8, [np.nan, 3, -7, 2] * 8, [np.nan] * 32], np.float32).ravel()
    result = clean(
        lanes(LOAD + f"redux.sync.{op}.f32 %r1, %r2, 0xffffffff;", 96, inputs={"x": x.view(np.uint32)})
    )
    got = result["out"].view(np.float32).reshape(3, 32)[:, 0]
    want = {"min": [-2, -7, np.nan], "max": [1, 3, np.nan], "min.NaN": [-2, np.nan, np.nan],
            "max.abs": [2, 7, np.nan],
            "max.abs.NaN": [2, np.nan, np.nan]}[op]  # fmt: skip
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    assert (result["out"].reshape(3, 32)[2] == 0x7FFFFFFF).all()


@pytest.mark.parametrize(("mask", "leader"), [(0xFFFFFFFF, 0), (0xFFFFFFF0, None)])
def test_elect(mask, leader):
    body = (
        f"mov.u32 %r1, 99;\nelect.sync %r2|%p1, {mask};\nselp.u32 %r3, 1000, 0, %p1;\nadd.u32 %r1, %r2, %r3;"
    )
    result = lanes(body, 32)
    if leader is None:
        assert "membermask" in result.rules
        assert result["out"][4] == 1004
    else:
        np.testing.assert_array_equal(clean(result)["out"], np.where(np.arange(32) == 0, 1000, 0))


def test_active_mask_of_a_divided_warp():
    body = "mov.u32 %r1, 0;\nsetp.lt.u32 %p1, %r0, 5;\n@%p1 activemask.b32 %r1;"
    np.testing.assert_array_equal(clean(lanes(body, 32))["out"], [0x1F] * 5 + [0] * 27)


def test_lane_mask_registers():
    for name, want in {
        "lt": lambda n: (1 << n) - 1,
        "le": lambda n: (2 << n) - 1,
        "eq": lambda n: 1 << n,
        "gt": lambda n: 0xFFFFFFFF & ~((2 << n) - 1),
        "ge": lambda n: 0xFFFFFFFF & ~((1 << n) - 1),
    }.items():
        result = clean(lanes(f"mov.u32 %r1, %lanemask_{name};", 32))
        assert result["out"].tolist() == [want(n) for n in range(32)]


def test_warp_sum_keeps_nan_canonical_in_memory():
    x = np.zeros(32, np.uint32)
    x[3] = 0xFFC12345  # a NaN with sign and payload
    body = LOAD + "mov.b32 %f1, %r2;\n"
    for step in (16, 8, 4, 2, 1):
        body += f"shfl.sync.bfly.b32 %r3, %f1, {step}, 31, -1;\nmov.b32 %f2, %r3;\nadd.f32 %f1, %f1, %f2;\n"
    result = clean(lanes(body + "mov.b32 %r1, %f1;", 32, inputs={"x": x}))
    assert (result["out"] == 0x7FFFFFFF).all()
