"""Loads, stores, atomics: every width, space and operation that decode kernels use."""

from __future__ import annotations

import numpy as np

from gpu_check.probes.builder import Builder
from gpu_check.probes.operands import operands

_THREADS = 128
_WORDS = _THREADS * 8


def builders() -> list[Builder]:
    """Two families."""
    return [_loads(), _atomics()]


def _list(letter: str, count: int, first: int = 10) -> str:
    return (
        "{" + ", ".join(f"%{letter}{first + k}" for k in range(count)) + "}"
        if count > 1
        else f"%{letter}{first}"
    )


def _loads() -> Builder:
    b = Builder("loads and stores", "widths, vectors, cache hints, spaces")
    b.give("x", operands("u64", 0, _WORDS))
    kinds = [("b8", "r", 1), ("b16", "h", 2), ("b32", "r", 4), ("b64", "d", 8)]
    hints = ["", ".nc", ".L1::no_allocate", ".volatile", ".relaxed.gpu", ".acquire.gpu", ".cg", ".ca"]
    for hint in hints:
        for kind, letter, size in kinds:
            for vector in (1, 2, 4):
                if vector * size > 16 or (
                    kind == "b8" and hint.startswith((".relaxed", ".acquire")) and vector > 1
                ):
                    continue
                v = f".v{vector}" if vector > 1 else ""
                order = hint if hint in (".volatile", ".relaxed.gpu", ".acquire.gpu") else ""
                after = "" if order else hint
                form = f"ld{order}.global{after}{v}.{kind}"
                bytes_each = vector * size
                body = (
                    f"mul.wide.u32 %d1, %r1, {bytes_each};\nadd.s64 %d3, %d1, %x;\nadd.s64 %d2, %d1, %out;\n"
                    f"{form} {_list(letter, vector)}, [%d3];\nst.global{v}.{kind} [%d2], {_list(letter, vector)};"
                )
                fmt = f"u{8 * size}"
                b.entry(form, body, ("x",), [(fmt, _THREADS * vector)], block=_THREADS,
                        covers=(form, f"st.global{v}.{kind}"))  # fmt: skip
    for sign in ("u8", "s8", "u16", "s16"):
        form = f"ld.global.{sign}"
        size = int(sign[1:]) // 8
        body = (
            f"mul.wide.u32 %d1, %r1, {size};\nadd.s64 %d3, %d1, %x;\n{form} %r9, [%d3];\n"
            "mul.wide.u32 %d1, %r1, 4;\nadd.s64 %d2, %d1, %out;\nst.global.b32 [%d2], %r9;"
        )
        b.entry(f"{form} to 32 bits", body, ("x",), [("u32", _THREADS)], block=_THREADS, covers=(form,))
    for kind, letter, size in kinds:
        for vector in (1, 2, 4):
            if vector * size > 16:
                continue
            v = f".v{vector}" if vector > 1 else ""
            for space, variables in (
                ("shared", f".shared .align 16 .b8 s[{_THREADS * 16}];"),
                ("local", f".local .align 16 .b8 s[{16 * 4}];"),
            ):
                each = vector * size
                # Written by one thread and read by another in shared memory; by itself in local memory.
                there = (
                    f"xor.b32 %r5, %r0, 37;\nmul.lo.u32 %r5, %r5, {each};\nmul.lo.u32 %r4, %r0, {each};"
                    if space == "shared"
                    else f"and.b32 %r4, %r0, 3;\nmul.lo.u32 %r4, %r4, {each};\nmov.u32 %r5, %r4;"
                )
                body = (
                    f"mul.wide.u32 %d1, %r1, {each};\nadd.s64 %d3, %d1, %x;\nadd.s64 %d2, %d1, %out;\n"
                    f"mov.u32 %r6, s;\n{there}\nadd.u32 %r4, %r4, %r6;\nadd.u32 %r5, %r5, %r6;\n"
                    f"ld.global{v}.{kind} {_list(letter, vector, 20)}, [%d3];\n"
                    f"st.{space}{v}.{kind} [%r4], {_list(letter, vector, 20)};\n"
                    + ("bar.sync 0;\n" if space == "shared" else "")
                    + f"ld.{space}{v}.{kind} {_list(letter, vector, 30)}, [%r5];\n"
                    f"st.global{v}.{kind} [%d2], {_list(letter, vector, 30)};"
                )
                b.entry(f"ld.{space}{v}.{kind}, st.{space}{v}.{kind}", body, ("x",),
                        [(f"u{8 * size}", _THREADS * vector)], block=_THREADS, variables=variables)  # fmt: skip
    generic = (
        "mul.wide.u32 %d1, %r1, 4;\nadd.s64 %d3, %d1, %x;\nadd.s64 %d2, %d1, %out;\nld.b32 %r9, [%d3];\n"
        "mov.u32 %r4, s;\nshl.b32 %r5, %r0, 2;\nadd.u32 %r4, %r4, %r5;\ncvt.u64.u32 %d5, %r4;\n"
        "cvta.shared.u64 %d6, %d5;\nst.b32 [%d6], %r9;\nld.shared.b32 %r8, [%r4];\nisspacep.shared %p1, %d6;\n"
        "selp.u32 %r7, 1, 0, %p1;\nadd.u32 %r8, %r8, %r7;\nst.b32 [%d2], %r8;"
    )
    b.entry("generic ld, st, cvta, isspacep", generic, ("x",), [("u32", _THREADS)], block=_THREADS,
            variables=f".shared .align 16 .b8 s[{4 * _THREADS}];")  # fmt: skip
    return b


