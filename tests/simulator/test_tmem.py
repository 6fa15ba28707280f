"""Tensor memory: allocation, tcgen05.ld and .st shapes, copies, and what goes wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.tcgen05_kernels import (
    COMMIT,
    FREE,
    IMAGE,
    SETUP,
    WAIT,
    argument,
    descriptor,
    launch,
    module,
    place,
    read,
)
from workbench.simulator.tmem import TensorMemory, cells, copy_lanes, registers, split_address

EMPTY = np.zeros(16, np.uint8)


def fragment(shape, lane, r):
    """Cell of register r of a lane, from the figures of the ISA: 8x2, 8x4 ... quads of lanes a row."""
    if shape == "32x32b":
        return lane, r
    if shape == "16x64b":
        return lane // 4 + (8 if lane % 2 else 0), (lane % 4) // 2 + 2 * r
    if shape == "16x128b":
        return lane // 4 + (8 if r % 2 else 0), lane % 4 + 4 * (r // 2)
    if shape == "16x256b":
        return lane // 4 + (8 if r % 4 >= 2 else 0), 2 * (lane % 4) + r % 2 + 8 * (r // 4)
    raise AssertionError


SHAPES = ["32x32b", "16x64b", "16x128b", "16x256b"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("repeat", [1, 2, 8])
def test_fragments_cover_their_rectangle_once(shape, repeat):
    rows, columns = cells(shape, repeat)
    assert rows.shape == columns.shape == (registers(shape, repeat), 32)
    for r in range(len(rows)):
        for lane in range(32):
            assert (rows[r, lane], columns[r, lane]) == fragment(shape, lane, r)
    height = 32 if shape == "32x32b" else 16
    width = rows.size // height
    seen = np.zeros((height, width), int)
    np.add.at(seen, (rows, columns), 1)
    assert (seen == 1).all()


def test_halves_of_16x32bx2():
    rows, columns = cells("16x32bx2", 4, 10)
    np.testing.assert_array_equal(rows[0], [*range(16), *range(16)])
    np.testing.assert_array_equal(columns[:, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(columns[:, 16], [10, 11, 12, 13])


def test_copy_lanes():
    np.testing.assert_array_equal(copy_lanes("4x256b", ""), [[0, 32, 64, 96]])
    np.testing.assert_array_equal(copy_lanes("32x128b", "warpx4")[:, 5], [5, 37, 69, 101])
    np.testing.assert_array_equal(copy_lanes("64x128b", "warpx2::02_13")[:, 40], [40, 104])
    np.testing.assert_array_equal(copy_lanes("64x128b", "warpx2::01_23")[:, 40], [72, 104])
    assert copy_lanes("128x256b", "").shape == (1, 128)


def test_allocator_gives_aligned_poisoned_columns():
    memory = TensorMemory()
    first = memory.allocate(64, None)
    second = memory.allocate(128, None)
    third = memory.allocate(32, None)
    assert (first, second, third) == (0, 128, 64)
    assert memory.allocate(512, None) is None
    assert memory.allocated(0, 96) and not memory.allocated(90, 100)
    memory.data[:, :64], memory.written[:, :64] = 1, True
    assert not memory.free(0, 32) and memory.free(0, 64) and not memory.free(0, 64)
    assert memory.allocate(64, None) == 0
    assert not memory.written[:, :64].any() and (memory.data[:, :64] != 1).all()
    assert split_address(0x00600123) == (96, 0x123)


def roundtrip(store_shape, store_x, load_shape, load_x, store_more="", load_more="", packs=("", "")):
    """Store register numbers through one shape, load through another; all four warps."""
    count, back = registers(store_shape, store_x), registers(load_shape, load_x)
    put = "shl.b32 %r1, %warp, 21;\nadd.u32 %r1, %r1, %tm;\nshl.b32 %r2, %tx, 8;\n"
    put += "".join(f"add.u32 %v{j}, %r2, {j};\n" for j in range(count))
    names = ", ".join(f"%v{j}" for j in range(count))
    put += f"tcgen05.st.sync.aligned.{store_shape}.x{store_x}{packs[0]}.b32 [%r1]{store_more}, {{{names}}};\n"
    put += "tcgen05.wait::st.sync.aligned;\n"
    names = ", ".join(f"%v{j}" for j in range(back))
    put += f"tcgen05.ld.sync.aligned.{load_shape}.x{load_x}{packs[1]}.b32 {{{names}}}, [%r1]{load_more};\n"
    put += f"tcgen05.wait::ld.sync.aligned;\nmul.wide.u32 %d0, %tx, {4 * back};\nadd.s64 %d0, %out, %d0;\n"
    put += "".join(f"st.global.b32 [%d0+{4 * j}], %v{j};\n" for j in range(back))
    return launch(module(SETUP, put, FREE), EMPTY, back, [0])


@pytest.mark.parametrize("shape", SHAPES)
def test_store_and_load_agree_through_every_shape(shape):
    repeat = 4
    result, out = roundtrip(shape, repeat, shape, repeat)
    assert result.rules == []
    lanes = np.arange(128)[:, None] << 8
    np.testing.assert_array_equal(out, lanes + np.arange(registers(shape, repeat)))


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_shapes_see_what_32x32b_stores(shape):
    result, out = roundtrip("32x32b", 16, shape, 16 // {"16x64b": 2, "16x128b": 4, "16x256b": 8}[shape])
    assert result.rules == []
    for thread in range(128):
        for r in range(out.shape[1]):
            row, column = fragment(shape, thread % 32, r)
            assert out[thread, r] == ((thread // 32 * 32 + row) << 8) + column


def test_packed_loads_join_the_low_halves_of_two_columns():
    result, out = roundtrip("32x32b", 8, "32x32b", 4, packs=("", ".pack::16b"))
    assert result.rules == []
    words = ((np.arange(128)[:, None] << 8) + np.arange(8)).astype(np.uint32) & 0xFFFF
    np.testing.assert_array_equal(out, words[:, 0::2] | words[:, 1::2] << 16)
    result, out = roundtrip("32x32b", 4, "32x32b", 4, packs=(".unpack::16b", ".pack::16b"))
    assert result.rules == []
    np.testing.assert_array_equal(out, (np.arange(128)[:, None] << 8) + np.arange(4))


def test_split_halves():
    result, out = roundtrip("32x32b", 8, "16x32bx2", 2, load_more=", 4")
    assert result.rules == []
    for thread in range(128):
        lane = thread % 32
        row = thread // 32 * 32 + lane % 16
        assert list(out[thread]) == [(row << 8) + 4 * (lane // 16) + r for r in range(2)]


# -- copies --------------------------------------------------------------------------------------

COPY = argument(0, "%a0") + "add.s64 %a0, %a0, %origin;\n"


@pytest.mark.parametrize(
    ("form", "rows", "words"),
    [("128x256b", 128, 8), ("128x128b", 128, 4), ("64x128b.warpx2::02_13", 64, 4),
     ("64x128b.warpx2::01_23", 64, 4), ("32x128b.warpx4", 32, 4)],
)  # fmt: skip
@pytest.mark.parametrize("swizzle", [0, 2])
def test_copies(form, rows, words, swizzle):
    width = 32 if swizzle else words
    source = np.random.default_rng(0).integers(0, 1 << 32, (rows, width), dtype=np.uint32)
    image = np.zeros(IMAGE, np.uint8)
    _, leading, stride = place(image, 1024, source, swizzle)
    issue = f"@%first tcgen05.cp.cta_group::1.{form} [%tm], %a0;\n"
    text = module(SETUP, COPY, issue, COMMIT, WAIT, read(words), FREE)
    result, out = launch(text, image, words, [descriptor(1024, leading, stride, swizzle)])
    assert result.rules == [], result.outcome.findings
    lanes = copy_lanes(form.split(".")[0], form.partition(".")[2])
    for replica in lanes:
        np.testing.assert_array_equal(out[replica], source[:, :words])


# -- faults --------------------------------------------------------------------------------------


def rules(*parts, columns=512):
    return launch(module(*parts, columns=columns), EMPTY, 32, [0])[0].rules


def test_memory_that_is_never_freed():
    assert rules(SETUP) == ["tmem-lifetime"]
    assert rules(SETUP, FREE) == []


def test_use_after_free_and_outside_the_allocation():
    assert rules(SETUP, FREE, read(32)) == ["tmem-lifetime"]
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1+40], {%tx};\ntcgen05.wait::st.sync.aligned;\n"
    address = "shl.b32 %r1, %warp, 21;\nadd.u32 %r1, %r1, %tm;\n"
    assert rules(SETUP, address, store, FREE, columns=32) == ["tmem-lifetime"]
    assert rules(SETUP, address, store, FREE, columns=64) == []


def test_unwritten_cells():
    assert rules(SETUP, read(32), FREE) == ["uninitialized-read"]


def test_lanes_of_another_warp():
    text = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%tm], {%tx};\ntcgen05.wait::st.sync.aligned;\n"
    assert rules(SETUP, text, FREE) == ["out-of-bounds"]


def test_loading_what_was_stored_without_a_wait():
    text = "shl.b32 %r1, %warp, 21;\nadd.u32 %r1, %r1, %tm;\n"
    text += "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%tx};\n"
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%r1];\n"
    assert "tcgen05-order" in rules(SETUP, text, load, FREE)
    assert rules(SETUP, text, "tcgen05.wait::st.sync.aligned;\n", load, FREE) == []


ALLOC = "@%zero tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {};\n"


def test_allocation_faults():
    assert "tmem-lifetime" in rules(SETUP, ALLOC.format(48), FREE)
    assert "tmem-lifetime" in rules(SETUP, ALLOC.format(32), FREE)  # all 512 are taken: hangs
    relinquish = "@%zero tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
    assert "tmem-lifetime" in rules(SETUP, relinquish, ALLOC.format(32), FREE, columns=64)
    wrong = FREE.replace("%tm, COLUMNS", "%tm, 64")
    assert "tmem-lifetime" in rules(SETUP, wrong, columns=32)
