"""Memory: allocations, guards, shadow state, and the findings of loads and stores."""

from __future__ import annotations

import numpy as np
import pytest

import workbench.simulator.memory as memory_module
from tests.simulator.kernels import kernel, lanes, run
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.simulator import Memory
from workbench.simulator.memory import GUARD


def clean(result):
    assert result.rules == [], result.outcome.findings
    return result


def test_allocations_are_aligned_guarded_and_zero():
    memory = Memory(1 << 24)
    a = memory.allocate("a", 100, align=256)
    b = memory.allocate("b", 10, align=4096)
    assert memory.address("a") % 256 == 0
    assert memory.address("b") % 4096 == 0
    assert memory.address("b") - (memory.address("a") + 100) >= GUARD
    assert not a.any()
    b[:] = 7
    np.testing.assert_array_equal(memory.view("b"), 7)
    assert memory.unwritten("a") == 100


def test_bad_allocations_are_refused():
    memory = Memory(1 << 20)
    memory.allocate("a", 16)
    with pytest.raises(WorkbenchError, match="already"):
        memory.allocate("a", 16)
    with pytest.raises(WorkbenchError, match="alignment"):
        memory.allocate("b", 16, align=3)
    with pytest.raises(WorkbenchError, match="full"):
        memory.allocate("b", 1 << 21)
    with pytest.raises(UnknownNameError, match="nearest: a"):
        memory.address("aa")


def test_release_frees_and_zeroes_what_came_after_the_mark():
    memory = Memory(1 << 24)
    memory.allocate("inputs", 5000)[:] = 1
    mark = memory.mark()
    memory.allocate("scratch", 100_000)[:] = 9
    memory.mark_written("scratch")
    where = memory.address("scratch")
    memory.release(mark)
    assert "scratch" not in memory
    again = memory.allocate("other", 100_000)
    assert memory.address("other") == where
    assert not again.any()
    assert memory.unwritten("other") == 100_000
    assert memory.view("inputs").all()
    memory.release(0)
    assert memory.allocations == ()


def test_huge_zero_buffers_cost_nothing():
    memory = Memory()
    assert memory.allocate("weights", 8 << 30, initialized=True)[-1] == 0


@pytest.mark.parametrize("distance", [0, 4, 64, 1500])
@pytest.mark.parametrize("side", ["before", "after"])
def test_reads_in_a_guard_band_are_out_of_bounds(side, distance):
    offset = 4 * 32 + distance if side == "after" else -4 - distance
    body = f"setp.eq.u32 %p1, %r0, 7;\nmov.u32 %r1, 0;\n@%p1 ld.global.u32 %r1, [%x+{offset}];"
    result = lanes(body, 32, inputs={"x": np.ones(32, np.uint32)})
    assert result.rules == ["out-of-bounds"]
    finding = result.outcome.findings[0]
    assert finding.buffer == "x"
    assert finding.thread == "cta=(0,0,0) thread=(7,0,0)"
    assert finding.address == result.memory.address("x") + offset
    assert finding.count == 1
    assert side in finding.message or f"{4 + distance} bytes before" in finding.message
    assert result["out"][7] == 0


def test_a_wild_pointer_is_out_of_bounds():
    result = lanes("mov.u64 %d1, 64;\nld.global.u32 %r1, [%d1];", 32)
    assert result.rules == ["out-of-bounds"]
    assert result.outcome.findings[0].buffer is None
    assert result.outcome.findings[0].count == 32


def test_an_access_that_straddles_the_end_is_out_of_bounds():
    body = "ld.global.v2.u32 {%r1, %r2}, [%x+8];"
    assert lanes(body, 32, inputs={"x": np.ones(3, np.uint32)}).rules == ["out-of-bounds"]


def test_stores_out_of_bounds_change_nothing():
    body = "mov.u32 %r1, 5;\nst.global.u32 [%x+16], %r1;\nst.global.u32 [%x+-4096], %r1;"
    result = lanes(body, 32, inputs={"x": np.ones(4, np.uint32)})
    assert result.rules == ["out-of-bounds"] * 2
    assert result["x"].tolist() == [1] * 4
    assert not result.memory.bytes[: result.memory.allocation("out").start].any()


