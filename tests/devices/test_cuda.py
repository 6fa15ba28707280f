"""The CUDA device and the timing protocol, on a driver whose calls the simulator carries out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.devices.probe_kernels import add_one
from tests.devices.simulated_driver import LAUNCH_US, SimulatedDriver
from workbench.devices import CudaDevice, DeviceError, TimingOptions, available, time_kernel

GIVEN = {"x": np.arange(32, dtype=np.uint32).view(np.uint8)}
PDL = "PROGRAMMATIC_STREAM_SERIALIZATION"


def test_without_a_driver_the_reason_is_said() -> None:
    there = available()
    if not there:
        assert there.devices == () and "driver" in there.reason
        with pytest.raises(DeviceError, match="driver"):
            CudaDevice()


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (SimulatedDriver(failing="cuInit"), "cuInit failed: CUDA_ERROR_OPERATING_SYSTEM"),
        (SimulatedDriver(devices=0), "no device"),
    ],
)
def test_a_driver_without_a_device_says_so(driver: SimulatedDriver, said: str) -> None:
    there = available(driver)
    assert not there and said in there.reason
    with pytest.raises(DeviceError, match=said):
        CudaDevice(driver=driver)


def test_what_the_device_says_of_itself() -> None:
    (info,) = available(SimulatedDriver()).devices
    assert (info.name, info.arch, info.driver, info.sms) == ("Simulated GPU", "sm_90a", "13.0", 132)
    assert available(SimulatedDriver(capability=(8, 6))).devices[0].arch == "sm_86"


def test_a_kernel_of_another_arch_is_never_loaded() -> None:
    driver = SimulatedDriver(capability=(10, 3)).knows(add_one())
    device = CudaDevice(driver=driver)
    with pytest.raises(DeviceError, match="is built for sm_90a, Simulated GPU is sm_103a"):
        device.load(add_one())
    assert not driver.live.get("module")


@pytest.mark.parametrize("method", ["events", "graph"])
@pytest.mark.parametrize("l2", ["flushed", "warm"])
def test_samples_are_of_the_launches_alone(method: Any, l2: Any) -> None:
    kernel = add_one(times=2)
    driver = SimulatedDriver().knows(kernel)
    device = CudaDevice(driver=driver)
    before = {kind: len(handles) for kind, handles in driver.live.items()}
    timing = time_kernel(
        device, kernel, GIVEN, TimingOptions(method=method, l2=l2, warmup=3, warmup_s=0, samples=20)
    )
    assert timing.kind == "measured" and len(timing.samples_us) == 20
    assert np.allclose(timing.samples_us, 2 * LAUNCH_US)  # no flush, no launch of another sample
    assert timing.premises["flush_bytes"] == (256 << 20 if l2 == "flushed" else 0)
    assert timing.median_us == pytest.approx(6) and timing.host_us >= 0
    # One run to see that it does not fault, the warm-up, the samples.
    assert len(driver.launched) == 2 * (1 + 3 + 20)
    # The first launch of a chain waits for the flush, the second starts as it was built.
    assert [PDL in n.attributes for n in driver.launched[2:4]] == [False, True]
    left = {kind: len(handles) for kind, handles in driver.live.items() if handles}
    assert left == {kind: n for kind, n in before.items() if n}, "events, graphs, modules and memory go back"


def test_chains_share_a_sample() -> None:
    kernel = add_one()
    device = CudaDevice(driver=SimulatedDriver().knows(kernel))
    options = TimingOptions(l2="warm", chains=4, samples=5, warmup_s=0)
    assert np.allclose(time_kernel(device, kernel, GIVEN, options).samples_us, LAUNCH_US)
    with pytest.raises(DeviceError, match="only one chain"):
        TimingOptions(chains=4)
    with pytest.raises(DeviceError, match="at least one sample"):
        TimingOptions(samples=0)


def test_a_time_limit_gives_fewer_samples_never_none() -> None:
    kernel = add_one()
    device = CudaDevice(driver=SimulatedDriver().knows(kernel))
    timing = time_kernel(device, kernel, GIVEN, TimingOptions(samples=10_000, warmup=2, time_limit=0.0))
    assert 1 <= len(timing.samples_us) < 100


@pytest.mark.parametrize(
    "call", ["cuEventCreate", "cuStreamBeginCapture", "cuGraphInstantiate", "cuLaunchKernelEx"]
)
def test_what_the_driver_refuses_is_named(call: str) -> None:
    kernel = add_one()
    device = CudaDevice(driver=SimulatedDriver(failing=call).knows(kernel))
    with pytest.raises(DeviceError, match=f"{call} failed"):
        time_kernel(device, kernel, GIVEN, TimingOptions(method="graph"))


def test_a_damaged_cubin_is_named() -> None:
    kernel = add_one()
    device = CudaDevice(driver=SimulatedDriver())
    with pytest.raises(DeviceError, match="add one: cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE"):
        device.load(kernel)


def test_the_device_needs_nothing_but_numpy_and_the_bindings() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'torch', 'rich', 'optuna', 'typer', 'cutlass', 'ml_dtypes'):\n"
        "    sys.modules[name] = None\n"
        "import workbench.devices as d, workbench.devices.timing\n"
        "print(d.available().reason or 'a device')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr


def test_an_artifact_runs_through_its_contract() -> None:
    from pathlib import Path

    from tests.export.module_winners import compiled
    from workbench.devices import execute, inputs, kernel_of, time
    from workbench.ops import load_op
    from workbench.workspace import Workspace

    op = load_op(Workspace(Path(__file__).parents[2]), "rmsnorm")
    artifact = compiled("rmsnorm", "small_b1", arch="sm_90a")
    kernel = kernel_of(artifact)
    driver = SimulatedDriver().knows(kernel)
    device = CudaDevice(driver=driver)
    given = inputs(op, artifact.axes)
    (out,) = execute(device, kernel, given)
    check(op, artifact.axes, given, out)
    timing = time(artifact, op, device=device, options=TimingOptions(samples=3, warmup=1, warmup_s=0))
    assert timing.kernel == "rmsnorm small_b1 row" and len(timing.samples_us) == 3


def check(op: Any, axes: Any, given: dict[str, Any], out: dict[str, Any]) -> None:
    import torch

    from workbench.ops.compare import compare, standard_of
    from workbench.ops.model import storage_shape

    def shaped(b: Any, raw: Any) -> torch.Tensor:
        return torch.from_numpy(raw).view(getattr(torch, b.dtype.torch_name)).view(storage_shape(b, axes))

    tensors = {b.name: shaped(b, given[b.name]) for b in op.inputs}
    standard = standard_of(op, tensors, axes)
    for b in op.outputs:
        got = compare(
            standard.golden[b.name], shaped(b, out[b.name]), op.tolerances[b.name], standard.honest[b.name]
        )
        assert got.passed, got.reason
