"""SASS through nvdisasm: parsing, control flow, register contents and where addresses come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.errors import MissingToolError, WorkbenchError
from workbench.isa.ptx.model import Loc
from workbench.isa.sass import SassFunction, SassModule, SassSyntaxError, disassemble, parse_sass, tool
from workbench.isa.sass.cfg import build
from workbench.isa.sass.dataflow import reads, writes
from workbench.isa.sass.model import (
    SassAddress,
    SassConst,
    SassImm,
    SassInstruction,
    SassLabel,
    SassReg,
    SassSpecial,
)
from workbench.isa.sass.values import SassValues
from workbench.isa.values import ParameterBlock, RootKind, Threads

ARCHS = pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])


def cubin(
    body: str, arch: str = "sm_103a", params: str = ".param .u64 P, .param .u64 Q, .param .u32 n"
) -> bytes:
    version = "9.0" if arch == "sm_103a" else "8.4"
    text = (
        f'.version {version}\n.target {arch}\n.address_size 64\n.file 1 "k.py"\n'
        f".visible .entry k({params})\n.reqntid 128,1,1\n{{\n"
        ".reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<9>; .shared .b8 sm[1024];\n"
        "ld.param.b64 %rd1, [P]; ld.param.b64 %rd2, [Q]; ld.param.b32 %r9, [n]; mov.u32 %r1, %tid.x;\n"
        f"{body}\nret;\n}}\n"
    )
    return assemble(text, arch, DEFAULT_PTXAS_FLAGS, Limits()).cubin


def one(line: str) -> SassInstruction:
    text = f"\t.target\tsm_103a\n\t.section\t.text.k\n        /*0000*/    {line} ;\n"
    return parse_sass(text).functions[0].instructions[0]


def function(data: bytes) -> tuple[SassModule, SassFunction]:
    module = parse_sass(disassemble(data))
    return module, module.function("k")


@pytest.mark.parametrize(
    ("line", "operands"),
    [
        ("LDG.E.128.CONSTANT R4, desc[UR8][R2.64+-0x10]",
         (SassReg("R4"), SassAddress((SassReg("R2", wide=True),), -16))),
        ("LDG.E R0, desc[UR4][R2.64+UR6+0x8]",
         (SassReg("R0"), SassAddress((SassReg("R2", wide=True), SassReg("UR6")), 8))),
        ("IADD3 R4, P0, PT, R2.reuse, 0x400, RZ",
         (SassReg("R4"), SassReg("P0"), SassReg("PT"), SassReg("R2"), SassImm(0x400), SassReg("RZ"))),
        ("LDC.64 R2, c[0x0][0x380]", (SassReg("R2"), SassConst(0, 0x380))),
        ("LDC R2, c[0x0][R4+0x380]", (SassReg("R2"), SassConst(0, 0x380, SassReg("R4")))),
        ("S2R R0, SR_TID.X", (SassReg("R0"), SassSpecial("SR_TID.X"))),
        ("BRA.U !UP0, `(.L_x_7)", (SassReg("UP0", negated=True), SassLabel(".L_x_7"))),
        ("LOP3.LUT P2, RZ, R4, 0xf, RZ, 0xc0, !PT",
         (SassReg("P2"), SassReg("RZ"), SassReg("R4"), SassImm(15), SassReg("RZ"), SassImm(0xC0),
          SassReg("PT", negated=True))),
        ("R2P PR, R4.B2, 0x7f", (SassReg("PR"), SassReg("R4", byte=2), SassImm(0x7F))),
        ('BRX R2 -0x230 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)', None),
    ],
)  # fmt: skip
def test_operands(line: str, operands: tuple[object, ...] | None) -> None:
    parsed = one(line).operands
    if operands is None:
        assert parsed[-2:] == (SassLabel(".L_x_1"), SassLabel(".L_x_2"))
    else:
        assert parsed == operands


def test_guards_and_modifiers() -> None:
    i = one("@!UP0 UIADD3 UR4, UPT, UPT, -UR5, 0x100000, URZ")
    assert (i.opcode, i.predicate, i.negated) == ("UIADD3", "UP0", True)
    assert i.operands[3] == SassReg("UR5", negated=True)
    assert one("ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU PT, R3, desc[UR8][R4.64+0x8], R3").modifiers[-2:] == (
        "STRONG",
        "GPU",
    )
    assert one("@P3 EXIT").predicate == "P3"


@pytest.mark.parametrize(
    ("line", "written", "read"),
    [
        ("LDG.E.128 R4, desc[UR8][R2.64]", ["R4", "R5", "R6", "R7"], ["R2", "R3"]),
        ("STG.E desc[UR8][R2.64], R7", [], ["R2", "R3", "R7"]),
        ("@P1 IMAD.WIDE R2, R9, 0x4, R4", ["R2", "R3"], ["R9", "R4", "P1"]),
        ("ISETP.GE.AND P0, PT, R1, R2, P3", ["P0"], ["R1", "R2", "P3"]),
        ("IADD3 R4, P0, PT, R2, 0x400, RZ", ["R4", "P0"], ["R2"]),
        ("IADD3.X R5, PT, PT, R3, R6, RZ, P0, !PT", ["R5"], ["R3", "R6", "P0"]),
        ("SHFL.BFLY PT, R7, R3, 0x1, 0x1f", ["R7"], ["R3"]),
        ("VOTEU.ALL UP0, P1", ["UP0"], ["P1"]),
        ("SEL R0, R1, R2, P0", ["R0"], ["R1", "R2", "P0"]),
        ("LDG.E.ENL2.256 R12, R8, desc[UR12][R2.64]",
         ["R12", "R13", "R14", "R15", "R8", "R9", "R10", "R11"], ["R2", "R3"]),
        ("R2P PR, R4, 0x3", ["P0", "P1"], ["R4"]),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", ["R4", "R5", "R6", "R7"], ["R8", "R12", "R4"]),
        ("BAR.SYNC.DEFER_BLOCKING 0x1, 0x40", [], []),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R0", ["P0"], ["UR6", "R0"]),
    ],
)  # fmt: skip
def test_reads_and_writes(line: str, written: list[str], read: list[str]) -> None:
    assert list(writes(one(line))) == written
    assert list(reads(one(line))) == read


@ARCHS
def test_lines_labels_and_the_loop(arch: str) -> None:
    body = (
        ".loc 1 7 2\nmov.f32 %f1, 0f00000000;\n"
        "L: .loc 1 9 2\nld.global.f32 %f2, [%rd1]; add.f32 %f1, %f1, %f2; "
        "add.s32 %r9, %r9, -1; add.s64 %rd1, %rd1, 512; setp.ne.s32 %p1, %r9, 0; @%p1 bra L;\n"
        ".loc 1 12 2\nst.global.f32 [%rd2], %f1;"
    )
    module, code = function(cubin(body, arch))
    assert module.target == arch
    assert [f.name for f in module.functions] == ["k"]
    loads = [i for i in code.instructions if i.opcode == "LDG"]
    assert loads
    assert {i.loc for i in loads} == {Loc("k.py", 9, 0)}
    assert {i.loc for i in code.instructions if i.opcode == "STG"} == {Loc("k.py", 12, 0)}
    graph = build(code)
    assert graph.back_edges
    assert all(code.instructions[n].offset == 16 * n for n in range(len(code.instructions)))
    assert code.at(16) is code.instructions[1]


@ARCHS
def test_addresses_come_from_parameters(arch: str) -> None:
    body = (
        "mad.lo.s32 %r2, %r1, 3, %r9; mul.wide.s32 %rd3, %r2, 4; "
        "add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3; ld.global.b32 %r3, [%rd4+16]; "
        "ld.global.b32 %r4, [%rd2]; mul.wide.s32 %rd6, %r4, 8; add.s64 %rd7, %rd1, %rd6; "
        "ld.global.b64 %rd8, [%rd7]; st.global.b32 [%rd5], %r3; st.global.b64 [%rd8], %rd8;"
    )
    module, code = function(cubin(body, arch))
    graph = build(code)
    values = SassValues(graph, Threads((128, 1, 1)), ParameterBlock(), module.parameter_base)
    found = []
    for block in graph.blocks:
        for at, state in values.walk(block.index):
            i = graph.instructions[at]
            address = next((o for o in i.operands if isinstance(o, SassAddress)), None)
            if i.opcode in ("LDG", "STG") and address is not None:
                roots = values.operand(address, state).roots
                params = {r.offset // 8 for r in roots if r.kind is RootKind.PARAM and (r.offset or 0) < 16}
                found.append((i.opcode, params))
    assert sorted(map(str, found)) == sorted(
        map(str, [("LDG", {0}), ("LDG", {1}), ("LDG", {0}), ("STG", {1}), ("STG", set())])
    )


# Conditions on the thread number in PTX with their meaning in NumPy.
tid = np.arange(128)
_CONDITIONS = {
    "setp.lt.u32 %p1, %r1, {k};": lambda k: tid < k,
    "shr.u32 %r2, %r1, 5; setp.eq.s32 %p1, %r2, {k};": lambda k: tid // 32 == k,
    "and.b32 %r2, %r1, {k}; setp.ne.s32 %p1, %r2, 0;": lambda k: (tid & k) != 0,
    "mad.lo.s32 %r2, %r1, 3, {k}; and.b32 %r2, %r2, 8; setp.eq.s32 %p1, %r2, 0;": lambda k: (
        ((3 * tid + k) & 8) == 0
    ),
    "setp.lt.u32 %p2, %r1, {k}; setp.ge.and.u32 %p1, %r1, 7, %p2;": lambda k: (tid < k) & (tid >= 7),
    "setp.lt.s32 %p2, %r1, {k}; setp.gt.or.s32 %p1, %r1, 99, %p2;": lambda k: (tid < k) | (tid > 99),
    "min.u32 %r2, %r1, {k}; setp.eq.s32 %p1, %r2, %r1;": lambda k: tid <= k,
    "xor.b32 %r2, %r1, {k}; shl.b32 %r2, %r2, 3; setp.gt.u32 %p1, %r2, 100;": lambda k: ((tid ^ k) * 8) > 100,
    "sub.s32 %r2, %r1, {k}; setp.lt.s32 %p1, %r2, 0;": lambda k: tid - k < 0,
    "setp.lt.u32 %p1, %r1, %r9;": lambda k: tid < 50,
}


@pytest.mark.parametrize("arch", ["sm_103a", "sm_90a"])
@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(_CONDITIONS)), st.integers(0, 127))
def test_guards_are_never_wrong(arch: str, condition: str, k: int) -> None:
    """Who issues a copy under a condition: either not known, or exactly the threads of the condition."""
    body = condition.format(k=k) + " mov.b32 %r8, sm; @%p1 cp.async.ca.shared.global [%r8], [%rd1], 4;"
    module, code = function(cubin(body, arch))
    graph = build(code)
    n = ParameterBlock(bytes(16) + (50).to_bytes(4, "little"), frozenset(range(16, 20)))
    values = SassValues(graph, Threads((128, 1, 1)), n, module.parameter_base)
    expected = _CONDITIONS[condition](k)
    seen = False
    for block in graph.blocks:
        for at, state in values.walk(block.index):
            i = graph.instructions[at]
            last = graph.instructions[block.end - 1]
            if i.opcode == "LDGSTS" and i.predicate is not None:
                known = values.predicate(i.predicate, i.negated, state)
                seen = True
                assert known is None or (known.astype(bool) == expected).all()
            elif i is last and i.opcode in ("EXIT", "BRA") and i.predicate is not None:
                known = values.predicate(i.predicate, i.negated, state)
                seen = True
                assert known is None or (known.astype(bool) == ~expected).all()
    assert seen or expected.all() or not expected.any()


def test_bytes_that_are_no_cubin() -> None:
    with pytest.raises(WorkbenchError, match="do not start with an ELF header"):
        disassemble(b"PTX")
    with pytest.raises(WorkbenchError, match="nvdisasm cannot read the cubin"):
        disassemble(b"\x7fELF" + bytes(100))


def test_a_missing_disassembler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingToolError, match="pip install"):
        disassemble(b"\x7fELF" + bytes(100), tool=tmp_path / "nvdisasm")
    tool.find_nvdisasm.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingToolError, match="nvdisasm is not installed; pip install"):
        tool.find_nvdisasm()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "\t.target\tsm_103a\n        /*0000*/   EXIT ;\n",
        "\t.target sm_90\n\t.section\t.text.k\n /*0000*/ ??? ;\n",
    ],
)
def test_text_that_nvdisasm_did_not_print(text: str) -> None:
    with pytest.raises(SassSyntaxError):
        parse_sass(text)
