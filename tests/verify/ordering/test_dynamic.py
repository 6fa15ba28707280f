"""The dynamic half of the audit: invented contents, budgets, determinism, what is not run and why."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from pairing import PAIRS
from snippets import DECLARE, LOAD_X, STORE, contract, ptx

from workbench.isa.ptx import parse
from workbench.ops.model import Role
from workbench.simulator import Memory
from workbench.verify.ordering import AuditTarget, audit_file
from workbench.verify.ordering.contents import Fill, SimulatedBuffer, place, reset
from workbench.verify.ordering.dynamic import audit_dynamic
from workbench.verify.ordering.joining import premises
from workbench.verify.ordering.polls import polls_memory, sentinels
from workbench.verify.ordering.runs import DynamicLaunch
from workbench.verify.ordering.schedules import PLAIN, Schedule
from workbench.verify.report import Verdict


def sized(**roles: str) -> str:
    """The snippets' contract with sizes, so that the kernel is run."""
    return contract(pdl=False, **roles).replace("role =", "bytes = 4096\nrole =")


def audited(folder: Path, body: str, terms: str | None = None, declare: str = DECLARE) -> AuditTarget:
    (folder / "k.ptx").write_text(ptx(body, declare=declare))
    (folder / "k.toml").write_text(terms if terms is not None else sized())
    (target,) = audit_file(folder / "k.ptx", folder / "k.toml").targets
    return target


def dynamic(target: AuditTarget) -> list[str]:
    return [f.rule for f in target.findings if "schedule: seed" in f.message]


def test_a_kernel_is_run_and_the_assumptions_say_so(tmp_path: Path) -> None:
    target = audited(tmp_path, LOAD_X + STORE)
    assert not target.findings
    assert "run in the simulator on invented data under" in target.assumptions[-1]


def test_a_contract_without_sizes_is_not_run_and_the_assumptions_say_why(tmp_path: Path) -> None:
    target = audited(tmp_path, LOAD_X + STORE, contract(pdl=False))
    assert (
        "not run in the simulator: the contract does not say how many bytes 'x' has" in target.assumptions[-1]
    )


def test_a_finding_prints_its_schedule_and_seed(tmp_path: Path) -> None:
    target = audited(tmp_path, "ld.global.f32 %f1, [%rd5+4096];" + STORE)
    assert dynamic(target) == ["out-of-bounds"]
    assert "(schedule: seed 0, lockstep)" in target.findings[0].message


@pytest.mark.parametrize("role", ["activation", "metadata", "weight", "state"])
def test_what_invented_contents_cause_is_not_judged(tmp_path: Path, role: str) -> None:
    index = "ld.global.u32 %r10, [%rd5]; mul.wide.u32 %rd10, %r10, 4; add.s64 %rd11, %rd2, %rd10;\n"
    target = audited(tmp_path, index + "ld.global.f32 %f1, [%rd11];" + STORE, sized(x=role))
    assert dynamic(target) == []
    pointer = "mad.wide.s32 %rd10, %r1, 8, %rd1; ld.global.b64 %rd11, [%rd10];\n"
    target = audited(tmp_path, pointer + "ld.global.f32 %f1, [%rd11];" + STORE, sized(x=role))
    assert "out-of-bounds" not in dynamic(target)


def test_a_fault_behind_invented_contents_that_does_not_depend_on_them_counts(tmp_path: Path) -> None:
    target = audited(tmp_path, LOAD_X + "ld.global.f32 %f2, [%rd6+4093]; add.f32 %f1, %f1, %f2;" + STORE)
    assert dynamic(target) == ["misaligned"]


def test_an_output_that_is_updated_in_place_is_the_callers(tmp_path: Path) -> None:
    assert dynamic(audited(tmp_path, "ld.global.f32 %f1, [%rd7];" + STORE)) == []


def test_a_counter_in_scratch_is_zero_at_first(tmp_path: Path) -> None:
    body = LOAD_X + STORE + "red.global.add.u32 [%rd2], 1;"
    assert dynamic(audited(tmp_path, body, sized(w="scratch"))) == []


