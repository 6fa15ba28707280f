"""ldmatrix and stmatrix against tables of who holds which element."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.kernels import kernel, run
from tests.simulator.legal import complaint
from workbench.simulator import UnsupportedInstruction

RNG = np.random.default_rng(5)
COUNTS = {"x1": 1, "x2": 2, "x4": 4}
SHARED = ".shared .align 16 .b8 s[16384];"

FILL = """
mov.u32 %r0, %tid.x;
mov.u32 %r50, %ctaid.x;
mov.u32 %r51, %ntid.x;
mad.lo.s32 %r49, %r50, %r51, %r0;
mul.wide.u32 %d49, %r49, 64;
add.s64 %x, %x, %d49;
mul.wide.u32 %d48, %r49, 16;
add.s64 %out, %out, %d48;
mov.u32 %r40, s;
mad.lo.s32 %r41, %r0, 64, %r40;
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x];
st.shared.v4.b32 [%r41], {%r1, %r2, %r3, %r4};
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x+16];
st.shared.v4.b32 [%r41+16], {%r1, %r2, %r3, %r4};
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x+32];
st.shared.v4.b32 [%r41+32], {%r1, %r2, %r3, %r4};
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x+48];
st.shared.v4.b32 [%r41+48], {%r1, %r2, %r3, %r4};
bar.sync 0;
"""
# the address of row `r` is that of a table of 32 rows (16 bytes each) a warp, from buffer `rows`
ADDRESS = """
mul.wide.u32 %d1, %r49, 4;
add.s64 %d1, %d1, %rows;
ld.global.u32 %r42, [%d1];
add.u32 %r42, %r42, %r40;
"""


def registers(count, first=10):
    return "{" + ", ".join(f"%r{first + k}" for k in range(count)) + "}"


def loaded(num, trans, space="shared", warps=4, ctas=2, wild=True, **options):
    """Run ldmatrix on a shared memory of random bytes; return the registers and what they should be."""
    count = COUNTS[num]
    threads = warps * 32
    data = RNG.integers(0, 256, (ctas, threads * 64)).astype(np.uint8)
    rows = RNG.integers(0, threads * 4, (ctas, warps, 32)).astype(np.uint32) * 16
    if wild and count < 4:
        rows[:, :, 8 * count :] = 0x7FFFFF1  # addresses that must not matter
    address = "%r42"
    convert = ""
    if space == "generic":
        convert = "cvt.u64.u32 %d5, %r42;\ncvta.shared.u64 %d5, %d5;"
        address = "%d5"
    modifier = "" if space == "generic" else f".{space}"
    body = FILL + ADDRESS + convert + "".join(f"mov.b32 %r{k}, 0;\n" for k in range(10, 14))
    body += f"ldmatrix.sync.aligned.m8n8.{num}{'.trans' if trans else ''}{modifier}.b16 "
    body += f"{registers(count)}, [{address}];\nst.global.v4.b32 [%out], {registers(4)};"
    text = kernel(body, ["out", "x", "rows"], SHARED)
    result = run(
        text, {"out": (ctas * threads * 4, np.uint32), "x": data, "rows": rows}, grid=ctas, block=threads,
        **options,
    )  # fmt: skip
    want = np.zeros((ctas, warps, 32, 4), np.uint32)
    for cta in range(ctas):
        halves = data[cta].view(np.uint16)
        for warp in range(warps):
            for j in range(count):
                matrix = [halves[rows[cta, warp, 8 * j + r] // 2 :][:8] for r in range(8)]
                for lane in range(32):
                    r, c = lane // 4, 2 * (lane % 4)
                    (r1, c1), (r2, c2) = ((c, r), (c + 1, r)) if trans else ((r, c), (r, c + 1))
                    low, high = matrix[r1][c1], matrix[r2][c2]
                    want[cta, warp, lane, j] = int(low) | int(high) << 16
    return result, result["out"].reshape(want.shape), want


@pytest.mark.parametrize("space", ["shared", "shared::cta", "generic"])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("num", ["x1", "x2", "x4"])
def test_load(num, trans, space):
    result, got, want = loaded(num, trans, space)
    assert result.rules == []
    np.testing.assert_array_equal(got, want)
    counters = result.outcome.counters[0]
    assert counters.warp_instructions["load_shared"] == 8


def test_load_under_another_schedule():
    for seed in (1, 2, 3):
        result, got, want = loaded("x4", True, seed=seed)
        assert result.rules == []
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("num", ["x1", "x2", "x4"])
def test_store_is_the_inverse_of_load(num, trans):
    count = COUNTS[num]
    body = """
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d1, %r0, 16;
    add.s64 %d2, %x, %d1;
    add.s64 %out, %out, %d1;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d2];
    mov.u32 %r40, s;
    shr.u32 %r41, %r0, 5;
    shl.b32 %r41, %r41, 9;
    add.u32 %r40, %r40, %r41;
    and.b32 %r42, %r0, 31;
    mad.lo.s32 %r43, %r42, 16, %r40;
    """
    body += f"stmatrix.sync.aligned.m8n8.{num}{'.trans' if trans else ''}.shared.b16 [%r43], "
    body += registers(count) + ";\nbar.warp.sync 0xffffffff;\n"
    # every lane reads back 16 bytes of its warp's block; lanes past the matrices read what lanes 0.. wrote
    body += f"""
    rem.u32 %r44, %r42, {8 * count};
    mad.lo.s32 %r45, %r44, 16, %r40;
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r45];
    st.global.v4.b32 [%out], {{%r20, %r21, %r22, %r23}};
    """
    x = RNG.integers(0, 1 << 16, (2, 32, 8)).astype(np.uint16)  # warp, lane, two elements in each register
    result = run(kernel(body, ["out", "x"], SHARED), {"out": (2 * 32 * 8, np.uint16), "x": x}, block=64)
    assert result.rules == []
    memory = np.zeros((2, count * 8, 8), np.uint16)
    for warp in range(2):
        for j in range(count):
            for lane in range(32):
                for e in (0, 1):
                    r, c = lane // 4, 2 * (lane % 4) + e
                    if trans:
                        r, c = c, r
                    memory[warp, 8 * j + r, c] = x[warp, lane, 2 * j + e]
    got = result["out"].reshape(2, 32, 8)
    np.testing.assert_array_equal(got, memory[:, np.arange(32) % (8 * count)])


def test_unwritten_bytes_and_bad_addresses_are_found():
    def rules(address):
        body = f"mov.u32 %r40, s;\nmov.u32 %r0, %tid.x;\n{address}\n"
        body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r41];"
        return run(kernel(body, [], SHARED), {}, block=64).rules

    assert rules("mad.lo.s32 %r41, %r0, 16, %r40;") == ["uninitialized-read"]
    assert "misaligned" in rules("mad.lo.s32 %r41, %r0, 8, %r40;")
    assert "out-of-bounds" in rules("mad.lo.s32 %r41, %r0, 1024, %r40;")


def test_race_with_another_warp_is_found():
    body = """
    mov.u32 %r40, s;
    mov.u32 %r0, %tid.x;
    mad.lo.s32 %r41, %r0, 16, %r40;
    st.shared.v4.b32 [%r41], {%r0, %r0, %r0, %r0};
    xor.b32 %r1, %r0, 32;
    mad.lo.s32 %r41, %r1, 16, %r40;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r41];
    """
    assert run(kernel(body, [], SHARED), {}, block=64).rules == ["race"]
    fixed = body.replace("ldmatrix", "bar.sync 0;\n ldmatrix")
    assert run(kernel(fixed, [], SHARED), {}, block=64).rules == []


def test_warp_that_is_not_whole_is_found():
    body = """
    mov.u32 %r40, s;
    mov.u32 %r0, %tid.x;
    mad.lo.s32 %r41, %r0, 16, %r40;
    st.shared.v4.b32 [%r41], {%r0, %r0, %r0, %r0};
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r41];
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r41], {%r10};
    """
    assert set(run(kernel(body, [], SHARED), {}, block=48).rules) == {"inactive-lane"}


def rows_of(data, at, bits):
    """Elements of rows of shared memory at byte offsets, unpacked bit by bit."""
    out = []
    for start in at:
        row = data[start : start + 16]
        number = int.from_bytes(bytes(row), "little")
        out.append(
            [number >> (bits * k) & ((1 << bits) - 1) for k in range(128 // bits if bits == 8 else 16)]
        )
    return np.array(out, np.uint32)


@pytest.mark.parametrize(("types", "bits"), [("b8", 8), ("b8x16.b6x16_p32", 6), ("b8x16.b4x16_p64", 4)])
@pytest.mark.parametrize(("shape", "num"), [("m16n16", "x1"), ("m16n16", "x2"), ("m8n16", "x1"),
                                            ("m8n16", "x2"), ("m8n16", "x4")])  # fmt: skip
def test_load_of_narrow_elements(shape, num, types, bits):
    if shape == "m8n16" and bits == 8:
        return
    count, high = COUNTS[num], 16 if shape == "m16n16" else 8
    words = count * (2 if shape == "m16n16" else 1)
    data = RNG.integers(0, 256, 64 * 64).astype(np.uint8)
    rows = RNG.integers(0, 256, (2, 32)).astype(np.uint32) * 16
    rows[:, high * count :] = 0x7FFFFF1
    body = FILL + ADDRESS + "".join(f"mov.b32 %r{k}, 0;\n" for k in range(10, 14))
    body += f"ldmatrix.sync.aligned.{shape}.{num}{'.trans' if shape == 'm16n16' else ''}.shared.{types} "
    body += f"{registers(words)}, [%r42];\nst.global.v4.b32 [%out], {registers(4)};"
    text = kernel(body, ["out", "x", "rows"], SHARED)
    assert complaint(text) == ""
    result = run(text, {"out": (256, np.uint32), "x": data, "rows": rows}, block=64)
    assert result.rules == []
    want = np.zeros((2, 32, 4), np.uint32)
    for warp in range(2):
        for j in range(count):
            matrix = rows_of(data, rows[warp, high * j : high * (j + 1)], bits)
            for lane in range(32):
                c = lane % 4
                for e in range(4):
                    if shape == "m8n16":
                        want[warp, lane, j] |= matrix[lane // 4, 4 * c + e] << (8 * e)
                    else:
                        want[warp, lane, 2 * j] |= matrix[4 * c + e, lane // 4] << (8 * e)
                        want[warp, lane, 2 * j + 1] |= matrix[4 * c + e, lane // 4 + 8] << (8 * e)
    np.testing.assert_array_equal(result["out"].reshape(want.shape), want)


@pytest.mark.parametrize("num", ["x1", "x2", "x4"])
def test_store_of_bytes(num):
    count = COUNTS[num]
    body = """
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d1, %r0, 16;
    add.s64 %d2, %x, %d1;
    add.s64 %out, %out, %d1;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d2];
    mov.u32 %r40, s;
    mad.lo.s32 %r41, %r0, 16, %r40;
    st.shared.v4.b32 [%r41], {0, 0, 0, 0};
    """
    body += f"stmatrix.sync.aligned.m16n8.{num}.trans.shared.b8 [%r41], {registers(count)};\n"
    body += "bar.warp.sync 0xffffffff;\nld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r41];\n"
    body += "st.global.v4.b32 [%out], {%r20, %r21, %r22, %r23};"
    text = kernel(body, ["out", "x"], SHARED)
    assert complaint(text) == ""
    x = RNG.integers(0, 256, (32, 16)).astype(np.uint8)  # lane, four bytes in each register
    result = run(text, {"out": (512, np.uint8), "x": x})
    assert result.rules == []
    memory = np.zeros((32, 16), np.uint8)
    for j in range(count):
        for lane in range(32):
            for e in range(4):
                row, column = lane // 4 + 8 * (e // 2), 2 * (lane % 4) + e % 2
                memory[8 * j + column, row] = x[lane, 4 * j + e]
    np.testing.assert_array_equal(result["out"].reshape(32, 16), memory)


def test_shape_and_number_in_the_old_order():
    body = "mov.u32 %r40, s;\nmov.u32 %r0, %tid.x;\nmad.lo.s32 %r41, %r0, 16, %r40;\n"
    body += "st.shared.v4.b32 [%r41], {%r0, %r0, %r0, %r0};\nbar.warp.sync 0xffffffff;\n"
    body += "ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%r10, %r11, %r12, %r13}, [%r41];\n"
    body += "mul.wide.u32 %d1, %r0, 4;\nadd.s64 %out, %out, %d1;\nst.global.b32 [%out], %r13;"
    text = kernel(body, ["out"], SHARED)
    assert complaint(text) == ""
    np.testing.assert_array_equal(run(text, {"out": (32, np.uint32)})["out"], 24 + np.arange(32) // 4)


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r10}, [%r0];",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r10, %r11}, [%r0];",
        "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {%r10, %r11, %r12, %r13}, [%r0];",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r0], {%r10};",
        "stmatrix.sync.aligned.m16n16.x1.trans.shared.b8 [%r0], {%r10, %r11};",
    ],
)
def test_forms_that_do_not_exist_are_refused(text):
    assert complaint(kernel(text, [], SHARED))
    with pytest.raises(UnsupportedInstruction, match="matrix"):
        run(kernel(text, [], SHARED), {})
