"""Single rounding against exact rational arithmetic, and against the hardware-like float32 route for
exact float32 inputs."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.ops.rounding import to_bf16, to_e4m3

BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
FINITE = sorted({Fraction(float(v)) for v in BF16 if math.isfinite(v)})
BF16_MAX = FINITE[-1]


def nearest_even_bf16(x: float) -> float:
    """Nearest bfloat16 by search over all of them, ties to the even mantissa, overflow by the usual rule."""
    import bisect

    exact = Fraction(x)
    step = Fraction(2) ** (127 - 7)
    if abs(exact) >= BF16_MAX + step / 2:
        return math.copysign(math.inf, x)
    i = bisect.bisect_left(FINITE, exact)
    around = [FINITE[j] for j in (i - 1, i) if 0 <= j < len(FINITE)]
    best = min(abs(exact - c) for c in around)
    ties = [c for c in around if abs(exact - c) == best]
    if len(ties) == 2:
        even = [c for c in ties if not int(np.array(float(c), ml_dtypes.bfloat16).view(np.uint16)) & 1]
        return float(even[0])
    return float(ties[0])


@settings(max_examples=400, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-3.5e38, max_value=3.5e38))
def test_bf16_is_the_nearest(x: float) -> None:
    assert float(to_bf16(torch.tensor([x], dtype=torch.float64))[0]) == nearest_even_bf16(x)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 0x7F7E), st.integers(-60, -10), st.sampled_from([-1, 1]))
def test_just_beside_a_midpoint(bits: int, exponent: int, side: int) -> None:
    """A value a little beside the midpoint of two neighbours: where rounding through float32 goes wrong."""
    low, high = (float(BF16[b]) for b in (bits, bits + 1))
    x = (low + high) / 2 * (1 + side * 2.0**exponent)
    assert float(to_bf16(torch.tensor([x], dtype=torch.float64))[0]) == nearest_even_bf16(x)


def test_torch_alone_rounds_twice() -> None:
    x = torch.tensor([1 + 2.0**-8 + 2.0**-30], dtype=torch.float64)
    assert float(x.to(torch.bfloat16)) == 1.0, "torch rounds once now: the detour may go"
    assert float(to_bf16(x)) == 1 + 2.0**-7


def test_special_values() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e300, -1e300, 1e-300], dtype=torch.float64)
    got = to_bf16(x).double()
    assert got[0] == math.inf and got[1] == -math.inf and got[2].isnan()
    assert got[3:5].tolist() == [0.0, 0.0] and got[4].signbit() and not got[3].signbit()
    assert got[5:].tolist() == [math.inf, -math.inf, 0.0]


def test_float32_goes_straight() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    assert torch.equal(to_bf16(x), x.to(torch.bfloat16)) and torch.equal(
        to_bf16(x.double()), x.to(torch.bfloat16)
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_e4m3_is_the_nearest_and_saturates(scale: float) -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * scale
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    got = to_e4m3(x).double().numpy()
    distance = np.abs(values[None] - x.numpy()[:, None])
    assert (np.abs(got - x.numpy()) == distance.min(1)).all()
    assert float(to_e4m3(torch.tensor([1e9], dtype=torch.float64)).double()) == 448.0
