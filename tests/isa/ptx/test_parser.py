"""The PTX parser against the grammar: dialects, scopes, operands, errors, and arbitrary text."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.isa.ptx import (
    Address,
    Imm,
    Instruction,
    Kernel,
    Label,
    Loc,
    Module,
    Negated,
    Pair,
    PtxSyntaxError,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vector,
    parse,
    print_module,
)

HEAD = ".version 9.4\n.target sm_103a\n.address_size 64\n"


def module(body: str, *, params: str = ".param .u64 P", before: str = "", after: str = "") -> Module:
    return parse(f"{HEAD}{before}\n.visible .entry k({params}) {after}\n{{\n{body}\n}}\n")


def kernel(body: str, **where: str) -> Kernel:
    return module(body, **where).kernels[0]


def one(statement: str, declarations: str = "", **where: str) -> Instruction:
    registers = ".reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>; .reg .f32 %f<9>; "
    (instruction,) = kernel(registers + declarations + "\n" + statement, **where).instructions
    return instruction


def stripped(m: Module) -> Module:
    """Without lines and statement text, which a printer cannot keep."""

    def item(i: Instruction | Label) -> Instruction | Label:
        return replace(i, line=0, text="") if isinstance(i, Instruction) else replace(i, line=0)

    return replace(
        m, kernels=tuple(replace(k, line=0, body=tuple(item(i) for i in k.body)) for k in m.kernels)
    )


R = Reg


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("ld.global.nc.v4.b32 {%r1,_,%r3,%r4}, [%rd1+-16];",
         (Vector((R("%r1"), Sink(), R("%r3"), R("%r4"))), Address(R("%rd1"), -16))),
        ("ld.param.b64 %rd1, [P+8];", (R("%rd1"), Address(Symbol("P"), 8))),
        ("st.shared.b32 [128], %r1;", (Address(None, 128), R("%r1"))),
        ("st.shared.b32 [%r1-4], -1;", (Address(R("%r1"), -4), Imm(-1))),
        ("elect.sync %r1|%p1, 0xffffffff;", (Pair(R("%r1"), R("%p1")), Imm(0xFFFFFFFF))),
        ("elect.sync _|%p1, -1;", (Pair(Sink(), R("%p1")), Imm(-1))),
        ("setp.eq.and.s32 %p1|%p2, %r1, 0b101, !%p3;",
         (Pair(R("%p1"), R("%p2")), R("%r1"), Imm(5), Negated(R("%p3")))),
        ("mov.b64 {%r1, %r2}, %rd1;", (Vector((R("%r1"), R("%r2"))), R("%rd1"))),
        ("tensormap.x {%r1, %r2}|%p1, %r3;",
         (Pair(Vector((R("%r1"), R("%r2"))), R("%p1")), R("%r3"))),
        ("mov.f32 %f1, 0f3F800000;", (R("%f1"), Imm(0x3F800000, "f32"))),
        ("mov.f64 %rd1, 0d3FF0000000000000;", (R("%rd1"), Imm(0x3FF0000000000000, "f64"))),
        ("mov.f32 %f1, -2.5;", (R("%f1"), Imm(struct.unpack("<Q", struct.pack("<d", -2.5))[0], "f64"))),
        ("mov.b32 %r1, 017;", (R("%r1"), Imm(15))),
        ("mov.b32 %r1, 0x1FU;", (R("%r1"), Imm(31))),
        ("mov.b32 %r1, (1 << 4) + 3 * 2;", (R("%r1"), Imm(22))),
        ("mov.b32 %r1, -7 / 2;", (R("%r1"), Imm(-3))),
        ("mov.b32 %r1, 3 > 2 ? 10 : 20;".replace("3 > 2", "(3 > 2)"), (R("%r1"), Imm(10))),
        ("mov.b32 %r1, 'A';", (R("%r1"), Imm(65))),
        ("mov.b32 %r1, WARP_SZ;", (R("%r1"), Imm(32))),
        ("mov.b32 %r1, %tid.x;", (R("%r1"), Special("%tid.x"))),
        ("mov.b64 %rd1, %clock64;", (R("%rd1"), Special("%clock64"))),
        ("mov.b32 %r1, %cluster_ctarank;", (R("%r1"), Special("%cluster_ctarank"))),
        ("mov.b64 %rd1, P;", (R("%rd1"), Symbol("P"))),
        ("mov.b64 %rd1, P+16;", (R("%rd1"), Symbol("P", 16))),
        ("bar.sync 0;", (Imm(0),)),
        ("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
         "[%r1], [%rd2,{%r3,%r4}], [%r5+8], %rd6;",
         (Address(R("%r1")), TensorAddress(Address(R("%rd2")), (R("%r3"), R("%r4"))),
          Address(R("%r5"), 8), R("%rd6"))),
    ],
)  # fmt: skip
def test_operands(text: str, operands: tuple[object, ...]) -> None:
    assert one(text).operands == operands


def test_used_bytes_belong_to_the_next_instruction() -> None:
    body = """.reg .b32 %r<9>;
    .pragma "nounroll";
    .pragma "used_bytes_mask 0xf0f";
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
    mov.b32 %r6, %r1;
    """
    m = module(body)
    first, second = m.kernels[0].instructions
    assert (first.used_bytes, second.used_bytes) == (0xF0F, None)
    assert m.kernels[0].directives["body_pragma"] == "nounroll"
    assert [i.used_bytes for i in parse(print_module(m)).kernels[0].instructions] == [0xF0F, None]
    with pytest.raises(PtxSyntaxError, match="used_bytes_mask"):
        module('.pragma "used_bytes_mask x";\nret;')


def test_opcode_and_modifiers() -> None:
    i = one(
        "@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];"
    )
    assert i.opcode == "cp"
    assert i.modifiers == (
        "async",
        "bulk",
        "shared::cluster",
        "global",
        "mbarrier::complete_tx::bytes",
    )
    assert (i.predicate, i.negated) == (Reg("%p1"), True)
    assert one(
        "ld.global.L1::no_allocate.L2::256B.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%rd1];"
    ).name == ("ld.global.L1::no_allocate.L2::256B.v8.b32")


def test_inner_scopes_get_their_own_registers_and_labels() -> None:
    k = kernel(
        """
        .reg .pred p; .reg .b32 %r<4>;
        setp.eq.s32 p, %r0, 0;
        { .reg .pred p; .reg .b32 x<2>; LAB_WAIT: setp.ne.s32 p, x1, 0; @p bra DONE; bra LAB_WAIT; DONE: }
        { .reg .pred p; LAB_WAIT: @p bra DONE; bra LAB_WAIT; DONE: }
        @p bra DONE;
        DONE: ret;
        """
    )
    branches = [i for i in k.instructions if i.opcode == "bra"]
    labels = [i.name for i in k.body if isinstance(i, Label)]
    assert len(labels) == len(set(labels)) == 5
    targets = [i.operands[0] for i in branches]
    assert targets == [Symbol(labels[n]) for n in (1, 0, 3, 2, 4)]
    predicates = [i.predicate.name for i in branches if i.predicate]
    assert len(set(predicates)) == 3
    assert k.registers[predicates[0]] == "pred"
    assert predicates[2] == "p"


def test_inner_register_shadows_only_inside() -> None:
    k = kernel(".reg .b32 a; mov.b32 a, 1; { mov.b32 a, 2; .reg .b32 a; mov.b32 a, 3; } mov.b32 a, 4;")
    names = [i.operands[0].name for i in k.instructions]  # type: ignore[union-attr]
    assert names[0] == names[1] == names[3] == "a" != names[2]


def test_range_prefix_may_end_in_a_digit() -> None:
    k = kernel(".reg .b32 r1<12>; mov.b32 r111, r10;")
    assert k.instructions[0].operands == (Reg("r111"), Reg("r10"))
    with pytest.raises(PtxSyntaxError, match="r112"):
        kernel(".reg .b32 r1<12>; mov.b32 r112, r10;")


def test_parameters_are_packed_like_c_structs() -> None:
    k = kernel(
        "ret;",
        params=(
            ".param .align 8 .b8 a[16], .param .u8 b, .param .u16 c, .param .f32 d, "
            ".param .u64 .ptr .global .align 16 e, .param .align 64 .b8 f[128], .param .u64 .ptr .align 1 g"
        ),
    )
    assert [(p.name, p.offset, p.size) for p in k.params] == [
        ("a", 0, 16),
        ("b", 16, 1),
        ("c", 18, 2),
        ("d", 20, 4),
        ("e", 24, 8),
        ("f", 64, 128),
        ("g", 192, 8),
    ]
    assert (k.params[4].pointer_space, k.params[4].pointer_align) == ("global", 16)
    assert (k.params[6].pointer_space, k.params[6].pointer_align) == ("generic", 1)


def test_directives_locations_and_sections() -> None:
    text = (
        HEAD
        + '.file 1 "k.py"\n.file 2 "h.py", 123, 456\n'
        + ".visible .entry k()\n.reqntid 128, 1, 1\n.minnctapersm 2\n.maxnreg 64\n.explicitcluster\n"
        + '.reqnctapercluster 2, 1, 1\n.pragma "nounroll";\n{\n.reg .b32 %r<3>;\n'
        + ".loc 1 10 5\nmov.b32 %r1, 0;\n"
        + ".loc 2 20 7, function_name $L__info_string0, inlined_at 1 11 3\nmov.b32 %r2, 1;\n}\n"
        + ".section .debug_abbrev\n{\n.b8 1\n$L__info: .b64 .debug_line\n}\n@@DWARF .byte 1\n"
    )
    k = parse(text).kernels[0]
    assert k.reqntid == (128, 1, 1)
    assert k.minnctapersm == 2
    assert k.directives == {
        "maxnreg": "64",
        "explicitcluster": "",
        "reqnctapercluster": "2, 1, 1",
        "pragma": "nounroll",
    }
    first, second = k.instructions
    assert first.loc == Loc("k.py", 10, 5)
    assert second.loc == Loc("h.py", 20, 7, Loc("k.py", 11, 3))
    assert first.line == 16


def test_files_may_be_named_after_the_kernels() -> None:
    k = parse(HEAD + '.entry k { .loc 1 3 4\nret; }\n.file 1 "late.py"\n').kernels[0]
    assert k.instructions[0].loc == Loc("late.py", 3, 4)


def test_variables_and_initialisers() -> None:
    m = module(
        ".shared .align 16 .b8 s[64]; ret;",
        before=(
            ".extern .shared .align 1024 .b8 dyn[];\n"
            ".global .align 4 .u32 t[4] = {1, 0x10, 3 * 4};\n"
            ".const .f32 c[2] = {1.0, 0f40000000};\n"
            ".global .align 1 .b8 text[4] = {37, 102, 10, 0};\n"
            ".global .u64 ptr[2] = {t+8, generic(text)};\n"
        ),
    )
    dyn, t, c, text, ptr = m.variables
    assert dyn.extern
    assert dyn.elements is None
    assert dyn.align == 1024
    assert t.initial == struct.pack("<4I", 1, 16, 12, 0)
    assert c.initial == struct.pack("<2f", 1.0, 2.0)
    assert text.initial == b"%f\n\0"
    assert ptr.pointers == ((0, "t", 8), (8, "text", 0))
    assert ptr.initial == bytes(16)
    assert m.kernels[0].variables[0].elements == 64


def test_calls_with_their_parameter_scope() -> None:
    m = module(
        """
        .local .align 8 .b8 __local_depot0[8];
        .reg .b64 %rd<5>; .reg .b32 %r<3>;
        { // callseq 0
        .param .b64 param0; st.param.b64 [param0+0], %rd1;
        .param .b64 param1; st.param.b64 [param1], %rd2;
        .param .b32 retval0;
        call.uni (retval0), vprintf, (param0, param1);
        ld.param.b32 %r1, [retval0+0];
        }
        { .param .b64 param0; call f, (param0); }
        """,
        before=(
            ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n"
            ".func f(.param .b64 q) { ret; }"
        ),
    )
    assert m.declared_functions == ("vprintf", "f")
    calls = [i for i in m.kernels[0].instructions if i.opcode == "call"]
    assert calls[0].operands == (
        Vector((Symbol("retval0"),)),
        Symbol("vprintf"),
        Vector((Symbol("param0"), Symbol("param1"))),
    )
    assert calls[1].operands == (Symbol("f"), Vector((Symbol("param0$1"),)))


def test_indexed_branches_name_their_labels() -> None:
    k = kernel("{ .reg .b32 i; brx.idx i, ts; ts: .branchtargets A, B; A: ret; B: ret; }")
    assert k.instructions[0].operands == (Reg("i"), Symbol("ts"))
    assert k.branch_targets == {"ts": ("A", "B")}


def test_several_statements_a_line_and_comments() -> None:
    k = kernel(".reg .b32 a;/* x; y */mov.b32 a, 1; mov.b32 a, // c\n 2;\n;;mov.b32 a, 3;")
    assert [i.text for i in k.instructions] == ["mov.b32 a, 1;", "mov.b32 a , 2;", "mov.b32 a, 3;"]
    assert [i.line for i in k.instructions] == [7, 7, 9]


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("mov.b32 %r1, 1;", 7, "'%r1' is not declared"),
        ("\n\nbra NOWHERE;", 9, "'NOWHERE' is not declared"),
        (".reg .b32 a; mov.b32 a 1;", 7, "',' or ';'"),
        (".reg .b32 a; mov.b32 a, ;", 7, "an operand"),
        (".reg .b32 a; mov.b32 a, [a+4;", 7, "']'"),
        (".reg .b32 a, a;", 7, "not taken"),
        (".reg .b99 a;", 7, "a register type"),
        ("@p mov.b32 p, 1;", 7, "predicate register"),
        ("L: L: ret;", 7, "label"),
        ("{ ret;", 9, "never closed"),
        (".reg .b32 a; mov.b32 a, 1/0;", 7, "division by zero"),
        (".reg .b32 a; mov.b32 a, 99999999999999999999;", 7, "64 bits"),
        (".reg .b32 a; mov.b32 a, `;", 7, "unexpected character"),
        (".frob 3;", 7, "an instruction or one of .reg"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(body: str, line: int, words: str) -> None:
    with pytest.raises(PtxSyntaxError) as caught:
        kernel(body)
    assert caught.value.line == line
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        ".version 9.4",
        HEAD + ".visible",
        HEAD + ".entry",
        HEAD + ".entry k(.param .u64",
        HEAD + ".entry k {",
    ],
)
def test_text_that_ends_early_is_an_error(text: str) -> None:
    with pytest.raises(PtxSyntaxError):
        parse(text)


_SALAD = """
.version 9.4 .target sm_103a .address_size 64 .visible .entry .func .reg .b32 .pred .param .u64 .ptr .align
.global .shared .loc .file .pragma .section .branchtargets .local .const k P a b p %r1 %r <8> { } ( ) [ ]
, ; : @ ! | + - * / ? < > << mov.b32 ld.global.b32 bra call.uni ret brx.idx setp.eq.s32 0 1 077 0x1F
0f3F800000 1.5 'a' "s" _ WARP_SZ generic = = %tid.x // /* */
"""
_WORDS = st.sampled_from(_SALAD.split())


@settings(max_examples=400, deadline=None)
@given(st.lists(_WORDS, max_size=40).map(" ".join), st.booleans())
def test_word_salad_raises_only_syntax_errors(words: str, in_body: bool) -> None:
    text = HEAD + ".entry k(.param .u64 P) { .reg .b32 a; .reg .pred p; " + words if in_body else words
    try:
        parse(text)
    except PtxSyntaxError as error:
        assert error.line >= 1


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_arbitrary_text_raises_only_syntax_errors(text: str) -> None:
    for source in (
        text,
        HEAD + text,
        HEAD + ".entry k { .reg .b32 a; " + text,
        HEAD + ".global .u32 x = " + text,
    ):
        try:
            parse(source)
        except PtxSyntaxError as error:
            assert error.line >= 1


_REGISTERS = {
    "b32": [f"%r{n}" for n in range(4)],
    "b64": [f"%rd{n}" for n in range(4)],
    "pred": ["%p1", "%p2"],
}
_reg = st.sampled_from([n for names in _REGISTERS.values() for n in names]).map(Reg)
_imm = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1).map(Imm),
    st.integers(0, (1 << 32) - 1).map(lambda v: Imm(v, "f32")),
    st.integers(0, (1 << 64) - 1).map(lambda v: Imm(v, "f64")),
)
_base = st.one_of(_reg, st.just(Symbol("P")), st.just(Symbol("smem")))
_address = st.one_of(
    st.builds(Address, _base, st.integers(-(1 << 31), 1 << 31)),
    st.builds(Address, st.none(), st.integers(0, 1 << 31)),
)
_plain = st.one_of(
    _reg, _imm, st.sampled_from(["%tid.x", "%laneid", "%ctaid.z", "%clock64"]).map(Special), st.just(Sink())
)
_vector = st.lists(_plain, min_size=1, max_size=4).map(lambda e: Vector(tuple(e)))
_operand = st.one_of(
    _plain,
    _address,
    _vector,
    st.builds(Pair, st.one_of(_reg, _vector, st.just(Sink())), _reg),
    st.builds(Negated, _reg),
    st.builds(Symbol, st.just("smem"), st.integers(-64, 64)),
    st.builds(TensorAddress, _address, st.lists(_reg, min_size=1, max_size=5).map(tuple)),
)
_instruction = st.builds(
    Instruction,
    st.sampled_from(["ld", "st", "mov", "fma", "cp", "tcgen05"]),
    st.lists(st.sampled_from(["global", "nc", "v4", "b32", "L2::128B", "2d", "32x32b"]), max_size=4).map(
        tuple
    ),
    st.lists(_operand, max_size=4).map(tuple),
    st.just(0),
    st.one_of(st.none(), st.sampled_from(["%p1", "%p2"]).map(Reg)),
    st.just(False),
    st.one_of(st.none(), st.builds(Loc, st.just("a.py"), st.integers(1, 99), st.integers(0, 9))),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_instruction, max_size=12), st.lists(st.sampled_from(["L1", "$L2", "_L3"]), unique=True))
def test_print_then_parse_gives_the_same_module(body: list[Instruction], labels: list[str]) -> None:
    located: list[Instruction] = []
    for i in body:  # a location holds until the next one
        here = i.loc or (located[-1].loc if located else None)
        located.append(replace(i, loc=here))
    used = parse(
        print_module(
            Module(
                (9, 4),
                "sm_103a",
                64,
                module("ret;", before=".extern .shared .align 16 .b8 smem[];").variables,
                (
                    replace(
                        kernel("ret;"),
                        registers={n: t for t, names in _REGISTERS.items() for n in names},
                        body=(*located, *(Label(name, 0) for name in labels)),
                    ),
                ),
            )
        )
    )
    assert stripped(used).kernels[0].body == (*located, *(Label(name, 0) for name in labels))
    assert stripped(parse(print_module(used))) == stripped(used)


def test_a_large_module_parses_in_linear_work() -> None:
    block = (
        "{ .reg .pred P1; .reg .b32 t<4>; L: setp.eq.s32 P1, t1, 0; @P1 bra L; fma.rn.f32 f1, f1, f1, f1; }\n"
    )
    k = kernel(".reg .f32 f<2>;\n" + block * 7000)
    assert len(k.instructions) == 21000
    assert len(k.registers) == 14001
