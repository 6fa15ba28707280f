"""Tensor cores and the loads that feed them: mma.sync, wgmma, ldmatrix, stmatrix, movmatrix.

Two kinds of numbers are multiplied. Of small integers every sum is exact in every order, so that all bits must
agree. Of random numbers the order and the width of the hardware's sums show, which the ISA leaves open: there the
distance is reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_check.probes.builder import Builder
from gpu_check.probes.operands import operands

_WARPS = 4
_MMA = (
    # shape, D, A, B, C, words of A, B, C
    ("m16n8k16", "f32", "bf16", "bf16", "f32", 4, 2, 4),
    ("m16n8k8", "f32", "bf16", "bf16", "f32", 2, 1, 4),
    ("m16n8k16", "f32", "f16", "f16", "f32", 4, 2, 4),
    ("m16n8k16", "f16", "f16", "f16", "f16", 4, 2, 2),
    ("m16n8k8", "f16", "f16", "f16", "f16", 2, 1, 2),
    ("m16n8k8", "f32", "tf32", "tf32", "f32", 4, 2, 4),
    ("m16n8k4", "f32", "tf32", "tf32", "f32", 2, 1, 4),
    ("m16n8k32", "f32", "e4m3", "e4m3", "f32", 4, 2, 4),
    ("m16n8k32", "f32", "e5m2", "e4m3", "f32", 4, 2, 4),
    ("m16n8k32", "s32", "s8", "s8", "s32", 4, 2, 4),
    ("m16n8k32", "s32", "u8", "s8", "s32", 4, 2, 4),
    ("m16n8k16", "s32", "s8", "s8", "s32", 2, 1, 4),
)
_LOOSE = "order and width of the sums are the hardware's"
_SMEM = 32 * 1024


def builders() -> list[Builder]:
    """Three families."""
    return [_mma(), _ldmatrix(), _wgmma()]


def _codes(kind: str, words: int, exact: bool, seed: int) -> Any:
    """Words of packed elements of a type: small integers, or normal numbers."""
    rng = np.random.default_rng([seed, *kind.encode()])
    per = {"f32": 1, "tf32": 1, "s32": 1, "f16": 2, "bf16": 2}.get(kind, 4)
    count = words * per
    if kind in ("s8", "u8"):
        return rng.integers(0, 256, count, np.uint8).view(np.uint32)
    if kind == "s32":
        return rng.integers(-1000, 1000, count, np.int32).view(np.uint32)
    values = (
        rng.integers(-4, 5, count).astype(np.float32)
        if exact
        else rng.standard_normal(count).astype(np.float32)
    )
    if kind == "f16":
        return values.astype(np.float16).view(np.uint32)
    if kind == "f32":
        return values.view(np.uint32)
    if kind in ("bf16", "tf32"):
        # Cut off, not rounded: any code will do.
        bits = values.view(np.uint32)
        return (
            (bits >> np.uint32(16)).astype(np.uint16).view(np.uint32)
            if kind == "bf16"
            else bits & np.uint32(0xFFFFE000)
        )
    import ml_dtypes

    narrow = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    return values.astype(narrow).view(np.uint8).view(np.uint32)


def _format(kind: str) -> str:
    return {"s32": "u32"}.get(kind, kind)


def _names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{k}" for k in range(count)) + "}"


def _load(name: str, prefix: str, count: int) -> str:
    text = f"mul.wide.u32 %d1, %r1, {4 * count};\nadd.s64 %d2, %d1, %{name};\n"
    return text + "".join(f"ld.global.b32 %{prefix}{k}, [%d2+{4 * k}];\n" for k in range(count))


def _store(prefix: str, count: int) -> str:
    text = f"mul.wide.u32 %d1, %r1, {4 * count};\nadd.s64 %d2, %d1, %out;\n"
    return text + "".join(f"st.global.b32 [%d2+{4 * k}], %{prefix}{k};\n" for k in range(count))


def _part(exact: bool, d: str, a: str) -> dict[str, Any]:
    """How far inexact sums may lie apart before they are called different: this check's choice, not the ISA's.

    Products of numbers of unit size, up to 32 of them, twice: sums of size 10. f16 results have steps of 2^-7
    there; eight-bit inputs are summed with about 14 bits on Hopper, others with 23.
    """
    if exact:
        return {}
    apart = -3 if a in ("e4m3", "e5m2") else -6 if d == "f16" else -14
    return {
        "exact": False,
        "bound": f"{_LOOSE}; taken as alike within 2^{apart}",
        "absolute": 2.0 ** (apart - 1),
    }


def _mma() -> Builder:
    b = Builder("mma.sync", "products of fragments in registers, all types of sm_90a")
    threads = 32 * _WARPS
    for shape, d, a, bt, c, na, nb, nc in _MMA:
        for exact in (True, False):
            if d == "s32" and not exact:
                continue
            kind = "integers" if exact else "random"
            given = {
                f"a_{a}_{na}_{kind}": (a, na),
                f"b_{bt}_{nb}_{kind}": (bt, nb),
                f"c_{c}_{nc}_{kind}": (c, nc),
            }
            for seed, (name, (t, n)) in enumerate(given.items()):
                if name not in b.inputs:
                    b.give(name, _codes(t, threads * n, exact, seed))
            first, second, third = given
            form = f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{bt}.{c}"
            body = _load(first, "ra", na) + _load(second, "rb", nb) + _load(third, "rc", nc)
            body += (
                f"{form} {_names('rd', nc)}, {_names('ra', na)}, {_names('rb', nb)}, {_names('rc', nc)};\n"
                + _store("rd", nc)
            )
            count = threads * nc * (2 if d == "f16" else 1)
            b.entry(f"{form}, {kind}", body, tuple(given), [(_format(d), count)], block=threads,
                    variables=".reg .b32 %ra<4>, %rb<4>, %rc<4>, %rd<4>;", covers=(form,), part=_part(exact, d, a))  # fmt: skip
    body = _load("m", "ra", 1) + "movmatrix.sync.aligned.m8n8.trans.b16 %rd0, %ra0;\n" + _store("rd", 1)
    b.give("m", operands("b32", 0, threads))
    b.entry("movmatrix.sync.aligned.m8n8.trans.b16", body, ("m",), [("u32", threads)], block=threads,
            variables=".reg .b32 %ra<4>, %rd<4>;", covers=("movmatrix.sync.aligned.m8n8.trans.b16",))  # fmt: skip
    return b


def _ldmatrix() -> Builder:
    b = Builder("ldmatrix", "ldmatrix and stmatrix, 1 to 4 matrices, transposed or not")
    threads = 32 * _WARPS
    b.give("x", operands("u32", 9, threads * 4))
    fill = (
        "mov.u32 %r4, s;\nmul.wide.u32 %d1, %r1, 16;\nadd.s64 %d2, %d1, %x;\nadd.s64 %d3, %d1, %out;\n"
        "mad.lo.u32 %r5, %r0, 16, %r4;\nld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d2];\n"
    )
    # Rows are 16 bytes; those of a warp are read in an order of their own.
    row = "xor.b32 %r6, %r0, 43;\nmad.lo.u32 %r6, %r6, 16, %r4;\n"
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            names = "{" + ", ".join(f"%r{20 + k}" for k in range(count)) + "}"
            zero = "".join(f"mov.u32 %r{20 + k}, 0;\n" for k in range(4))
            form = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            body = fill + "st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};\nbar.sync 0;\n" + row + zero
            body += f"{form} {names}, [%r6];\nst.global.v4.b32 [%d3], {{%r20, %r21, %r22, %r23}};"
            variables = f".shared .align 16 .b8 s[{threads * 16}];"
            b.entry(
                form, body, ("x",), [("u32", threads * 4)], block=threads, variables=variables, covers=(form,)
            )
            form = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            names = "{" + ", ".join(f"%r{10 + k}" for k in range(count)) + "}"
            body = fill + "st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};\nbar.sync 0;\n" + row
            body += (
                f"{form} [%r6], {names};\nbar.sync 0;\nld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r5];\n"
            )
            body += "st.global.v4.b32 [%d3], {%r20, %r21, %r22, %r23};"
            b.entry(
                form, body, ("x",), [("u32", threads * 4)], block=threads, variables=variables, covers=(form,)
            )
    return b


_WGMMA = (
    # D, A, B, k, n
    ("f32", "bf16", "bf16", 16, 64),
    ("f32", "bf16", "bf16", 16, 8),
    ("f32", "f16", "f16", 16, 32),
    ("f16", "f16", "f16", 16, 32),
    ("f32", "tf32", "tf32", 8, 32),
    ("f32", "e4m3", "e4m3", 32, 64),
    ("f32", "e5m2", "e4m3", 32, 16),
    ("s32", "s8", "s8", 32, 32),
)


def _wgmma() -> Builder:
    b = Builder(
        "wgmma", "products of matrices in shared memory, every swizzle, A in registers or shared memory"
    )
    threads = 128
    for d, a, bt, k, n in _WGMMA:
        for exact in (True, False):
            if d == "s32" and not exact:
                continue
            kind = "integers" if exact else "random"
            image = f"image_{a}_{bt}_{kind}"
            if image not in b.inputs:
                # A in the first half, B in the second: any content is some matrix, whatever the layout.
                half = _SMEM // 2 // 4
                b.give(image, np.concatenate([_codes(a, half, exact, 3), _codes(bt, half, exact, 4)]))
            fragment = f"a_{a}_{kind}"
            if fragment not in b.inputs:
                b.give(fragment, _codes(a, threads * 4, exact, 5))
            modes = (("none", 0), ("32", 3), ("64", 2), ("128", 1)) if n == 64 else (("128", 1),)
            for swizzle, mode in modes:
                for source in ("shared", "registers"):
                    _one_wgmma(b, (d, a, bt, k, n), image, fragment, (swizzle, mode), source, exact)
    return b


def _one_wgmma(
    b: Builder, types: tuple[str, str, str, int, int], image: str, fragment: str, swizzle: tuple[str, int],
    source: str, exact: bool,
) -> None:  # fmt: skip
    d, a, bt, k, n = types
    threads = 128
    count = n // (4 if d == "f16" else 2)
    width = {"none": 16, "32": 32, "64": 64, "128": 128}[swizzle[0]]
    leading, stride = (128, 256) if swizzle[0] == "none" else (16, 8 * width)
    fields = (leading >> 4) << 16 | (stride >> 4) << 32 | swizzle[1] << 62
    form = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{a}.{bt}"
    scales = "" if d == "s32" else ", 1, 1"
    if a in ("bf16", "f16"):
        scales += ", 0, 0" if source == "shared" else ", 0"
    left = "%d20" if source == "shared" else "{%ra0, %ra1, %ra2, %ra3}"
    body = (
        "mov.u32 %r4, s;\nmul.wide.u32 %d1, %r0, 16;\nadd.s64 %d2, %d1, %image;\nmad.lo.u32 %r5, %r0, 16, %r4;\n"
        "mov.u32 %r7, 0;\nFILL:\nld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d2];\n"
        "st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};\nadd.s64 %d2, %d2, 2048;\nadd.u32 %r5, %r5, 2048;\n"
        f"add.u32 %r7, %r7, 2048;\nsetp.lt.u32 %p1, %r7, {_SMEM};\n@%p1 bra FILL;\n"
        "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    ).replace("%image", f"%{image}")
    body += _load(fragment, "ra", 4)
    body += "".join(f"mov.b32 %acc{i}, {0 if d != 'f32' else '0f00000000'};\n" for i in range(count))
    body += (
        f"and.b32 %r8, %r4, 0x3ffff;\nshr.u32 %r8, %r8, 4;\ncvt.u64.u32 %d20, %r8;\nor.b64 %d20, %d20, {fields:#x};\n"
        f"add.s64 %d21, %d20, {_SMEM // 2 >> 4};\nwgmma.fence.sync.aligned;\n"
        f"{form} {_names('acc', count)}, {left}, %d21, 1{scales};\n"
        # Twice, so that the accumulator is read as well.
        f"{form} {_names('acc', count)}, {left}, %d21, 1{scales};\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    )
    body += _store("acc", count)
    elements = threads * count * (2 if d == "f16" else 1)
    part = _part(exact, d, a)
    label = f"{form}, A in {source}, swizzle {swizzle[0]}, {'integers' if exact else 'random'}"
    b.entry(label, body, (image, fragment), [(_format(d), elements)], block=threads,
            variables=f".shared .align 1024 .b8 s[{_SMEM}];\n.reg .b32 %acc<{count}>; .reg .b32 %ra<4>;",
            covers=(form, "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned",
                    "wgmma.wait_group.sync.aligned"), part=part)  # fmt: skip
