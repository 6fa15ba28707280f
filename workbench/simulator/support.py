"""Which instructions the simulator executes, found by translating one example of each form.

    python -m workbench.simulator.support > docs/support.md

The examples are spelled out here; what becomes of them is asked of the code.
"""

from __future__ import annotations

import re
import sys

from workbench.isa.ptx import parse
from workbench.isa.ptx.dataflow import writes
from workbench.isa.ptx.lexer import PtxSyntaxError
from workbench.simulator.arith import forms
from workbench.simulator.codegen import compile_kernel
from workbench.simulator.program import UnsupportedInstruction

_HEAD = """.version 9.2
.target sm_103a
.address_size 64
.shared .align 128 .b8 smem[4096];
.visible .entry k(.param .u64 x)
{
.reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .f64 %fd<20>; .reg .b64 %d<20>;
.reg .b8 %c<9>; .reg .b128 %q<5>;
"""
_R4, _R8 = "{%r1, %r2, %r3, %r4}", "{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}"
_F4 = "{%f1, %f2, %f3, %f4}"


def _numbers(letter: str, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{k}" for k in range(1, count + 1)) + "}"


FAMILIES: dict[str, tuple[str, ...]] = {
    "Loads and stores": (
        "ld.global.u32 %r1, [%d1];",
        "ld.global.nc.v4.f32 " + _F4 + ", [%d1];",
        "ld.global.v8.f32 " + _numbers("f", 8) + ", [%d1];",
        "ld.global.b128 %q1, [%d3];",
        "ld.volatile.global.v4.u32 " + _R4 + ", [%d1];",
        "ld.relaxed.gpu.global.u32 %r1, [%d1];",
        "ld.acquire.sys.global.u32 %r1, [%d1];",
        "ld.mmio.relaxed.sys.global.u32 %r1, [%d1];",
        "ld.const.u32 %r1, [%d1];",
        "ld.local.u32 %r1, [%d1];",
        "ld.param.u64 %d1, [x];",
        "ld.shared.v2.f32 {%f1, %f2}, [%r1];",
        "ld.shared::cluster.u32 %r1, [%r2];",
        "ld.u32 %r1, [%d1];",
        "st.global.v4.u32 [%d1], " + _R4 + ";",
        "st.release.gpu.global.u32 [%d1], %r1;",
        "st.shared.u32 [%r1], %r2;",
        "st.shared::cluster.u32 [%r1], %r2;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];",
        "st.bulk.weak.shared::cta [%d1], 64, 0;",
    ),
    "Atomics and reductions": (
        "atom.global.add.u32 %r1, [%d1], %r2;",
        "atom.acq_rel.gpu.global.cas.b32 %r1, [%d1], %r2, %r3;",
        "atom.global.cas.b64 %d1, [%d2], %d3, %d4;",
        "atom.global.cas.b128 %q1, [%d2], %q2, %q3;",
        "atom.global.exch.b32 %r1, [%d1], %r2;",
        "atom.global.inc.u32 %r1, [%d1], %r2;",
        "atom.global.add.f32 %f1, [%d1], %f2;",
        "atom.global.add.noftz.bf16x2 %r1, [%d1], %r2;",
        "atom.global.v4.f32.add " + _F4 + ", [%d1], " + _F4 + ";",
        "atom.shared.add.u32 %r1, [%r2], %r3;",
        "atom.shared::cluster.add.u32 %r1, [%r2], %r3;",
        "red.release.gpu.global.add.u32 [%d1], %r1;",
        "red.global.add.v4.f32 [%d1], " + _F4 + ";",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3];",
    ),
    "Multicast addresses": (
        "multimem.st.relaxed.sys.global.v4.f32 [%d1], " + _F4 + ";",
        "multimem.st.weak.global.b64 [%d1], %d2;",
        "multimem.red.release.sys.global.add.u32 [%d1], %r1;",
        "multimem.red.relaxed.sys.global.add.v2.bf16x2 [%d1], {%r1, %r2};",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 " + _F4 + ", [%d1];",
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 " + _R4 + ", [%d1];",
        "multimem.ld_reduce.relaxed.sys.global.max.f16x2 %r1, [%d1];",
        "multimem.ld_reduce.relaxed.sys.global.and.b32 %r1, [%d1];",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.e4m3x4 " + _R4 + ", [%d1];",
        "multimem.cp.async.bulk.bulk_group.global.shared::cta [%d1], [%r1], 16;",
    ),
    "Addresses": (
        "cvta.to.global.u64 %d1, %d2;",
        "cvta.shared.u64 %d1, %d2;",
        "isspacep.global %p1, %d1;",
        "mapa.shared::cluster.u32 %r1, %r2, %r3;",
        "getctarank.shared::cluster.u32 %r1, %r2;",
        "createpolicy.fractional.L2::evict_last.b64 %d1, 0f3f800000;",
    ),
    "Warps": (
        "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",
        "vote.sync.ballot.b32 %r1, %p1, -1;",
        "match.any.sync.b32 %r1, %r2, -1;",
        "redux.sync.add.s32 %r1, %r2, -1;",
        "redux.sync.max.abs.f32 %f1, %f2, -1;",
        "elect.sync %r1|%p1, -1;",
        "activemask.b32 %r1;",
        "bar.warp.sync -1;",
    ),
    "Barriers and ordering": (
        "bar.sync 0;",
        "barrier.sync.aligned 1, 64;",
        "bar.arrive 1, 64;",
        "bar.red.popc.u32 %r1, 0, %p1;",
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
        "fence.acq_rel.gpu;",
        "fence.sc.sys;",
        "membar.gl;",
        "fence.proxy.async;",
        "fence.proxy.async.shared::cta;",
        "fence.proxy.alias;",
        "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;",
        "fence.mbarrier_init.release.cluster;",
        "griddepcontrol.wait;",
        "griddepcontrol.launch_dependents;",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];",
        "nanosleep.u32 100;",
        "setmaxnreg.inc.sync.aligned.u32 232;",
    ),
    "mbarrier": (
        "mbarrier.init.shared::cta.b64 [%r1], 1;",
        "mbarrier.inval.shared::cta.b64 [%r1];",
        "mbarrier.arrive.shared::cta.b64 %d1, [%r1];",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 128;",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 128;",
        "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], 128;",
        "mbarrier.arrive_drop.shared::cta.b64 %d1, [%r1];",
        "mbarrier.arrive.noComplete.shared::cta.b64 %d1, [%r1], 1;",
        "mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %d1;",
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], %r2, %r3;",
        "mbarrier.pending_count.b64 %r1, %d1;",
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];",
    ),
    "Asynchronous copies": (
        "cp.async.cg.shared.global [%r1], [%d1], 16;",
        "cp.async.ca.shared.global [%r1], [%d1], 8, %r2;",
        "cp.async.commit_group;",
        "cp.async.wait_group 1;",
        "cp.async.wait_all;",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1], [%d1], %r2, [%r3], %h1;",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], %r3, [%r4];",
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], %r2;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], %r2;",
        "cp.async.bulk.prefetch.L2.global [%d1], %r1;",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group 0;",
        "cp.async.bulk.wait_group.read 0;",
        "prefetch.global.L2 [%d1];",
    ),
    "Tensor copies": (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, "
        "{%r2, %r3}], [%r4];",
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r7];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1], [%d1, {%r2, %r3}], [%r4], %h1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 "
        "[%r1], [%d1, {%r2, %r3}], [%r4];",
        "cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4, %r5}], [%r6], {%h1, %h2};",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r7];",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r2, %r3}], [%r4];",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {%r2, %r3}], [%r4];",
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {%r2, %r3}];",
        "prefetch.tensormap [%d1];",
        "tensormap.replace.tile.global_address.global.b1024.b64 [%d1], %d2;",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%d1], [%r1], 128;",
    ),
    "Matrices in registers": (
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 " + _R4 + ", [%r5];",
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r1, %r2}, [%r5];",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5], " + _R4 + ";",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " + _F4 + ", " + _R4 + ", {%r5, %r6}, "
        "" + _F4 + ";",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " + _F4 + ", " + _R4 + ", {%r5, %r6}, "
        "" + _F4 + ";",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r7, "
        "%r8}, {%r9, %r10};",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 " + _F4 + ", " + _R4 + ", {%r5, %r6}, "
        "" + _F4 + ";",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 " + _F4 + ", " + _R4 + ", {%r5, %r6}, "
        "" + _F4 + ";",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 " + _R4 + ", {%r5, %r6, %r7, %r8}, {%r9, "
        "%r10}, " + _R4 + ";",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 " + _F4 + ", " + _R4 + ", {%r5, %r6, "
        "%r7, %r8}, " + _F4 + ", %r9, 0;",
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 " + _R8 + ", [%d1], %r9;",
    ),
    "wgmma (sm_90a)": (
        "wgmma.fence.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " + _F4 + ", %d1, %d2, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 " + _F4 + ", " + _R4 + ", %d2, 1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 " + _F4 + ", %d1, %d2, 1, 1, 1;",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 " + _F4 + ", %d1, %d2, %r9, 0, 1, 1, 1, 0, 0;",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
    ),
    "tcgen05": (
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;",
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "tcgen05.ld.sync.aligned.32x32b.x4.b32 " + _R4 + ", [%r9];",
        "tcgen05.ld.sync.aligned.16x256b.x1.b32 " + _R4 + ", [%r9];",
        "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r9], " + _R4 + ";",
        "tcgen05.wait::ld.sync.aligned;",
        "tcgen05.wait::st.sync.aligned;",
        "tcgen05.cp.cta_group::1.128x256b [%r1], %d1;",
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %d1;",
        "tcgen05.shift.cta_group::1.down [%r1];",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r3], %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::tf32 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [%r1], %d1, %d2, %r2, [%r3], "
        "[%r4], %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
        "[%r1], %d1, %d2, %r2, [%r3], [%r4], %p1;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r5], %r2, %p1;",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%r1], %h1;",
        "tcgen05.fence::before_thread_sync;",
        "tcgen05.fence::after_thread_sync;",
    ),
    "Control": (
        "bra.uni END;",
        "@%p1 bra END;",
        "trap;",
        "exit;",
        "discard.global.L2 [%d1], 128;",
        "brkpt;",
    ),
    "Textures, video, others": (
        "tex.2d.v4.f32.f32 " + _F4 + ", [%d1, {%f5, %f6}];",
        "vadd.s32.s32.s32 %r1, %r2, %r3;",
        "stacksave.u64 %d1;",
        "alloca.u64 %d1, 16;",
    ),
}  # fmt: skip


