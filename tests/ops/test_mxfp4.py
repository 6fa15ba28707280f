"""MXFP4 decoding against ml_dtypes, which has its own tables."""

import ml_dtypes
import numpy as np
import pytest
import torch

from workbench.ops import mxfp4
from workbench.ops.random import fill_bytes, stream


def reference(packed: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    if scale is not None:
        values *= np.repeat(scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=-1)
    return values


def test_every_code() -> None:
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert list(mxfp4.E2M1_VALUES) == codes.tolist()
    scales = np.arange(256, dtype=np.uint8)
    wanted = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(mxfp4.decode_scale(torch.from_numpy(scales)).numpy(), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decode(dtype: torch.dtype) -> None:
    packed = fill_bytes(torch.empty(6, 5, 64, dtype=torch.uint8), stream(1, "packed"))
    scale = torch.randint(100, 150, (6, 5, 4), generator=stream(1, "scale")).to(torch.uint8)
    got = mxfp4.decode(packed, scale, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.double().numpy(), reference(packed.numpy(), scale.numpy()))
    np.testing.assert_array_equal(
        mxfp4.decode(packed, None, dtype).double().numpy(), reference(packed.numpy(), None)
    )


def test_a_nan_scale_spoils_its_block_and_no_other() -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    got = mxfp4.decode(packed, torch.tensor([[127, 255]], dtype=torch.uint8))
    assert got[0, :32].isfinite().all() and got[0, 32:].isnan().all()


def test_low_nibble_first_and_pack_is_the_inverse() -> None:
    assert mxfp4.decode(torch.tensor([0x21], dtype=torch.uint8), None).tolist() == [0.5, 1.0]
    packed = fill_bytes(torch.empty(3, 10, dtype=torch.uint8), stream(2, "bytes"))
    assert torch.equal(mxfp4.pack(mxfp4.unpack(packed)), packed)


def test_statistics_of_random_codes() -> None:
    values = np.array(mxfp4.E2M1_VALUES)
    assert np.isclose(mxfp4.E2M1_RMS, np.sqrt(np.mean(values**2)))
    assert np.isclose(mxfp4.E2M1_MEAN, np.mean(np.abs(values)))


def test_bytes_are_uniform_and_depend_on_the_stream_alone() -> None:
    a = fill_bytes(torch.empty(100_003, dtype=torch.uint8), stream(3, "x"))
    b = fill_bytes(torch.empty(100_003, dtype=torch.uint8), stream(3, "x"))
    c = fill_bytes(torch.empty(100_003, dtype=torch.uint8), stream(3, "y"))
    assert torch.equal(a, b) and not torch.equal(a, c)
    counts = torch.bincount(a.int(), minlength=256)
    assert counts.min() > 280 and counts.max() < 510
