"""Ordering faults that reached real projects, rebuilt small: each is named, and the mended kernel passes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from workbench import api
from workbench.verify.ordering import AuditTarget
from workbench.verify.report import Verdict
from workbench.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Case:
    """A PTX kernel with the buffers of its parameters: name to (role, bytes)."""

    body: str
    buffers: dict[str, tuple[str, int]]
    threads: int = 128
    grid: int = 4
    cluster: int = 1
    pdl: bool = False
    shared: str = ""

    def ptx(self) -> str:
        params = ", ".join(f".param .u64 {n}" for n in self.buffers)
        loads = "".join(f"ld.param.u64 %rd{i}, [{n}];\n" for i, n in enumerate(self.buffers, 1))
        return (
            ".version 9.0\n.target sm_103a\n.address_size 64\n"
            f".visible .entry k({params})\n.reqntid {self.threads}, 1, 1\n{{\n"
            ".reg .pred %p<10>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<40>;\n.reg .f32 %f<20>;\n"
            f"{self.shared}\n{loads}mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\n"
            f"mad.lo.u32 %r3, %r2, {self.threads}, %r1;\nmul.wide.u32 %rd10, %r3, 4;\n{self.body}\nret;\n}}\n"
        )

    def contract(self) -> str:
        text = f"[[kernel]]\ngrid = [{self.grid}, 1, 1]\nblock = [{self.threads}, 1, 1]\n"
        text += f"cluster = [{self.cluster}, 1, 1]\npdl = {str(self.pdl).lower()}\n"
        for n, (name, (role, nbytes)) in enumerate(self.buffers.items()):
            text += f'[[kernel.buffer]]\nparam = {n}\nname = "{name}"\nrole = "{role}"\nbytes = {nbytes}\n'
        return text

    def audit(self, folder: Path) -> AuditTarget:
        path, terms = folder / "k.ptx", folder / "k.toml"
        path.write_text(self.ptx())
        terms.write_text(self.contract())
        (target,) = api.audit(path, terms, workspace=WORKSPACE).targets
        return target

    def line_of(self, text: str) -> set[int]:
        return {n for n, line in enumerate(self.ptx().splitlines(), 1) if text in line}


def errors(target: AuditTarget) -> dict[str, set[int | None]]:
    """PTX lines of the errors, by rule."""
    found: dict[str, set[int | None]] = {}
    for f in target.findings:
        if f.severity.value == "error":
            found.setdefault(f.rule, set()).add(f.ptx_line)
    return found


X_OUT = {"x": ("activation", 2048), "out": ("output", 2048)}

# -- an mbarrier arrive at CTA scope across a cluster ----------------------------------------------

REMOTE = """
mov.u32 %r4, tile;
mov.u32 %r5, full;
mov.u32 %r6, %cluster_ctarank;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r5], 128;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.ne.u32 %p2, %r6, 0;
@%p2 bra CONSUMER;
add.u64 %rd11, %rd1, %rd10;
ld.global.f32 %f1, [%rd11];
shl.b32 %r7, %r1, 2;
add.u32 %r8, %r4, %r7;
mapa.shared::cluster.u32 %r9, %r8, 1;
st.shared::cluster.f32 [%r9], %f1;
mapa.shared::cluster.u32 %r10, %r5, 1;
mbarrier.arrive.release.SCOPE.shared::cluster.b64 _, [%r10];
bra.uni END;
CONSUMER:
WAIT
xor.b32 %r11, %r1, 127;
shl.b32 %r12, %r11, 2;
add.u32 %r13, %r4, %r12;
ld.shared.f32 %f2, [%r13];
add.u64 %rd12, %rd2, %rd10;
st.global.f32 [%rd12], %f2;
END:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
POLL = """POLL:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r5], 0;
@!%p3 bra POLL;"""


def remote(scope: str, wait: str = POLL) -> Case:
    body = REMOTE.replace("SCOPE", scope).replace("WAIT", wait)
    shared = ".shared .align 16 .b8 tile[512];\n.shared .align 8 .b64 full;"
    return Case(body, X_OUT, cluster=2, shared=shared)


def test_a_remote_arrive_at_cta_scope(tmp_path: Path) -> None:
    wrong = remote("cta")
    found = errors(wrong.audit(tmp_path))
    assert "scope-too-narrow" in found
    assert found["scope-too-narrow"] & (
        wrong.line_of("mbarrier.arrive.release.cta") | wrong.line_of("ld.shared.f32")
    )
    assert remote("cluster").audit(tmp_path).verdict is Verdict.PASS