@pytest.mark.parametrize(
    ("access", "offset"), [("u32", 2), ("u16", 1), ("v4.u32", 8), ("u64", 4), ("v2.u16", 2)]
)
def test_misaligned(access, offset):
    registers = {
        "u32": "%r1",
        "u16": "%h1",
        "v4.u32": "{%r1, %r2, %r3, %r4}",
        "u64": "%d1",
        "v2.u16": "{%h1, %h2}",
    }
    body = f"mov.u32 %r1, 0;\nld.global.{access} {registers[access]}, [%x+{offset}];"
    result = lanes(body, 32, inputs={"x": np.ones(64, np.uint32)})
    assert result.rules == ["misaligned"]
    assert result.outcome.findings[0].buffer == "x"


def test_uninitialised_global_read():
    text = kernel("ld.global.u32 %r1, [%scratch+4];\nst.global.u32 [%scratch+8], %r1;", ["scratch"])
    result = run(text, {"scratch": (16, np.uint32)}, block=1)
    assert result.rules == ["uninitialized-read"]
    assert result.outcome.findings[0].buffer == "scratch"


def test_written_global_memory_may_be_read():
    body = """
    st.global.u32 [%d0], %r0;
    ld.global.u32 %r1, [%d0];
    add.u32 %r1, %r1, 1;
    """
    np.testing.assert_array_equal(clean(lanes(body, 64))["out"], np.arange(64) + 1)


def test_shadow_state_is_exact_to_the_byte():
    body = """
    mov.u16 %h1, 7;
    st.global.u8 [%s+5], %h1;
    ld.global.u8 %r1, [%s+5];
    ld.global.u8 %r2, [%s+4];
    """
    result = run(kernel(body, ["s"]), {"s": (16, np.uint8)}, block=1)
    assert result.rules == ["uninitialized-read"]
    line = next(k for k, x in enumerate(kernel(body, ["s"]).splitlines(), 1) if "[%s+4]" in x)
    assert result.outcome.findings[0].ptx_line == line


def test_a_wide_read_sees_one_unwritten_byte():
    body = (
        "\n".join(f"st.global.u8 [%s+{k}], %h1;" for k in range(16) if k != 9)
        + "\nld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%s];"
    )
    result = run(kernel("mov.u16 %h1, 1;\n" + body, ["s"]), {"s": (16, np.uint8)}, block=1)
    assert result.rules == ["uninitialized-read"]


def test_uninitialised_shared_read():
    variables = ".shared .align 4 .b8 s[256];"
    body = "mov.u32 %r2, s;\nshl.b32 %r3, %r0, 2;\nadd.u32 %r3, %r3, %r2;\n"
    bad = lanes(body + "ld.shared.u32 %r1, [%r3];", 32, variables=variables)
    assert bad.rules == ["uninitialized-read"]
    assert bad.outcome.findings[0].count == 32
    clean(lanes(body + "st.shared.u32 [%r3], %r0;\nld.shared.u32 %r1, [%r3];", 32, variables=variables))
    half = (
        body
        + "setp.lt.u32 %p1, %r0, 16;\n@%p1 st.shared.u32 [%r3], %r0;\nbar.sync 0;\nld.shared.u32 %r1, [%r3];"
    )
    result = lanes(half, 64, variables=variables)
    assert result.outcome.findings[0].count == 48  # half a warp of CTA 0, all of CTA 1 (indices from 32)