def module_text(line: str) -> str:
    """Return a module whose only kernel executes one instruction."""
    return f"{_HEAD}{line}\nEND:\nret;\n}}\n"


def status(line: str) -> tuple[str, str]:
    """Return what becomes of an instruction (`modelled`, `ordering only`, `no effect`, `refused`) and why."""

    def source(text: str) -> str:
        module = parse(module_text(text))
        program = compile_kernel(module, module.kernels[0])
        actions = [(b.action, b.instruction is not None) for b in program.blocks]
        return f"{program.source} {actions} {[s.instruction.name for s in program.context.sites]}"

    try:
        here = source(line)
    except UnsupportedInstruction as refusal:
        why = re.search(r"\(([^()]*)\)$", str(refusal))
        return "refused", why.group(1) if why else ""
    except PtxSyntaxError:
        return "refused", "not read"
    made = writes(parse(module_text(line)).kernels[0].instructions[0])
    idle = here == source("brkpt;") and (not made or line.startswith("createpolicy"))
    if "order_fence(" in here or "proxy_fence" in here or "warp_barrier(" in here:
        return "ordering only", ""
    return ("no effect" if idle else "modelled"), ""


def page() -> str:
    """Return the page docs/support.md."""
    out = [
        "# What the simulator executes",
        "",
        "Made by `python -m workbench.simulator.support`, which translates an example of each form; "
        "do not edit.",
        "",
        "*modelled*: executed, with its findings. *ordering only*: changes no value; happens-before and the "
        "async proxy\nare followed through it. *no effect*: accepted; it changes no value here, "
        "and what it"
        " orders is the\nbusiness of the ordering checks. *refused*: the simulator stops and names the"
        " instruction. Forms that differ only in cache\nhints, order and scope are not listed one by one.",
    ]
    for family, lines in FAMILIES.items():
        out += ["", f"## {family}", "", "| form | |", "|---|---|"]
        for line in lines:
            verdict, why = status(line)
            name = "@p bra" if line.startswith("@") else line.rstrip(";").split()[0]
            if sum(other.startswith(f"{name} ") for other in lines) > 1:  # only the operands tell them apart
                name = line.rstrip(";")
            out.append(f"| `{name}` | {verdict}{f': {why}' if why else ''} |")
    counts: dict[str, list[str]] = {}
    for form in forms():
        counts.setdefault(form.text.split(".")[0].split()[0], []).append(form.text)
    out += [
        "", "## Arithmetic, logic, comparison and conversion", "",
        f"{len(forms())} forms, each compared with an oracle in the tests.", "",
        "| opcode | forms | types of the first operand or result |", "|---|---|---|",
    ]  # fmt: skip
    for opcode, texts in sorted(counts.items()):
        kinds = sorted({m for t in texts for m in t.split()[0].split(".")[1:] if re.fullmatch(_KINDS, m)})
        out.append(f"| `{opcode}` | {len(texts)} | {' '.join(kinds)} |")
    return "\n".join(out) + "\n"


_KINDS = r"(b|s|u|f|bf|tf)\d+(x\d)?|pred|ue8m0x2|e\dm\dx\d"


if __name__ == "__main__":
    sys.stdout.write(page())
