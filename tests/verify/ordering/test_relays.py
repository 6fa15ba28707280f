"""A wait that flags hand on, within a kernel and from one that overlaps; see also pairs/*/relay_*."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.verify.ordering import audit_file

CHAIN = """
.version 9.0
.target sm_103a
.address_size 64
.visible .entry producer(.param .u64 x, .param .u64 mid, .param .u64 flag)
.reqntid 128, 1, 1
{
	.reg .pred %p<8>;
	.reg .b32 %r<32>;
	.reg .b64 %rd<32>;
	ld.param.u64 %rd1, [x];
	ld.param.u64 %rd2, [mid];
	ld.param.u64 %rd3, [flag];
	griddepcontrol.launch_dependents;
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mad.lo.u32 %r3, %r2, 128, %r1;
	mul.wide.u32 %rd10, %r3, 4;
	add.u64 %rd11, %rd1, %rd10;
	add.u64 %rd12, %rd2, %rd10;
	griddepcontrol.wait;
	ld.global.u32 %r5, [%rd11];
	st.global.u32 [%rd12], %r5;
	bar.sync 0;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra DONE;
	red.release.gpu.global.add.u32 [%rd3], 1;
DONE:
	ret;
}
.visible .entry consumer(.param .u64 mid, .param .u64 flag, .param .u64 out, .param .u32 epoch)
.reqntid 128, 1, 1
{
	.reg .pred %p<8>;
	.reg .b32 %r<32>;
	.reg .b64 %rd<32>;
	ld.param.u64 %rd1, [mid];
	ld.param.u64 %rd2, [flag];
	ld.param.u64 %rd3, [out];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mad.lo.u32 %r3, %r2, 128, %r1;
	mul.wide.u32 %rd10, %r3, 4;
	add.u64 %rd11, %rd1, %rd10;
	add.u64 %rd12, %rd3, %rd10;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra MEET;
POLL:
	ld.acquire.gpu.global.u32 %r4, [%rd2];
	ld.param.u32 %r9, [epoch];
	setp.lt.u32 %p2, %r4, %r9;
	@%p2 bra POLL;
MEET:
	bar.sync 0;
	ld.global.u32 %r5, [%rd11];
	griddepcontrol.wait;
	st.global.u32 [%rd12], %r5;
	@%p1 bra DONE;
	setp.ne.u32 %p3, %r2, 0;
	@%p3 bra DONE;
DONE:
	ret;
}
"""
CONTRACT = """
[[kernel]]
name = "producer"
grid = [4, 1, 1]
block = [128, 1, 1]
pdl = true
[[kernel.buffer]]
param = 0
name = "x"
role = "activation"
bytes = 2048
[[kernel.buffer]]
param = 1
name = "mid"
role = "scratch"
bytes = 2048
[[kernel.buffer]]
param = 2
name = "flag"
role = "flag"
bytes = 4
[[kernel]]
name = "consumer"
grid = [4, 1, 1]
block = [128, 1, 1]
pdl = true
[[kernel.buffer]]
param = 0
name = "mid"
role = "scratch"
bytes = 2048
[[kernel.buffer]]
param = 1
name = "flag"
role = "flag"
bytes = 4
[[kernel.buffer]]
param = 2
name = "out"
role = "output"
bytes = 2048
[[kernel.scalar]]
param = 3
value = 4
step = 4
"""


def audited(folder: Path, text: str) -> tuple[str, set[str]]:
    (folder / "k.ptx").write_text(text)
    (folder / "k.toml").write_text(CONTRACT)
    document = audit_file(folder / "k.ptx", folder / "k.toml")
    return document.verdict.value, {f.rule for t in document.targets for f in t.findings}


def test_a_flag_of_the_kernel_before_may_order_what_stands_before_the_wait(tmp_path: Path) -> None:
    """The runs find nothing; that no run could is not known, so that it is neither an error nor a pass."""
    assert audited(tmp_path, CHAIN) == ("unknown", {"undecided"})


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("red.release.gpu.global.add.u32", "red.relaxed.gpu.global.add.u32", "flag-without-release"),
        ("ld.acquire.gpu", "ld.relaxed.gpu", "flag-without-acquire"),
        ("\tbar.sync 0;\n\tsetp.ne.u32 %p1", "\tsetp.ne.u32 %p1", "flag-without-release"),
    ],
)
def test_a_flag_that_orders_nothing_is_found(tmp_path: Path, old: str, new: str, rule: str) -> None:
    assert old in CHAIN
    verdict, rules = audited(tmp_path, CHAIN.replace(old, new))
    assert verdict == "fail" and {rule, "pdl-load-before-wait"} <= rules
