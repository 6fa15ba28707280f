"""What every device does alike: the simulator, the CUDA device on a driver that simulates, and a real one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.devices.probe_kernels import add_one
from tests.devices.simulated_driver import SimulatedDriver
from workbench.devices import (
    CudaDevice,
    Device,
    DeviceError,
    Kernel,
    SimulatedDevice,
    Slot,
    available,
    execute,
)
from workbench.devices.model import place

X = np.arange(32, dtype=np.uint32)


@pytest.fixture(params=["simulator", "driver", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made: Device
    if request.param == "simulator":
        made = SimulatedDevice()
    elif request.param == "driver":
        made = CudaDevice(driver=SimulatedDriver().knows(add_one()))
    else:
        if not (there := available()):
            pytest.skip(there.reason)
        made = CudaDevice()
    yield made
    made.close()


@pytest.fixture
def kernel(device: Device) -> Kernel:
    """Its cubin assembled where a real device runs it."""
    if device.info.kind == "cuda" and not isinstance(getattr(device, "cuda").api, SimulatedDriver):  # noqa: B009
        from workbench.compile.ptxas import assemble
        from workbench.compile.request import Limits

        return add_one(cubin=assemble(add_one().ptx, device.info.arch, (), Limits()).cubin)
    return add_one()


def test_a_kernel_runs_on_its_inputs_and_leaves_them(device: Device, kernel: Kernel) -> None:
    (result,) = execute(device, kernel, {"x": X.view(np.uint8)})
    assert list(result) == ["out"] and np.array_equal(result["out"].view(np.uint32), X + 1)


def test_bytes_come_back_as_they_went(device: Device) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    with device.scope():
        address, other = device.allocate(1000), device.allocate(10)
        assert address % 256 == 0 and other % 256 == 0 and address != other
        device.write(address, data)
        device.fill(address + 100, 50, 0x11)
        back = device.read(address, 1000)
        assert (back[100:150] == 0x11).all()
        back[100:150] = data[100:150]
        assert np.array_equal(back, data) and np.array_equal(device.read(address + 7, 5), data[7:12])
        assert device.read(address, 0).size == 0


def test_launches_see_what_those_before_wrote(device: Device, kernel: Kernel) -> None:
    twice = add_one(times=2, cubin=kernel.cubin)
    first, second = execute(device, twice, {"x": X.view(np.uint8)}, repeats=2)
    assert np.array_equal(first["x"].view(np.uint32), X + 2)
    assert np.array_equal(second["x"], first["x"]), "the state is restored before a repeat"


def test_outputs_are_poisoned_scratch_too_flags_are_zero(device: Device, kernel: Kernel) -> None:
    slots = (
        *kernel.slots,
        Slot("work", 64, "scratch"),
        Slot("ready", 64, "flag"),
        Slot("n", 64, "scratch", zeroed=True),
    )
    with device.scope():
        addresses = place(device, Kernel("k", "sm_90a", (), slots, b""), {"x": X.view(np.uint8)}, poison=0x5A)
        for name, byte in (("out", 0x5A), ("work", 0x5A), ("ready", 0), ("n", 0)):
            assert (device.read(addresses[name], 64) == byte).all(), name


def test_inputs_that_do_not_fit_are_refused(device: Device, kernel: Kernel) -> None:
    with pytest.raises(DeviceError, match="nothing is given for the buffer x"):
        execute(device, kernel, {})
    with pytest.raises(DeviceError, match="x has 128 bytes, 4 are given"):
        execute(device, kernel, {"x": np.zeros(4, np.uint8)})


def test_memory_of_a_scope_is_freed(device: Device) -> None:
    for _ in range(3):
        with device.scope():
            device.allocate(1 << 30)
            device.allocate(1 << 30)


def test_an_entry_that_is_not_there_is_an_error(device: Device, kernel: Kernel) -> None:
    launch = type(kernel.launches[0])("absent", (1, 1, 1), (32, 1, 1))
    wrong = Kernel("k", kernel.arch, (launch,), kernel.slots, kernel.cubin, kernel.ptx)
    with pytest.raises(DeviceError):
        device.load(wrong)
    with pytest.raises(DeviceError, match="memory"):
        device.allocate(1 << 60)


@pytest.mark.parametrize("which", ["simulator", "driver"])  # on a real device the context is lost afterwards
def test_a_fault_of_a_kernel_is_an_error(which: str) -> None:
    wrong = add_one(beyond=1 << 20)
    device: Device = (
        SimulatedDevice() if which == "simulator" else CudaDevice(driver=SimulatedDriver().knows(wrong))
    )
    with pytest.raises(DeviceError, match=r"out-of-bounds|ILLEGAL_ADDRESS"):
        execute(device, wrong, {"x": X.view(np.uint8)})
    device.close()