def _atomics() -> Builder:
    """Values are chosen so that the result does not depend on the order; returns are used where it does not."""
    b = Builder("atomics", "atom and red in global and shared memory, results that no order changes")
    rng = np.random.default_rng(77)
    b.give("x32", rng.integers(0, 1 << 32, _THREADS * 4, np.uint32))
    b.give("x64", rng.integers(0, 1 << 63, _THREADS * 4, np.uint64))
    small = rng.integers(-64, 65, _THREADS * 4)
    b.give("xf32", small.astype(np.float32))
    b.give("xf64", small.astype(np.float64))
    halves = rng.integers(-3, 4, _THREADS * 8).astype(np.float16)
    b.give("xf16x2", halves)
    b.give("xbf16x2", (halves.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    cases: list[tuple[str, str, str, str]] = []
    for op in ("add", "min", "max"):
        cases += [(op, t, f"x{t[1:]}", t) for t in ("u32", "s32", "u64", "s64") if (op, t) != ("add", "s64")]
    for op in ("and", "or", "xor"):
        cases += [(op, t, f"x{t[1:]}", t) for t in ("b32", "b64")]
    cases += [("add", "f32", "xf32", "f32"), ("add", "f64", "xf64", "f64")]
    cases += [("add.noftz", "f16x2", "xf16x2", "f16x2"), ("add.noftz", "bf16x2", "xbf16x2", "bf16x2")]
    cases += [("inc", "u32", "x32", "u32"), ("dec", "u32", "x32", "u32")]
    size_of = {"u": 4, "s": 4, "b": 4, "f": 4}
    for op, kind, source, _ in cases:
        size = 8 if kind.endswith("64") else size_of[kind[0]]
        letter = {("f", 4): "r", ("f", 8): "d"}.get((kind[0], size), "d" if size == 8 else "r")
        register = (
            f"%{letter}20" if not kind.startswith("f") or "x2" in kind else ("%fd1" if size == 8 else "%f1")
        )
        load = f"ld.global.{'f' if register.startswith('%f') else 'b'}{8 * size} {register}, [%d3];"
        limit = "mov.u32 %r20, 300;\n" if op in ("inc", "dec") else ""
        fmt = {"f32": "f32", "f64": "f64", "f16x2": "f16", "bf16x2": "bf16"}.get(kind, f"u{8 * size}")
        elements = 16 * (2 if "x2" in kind else 1)
        for space in ("global", "shared"):
            if space == "shared" and "x2" in kind:
                continue
            for what in ("atom", "red"):
                form = f"{what}.{space}.{op}.{kind}".replace(".add.noftz", ".add.noftz")
                result = f"{ {'r': '%r30', 'd': '%d30'}[letter] if not register.startswith('%f') else ('%fd2' if size == 8 else '%f2') }, "
                target = "[%d6]" if space == "global" else "[%r6]"
                body = (
                    # 16 cells, eight threads a cell; the cells are zeroed by the kernel.
                    f"mul.wide.u32 %d1, %r0, {size};\nadd.s64 %d3, %d1, %{source};\n{load}\n{limit}"
                    f"and.b32 %r5, %r0, 15;\nmul.wide.u32 %d4, %r5, {size};\nadd.s64 %d6, %d4, %out;\n"
                    f"mov.u32 %r7, s;\nmad.lo.u32 %r6, %r5, {size}, %r7;\nmov.b64 %d7, 0;\nmov.u32 %r8, 0;\n"
                    "setp.ge.u32 %p1, %r0, 16;\n@%p1 bra READY;\n"
                    f"st.{space}.b{8 * size} {target}, {'%d7' if size == 8 else '%r8'};\nREADY:\nbar.sync 0;\n"
                    f"{form} {result if what == 'atom' else ''}{target}, {register};\nbar.sync 0;\n"
                )  # fmt: skip
                if space == "shared":
                    body += (
                        f"@%p1 bra DONE;\nld.shared.b{8 * size} {'%d8' if size == 8 else '%r9'}, [%r6];\n"
                        f"st.global.b{8 * size} [%d6], {'%d8' if size == 8 else '%r9'};\nDONE:"
                    )
                b.entry(form, body, (source,), [(fmt, elements)], block=_THREADS, covers=(form,),
                        variables=".shared .align 16 .b8 s[256];")  # fmt: skip
    _returns(b)
    return b


def _returns(b: Builder) -> None:
    """What atom returns, one thread a cell; cas and exch; vector reductions."""
    for op, body, kind in (
        ("atom.global.exch.b32", "atom.global.exch.b32 %r9, [%d6], %r20;", "b32"),
        ("atom.global.cas.b32", "atom.global.cas.b32 %r9, [%d6], %r21, %r20;", "b32"),
        ("atom.global.add.u32", "atom.global.add.u32 %r9, [%d6], %r20;", "b32"),
        ("atom.acq_rel.gpu.global.add.u32", "atom.acq_rel.gpu.global.add.u32 %r9, [%d6], %r20;", "b32"),
        ("atom.global.inc.u32", "atom.global.inc.u32 %r9, [%d6], 12;", "b32"),
        ("atom.global.dec.u32", "atom.global.dec.u32 %r9, [%d6], 12;", "b32"),
        ("atom.global.max.s32", "atom.global.max.s32 %r9, [%d6], %r20;", "b32"),
        ("atom.global.exch.b64", "atom.global.exch.b64 %d9, [%d6], %d20;", "b64"),
        ("atom.global.cas.b64", "atom.global.cas.b64 %d9, [%d6], %d21, %d20;", "b64"),
    ):
        size = int(kind[1:]) // 8
        letter = "d" if size == 8 else "r"
        text = (
            f"mul.wide.u32 %d1, %r0, {size};\nadd.s64 %d3, %d1, %x{8 * size};\nadd.s64 %d6, %d1, %out;\n"
            f"add.s64 %d8, %d1, %out1;\nld.global.{kind} %{letter}20, [%d3];\n"
            # Every other cell holds what cas compares with.
            f"and.b32 %r5, %r0, 1;\nmov.u32 %r21, 3;\nadd.u32 %r22, %r5, 2;\nmov.b64 %d21, 3;\ncvt.u64.u32 %d22, %r22;\n"
            f"st.global.{kind} [%d6], %{letter}22;\n{body}\nst.global.{kind} [%d8], %{letter}9;"
        )
        fmt = f"u{8 * size}"
        b.entry(f"{op} returned", text, (f"x{8 * size}",), [(fmt, _THREADS), (fmt, _THREADS)], block=_THREADS,
                names=(f"{op} left", f"{op} returned"), covers=(op,))  # fmt: skip
    for form in ("red.global.add.v4.f32", "red.global.add.v2.f32"):
        n = int(form.split(".v")[1][0])
        names = ", ".join(f"%f{k}" for k in range(1, n + 1))
        body = (
            f"and.b32 %r5, %r0, 7;\nmul.wide.u32 %d1, %r0, {4 * n};\nadd.s64 %d3, %d1, %xf32;\n"
            f"mul.wide.u32 %d4, %r5, {4 * n};\nadd.s64 %d6, %d4, %out;\nsetp.ge.u32 %p1, %r0, 8;\n"
            + "mov.f32 %f9, 0f00000000;\n@%p1 bra READY;\n"
            + "".join(f"st.global.f32 [%d6+{4 * k}], %f9;\n" for k in range(n))
            + f"READY:\nbar.sync 0;\nld.global.v{n}.f32 {{{names}}}, [%d3];\n{form} [%d6], {{{names}}};"
        )
        b.entry(form, body, ("xf32",), [("f32", 8 * n)], block=_THREADS, covers=(form,))
