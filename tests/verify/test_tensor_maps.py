"""Tensor maps that a contract describes: their bytes, what their copies bring, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from workbench.simulator.tensormap import decode
from workbench.verify.tensor_maps import ContractTensorMap, box_bytes


def test_a_map_is_what_the_contract_says() -> None:
    m = ContractTensorMap(dtype="bf16", shape=(256, 128), box=(64, 32), swizzle=128)
    made = decode(m.raw)
    assert (made.dims, made.strides, made.box, made.swizzle.span) == ((256, 128), (512,), (64, 32), 128)
    assert m.nbytes == 256 * 128 * 2
    assert box_bytes(m.raw) == 64 * 32 * 2


def test_rows_may_lie_apart() -> None:
    m = ContractTensorMap(dtype="e4m3", shape=(128, 4, 3), box=(128, 1, 1), strides=(256, 4096))
    assert decode(m.raw).strides == (256, 4096)
    assert m.nbytes == 128 + 3 * 256 + 2 * 4096


def test_four_bit_elements_count_packed() -> None:
    m = ContractTensorMap(dtype="e2m1", shape=(256, 8), box=(128, 8))
    assert (m.nbytes, box_bytes(m.raw)) == (1024, 512)


def test_what_is_no_map_brings_nobody_knows_what() -> None:
    assert box_bytes(bytes(128)) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "f8"}, "no element type 'f8'"),
        ({"box": (64,)}, "box"),
        ({"box": (512, 1)}, "1 to 256"),
        ({"strides": (24,)}, "multiples of 16"),
        ({"swizzle": 64}, "its swizzle 64"),
    ],
)
def test_what_the_driver_refuses_is_one_error(fields: dict[str, object], words: str) -> None:
    given = {"dtype": "bf16", "shape": (256, 8), "box": (64, 8)} | fields
    with pytest.raises(ValidationError, match=words):
        ContractTensorMap.model_validate(given)