def test_shared_memory_of_ctas_is_apart_and_bounded():
    body = """
    mov.u32 %r2, s;
    mov.u32 %r3, %ctaid.x;
    setp.eq.u32 %p1, %r0, 0;
    st.shared.u32 [%r2], %r3;
    ld.shared.u32 %r1, [%r2];
    @%p1 ld.shared.u32 %r1, [%r2+4];
    """
    result = lanes(body, 128, variables=".shared .align 4 .b8 s[4];")
    assert result.rules == ["out-of-bounds"]
    np.testing.assert_array_equal(result["out"][1:], np.arange(128)[1:] // 32)


def test_dynamic_shared_memory():
    module = ".extern .shared .align 16 .b8 dyn[];\n"
    body = (
        "mov.u32 %r2, dyn;\nshl.b32 %r3, %r0, 2;\nadd.u32 %r3, %r3, %r2;\n"
        "st.shared.u32 [%r3], %r0;\nld.shared.u32 %r1, [%r3];"
    )
    body += "\nmov.u32 %r4, %dynamic_smem_size;\nadd.u32 %r1, %r1, %r4;"
    np.testing.assert_array_equal(clean(lanes(body, 32, module=module, smem=128))["out"], np.arange(32) + 128)
    assert lanes(body, 32, module=module, smem=64).rules == ["out-of-bounds"] * 2


def test_local_memory_is_one_a_thread():
    body = """
    mov.u32 %r2, depot;
    st.local.u32 [%r2+4], %r0;
    ld.local.u32 %r1, [%r2+4];
    """
    variables = ".local .align 4 .b8 depot[8];"
    np.testing.assert_array_equal(clean(lanes(body, 96, variables=variables))["out"], np.arange(96))
    assert lanes(
        body.replace("ld.local.u32 %r1, [%r2+4]", "ld.local.u32 %r1, [%r2]"), 32, variables=variables
    ).rules == ["uninitialized-read"]
    assert lanes(body.replace("+4", "+8"), 32, variables=variables).rules == ["out-of-bounds"] * 2


def test_same_address_stores_of_different_values_race():
    result = lanes("mov.u32 %r1, 1;\nst.global.u32 [%x], %r0;", 64, inputs={"x": np.zeros(1, np.uint32)})
    assert "race" in result.rules
    clean(lanes("mov.u32 %r1, 1;\nst.global.u32 [%x], %r1;", 64, inputs={"x": np.zeros(1, np.uint32)}))


def test_ctas_that_write_different_values_to_one_place_race():
    body = (
        "mov.u32 %r1, 1;\nmov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %tid.x;\nmul.wide.u32 %d1, %r3, 4;\n"
        "add.s64 %d1, %d1, %x;\n"
    )
    body += "st.global.u32 [%d1], %r2;"
    assert lanes(body, 64, inputs={"x": np.zeros(32, np.uint32)}).rules == ["race"]


def test_writes_to_inputs_are_found():
    from workbench.isa.ptx import parse
    from workbench.simulator import KernelLaunch, simulate_module

    memory = Memory(1 << 24)
    memory.allocate("x", 64, writable=False, initialized=True)
    text = kernel("st.global.u32 [%x+8], 5;", ["x"])
    launch = KernelLaunch("k", (1, 1, 1), (1, 1, 1), memory.address("x").to_bytes(8, "little"))
    outcome = simulate_module(parse(text), [launch], memory)
    assert [f.rule for f in outcome.findings] == ["read-only-write"]
    assert not memory.view("x").any()


@pytest.mark.parametrize(
    ("access", "count", "kind"),
    [("v2.u32", 2, np.uint32), ("v4.u32", 4, np.uint32), ("v8.b32", 8, np.uint32), ("v2.b64", 2, np.uint64),
     ("v4.b64", 4, np.uint64), ("v4.u16", 4, np.uint16), ("v2.u16", 2, np.uint16), ("v8.u16", 8, np.uint16),
     ("v4.u8", 4, np.uint8), ("v2.u8", 2, np.uint8)],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vector_loads_and_stores(access, count, kind, space):
    bits = np.dtype(kind).itemsize * 8
    prefix = {8: "%h", 16: "%h", 32: "%r1", 64: "%d1"}[bits]
    registers = "{" + ", ".join(f"{prefix}{k}" for k in range(count)) + "}"
    size = count * bits // 8
    body = f"mul.wide.u32 %d1, %r0, {size};\nadd.s64 %d2, %d1, %x;\nadd.s64 %d3, %d1, %y;\n"
    body += f"ld.global.L1::no_allocate.{access} {registers}, [%d2];\n"
    if space == "shared":
        body += (
            f"mov.u32 %r2, s;\nmad.lo.u32 %r2, %r0, {size}, %r2;\nst.shared.{access} [%r2], {registers};\n"
        )
        body += f"ld.shared.{access} {registers}, [%r2];\n"
    body += f"st.global.{access} [%d3], {registers};\nmov.u32 %r1, 0;"
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**bits, 32 * count, dtype=kind)
    result = clean(
        lanes(
            body,
            32,
            inputs={"x": x, "y": np.zeros(32 * count, kind)},
            variables=".shared .align 32 .b8 s[2048];",
        )
    )
    np.testing.assert_array_equal(result["y"], x)


@pytest.mark.parametrize(
    ("load", "want"), [("u8", 0xF0), ("s8", 0xFFFFFFF0), ("u16", 0x81F0), ("s16", 0xFFFF81F0), ("b8", 0xF0)]
)
def test_narrow_loads_extend_by_their_type(load, want):
    result = clean(lanes(f"ld.global.{load} %r1, [%x];", 32, inputs={"x": np.full(1, 0x123481F0, np.uint32)}))
    np.testing.assert_array_equal(result["out"], want)


def test_narrow_stores_truncate():
    x = np.zeros(4, np.uint8)
    body = "mov.u32 %r1, 0x11223344;\nst.global.u8 [%x+1], %r1;\nst.global.u16 [%x+2], %r1;"
    np.testing.assert_array_equal(clean(lanes(body, 32, inputs={"x": x}))["x"], [0, 0x44, 0x44, 0x33])


@pytest.mark.parametrize(
    "modifier",
    [
        "ca",
        "cg",
        "cs",
        "lu",
        "cv",
        "nc",
        "volatile",
        "relaxed.gpu",
        "acquire.sys",
        "weak",
        "L2::128B",
        "L1::evict_last.L2::256B",
        "nc.L1::no_allocate",
    ],
)
def test_cache_and_order_modifiers_do_not_change_values(modifier):
    before = modifier.partition(".")[0]
    text = (
        f"ld.{modifier}.global.u32 %r1, [%x];"
        if before in ("volatile", "relaxed", "acquire")
        else f"ld.global.{modifier}.u32 %r1, [%x];"
    )
    result = clean(lanes(text, 32, inputs={"x": np.full(1, 77, np.uint32)}))
    np.testing.assert_array_equal(result["out"], 77)


def test_generic_addresses_of_all_spaces_at_once():
    body = """
    mov.u32 %r2, s;
    cvt.u64.u32 %d1, %r2;
    cvta.shared.u64 %d1, %d1;
    mov.u64 %d2, depot;
    cvta.local.u64 %d2, %d2;
    rem.u32 %r3, %r0, 3;
    setp.eq.u32 %p1, %r3, 0;
    setp.eq.u32 %p2, %r3, 1;
    selp.b64 %d3, %d1, %d2, %p1;
    mad.lo.u32 %r4, %r0, 4, 0;
    cvt.u64.u32 %d4, %r4;
    add.s64 %d5, %d1, %d4;
    add.s64 %d6, %x, %d4;
    selp.b64 %d3, %d5, %d2, %p1;
    selp.b64 %d3, %d6, %d3, %p2;
    st.u32 [%d3], %r0;
    ld.u32 %r1, [%d3];
    isspacep.shared %p3, %d3;
    isspacep.global %p4, %d3;
    isspacep.local %p5, %d3;
    selp.u32 %r5, 1000, 0, %p3;
    selp.u32 %r6, 2000, 0, %p4;
    selp.u32 %r7, 3000, 0, %p5;
    add.u32 %r1, %r1, %r5;
    add.u32 %r1, %r1, %r6;
    add.u32 %r1, %r1, %r7;
    """
    result = clean(
        lanes(
            body,
            32,
            inputs={"x": np.zeros(32, np.uint32)},
            variables=".shared .align 4 .b8 s[128];\n.local .align 4 .b8 depot[4];",
        )
    )
    n = np.arange(32)
    np.testing.assert_array_equal(result["out"], n + np.array([1000, 2000, 3000])[n % 3])
    np.testing.assert_array_equal(result["x"], np.where(n % 3 == 1, n, 0))


def test_module_variables_and_constants():
    module = ".const .align 4 .u32 table[4] = {5, 6, 7, 8};\n.global .align 4 .u32 counter[2] = {40, 41};\n"
    body = """
    mov.u64 %d1, table;
    ld.const.u32 %r2, [%d1+8];
    ld.const.u32 %r3, [table+4];
    ld.global.u32 %r4, [counter+4];
    add.u32 %r1, %r2, %r3;
    add.u32 %r1, %r1, %r4;
    """
    result = clean(lanes(body, 32, module=module))
    np.testing.assert_array_equal(result["out"], 7 + 6 + 41)
    assert [a.name for a in result.memory.allocations] == ["out"]


def test_module_variables_that_hold_addresses():
    module = ".global .align 4 .u32 data[2] = {40, 41};\n.global .align 8 .u64 where[2] = {data, data+4};\n"
    body = "ld.global.u64 %d1, [where+8];\nld.global.u32 %r1, [%d1];"
    np.testing.assert_array_equal(clean(lanes(body, 32, module=module))["out"], 41)


def test_parameters_by_value_and_by_address():
    body = """
    mov.b64 %d1, p_n;
    cvta.param.u64 %d2, %d1;
    ld.param.u32 %r2, [%d1];
    ld.u32 %r3, [%d2];
    add.u32 %r1, %r2, %r3;
    add.u32 %r1, %r1, %n;
    mad.lo.u32 %r4, %tid.x, 4, 0;
    """
    body = body.replace("mad.lo.u32 %r4, %tid.x, 4, 0;", "") + "st.global.u32 [%out], %r1;"
    result = clean(run(kernel(body, ["out", "n:u32"]), {"out": (1, np.uint32)}, (14,)))
    assert result["out"][0] == 42


def test_cp_async_arrives_at_the_wait_only():
    variables = ".shared .align 16 .b8 s[512];"
    copy = """
    mov.u32 %r2, s;
    mad.lo.u32 %r3, %r0, 16, %r2;
    mul.wide.u32 %d1, %r0, 16;
    add.s64 %d1, %d1, %x;
    cp.async.cg.shared.global [%r3], [%d1], 16;
    cp.async.commit_group;
    """
    x = np.arange(128, dtype=np.uint32)
    good = copy + "cp.async.wait_group 0;\nld.shared.u32 %r1, [%r3+8];"
    np.testing.assert_array_equal(
        clean(lanes(good, 32, inputs={"x": x}, variables=variables))["out"], x[2::4]
    )
    for missing in ("", "cp.async.wait_group 1;"):
        result = lanes(
            copy + missing + "\nld.shared.u32 %r1, [%r3+8];", 32, inputs={"x": x}, variables=variables
        )
        assert result.rules == ["cp-async-group"]


def test_cp_async_groups_complete_in_order():
    variables = ".shared .align 16 .b8 s[64];"
    body = """
    mov.u32 %r2, s;
    cp.async.ca.shared.global [%r2], [%x], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r2+4], [%x+4], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.u32 %r1, [%r2];
    cp.async.ca.shared.global [%r2+8], [%x+8], 4;
    cp.async.wait_all;
    ld.shared.u32 %r3, [%r2+8];
    add.u32 %r1, %r1, %r3;
    """
    x = np.array([5, 6, 7], np.uint32)
    result = clean(lanes(body, 1, 1, inputs={"x": x}, variables=variables))
    assert result["out"][0] == 12
    early = body.replace("ld.shared.u32 %r1, [%r2];", "ld.shared.u32 %r1, [%r2+4];")
    assert lanes(early, 1, 1, inputs={"x": x}, variables=variables).rules == ["cp-async-group"]


def test_cp_async_fills_with_zeros_past_its_source_size():
    variables = ".shared .align 16 .b8 s[512];"
    body = """
    mov.u32 %r2, s;
    mad.lo.u32 %r3, %r0, 16, %r2;
    mul.wide.u32 %d1, %r0, 16;
    add.s64 %d1, %d1, %x;
    setp.lt.u32 %p1, %r0, 4;
    selp.u32 %r4, 16, 0, %p1;
    setp.eq.u32 %p2, %r0, 3;
    selp.u32 %r4, 6, %r4, %p2;
    cp.async.cg.shared.global [%r3], [%d1], 16, %r4;
    cp.async.wait_all;
    ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r3];
    add.u32 %r1, %r5, %r6;
    add.u32 %r1, %r1, %r7;
    add.u32 %r1, %r1, %r8;
    """
    x = np.arange(1, 17, dtype=np.uint32) | np.uint32(0x10000)
    result = clean(lanes(body, 32, inputs={"x": x}, variables=variables))
    want = np.zeros(32, np.uint32)
    want[:3] = x[:12].reshape(3, 4).sum(axis=1)
    want[3] = x[12] + (x[13] & 0xFFFF)
    np.testing.assert_array_equal(result["out"], want)


def test_observer_sees_every_access():
    seen = []
    lanes(
        "ld.global.u32 %r1, [%x];",
        32,
        inputs={"x": np.ones(1, np.uint32)},
        observer=lambda site, address, co, ck: seen.append((site.instruction.opcode, int(address[0, 0]))),
    )
    assert [s[0] for s in seen] == ["ld", "st"]


def test_without_checks_wild_accesses_do_no_harm():
    result = lanes("mov.u64 %d1, 64;\nld.global.u32 %r1, [%d1];", 32, check_memory=False)
    assert result.rules == []


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(("mask", "rules"), [("0xf0f", []), ("0xfff", ["uninitialized-read"])])
def test_bytes_that_a_pragma_calls_unused_may_be_unwritten(space, mask, rules):
    at = "s" if space == "shared" else "%x"
    body = f"""
    st.{space}.u32 [{at}], 5;
    st.{space}.u32 [{at}+8], 6;
    .pragma "used_bytes_mask {mask}";
    ld.{space}.v4.b32 {{%r2, %r3, %r4, %r5}}, [{at}];
    add.u32 %r6, %r2, %r4;
    st.global.u32 [%out], %r6;
    """
    buffers = {"out": (1, np.uint32), "x": (4, np.uint32)}
    text = kernel(body, list(buffers), variables=".shared .align 16 .b8 s[16];")
    result = run(text, buffers, block=1)
    assert result.rules == rules
    assert result["out"][0] == 11


def test_cache_policies_of_loads_and_stores_change_nothing():
    body = """
    createpolicy.fractional.L2::evict_first.b64 %d1, 1.0;
    ld.global.L2::cache_hint.v2.u32 {%r1, %r2}, [%x], %d1;
    st.global.L2::cache_hint.v2.u32 [%x+8], {%r2, %r1}, %d1;
    """
    text = kernel(body, ["x"])
    result = clean(run(text, {"x": np.array([5, 6, 0, 0], np.uint32)}, block=1))
    assert result["x"].tolist() == [5, 6, 6, 5]


@pytest.mark.parametrize("refused", [False, True])
def test_large_buffers_are_cleared_whole_whether_pages_can_be_given_back_or_not(refused, monkeypatch):
    memory = Memory()
    before = memory.allocate("before", 64, initialized=True)
    data = memory.allocate("data", (1 << 22) + 5000, initialized=True)
    after = memory.allocate("after", 64, initialized=True)
    for array in (before, data, after):
        array[:] = 7
    if refused:
        monkeypatch.setattr(memory_module.mmap, "MADV_REMOVE", 12345)
    memory.poison("data", 0)
    assert not data.any() and (before == 7).all() and (after == 7).all()
    a = memory.allocation("data")
    assert not memory.shadow[a.start : a.end].any()
