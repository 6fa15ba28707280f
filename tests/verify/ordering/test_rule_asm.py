"""Rule asm-ordering on Python, CUDA C++ and MLIR text."""

from __future__ import annotations

import pytest

from workbench.findings import Finding, Severity
from workbench.verify.ordering.rules.asm import audit_source, effect, opcodes

CALL = "v = llvm.inline_asm(t, [a], {asm}, {constraints}, has_side_effects={effects})\n"


def python(
    asm: str, constraints: str = '"=r,l,~{memory}"', effects: str = "True", before: str = ""
) -> list[Finding]:
    text = before + CALL.format(asm=asm, constraints=constraints, effects=effects)
    return audit_source(text, "k.py")


def severities(found: list[Finding]) -> list[str]:
    return [f.severity.value for f in found]


def test_instructions_of_a_block() -> None:
    text = "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra W; "
    text += "@p ld.global.b32 $2, [$3]; }"
    assert opcodes(text) == ["mbarrier.try_wait.parity.shared::cta.b64", "bra", "ld.global.b32"]
    assert opcodes("// ld.global.b32 a, [b];\nadd.s32 $0, $1, 7;") == ["add.s32"]


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("ld.global.b32", "load"),
        ("ld.shared.v4.b32", "load"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "load"),
        ("ld.global.nc.L1::no_allocate.v4.b32", None),
        ("ld.param.b64", None),
        ("ld.acquire.gpu.global.b32", "order"),
        ("st.global.b32", "store"),
        ("red.release.gpu.global.add.u32", "order"),
        ("fence.proxy.async.shared::cta", "order"),
        ("griddepcontrol.wait", "order"),
        ("fma.rn.f32", None),
        ("shfl.sync.idx.b32", None),
        ("cp.async.bulk.prefetch.L2.global", None),
        ("prefetch.global.L2", None),
        ("mov.u64", None),
    ],
)
def test_what_an_instruction_does(instruction: str, what: str | None) -> None:
    assert effect(instruction) == what


def test_without_side_effects_is_an_error() -> None:
    (found,) = python('"ld.global.b32 $0, [$1];"', effects="False")
    assert found.severity is Severity.ERROR and found.source == "k.py:1"
    assert "ld.global.b32" in found.message
    (found,) = audit_source('v = llvm.inline_asm(t, [a], "st.shared.b32 [$0], $1;", "r,r")\n', "k.py")
    assert found.severity is Severity.ERROR  # the default of inline_asm


@pytest.mark.parametrize("effects", ["True", "x", "not pure", "flags['x']"])
def test_what_may_have_side_effects_is_no_error(effects: str) -> None:
    assert python('"ld.global.b32 $0, [$1];"', effects=effects) == []


def test_ordering_without_a_clobber_is_a_warning() -> None:
    assert severities(python('"fence.acq_rel.gpu;"', '""')) == ["warning"]
    assert severities(python('"ld.acquire.gpu.global.b32 $0, [$1];"', '"=r,l"')) == ["warning"]
    assert python('"fence.acq_rel.gpu;"', '"~{memory}"') == []
    assert python('"fence.acq_rel.gpu;"', "constraints") == []
    for quiet in (
        "ld.global.b32 $0, [$1];",
        "tcgen05.fence::after_thread_sync;",
        "st.relaxed.gpu.b32 [$0], $1;",
    ):
        assert python(f'"{quiet}"', '"=r,l"') == []


@pytest.mark.parametrize(
    ("before", "asm"),
    [
        ('code = "st.global"\ncode += ".b32 [$0], $1;"\n', "code"),
        ("", 'f"st.global{hint}.b32 [$0], $1;"'),
        ("", '"{ .reg .b32 x; " + "st.global.b32 [$0], $1; }"'),
        ('op = "ld.volatile.global" if volatile else "ld.global"\n', 'f"{op}.b32 $0, [$1];"'),
        ("", '"\\n".join(["mov.b32 $0, 0;", "st.global.b32 [$0], $1;"])'),
        ('TEXT = """\nred.global.add.u32 [$0], 1;\n"""\n', "TEXT"),
    ],
)
def test_text_that_is_put_together(before: str, asm: str) -> None:
    assert severities(python(asm, effects="False", before=before)) == ["error"]


WRAPPED = """
def block(code, constraints, values, *, effects=False):
    return llvm.inline_asm(t, values, code, constraints, has_side_effects=effects)

class Ops:
    def outer(self, text, values):
        return block(text, "=r,l", values)

def load(a):
    return block("ld.global.b32 $0, [$1];", "=r,l", [a])

def right(a):
    return block("ld.global.b32 $0, [$1];", "=r,l,~{memory}", [a], effects=True)

def add(a):
    return block("add.s32 $0, $1, 1;", "=r,r", [a])

def through(self, a):
    return self.outer("ld.shared.b32 $0, [$1];", [a])
"""


def test_wrappers_of_the_file_are_followed() -> None:
    found = audit_source(WRAPPED, "k.py")
    lines = [WRAPPED.splitlines()[int((f.source or "").split(":")[1]) - 1].strip() for f in found]
    assert [line.split("(")[1].split(" ")[0] for line in lines] == ['"ld.global.b32', '"ld.shared.b32']


def test_text_that_is_no_python_has_no_findings() -> None:
    assert audit_source("def f(:\n  asm", "k.py") == []


CUDA = r"""
// asm("st.global.b32 [%0], %1;" :: "l"(p), "r"(v));
__device__ int load(const int* p) {
  int v;
  asm("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::); }
__device__ void right() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void store(int* p, int v) { asm("st.global.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
__device__ int add(int a) { int b; asm("add.s32 %0, %1, 1;" : "=r"(b) : "r"(a)); return b; }
__device__ int named(int* p) { int v; asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
  : "=r"(v) : "l"(std::addressof(*p)) : "memory"); return v; }
"""


def test_cuda_source() -> None:
    found = audit_source(CUDA, "k.cu")
    assert [(f.source, f.severity.value) for f in found] == [("k.cu:5", "error"), ("k.cu:8", "warning")]


MLIR = r"""
%1 = llvm.inline_asm asm_dialect = att "ld.global.b32 $0, [$1];", "=r,l" %0 : (i64) -> i32
%2 = llvm.inline_asm has_side_effects asm_dialect = att "ld.global.b32 $0, [$1];", "=r,l,~{memory}" %0 : x
%3 = llvm.inline_asm has_side_effects asm_dialect = att "membar.gl;", "" : () -> !llvm.void
%4 = llvm.inline_asm asm_dialect = att "ex2.approx.f32 $0, $1;", "=f,f" %9 : (f32) -> f32
"""


def test_mlir() -> None:
    found = audit_source(MLIR, "k.mlir")
    assert [(f.source, f.severity.value) for f in found] == [("k.mlir:2", "error"), ("k.mlir:4", "warning")]
