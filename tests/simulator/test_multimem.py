"""multimem.st, .red and .ld_reduce on symmetric buffers, and what must not touch their addresses."""

from __future__ import annotations

import struct
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.kernels import kernel
from workbench.isa.ptx import parse
from workbench.simulator import (
    Domain,
    KernelLaunch,
    RankLaunch,
    SimulationOptions,
    UnsupportedInstruction,
    simulate_ranks,
)

RANKS = 4


def run_on_rank_0(
    body: str, box: list[np.ndarray], out: int = 64, seed: int = 0, lanes: int = 1, offset: int = 0
):
    """Run `body` on rank 0 with %mc, %box (its own part), %out; return the outcome and domain."""
    domain = Domain(len(box))
    for view, content in zip(domain.symmetric("box", box[0].nbytes, initialized=True), box, strict=True):
        view[:] = content.view(np.uint8)
    domain.allocate(0, "out", out)
    module = parse(kernel(body, ["mc", "box", "out"]))
    raw = struct.pack(
        "<3Q", domain.multicast("box") + offset, domain.address(0, "box"), domain.address(0, "out")
    )
    launch = RankLaunch(module, KernelLaunch("k", (1, 1, 1), (lanes, 1, 1), raw))
    launches = [[launch], *([] for _ in box[1:])]
    return simulate_ranks(domain, launches, SimulationOptions(seed=seed)), domain


def output(domain: Domain, kind, count: int) -> np.ndarray:
    return domain.view(0, "out").view(kind)[:count]


def boxes(kind, count: int, low=-50, high=50) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(low, high, count).astype(np.int64).astype(kind) for _ in range(RANKS)]


@pytest.mark.parametrize("form", ["relaxed.sys", "release.sys", "weak", "relaxed.gpu"])
@pytest.mark.parametrize(
    ("kind", "registers", "words"),
    [
        ("b32", "%r1", 1),
        ("f32", "%r1", 1),
        ("v2.f32", "{%r1, %r2}", 2),
        ("v4.f32", "{%r1, %r2, %r3, %r4}", 4),
        ("v4.bf16x2", "{%r1, %r2, %r3, %r4}", 4),
        ("b64", "%d1", 2),
    ],
)
def test_a_store_reaches_every_replica(form, kind, registers, words):
    body = "\n".join(f"mov.u32 %r{k + 1}, {100 + k};" for k in range(4)) + "\nmov.b64 %d1, {%r1, %r2};\n"
    body += f"multimem.st.{form}.global.{kind} [%mc+16], {registers};"
    outcome, domain = run_on_rank_0(body, boxes(np.uint32, 8, 0))
    assert outcome.findings == ()
    for r in range(RANKS):
        np.testing.assert_array_equal(
            domain.view(r, "box").view(np.uint32)[4 : 4 + words], 100 + np.arange(words)
        )


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_integer_reductions(op, kind):
    if (op, kind) == ("add", "s64"):
        pytest.skip("the ISA has add for u64 only")
    dtype = np.dtype({"u": "uint", "s": "int"}[kind[0]] + kind[1:])
    box = boxes(dtype, 2, 0 if kind[0] == "u" else -50)
    register, size = ("%r1", 4) if kind.endswith("32") else ("%d1", 8)
    body = f"multimem.ld_reduce.relaxed.sys.global.{op}.{kind} {register}, [%mc+{size}];"
    body += f"st.global.b{8 * size} [%out], {register};"
    outcome, domain = run_on_rank_0(body, box)
    assert outcome.findings == ()
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
    assert output(domain, dtype, 1)[0] == reduce(function, [b[1] for b in box])


@pytest.mark.parametrize(
    ("op", "function"), [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)]
)
@pytest.mark.parametrize("bits", [32, 64])
def test_logical_reductions(op, function, bits):
    box = boxes(f"uint{bits}", 1, 0, 1 << 30)
    register = "%r1" if bits == 32 else "%d1"
    body = f"multimem.ld_reduce.acquire.sys.global.{op}.b{bits} {register}, [%mc];"
    outcome, domain = run_on_rank_0(f"{body}\nst.global.b{bits} [%out], {register};", box)
    assert outcome.findings == ()
    assert output(domain, f"uint{bits}", 1)[0] == reduce(function, [b[0] for b in box])