def test_remote_data_that_nobody_waits_for(tmp_path: Path) -> None:
    wrong = remote("cluster", wait="")
    found = errors(wrong.audit(tmp_path))
    assert set(found) & {"race", "mbarrier-phase", "uninitialized-read"}
    assert any(lines & wrong.line_of("ld.shared.f32") for lines in found.values())


# -- an epilogue over an operand stage -------------------------------------------------------------

ALIASED = """
import cutlass
import cutlass.cute as cute

ARGUMENTS = {
    "a": {"shape": [4, 128], "dtype": "f32", "role": "activation"},
    "c": {"shape": [4, 128], "dtype": "f32", "role": "output"},
}


@cute.kernel
def gemm(a: cute.Tensor, c: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    smem = cutlass.utils.SmemAllocator()
    stage = smem.allocate_tensor(cutlass.Float32, cute.make_layout(128), byte_alignment=16)
    stage[tid] = a[bid, tid]
    cute.arch.sync_threads()
    acc = stage[tid] + stage[127 - tid]
    BARRIER
    stage[tid] = acc * 0.5
    cute.arch.sync_threads()
    c[bid, tid] = stage[(tid + 32) % 128]


@cute.jit
def host(a: cute.Tensor, c: cute.Tensor):
    gemm(a, c).launch(grid=[4, 1, 1], block=[128, 1, 1])
"""


def test_an_epilogue_over_the_stage_that_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "gemm.py"
    path.write_text(ALIASED.replace("    BARRIER\n", ""))
    (wrong,) = api.audit(path, workspace=WORKSPACE).targets
    found = [f for f in wrong.findings if f.rule in ("buffer-reuse", "race")]
    line = next(n for n, t in enumerate(path.read_text().splitlines(), 1) if "acc * 0.5" in t)
    assert wrong.verdict is Verdict.FAIL and f"gemm.py:{line}" in {f.source for f in found}
    path.write_text(ALIASED.replace("BARRIER", "cute.arch.sync_threads()"))
    (right,) = api.audit(path, workspace=WORKSPACE).targets
    assert right.verdict is Verdict.PASS


# -- one lane arrives for all ----------------------------------------------------------------------

ELECTED = """
mov.u32 %r4, tile;
mov.u32 %r5, full;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r5], 2;
READY:
bar.sync 0;
setp.ge.u32 %p2, %r1, 64;
@%p2 bra CONSUMER;
add.u64 %rd11, %rd1, %rd10;
ld.global.f32 %f1, [%rd11];
shl.b32 %r6, %r1, 2;
add.u32 %r7, %r4, %r6;
st.shared.f32 [%r7], %f1;
SYNC
ELECT
@%p3 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r5];
bra.uni END;
CONSUMER:
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p4, [%r5], 0;
@!%p4 bra CONSUMER;
sub.u32 %r8, 127, %r1;
shl.b32 %r9, %r8, 2;
add.u32 %r10, %r4, %r9;
ld.shared.f32 %f2, [%r10];
add.u64 %rd12, %rd2, %rd10;
st.global.f32 [%rd12], %f2;
END:
"""


@pytest.mark.parametrize(
    "elect",
    ["elect.sync _|%p3, 0xffffffff;", "and.b32 %r11, %r1, 31;\nsetp.eq.u32 %p3, %r11, 0;"],
    ids=["elect", "lane 0"],
)
def test_all_lanes_store_and_one_arrives(tmp_path: Path, elect: str) -> None:
    shared = ".shared .align 16 .b8 tile[256];\n.shared .align 8 .b64 full;"

    def case(sync: str) -> Case:
        return Case(ELECTED.replace("SYNC", sync).replace("ELECT", elect), X_OUT, shared=shared)

    assert "elected-arrive" in errors(case("").audit(tmp_path))
    assert case("bar.warp.sync -1;").audit(tmp_path).verdict is Verdict.PASS


# -- programmatic dependent launch -----------------------------------------------------------------

DEPENDENT = """
add.u64 %rd11, %rd1, %rd10;
add.u64 %rd12, %rd2, %rd10;
{0}
add.f32 %f2, %f1, 0f40000000;
st.global.f32 [%rd12], %f2;
"""
LOAD, WAIT = "ld.global.f32 %f1, [%rd11];", "griddepcontrol.wait;"


def test_the_predecessors_output_is_read_before_the_wait(tmp_path: Path) -> None:
    wrong = Case(DEPENDENT.format(f"{LOAD}\n{WAIT}"), X_OUT, pdl=True)
    target = wrong.audit(tmp_path)
    assert errors(target) == {"pdl-load-before-wait": wrong.line_of(LOAD)}
    assert all(f.sass_offset is not None for f in target.findings if f.rule == "pdl-load-before-wait")
    assert Case(DEPENDENT.format(f"{WAIT}\n{LOAD}"), X_OUT, pdl=True).audit(tmp_path).verdict is Verdict.PASS