def test_a_loop_without_end_is_not_judged(tmp_path: Path) -> None:
    body = "L: add.u32 %r10, %r10, 1; setp.ne.u32 %p5, %r11, 99; @%p5 bra L;" + LOAD_X + STORE
    target = audited(tmp_path, "mov.u32 %r11, 0;" + body)
    assert dynamic(target) == []
    assert "judges nothing" in target.assumptions[-1]


def test_of_a_large_grid_the_first_and_last_ctas_are_run(tmp_path: Path) -> None:
    grid, nbytes = 1 << 18, (1 << 18) * 512
    terms = sized().replace("[8, 1, 1]", f"[{grid}, 1, 1]").replace("bytes = 4096", f"bytes = {nbytes}")
    target = audited(tmp_path, LOAD_X + STORE, terms)
    assert dynamic(target) == [] and "only its first and last CTAs" in " ".join(target.assumptions)
    target = audited(tmp_path, LOAD_X + STORE, terms.replace(str(nbytes), str(nbytes - 4)))
    assert dynamic(target)[0] == "out-of-bounds"
    target = audited(tmp_path, "st.shared.u32 [%r8], %r1; ld.shared.f32 %f1, [%r8];" + STORE, terms)
    assert dynamic(target) == ["race"]


@pytest.mark.parametrize(
    "name", ["stale-epoch/tile_flag_set_to_one", "pdl-early-trigger/one_warp_triggers_for_all"]
)
def test_the_verdict_is_the_same_every_time(name: str) -> None:
    path = PAIRS / f"{name}.wrong.ptx"
    first = audit_file(path, PAIRS / f"{name}.toml")
    assert first.targets[0].findings
    assert all(audit_file(path, PAIRS / f"{name}.toml") == first for _ in range(3))


def test_schedules_print_their_seed() -> None:
    assert str(PLAIN) == "seed 0, lockstep"
    assert str(Schedule(replace(PLAIN.adversary, resident=3), 7)) == "seed 7, random order, 3 CTAs resident"


def test_sentinels_and_awaited_values_are_told_apart() -> None:
    load = "L: ld.relaxed.gpu.global.b32 %r10, [%rd5];\n"
    for compare, expected in (
        ("setp.eq.b32 %p5, %r10, 0x80000000; @%p5 bra L;", {0x80000000}),
        ("setp.ne.b32 %p5, %r10, 0x80000000; @!%p5 bra L;", {0x80000000}),
        ("setp.ne.b32 %p5, %r10, 1; @%p5 bra L;", set()),
        ("setp.eq.b32 %p5, %r10, 0; @%p5 bra L;", set()),
        ("setp.ne.b32 %p5, %r10, -1; @%p5 bra D; bra L; D:", {0xFFFFFFFF}),
    ):
        kernel = parse(ptx(load + compare)).kernels[0]
        assert polls_memory(kernel)
        assert sentinels(kernel) == expected, compare


@pytest.mark.parametrize("fill", list(Fill))
def test_contents(fill: Fill) -> None:
    memory = Memory(1 << 24)
    buffers = (
        SimulatedBuffer("x", 4099, Role.ACTIVATION, align=4),
        SimulatedBuffer("f", 64, Role.FLAG),
        SimulatedBuffer("y", 64, Role.OUTPUT),
    )
    place(memory, buffers)
    assert memory.address("x") % 8 == 4
    reset(memory, buffers, fill, 0)
    x, flags = memory.view("x").copy(), memory.view("f").copy()
    assert not flags.any()
    assert memory.unwritten("y") == 64
    reset(memory, buffers, fill, 0)
    assert (memory.view("x") == x).all()
    if fill is Fill.NUMBERS:
        import ml_dtypes
        import numpy as np

        for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
            assert np.isfinite(x[:4096].view(kind).astype(np.float64)).all()


