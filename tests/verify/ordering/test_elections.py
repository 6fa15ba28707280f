"""Which lane elect.sync elects is not promised: no verdict rests on its being lane 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.isa.values import Threads
from workbench.verify.ordering import audit_file
from workbench.verify.report import Verdict

HEAD = """.version 9.0
.target sm_103a
.address_size 64
.visible .entry k(.param .u64 .ptr .global .align 16 x, .param .u64 .ptr .global .align 16 y)
.reqntid 64, 1, 1
{
	.reg .pred %p<8>;
	.reg .b32 %r<16>;
	.reg .b64 %rd<8>;
	ld.param.b64 %rd1, [x];
	ld.param.b64 %rd2, [y];
	mov.u32 %r1, %tid.x;
	and.b32 %r2, %r1, 31;
"""
TAIL = """
	@%p2 ld.global.b32 %r5, [%rd1];
	@%p2 st.global.b32 [%rd2], %r5;
	ret;
}
"""
CONTRACT = """
[[kernel]]
grid = [1, 1, 1]
block = [64, 1, 1]
pdl = true
[[kernel.buffer]]
param = 0
name = "x"
role = "activation"
bytes = 64
[[kernel.buffer]]
param = 1
name = "y"
role = "output"
bytes = 64
"""


def audited(folder: Path, body: str) -> tuple[Verdict, list[str]]:
    (folder / "k.ptx").write_text(HEAD + body + TAIL)
    (folder / "k.toml").write_text(CONTRACT)
    document = audit_file(folder / "k.ptx", folder / "k.toml")
    return document.verdict, [f.message for t in document.targets for f in t.findings]


@pytest.mark.parametrize(
    ("leader", "mask", "lanes"),
    [
        (0, 0xFFFFFFFF, [0, 32]),
        (31, 0xFFFFFFFF, [31, 39]),
        (5, 0xFFFFFFFF, [5, 37]),
        (0, 0xF0, [4, 36]),
        (31, 0xF0, [7, 39]),
        (16, 0xF000000F, [28, 35]),
        (9, 0, []),
    ],
)
def test_one_member_of_each_warp_is_elected(leader: int, mask: int, lanes: list[int]) -> None:
    threads = Threads((40, 1, 1), leader=leader)
    found = threads.elected(threads.full(mask))
    assert found is not None
    assert [n for n in range(40) if found[n]] == lanes


def test_nothing_is_known_of_an_election_whose_mask_is_not_known() -> None:
    threads = Threads((64, 1, 1))
    assert threads.elected(None) is None
    assert threads.elected(threads.linear) is None
    assert Threads((64, 1, 1), leader=None).elected(threads.full(0xFFFFFFFF)) is None


@pytest.mark.parametrize("lane", [0, 7, 31])
def test_one_lane_that_waits_is_not_the_one_that_is_elected(tmp_path: Path, lane: int) -> None:
    body = f"""
	setp.eq.s32 %p1, %r2, {lane};
	@%p1 griddepcontrol.wait;
	elect.sync %r3|%p2, -1;"""
    verdict, messages = audited(tmp_path, body)
    assert verdict is Verdict.FAIL
    other = 31 if lane == 0 else 0
    assert all("elect.sync elects lane 31" in m for m in messages) == (other == 31), messages


@pytest.mark.parametrize(
    "body",
    [
        "elect.sync %r3|%p1, -1;\n@%p1 griddepcontrol.wait;\nelect.sync %r4|%p2, -1;",
        "setp.eq.s32 %p1, %r2, 0;\n@%p1 griddepcontrol.wait;\nbar.warp.sync -1;\nelect.sync %r4|%p2, -1;",
        "elect.sync %r3|%p1, -1;\nsetp.eq.s32 %p3, %r2, %r3;\n@%p3 griddepcontrol.wait;\nmov.pred %p2, %p1;",
        "elect.sync %r3|%p1, -1;\nmov.b32 %r4, 0;\n@%p1 mov.b32 %r4, 1;\nsetp.eq.b32 %p2, %r4, 1;\n"
        "@%p2 griddepcontrol.wait;",
    ],
    ids=["the_same_lane_each_time", "a_warp_barrier", "by_its_number", "as_cutlass_has_it"],
)
def test_the_elected_lane_is_one_and_the_same(tmp_path: Path, body: str) -> None:
    assert audited(tmp_path, body) == (Verdict.PASS, [])


def test_a_lane_that_is_neither_the_first_nor_the_last_may_be_elected(tmp_path: Path) -> None:
    body = """
	setp.eq.s32 %p1, %r2, 0;
	setp.eq.s32 %p3, %r2, 31;
	or.pred %p1, %p1, %p3;
	@%p1 griddepcontrol.wait;
	elect.sync %r3|%p2, -1;"""
    verdict, messages = audited(tmp_path, body)
    assert verdict is Verdict.FAIL
    assert all("elects lane 16" in m for m in messages)


def test_the_same_findings_come_in_the_same_order_each_time(tmp_path: Path) -> None:
    body = "setp.eq.s32 %p1, %r2, 0;\n@%p1 griddepcontrol.wait;\nelect.sync %r3|%p2, -1;"
    assert audited(tmp_path, body) == audited(tmp_path, body)
