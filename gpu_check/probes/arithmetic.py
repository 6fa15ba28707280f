"""Every arithmetic form that the simulator executes and that sm_90a has, element by element."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from gpu_check.probes.builder import Builder
from gpu_check.probes.operands import WIDTH, operands
from workbench.simulator.arith import Form, forms

COUNT = 2048
"""Elements of an operand."""
_FEWER = {"cvt": 1024}
"""Elements of a form, where its opcode has very many."""
_BLOCK = 256
_TABLES = (0x96, 0xE8, 0xCA, 0x1B, 0x80, 0xFE, 0x3C, 0x55)
_SELECTORS = (0x5410, 0x7632, 0x0123, 0x4321, 0xFB51, 0x8888)
_FORMAT = {"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64", "f16x2": "f16", "bf16x2": "bf16"}
_EVERY = {"set": 32, "setp": 4}
"""Of these opcodes every n-th form, and all plain comparisons; the rest differ in types and combinations."""

GROUPS = {
    "integer": "integer arithmetic, bit fields, shifts, logic, carries",
    "compare": "comparisons, selection, tests of numbers",
    "float": "f32 and f64: rounding modes, subnormals, saturation, fma",
    "half": "f16 and bf16, scalar and packed",
    "convert": "conversions between all formats, rounding modes, saturation",
    "approximate": "ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, division to full range",
}


def builders(wanted: Collection[str] | None = None) -> Iterator[Builder]:
    """One family a group, or those that are wanted."""
    made = {n: Builder(n, doc) for n, doc in GROUPS.items() if wanted is None or n in wanted}
    seen: dict[str, int] = {}
    for form in forms():
        opcode = form.text.split(" ")[0].split(".")[0]
        seen[opcode] = seen.get(opcode, 0) + 1
        if (seen[opcode] % _EVERY.get(opcode, 1) and not _plain(form)) or not _known(form):
            continue
        builder = made.get(_group(opcode, form))
        if builder is not None:
            for text in _texts(form):
                _add(builder, form, text)
            if _range(form.text, form.operand_types[-1], 1) == "nonzero":
                _add(builder, form, form.text, by_zero=True)
    yield from made.values()


def _plain(form: Form) -> bool:
    """`setp` of one comparison, no flush, one result."""
    return (
        form.text.startswith("setp.")
        and len(form.text.split(" ")[0].split(".")) == 3
        and "|" not in form.text
    )


def _known(form: Form) -> bool:
    return all(t in WIDTH for t in (*form.operand_types, *form.result_types)) and "{" not in form.text


def _group(opcode: str, form: Form) -> str:
    if not form.semantics.exact:
        return "approximate"
    if opcode in ("cvt",):
        return "convert"
    if opcode in ("set", "setp", "selp", "slct", "testp"):
        return "compare"
    kinds = {t.removesuffix("x2") for t in form.operand_types}
    if kinds & {"f16", "bf16"}:
        return "half"
    return "float" if kinds & {"f32", "f64"} else "integer"


def _texts(form: Form) -> list[str]:
    """The form, once for each immediate that is tried."""
    if form.immediate_required:
        return [form.text.replace("0x96", hex(table)) for table in _TABLES]
    if form.text == "prmt.b32 d, a, b, c":
        return [form.text, *(f"prmt.b32 d, a, b, {s:#x}" for s in _SELECTORS)]
    return [form.text]


def _register(kind: str, name: str) -> str:
    return f"%{ {8: 'r', 16: 'h', 32: 'r', 64: 'd'}[WIDTH[kind]] }{name}"


def _add(builder: Builder, form: Form, text: str, by_zero: bool = False) -> None:
    opcode, rest = text.split(" ", 1)
    destination, *sources = [o.strip() for o in rest.split(",")]
    letters = [s for s in sources if re.fullmatch(r"[a-e]", s)]
    types = list(form.operand_types)
    semantics = form.semantics
    carry = types.pop() if semantics.carry_in else None
    if len(letters) != len(types):
        types = [t for i, t in enumerate(types) if sources[i] in letters]
    places: dict[str, str] = {}
    body = []
    takes = []
    for n, (letter, kind) in enumerate(zip(letters, types, strict=True)):
        within = "zero" if by_zero and n else _range(opcode, kind, n)
        takes.append(_input(builder, kind, n, within))
        body.append(_load(kind, takes[-1], n))
        places[letter] = f"%p{n + 1}" if kind == "pred" else _register(kind, str(n + 10))
    if carry is not None:
        n = len(letters)
        takes.append(_input(builder, "pred", n))
        body.append(_load("pred", takes[-1], n))
        body.append(f"selp.u32 %r250, 1, 0, %p{n + 1};\nadd.cc.u32 %r251, %r250, 0xffffffff;")
    results = list(form.result_types)
    if semantics.carry_out:
        results.pop()
    targets = []
    for n, kind in enumerate(results):
        targets.append(f"%p{n + 20}" if kind == "pred" else _register(kind, str(n + 20)))
    if len(destination.split("|")) != len(targets):
        return
    spelled = ", ".join(places.get(s, s) for s in sources)
    body.append(f"{opcode} {'|'.join(targets)}, {spelled};")
    if semantics.carry_out:
        body.append("addc.u32 %r252, 0, 0;")
    stores, outputs = [], []
    for n, kind in enumerate(results):
        outputs.append(("u8" if kind == "pred" else _FORMAT.get(kind, f"u{WIDTH[kind]}"), kind))
        stores.append(_store(kind, targets[n], n))
    if semantics.carry_out:
        outputs.append(("u32", "u32"))
        stores.append(_store("u32", "%r252", len(results)))
    count = _FEWER.get(opcode.split(".")[0], COUNT)
    counted = [
        (fmt, count * (2 if kind.endswith("x2") and fmt in _FORMAT.values() else 1)) for fmt, kind in outputs
    ]
    label = text if any(c.isdigit() for s in sources for c in s) else opcode
    label += " by zero" if by_zero else ""
    names = [
        label,
        *(f"{label} ({'carry' if semantics.carry_out else 'second result'})",) * (len(counted) - 1),
    ]
    builder.entry(
        label,
        "\n".join((*body, *stores)),
        takes,
        counted,
        names=names,
        grid=(count // _BLOCK, 1, 1),
        block=_BLOCK,
        covers=(opcode,),
        part={
            "exact": semantics.exact and not by_zero,
            "any_nan": not semantics.canonical,
            "bound": "the ISA leaves it open" if by_zero else _bound(form),
            "ulp": semantics.tolerance_ulp,
            "relative": semantics.tolerance_relative,
            "absolute": semantics.tolerance_absolute,
        },
    )


def _range(opcode: str, kind: str, position: int) -> str:
    """Which operands of its type an instruction is defined for; empty if all."""
    first = opcode.split(".")[0]
    if first in ("sin", "cos"):
        return "angle"  # the ISA's bound is for -pi to pi
    if first in ("div", "rem") and kind[0] in "us" and position == 1:
        return "nonzero"
    if first == "fns" and position:
        return "lane" if position == 1 else "near"
    return ""


def _input(builder: Builder, kind: str, position: int, within: str = "") -> str:
    name = f"{within or 'any'}_{kind}_{position}"
    if name not in builder.inputs:
        builder.give(name, operands(kind, position, COUNT, within))
    return name


def _load(kind: str, name: str, n: int) -> str:
    width = WIDTH[kind]
    address = f"mul.wide.u32 %d1, %r1, {width // 8};\nadd.s64 %d1, %d1, %{name};\n"
    if kind == "pred":
        return address + f"ld.global.u8 %r{n + 10}, [%d1];\nsetp.ne.u32 %p{n + 1}, %r{n + 10}, 0;"
    letter = "s" if kind[0] == "s" and width == 8 else ("u" if width == 8 else "b")
    return address + f"ld.global.{letter}{width} {_register(kind, str(n + 10))}, [%d1];"


def _store(kind: str, register: str, n: int) -> str:
    out = f"%out{n or ''}"
    if kind == "pred":
        return f"selp.u32 %r253, 1, 0, {register};\ncvt.u64.u32 %d2, %r1;\nadd.s64 %d2, %d2, {out};\n" + (
            "st.global.u8 [%d2], %r253;"
        )
    width = WIDTH[kind]
    letter = "u" if width == 8 else "b"
    address = f"mul.wide.u32 %d2, %r1, {width // 8};\nadd.s64 %d2, %d2, {out};\n"
    return address + f"st.global.{letter}{width} [%d2], {register};"


def _bound(form: Form) -> str:
    s = form.semantics
    if s.exact:
        return ""
    parts = [
        f"{s.tolerance_ulp:g} ulp" if s.tolerance_ulp is not None else "",
        f"2^{_log2(s.tolerance_relative)} relative" if s.tolerance_relative else "",
        f"2^{_log2(s.tolerance_absolute)} absolute" if s.tolerance_absolute else "",
    ]
    return ", ".join(p for p in parts if p)


def _log2(value: float) -> str:
    import math

    return f"{math.log2(value):.1f}".removesuffix(".0")