EPOCH = """
mul.wide.u32 %rd10, %r1, 4; add.s64 %rd11, %rd2, %rd10;
setp.ne.u32 %p4, %r3, 0; @%p4 bra READER;
cvt.rn.f32.u32 %f1, %r1; st.global.f32 [%rd11], %f1;
bar.sync 0;
@%p1 st.release.gpu.global.u32 [%rd1], %r9;
ret;
READER: @!%p1 bra READY;
POLL: ld.acquire.gpu.global.u32 %r10, [%rd1]; setp.lt.u32 %p5, %r10, %r9; @%p5 bra POLL;
READY: bar.sync 0;
ld.global.f32 %f1, [%rd11]; st.global.f32 [%rd7], %f1;
"""
"""CTA 0 hands data to all others behind a flag that holds the epoch, the kernel's last parameter."""


@pytest.mark.parametrize(("step", "expected"), [(0, ["stale-epoch"]), (1, [])])
def test_an_epoch_that_the_host_counts(tmp_path: Path, step: int, expected: list[str]) -> None:
    terms = sized(x="flag", w="scratch").replace("value = 1024", f"value = 1\nstep = {step}")
    target = audited(tmp_path, EPOCH, terms)
    assert dynamic(target) == expected
    assert target.verdict is (Verdict.FAIL if expected else Verdict.PASS)


@pytest.mark.parametrize(
    ("first", "expected"), [("", ["uninitialized-read"]), ('"zero"', []), ('"random"', []), ("7", [])]
)
def test_what_a_buffer_holds_before_the_first_launch(tmp_path: Path, first: str, expected: list[str]) -> None:
    terms = sized(w="scratch")
    if first:
        terms = terms.replace('role = "scratch"', f'role = "scratch"\nfirst = {first}')
    terms = terms.replace('"w"\nbytes = 4096', '"w"\nbytes = 8192')
    body = "ld.global.f32 %f1, [%rd6]; st.global.f32 [%rd6+4096], %f1;" + STORE
    assert dynamic(audited(tmp_path, body, terms)) == expected


MEET = """
@!%p1 bra MET;
atom.add.acq_rel.gpu.global.u32 %r10, [%rd1], 1;
POLL: ld.acquire.gpu.global.u32 %r11, [%rd1]; setp.lt.u32 %p5, %r11, %r9; @%p5 bra POLL;
MET: bar.sync 0; mov.f32 %f1, 0f00000000;
"""


@pytest.mark.parametrize("ctas", [8192, 30000])
def test_a_grid_that_cannot_be_resident_is_decided_without_running_all_of_it(
    tmp_path: Path, ctas: int
) -> None:
    terms = sized(x="flag").replace("[8, 1, 1]", f"[{ctas}, 1, 1]").replace("value = 1024", f"value = {ctas}")
    terms = terms.replace('"out"\nbytes = 4096', f'"out"\nbytes = {512 * ctas}')
    start = time.process_time()
    target = audited(tmp_path, MEET + STORE, terms)
    assert "not-co-resident" in {f.rule for f in target.findings}
    assert time.process_time() - start < 30


def test_the_assumptions_say_when_the_budget_ended(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(ptx(LOAD_X + "bar.sync 0;" + STORE))
    module = parse((tmp_path / "k.ptx").read_text())
    buffers = [
        SimulatedBuffer("x", 4096, Role.ACTIVATION),
        SimulatedBuffer("w", 4096, Role.WEIGHT),
        SimulatedBuffer("out", 4096, Role.OUTPUT),
    ]

    def parameters(addresses: Mapping[str, int]) -> bytes:
        return b"".join(addresses[n].to_bytes(8, "little") for n in ("x", "w", "out")) + bytes(4)

    launch = DynamicLaunch("k", (8, 1, 1), (128, 1, 1), (1, 1, 1), 0, False, parameters)
    ran = [audit_dynamic(module, [launch], buffers, budget) for budget in (0.001, 0.02, 5.0)]
    assert ran[0].skipped is not None
    assert ran[1].spent and 1 <= len(ran[1].schedules) < len(ran[2].schedules)
    assert not ran[2].spent and ran[2].skipped is None
    text = premises(ran[1])[0]
    assert "budget of work ended" in text and str(ran[1].schedules[-1]) in text
