"""Warp instructions: shuffles, votes, matches, reductions, election; and the special registers."""

from __future__ import annotations

import numpy as np

from gpu_check.probes.builder import Builder
from gpu_check.probes.operands import operands

_THREADS = 256
_GRID = (4, 1, 1)
_COUNT = 4 * _THREADS
_SLOT = "mul.wide.u32 %d2, %r1, 4;\nadd.s64 %d2, %d2, %out;"
_X = "mul.wide.u32 %d1, %r1, 4;\nadd.s64 %d3, %d1, %x;\nld.global.b32 %r2, [%d3];"
_BOTH = _X + "\nadd.s64 %d4, %d1, %y;\nld.global.b32 %r3, [%d4];"


def builders() -> list[Builder]:
    """Three families."""
    return [_warp(), _special(), _control()]


def _warp() -> Builder:
    b = Builder("warp", "shuffles, votes, matches, redux, elect")
    rng = np.random.default_rng(31)
    b.give("x", operands("u32", 0, _COUNT))
    b.give("y", operands("u32", 1, _COUNT))
    b.give("few", rng.integers(0, 4, _COUNT, np.uint32))

    def add(form: str, body: str, inputs: tuple[str, ...] = ("x", "y"), kind: str = "u32") -> None:
        b.entry(form, f"{body}\n{_SLOT}\nst.global.b32 [%d2], %r9;", inputs, [(kind, _COUNT)], grid=_GRID,
                block=_THREADS, covers=(form,))  # fmt: skip

    for mode in ("up", "down", "bfly", "idx"):
        for width in (32, 16, 8):
            clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
            body = f"{_BOTH}\nand.b32 %r4, %r3, 31;\n"
            body += f"shfl.sync.{mode}.b32 %r9|%p1, %r2, %r4, {clamp}, 0xffffffff;\n"
            # The value of an out-of-range source is the lane's own; the predicate goes into the result.
            body += "selp.u32 %r5, 0x9e3779b9, 0, %p1;\nxor.b32 %r9, %r9, %r5;"
            form = f"shfl.sync.{mode}.b32"
            b.entry(
                f"{form} width {width}",
                f"{body}\n{_SLOT}\nst.global.b32 [%d2], %r9;",
                ("x", "y"),
                [("u32", _COUNT)],
                grid=_GRID,
                block=_THREADS,
                covers=(form,),
            )
    few = _X.replace("%x", "%few")
    add(
        "vote.sync.ballot.b32",
        f"{few}\nsetp.eq.u32 %p1, %r2, 1;\nvote.sync.ballot.b32 %r9, %p1, 0xffffffff;",
        ("few",),
    )
    for mode in ("all", "any", "uni"):
        body = f"{few}\nsetp.lt.u32 %p1, %r2, 3;\nvote.sync.{mode}.pred %p2, %p1, 0xffffffff;\nselp.u32 %r9, 1, 0, %p2;"
        add(f"vote.sync.{mode}.pred", body, ("few",))
    add("match.any.sync.b32", f"{few}\nmatch.any.sync.b32 %r9, %r2, 0xffffffff;", ("few",))
    add(
        "match.any.sync.b64",
        f"{few}\ncvt.u64.u32 %d5, %r2;\nshl.b64 %d5, %d5, 33;\nmatch.any.sync.b64 %r9, %d5, 0xffffffff;",
        ("few",),
    )
    body = f"{few}\nshr.u32 %r3, %r1, 7;\nmatch.all.sync.b32 %r9|%p1, %r3, 0xffffffff;\n"
    add("match.all.sync.b32", body + "selp.u32 %r4, 0, 5, %p1;\nadd.u32 %r9, %r9, %r4;", ("few",))
    for op, types in {
        "add": ("u32", "s32"), "min": ("u32", "s32"), "max": ("u32", "s32"), "and": ("b32",), "or": ("b32",),
        "xor": ("b32",),
    }.items():  # fmt: skip
        for kind in types:
            add(f"redux.sync.{op}.{kind}", f"{_X}\nredux.sync.{op}.{kind} %r9, %r2, 0xffffffff;", ("x",))
            half = (
                f"{_X}\nand.b32 %r4, %r0, 1;\nsetp.eq.u32 %p1, %r4, 0;\nmov.u32 %r9, 7;\n"
                f"@%p1 redux.sync.{op}.{kind} %r9, %r2, 0x55555555;"
            )
            b.entry(
                f"redux.sync.{op}.{kind} of half a warp",
                f"{half}\n{_SLOT}\nst.global.b32 [%d2], %r9;",
                ("x",),
                [("u32", _COUNT)],
                grid=_GRID,
                block=_THREADS,
                covers=(f"redux.sync.{op}.{kind}",),
            )
    b.entry(
        "elect.sync",
        "elect.sync %r9|%p1, 0xffffffff;\nselp.u32 %r5, 256, 0, %p1;\nadd.u32 %r9, %r9, %r5;\n"
        f"{_SLOT}\nst.global.b32 [%d2], %r9;",
        (),
        [("u32", _COUNT)],
        grid=_GRID,
        block=_THREADS,
        covers=("elect.sync",),
        part={"exact": False, "bound": "which lane is elected is the hardware's choice"},
    )
    add(
        "bar.warp.sync",
        f"{_X}\nbar.warp.sync 0xffffffff;\nactivemask.b32 %r9;\nxor.b32 %r9, %r9, %r2;",
        ("x",),
    )
    reduce = f"{_X}\nsetp.gt.s32 %p1, %r2, 0;\nBARRIER\n"
    for op, text in {
        "popc.u32": "barrier.sync.aligned 0;\nbar.red.popc.u32 %r9, 1, %p1;",
        "and.pred": "bar.red.and.pred %p2, 1, %p1;\nselp.u32 %r9, 1, 0, %p2;",
        "or.pred": "bar.red.or.pred %p2, 1, %p1;\nselp.u32 %r9, 1, 0, %p2;",
    }.items():
        add(f"bar.red.{op}", reduce.replace("BARRIER", text), ("x",))
    return b