@pytest.mark.parametrize("suffix", [".ptx", ".cubin"])
def test_the_attribute_is_on_and_the_wait_was_compiled_out(tmp_path: Path, suffix: str) -> None:
    from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
    from workbench.compile.ptxas import assemble

    for wait, rules in (("", {"pdl-wait-missing"}), (WAIT, set())):
        case = Case(DEPENDENT.format(f"{wait}\n{LOAD}"), X_OUT, pdl=True)
        path, terms = tmp_path / f"k{suffix}", tmp_path / "k.toml"
        terms.write_text(case.contract())
        made = assemble(case.ptx(), "sm_103a", DEFAULT_PTXAS_FLAGS, Limits()).cubin
        path.write_bytes(made if suffix == ".cubin" else case.ptx().encode())
        (target,) = api.audit(path, terms, workspace=WORKSPACE).targets
        assert set(errors(target)) == rules
        assert target.verdict is (Verdict.FAIL if rules else Verdict.PASS)
    ordinary = Case(DEPENDENT.format(LOAD), X_OUT)
    assert ordinary.audit(tmp_path).verdict is Verdict.PASS


ROLES = """
shr.u32 %r4, %r1, 5;
add.u64 %rd11, %rd1, %rd10;
add.u64 %rd12, %rd2, %rd10;
add.u64 %rd13, %rd3, %rd10;
setp.ne.u32 %p1, %r4, 0;
@%p1 bra NOT_FIRST;
griddepcontrol.wait;
NOT_FIRST:
{0}
setp.eq.u32 %p2, %r4, 2;
@%p2 bra WEIGHTS;
setp.eq.u32 %p3, %r4, 1;
@%p3 bra SECOND;
ld.global.f32 %f1, [%rd11];
bra.uni STORE;
SECOND:
ld.global.f32 %f1, [%rd11+4];
bra.uni STORE;
WEIGHTS:
ld.global.f32 %f1, [%rd12];
STORE:
{1}
st.global.f32 [%rd13], %f1;
"""
THREE = {"x": ("activation", 2048), "w": ("weight", 2048), "out": ("output", 2048)}


def test_only_the_roles_that_nothing_orders_are_named(tmp_path: Path) -> None:
    wrong = Case(ROLES.format("", "bar.sync 0;"), THREE, threads=96, pdl=True)
    found = errors(wrong.audit(tmp_path))
    assert found == {"pdl-load-before-wait": wrong.line_of("[%rd11+4]")}
    right = Case(ROLES.format("bar.sync 0;", ""), THREE, threads=96, pdl=True)
    assert right.audit(tmp_path).verdict is Verdict.PASS


# -- a stage of tensor memory handed back ----------------------------------------------------------

STAGE = """
mov.u32 %r4, slot;
mov.u32 %r5, empty;
setp.ge.u32 %p1, %r1, 32;
@%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
setp.ne.u32 %p2, %r1, 0;
@%p2 bra READY;
mbarrier.init.shared::cta.b64 [%r5], 128;
READY:
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %r6, [%r4];
and.b32 %r7, %r1, 96;
shl.b32 %r8, %r7, 16;
add.u32 %r9, %r6, %r8;
add.u64 %rd11, %rd1, %rd10;
add.u64 %rd12, %rd2, %rd10;
ld.global.b32 %r10, [%rd11];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r10};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r9];
WAITLD
tcgen05.fence::before_thread_sync;
mbarrier.arrive.release.cta.shared::cta.b64 _, [%r5];
HANDED:
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r5], 0;
@!%p3 bra HANDED;
tcgen05.fence::after_thread_sync;
mov.b32 %r12, 0;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r12};
tcgen05.wait::st.sync.aligned;
LATE
st.global.b32 [%rd12], %r11;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;
END:
"""


def test_a_stage_handed_back_while_it_is_read(tmp_path: Path) -> None:
    wait = "tcgen05.wait::ld.sync.aligned;"

    def case(early: str, late: str) -> Case:
        shared = ".shared .align 16 .b32 slot;\n.shared .align 8 .b64 empty;"
        return Case(STAGE.replace("WAITLD", early).replace("LATE", late), X_OUT, shared=shared)

    wrong = case("", wait).audit(tmp_path)
    assert "tcgen05-order" in errors(wrong)
    messages = " ".join(f.message + f.fix for f in wrong.findings if f.rule == "tcgen05-order")
    assert re.search(r"wait::ld", messages)
    assert case(wait, "").audit(tmp_path).verdict is Verdict.PASS
