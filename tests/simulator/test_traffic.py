"""Sector and bank-conflict counts of access patterns whose counts are known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import lanes


def counters(body, count=64, block=32, **more):
    result = lanes(body, count, block, count_sectors=True, **more)
    assert result.rules == [], result.outcome.findings
    return result.outcome.counters[0]


@pytest.mark.parametrize(
    ("stride", "kind", "sectors_a_warp"),
    [
        (4, "u32", 4),
        (8, "u32", 8),
        (32, "u32", 32),
        (128, "u32", 32),
        (16, "v4", 16),
        (0, "u32", 1),
        (2, "u16", 2),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_load_sectors(stride, kind, sectors_a_warp, processes):
    registers = {"u32": ("u32", "%r1"), "v4": ("v4.u32", "{%r1, %r2, %r3, %r4}"), "u16": ("u16", "%r1")}[kind]
    body = f"mad.wide.u32 %d1, %r0, {stride}, %x;\nld.global.{registers[0]} {registers[1]}, [%d1];"
    count = 4096
    x = np.zeros(max(stride, 1) * count + 32, np.uint8)
    c = counters(body, count, 32, inputs={"x": x}, processes=processes)
    assert c.global_load_sectors == sectors_a_warp * count // 32
    size = {"u32": 4, "v4": 16, "u16": 2}[kind]
    offsets = np.arange(count) * stride
    assert c.unique_load_bytes == 32 * len(
        np.unique(np.concatenate([offsets // 32, (offsets + size - 1) // 32]))
    )
    assert c.global_store_sectors == count * 4 // 32
    assert c.unique_store_bytes == count * 4


def test_sectors_in_any_order_and_of_partial_warps():
    body = (
        "xor.b32 %r2, %r0, 21;\nmul.lo.u32 %r2, %r2, 7;\nand.b32 %r2, %r2, 31;\n"
        "mad.wide.u32 %d1, %r2, 4, %x;\nld.global.u32 %r1, [%d1];"
    )
    assert counters(body, 32, inputs={"x": np.zeros(32, np.uint32)}).global_load_sectors == 4
    plain = (
        "mad.wide.u32 %d1, %r0, 4, %x;\nmov.u32 %r1, 0;\nsetp.lt.u32 %p1, %r0, 9;\n"
        "@%p1 ld.global.u32 %r1, [%d1];"
    )
    c = counters(plain, 40, 40, inputs={"x": np.zeros(40, np.uint32)})
    assert c.global_load_sectors == 2
    assert c.global_store_sectors == 5


def test_all_ctas_reading_one_vector_request_it_each_but_touch_it_once():
    body = "mov.u32 %r2, %tid.x;\nmad.wide.u32 %d1, %r2, 4, %x;\nld.global.u32 %r1, [%d1];"
    c = counters(body, 320, 32, inputs={"x": np.zeros(32, np.uint32)})
    assert c.global_load_sectors == 40
    assert c.unique_load_bytes == 128


@pytest.mark.parametrize(
    ("stride", "kind", "conflicts"),
    [
        (4, "u32", 0),
        (8, "u32", 1),
        (128, "u32", 31),
        (0, "u32", 0),
        (16, "v4", 0),
        (32, "v4", 4),
        (8, "v2", 0),
        (64, "v2", 14),
    ],
)
def test_bank_conflicts(stride, kind, conflicts):
    access, registers = {
        "u32": ("u32", "%r1"),
        "v4": ("v4.u32", "{%r1, %r2, %r3, %r4}"),
        "v2": ("v2.u32", "{%r1, %r2}"),
    }[kind]
    body = (
        f"mov.u32 %r3, s;\nmad.lo.u32 %r3, %r0, {stride}, %r3;\nmov.u32 %r1, 0; mov.u32 %r2, 0; "
        "mov.u32 %r4, 0;\n"
    )
    body = body.replace("%r3", "%r9") + "mov.u32 %r3, 0;\n" + f"st.shared.{access} [%r9], {registers};"
    assert counters(body, 32, variables=".shared .align 16 .b8 s[4224];").bank_conflicts == conflicts
