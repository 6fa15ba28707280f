"""A case in simulated memory: placement, permissions, restoring, scratch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.artifact import BoundBuffer
from workbench.errors import UnknownNameError
from workbench.ops import DType, Role, load_op
from workbench.ops.trivial import zero_inputs
from workbench.simulator.memory import Memory
from workbench.verify.inputs import POISONS, Case, place_scratch, reset_scratch
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])
MOE = load_op(WORKSPACE, "moe")


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 28)


@pytest.fixture
def case(memory: Memory) -> Case:
    return Case.create(MOE, MOE.workload("small_b3"), "ordinary", 3, memory)


def test_inputs_lie_in_memory_as_the_generator_made_them(case: Case, memory: Memory) -> None:
    axes = case.workload.axes
    storage = zero_inputs(MOE, axes)
    MOE.generators["ordinary"](axes, 3, storage.__getitem__)
    for b in MOE.inputs:
        assert memory.view(b.name).tobytes() == storage[b.name].view(-1).view(torch.uint8).numpy().tobytes()
        assert memory.address(b.name) % b.align == 0
        assert memory.allocation(b.name).writable == (b.role is Role.STATE)
        assert memory.unwritten(b.name) == 0


def test_outputs_start_as_poison_that_was_never_written(case: Case, memory: Memory) -> None:
    for byte in POISONS:
        case.restore(byte)
        assert (memory.view("out") == byte).all() and memory.unwritten("out") == memory.view("out").size
    assert torch.isnan(case.read_outputs()["out"].view(torch.int16).fill_(-1).view(torch.bfloat16)).all()


def test_state_is_put_back_and_outputs_are_copies(case: Case, memory: Memory) -> None:
    before = memory.view("latent").copy()
    case.restore()
    taken = case.read_outputs()
    memory.view("latent")[:] = 1
    memory.view("out")[:] = 2
    assert taken["latent"].view(-1).view(torch.uint8).numpy().tobytes() == before.tobytes()
    case.restore()
    assert (memory.view("latent") == before).all() and (memory.view("out") == POISONS[0]).all()


def test_golden_is_computed_from_the_state_before_the_run(case: Case, memory: Memory) -> None:
    memory.view("latent")[:] = 0  # a run has written the state before golden was first asked for
    other = Case.create(MOE, MOE.workload("small_b3"), "ordinary", 3, Memory(1 << 28))
    for name, value in other.standard.golden.items():
        assert torch.equal(case.standard.golden[name], value)
    assert case.standard is case.standard


def test_many_runs_share_a_case(case: Case, memory: Memory) -> None:
    """A run that leaves the golden behind passes; the next starts clean."""
    for _ in range(2):
        case.restore()
        assert case.judge(case.read_outputs(), poison=POISONS[0]).verdict == "fail"
        for name, value in case.standard.golden.items():
            raw = value.to(torch.bfloat16).view(-1).view(torch.uint8).numpy()
            memory.view(name)[:] = raw
        assert case.judge(case.read_outputs(), poison=POISONS[0]).verdict == "pass"


def test_label_and_unknown_generator(case: Case) -> None:
    assert case.label == "ordinary/seed3"
    with pytest.raises(UnknownNameError, match="ordinary"):
        Case.create(MOE, MOE.workload("small_b1"), "ordinray", 0, Memory(1 << 28))


def test_scratch_is_placed_poisoned_and_released(case: Case, memory: Memory) -> None:
    partial = BoundBuffer(name="partial", shape=(3, 5), dtype=DType.F32, role=Role.SCRATCH)
    flag = BoundBuffer(name="flag", shape=(4,), dtype=DType.U32, role=Role.FLAG)
    own = BoundBuffer(name="out", shape=(3, 128), dtype=DType.BF16, role=Role.OUTPUT)
    mark = memory.mark()
    scratch = place_scratch(memory, MOE, [own, partial, flag], POISONS[1])
    assert [b.name for b in scratch] == ["partial", "flag"]
    assert (memory.view("partial") == POISONS[1]).all() and memory.unwritten("partial") == 60
    assert not memory.view("flag").any() and memory.unwritten("flag") == 0
    memory.view("flag")[:] = 1
    memory.view("partial")[:] = 1
    reset_scratch(memory, scratch, POISONS[0])
    assert (memory.view("partial") == POISONS[0]).all() and not memory.view("flag").any()
    memory.release(mark)
    assert "partial" not in memory and "out" in memory


def test_real_size_is_cheap_to_hold(memory: Memory) -> None:
    """1.9 GB of weights, of which a fiftieth is ever touched."""
    big = Memory()
    before = _resident()
    case = Case.create(MOE, MOE.workload("tp8_b1"), "ordinary", 0, big)
    assert case.standard.golden["out"].isfinite().all()
    assert sum(a.size for a in big.allocations) > 1.8e9
    assert _resident() - before < 0.6e9


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_poisons_are_nan_and_a_number() -> None:
    values = [np.frombuffer(bytes([p, p]), np.uint16).astype(np.uint32) << 16 for p in POISONS]
    floats = [v.view(np.float32)[0] for v in values]
    assert np.isnan(floats[0]) and np.isfinite(floats[1])