def _special() -> Builder:
    b = Builder("special registers", "who a thread is, in one and in three dimensions")
    names = (
        "%tid.x", "%ctaid.x", "%ctaid.y", "%nctaid.x", "%nctaid.y", "%ntid.x", "%laneid", "%lanemask_eq",
        "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clusterid.x", "%cluster_ctaid.x",
        "%cluster_ctarank", "%nclusterid.x", "%cluster_nctaid.x", "%cluster_nctarank", "%dynamic_smem_size",
    )  # fmt: skip
    threads, grid = 96, (4, 2, 1)
    place = (
        "mov.u32 %r5, %ctaid.y;\nmov.u32 %r6, %nctaid.x;\nmad.lo.u32 %r5, %r5, %r6, %r298;\n"
        "mad.lo.u32 %r1, %r5, %r299, %r0;\n" + _SLOT
    )
    for name in names:
        b.entry(
            name,
            f"{place}\nmov.u32 %r9, {name};\nst.global.b32 [%d2], %r9;",
            (),
            [("u32", threads * 8)],
            grid=grid,
            block=threads,
            cluster=(2, 1, 1),
            smem=1024,
            covers=("mov.u32",),
        )
    return b


def _control() -> Builder:
    """Lanes that part and meet again, early returns, moves that pack and unpack."""
    b = Builder("control flow", "divergent branches and loops, early returns, moves")
    b.give("x", operands("u32", 2, _COUNT))
    loop = (
        f"{_X}\nand.b32 %r2, %r2, 0xffff;\nadd.u32 %r2, %r2, 1;\nmov.u32 %r9, 0;\nLOOP:\n"
        "setp.eq.u32 %p1, %r2, 1;\n@%p1 bra DONE;\nand.b32 %r4, %r2, 1;\nsetp.eq.u32 %p2, %r4, 0;\n@%p2 bra EVEN;\n"
        "mad.lo.u32 %r2, %r2, 3, 1;\nbra NEXT;\nEVEN:\nshr.u32 %r2, %r2, 1;\nNEXT:\nadd.u32 %r9, %r9, 1;\n"
        "bra.uni LOOP;\nDONE:"
    )
    early = f"{_X}\nmov.u32 %r9, 7;\n{_SLOT}\nst.global.b32 [%d2], %r9;\nsetp.lt.s32 %p1, %r2, 0;\n@%p1 ret;\nmov.b32 %r9, %r2;"
    moves = (
        f"{_X}\nmov.b32 {{%h1, %h2}}, %r2;\nmov.b16 %h3, %h1;\nmov.b32 %r3, {{%h2, %h3}};\nmov.b64 %d5, {{%r3, %r2}};\n"
        "mov.b64 %d6, %d5;\nmov.b64 {%r5, %r6}, %d6;\nmov.f32 %f1, 0f3fc00000;\nmov.b32 %r7, %f1;\nmov.pred %p3, 1;\n"
        "selp.b32 %r8, %r5, %r6, %p3;\nxor.b32 %r9, %r8, %r7;\nmov.u32 %r4, 0x1234;\nxor.b32 %r9, %r9, %r4;"
    )
    for name, body in (("loops of different lengths", loop), ("early return", early), ("moves", moves)):
        b.entry(name, f"{body}\n{_SLOT}\nst.global.b32 [%d2], %r9;", ("x",), [("u32", _COUNT)], grid=_GRID,
                block=_THREADS)  # fmt: skip
    return b