def test_f32_vectors_are_added_in_the_order_of_the_ranks():
    box = [
        np.array([1e8, 1, 2, 3], np.float32)
        if r == 0
        else np.array([3, -1e8 if r == 3 else 3, 5, 7], np.float32)
        for r in range(RANKS)
    ]
    body = """multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%f1, %f2, %f3, %f4}, [%mc];
st.global.v4.f32 [%out], {%f1, %f2, %f3, %f4};"""
    outcome, domain = run_on_rank_0(body, box)
    assert outcome.findings == ()
    total = box[0]
    for b in box[1:]:
        total = total + b
    np.testing.assert_array_equal(output(domain, np.float32, 4), total)


def test_a_seed_changes_the_order_of_a_sum():
    box = [np.array([v], np.float32) for v in (1e8, 3, 3, -1e8)]
    body = "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%mc];\nst.global.f32 [%out], %f1;"
    sums = {float(output(run_on_rank_0(body, box, seed=s)[1], np.float32, 1)[0]) for s in range(8)}
    assert len(sums) > 1


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_packed_sums_round_each_step_or_once(kind, dtype, count, wide):
    rng = np.random.default_rng(3)
    box = [(rng.standard_normal(2 * count) * 8).astype(np.float32).astype(dtype) for _ in range(RANKS)]
    names = ", ".join(f"%r{k + 1}" for k in range(count))
    vector = f".v{count}" if count > 1 else ""
    braces = f"{{{names}}}" if count > 1 else names
    acc = ".acc::f32" if wide else ""
    body = f"""multimem.ld_reduce.relaxed.sys.global.add{acc}{vector}.{kind}x2 {braces}, [%mc];
st.global{vector}.b32 [%out], {braces};"""
    outcome, domain = run_on_rank_0(body, box)
    assert outcome.findings == ()
    total = box[0].astype(np.float32)
    for b in box[1:]:
        total = total + b.astype(np.float32)
        if not wide:
            total = total.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(output(domain, np.uint16, 2 * count), total.astype(dtype).view(np.uint16))


def test_eight_single_halves():
    box = [np.arange(8).astype(np.float32).astype(ml_dtypes.bfloat16) for _ in range(RANKS)]
    names = ", ".join(f"%h{k}" for k in range(8))
    body = f"multimem.ld_reduce.relaxed.sys.global.max.v8.bf16 {{{names}}}, [%mc];\n"
    body += "\n".join(f"st.global.b16 [%out+{2 * k}], %h{k};" for k in range(8))
    outcome, domain = run_on_rank_0(body, box)
    assert outcome.findings == ()
    np.testing.assert_array_equal(output(domain, np.uint16, 8), box[0].view(np.uint16))


@pytest.mark.parametrize(
    ("form", "dtype", "value"),
    [
        ("add.u32", np.uint32, 3),
        ("max.s32", np.int32, 7),
        ("xor.b32", np.uint32, 255),
        ("add.f32", np.float32, 0.5),
    ],
)
def test_red_combines_with_every_replica(form, dtype, value):
    box = boxes(dtype, 4, 0)
    bits = int(np.array([value], dtype).view(np.uint32)[0])
    body = f"mov.b32 %r1, {bits};\nmultimem.red.relaxed.sys.global.{form} [%mc+4], %r1;"
    outcome, domain = run_on_rank_0(body, box, lanes=3)
    assert outcome.findings == ()
    function = {"add": np.add, "max": np.maximum, "xor": np.bitwise_xor}[form[:3]]
    for r in range(RANKS):
        wanted = box[r].copy()
        for _ in range(3):
            wanted[1] = function(wanted[1], dtype(value))
        np.testing.assert_array_equal(domain.view(r, "box").view(dtype), wanted)


