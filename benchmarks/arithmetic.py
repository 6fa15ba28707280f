"""Nanoseconds a lane of the simulator's arithmetic: `python benchmarks/arithmetic.py [form ...]`.

Takes the best of 40 calls over 16,384 lanes of ordinary values (normal deviates, small shift amounts).
"""

from __future__ import annotations

import sys
import time

import numpy as np

from workbench.simulator.arith import Form, forms, quiet

LANES = 16_384
HOT = (
    "add.s32 mul.lo.s32 mad.lo.s32 mul.wide.u32 mul.hi.u32 div.u32 shl.b32 shr.s32 lop3.b32 "
    "shf.l.wrap.b32 bfe.u32 bfi.b32 popc.b32 selp.b32 setp.lt.f32 add.f32 add.ftz.f32 fma.rn.f32 "
    "fma.rn.ftz.f32 fma.rz.f32 max.f32 div.rn.f32 rcp.approx.ftz.f32 rsqrt.approx.ftz.f32 "
    "ex2.approx.ftz.f32 lg2.approx.f32 tanh.approx.f32 fma.rn.f32x2 fma.rn.f32.bf16 fma.rn.bf16x2 "
    "fma.rn.f16x2 mul.bf16x2 max.bf16x2 fma.rn.f64 cvt.f32.bf16 cvt.f32.f16 cvt.rn.bf16.f32 "
    "cvt.rn.bf16x2.f32 cvt.rn.f16x2.f32 cvt.rn.f16x2.e2m1x2 cvt.rn.f16x2.e4m3x2 "
    "cvt.rn.bf16x2.ue8m0x2 cvt.rn.satfinite.e4m3x2.f32 cvt.rn.satfinite.e2m1x2.f32 "
    "cvt.rp.satfinite.ue8m0x2.f32 cvt.rn.f32.s32 cvt.rzi.s32.f32 cvt.rna.tf32.f32 "
)


def operand(kind: str, dtype: str, amount: bool, rng: np.random.Generator) -> np.ndarray:
    """Return ordinary values of a PTX type, shape (1, LANES); `amount` asks for shift amounts."""
    real = rng.standard_normal((1, 2 * LANES)).astype(np.float32)
    narrow = {
        "f16": real.astype(np.float16).view(np.uint16),
        "bf16": (real.view(np.uint32) >> 16).astype(np.uint16),
    }
    base = kind.removesuffix("x2")
    if base in narrow:
        return narrow[base].view(dtype) if kind != base else narrow[base][:, :LANES]
    if kind == "f32x2":
        return real.view(dtype)
    if kind.startswith("f"):
        return real[:, :LANES].astype(dtype)
    return rng.integers(0, 2 if dtype == "bool" else 32 if amount else 100, (1, LANES)).astype(dtype)


def nanoseconds(form: Form) -> float:
    """Return the best time a lane."""
    semantics = form.specialise(0x6C) if form.specialise else form.semantics
    rng = np.random.default_rng(0)
    kinds = form.operand_types[: len(semantics.operands)]
    arrays = [
        operand(k, d, i > 0, rng) for i, (k, d) in enumerate(zip(kinds, semantics.operands, strict=True))
    ]
    best = float("inf")
    with quiet():
        for _ in range(40):
            start = time.perf_counter()
            semantics.function(*arrays)
            best = min(best, time.perf_counter() - start)
    return best / LANES * 1e9


def main() -> None:
    """Print a table."""
    wanted = sys.argv[1:] or HOT.split()
    known = {f.text.partition(" ")[0]: f for f in reversed(forms())}
    for name in wanted:
        print(f"{name:32s} {nanoseconds(known[name]):8.2f}")


if __name__ == "__main__":
    main()