def test_red_of_a_vector_of_pairs():
    box = [np.arange(4).astype(np.float16) for _ in range(RANKS)]
    body = """mov.b32 %r1, 0x3c003c00;
mov.b32 %r2, 0x40004000;
multimem.red.relaxed.sys.global.add.v2.f16x2 [%mc], {%r1, %r2};"""
    outcome, domain = run_on_rank_0(body, box)
    assert outcome.findings == ()
    for r in range(RANKS):
        np.testing.assert_array_equal(domain.view(r, "box").view(np.float16), np.float16([1, 2, 4, 5]))


@pytest.mark.parametrize(
    "line",
    [
        "ld.global.u32 %r1, [%mc];",
        "ld.u32 %r1, [%mc];",
        "st.global.u32 [%mc], 1;",
        "st.volatile.global.u32 [%mc], 1;",
        "atom.global.add.u32 %r1, [%mc], 1;",
        "red.global.add.u32 [%mc], 1;",
        "multimem.st.relaxed.sys.global.u32 [%box], %r1;",
        "multimem.red.relaxed.sys.global.add.u32 [%box], %r1;",
        "multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%box];",
    ],
)
def test_multicast_and_ordinary_addresses_do_not_mix(line):
    before = boxes(np.uint32, 8, 0)
    outcome, domain = run_on_rank_0(f"mov.u32 %r1, 9;\n{line}", before)
    assert [f.rule for f in outcome.findings] == ["multimem-order"]
    finding = outcome.findings[0]
    assert finding.buffer == ("box@0" if "%box" in line else "box")
    assert finding.thread == "rank=0 cta=(0,0,0) thread=(0,0,0)"
    for r in range(RANKS):
        np.testing.assert_array_equal(domain.view(r, "box").view(np.uint32), before[r])


@pytest.mark.parametrize(
    ("offset", "rule"), [(32, "out-of-bounds"), (2, "misaligned"), (1 << 20, "out-of-bounds")]
)
def test_multicast_accesses_keep_to_their_buffer(offset, rule):
    outcome, _ = run_on_rank_0(
        "mov.u32 %r1, 9;\nmultimem.st.relaxed.sys.global.u32 [%mc], %r1;",
        boxes(np.uint32, 8, 0),
        offset=offset,
    )
    assert [f.rule for f in outcome.findings] == [rule]


def test_only_the_lanes_that_stray_are_left_out():
    body = """mov.u32 %r1, %tid.x;
mul.wide.u32 %d1, %r1, 4;
add.s64 %d1, %mc, %d1;
multimem.st.relaxed.sys.global.u32 [%d1], %r1;
multimem.ld_reduce.relaxed.sys.global.add.u32 %r2, [%d1];
mul.wide.u32 %d2, %r1, 4;
add.s64 %d2, %out, %d2;
st.global.u32 [%d2], %r2;"""
    outcome, domain = run_on_rank_0(body, boxes(np.uint32, 8, 0), lanes=10)
    assert [(f.rule, f.count) for f in outcome.findings] == [("out-of-bounds", 2)] * 2
    np.testing.assert_array_equal(output(domain, np.uint32, 10), [0, 4, 8, 12, 16, 20, 24, 28, 0, 0])


def test_reading_what_nobody_wrote_is_found():
    domain = Domain(2)
    domain.symmetric("box", 16)
    domain.view(0, "box")[:] = 1
    domain.memory.mark_written("box@0")
    module = parse(kernel("multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%mc];", ["mc"]))
    raw = struct.pack("<Q", domain.multicast("box"))
    launch = RankLaunch(module, KernelLaunch("k", (1, 1, 1), (1, 1, 1), raw))
    outcome = simulate_ranks(domain, [[launch], []])
    assert [(f.rule, f.buffer) for f in outcome.findings] == [("uninitialized-read", "box@1")]


@pytest.mark.parametrize(
    "line",
    [
        "multimem.ld_reduce.relaxed.sys.global.add.v4.e4m3x4 {%r1, %r2, %r3, %r4}, [%mc];",
        "multimem.ld_reduce.relaxed.sys.global.max.f32 %r1, [%mc];",
        "multimem.cp.async.bulk.bulk_group.global.shared::cta [%mc], [%r1], 16;",
    ],
)
def test_other_forms_are_refused(line):
    with pytest.raises(UnsupportedInstruction):
        run_on_rank_0(line, boxes(np.uint32, 8, 0))
