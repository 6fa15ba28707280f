from __future__ import annotations

import io

import pytest
from rich.console import Console

from workbench.errors import MissingToolError
from workbench.findings import Finding, Severity
from workbench.isa import sass
from workbench.report.findings import Listing, print_findings

SASS = """\
.section .text.first,"ax",@progbits
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;   /* 0x0000df00ff017b82 */
        /*0010*/                   EXIT ;                    /* 0x000000000000794d */
.section .text.second_half,"ax",@progbits
.text.second_half:
        /*0000*/                   NOP ;                     /* 0x0000000000007918 */
        /*0010*/                   BRA 0x0 ;                 /* 0x0000000000007947 */
.section .text.second,"ax",@progbits
.text.second:
        /*0000*/                   S2R R0, SR_TID.X ;        /* 0x0000000000007919 */
        /*0010*/              @!P0 LDG.E R2, desc[UR4][R2.64] ; /* 0x0000000402028981 */
"""
LISTING = Listing(
    ptx=".version 9.4\n  ld.global.u32 %r1, [%rd1];\n", cubin=b"cubin", source="a = 1\nb = load(x)\n"
)


@pytest.fixture(autouse=True)
def disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassemble", lambda cubin: {b"cubin": SASS}[cubin])


def shown(*findings: Finding, listing: Listing | None = LISTING) -> str:
    out = io.StringIO()
    print_findings(findings, Console(file=out, width=200), listing)
    return out.getvalue()


def finding(severity: Severity = Severity.ERROR, **fields: object) -> Finding:
    return Finding.model_validate(
        {"rule": "some-rule", "severity": severity, "message": "it breaks", **fields}
    )


def test_a_finding_quotes_the_code_it_is_about() -> None:
    text = shown(
        finding(
            ptx_line=2, source="kernel.py:2", sass_offset=0x10, kernel="second", buffer="x", fix="wait first"
        )
    )
    assert "error some-rule [x]: it breaks" in text
    assert "PTX line 2  ld.global.u32 %r1, [%rd1];" in text
    assert "kernel.py:2  b = load(x)" in text
    assert "SASS 0x0010  @!P0 LDG.E R2, desc[UR4][R2.64] ;" in text
    assert "fix: wait first" in text


def test_the_instruction_is_that_of_the_kernel_named() -> None:
    assert "SASS 0x0010  EXIT ;" in shown(finding(sass_offset=0x10, kernel="first"))
    assert "SASS 0x0000  S2R R0" in shown(finding(sass_offset=0, kernel="second"))


def test_a_place_outside_the_text_is_named_without_code() -> None:
    text = shown(finding(ptx_line=99, source="kernel.py:0", sass_offset=0x5000, kernel="third"))
    assert "PTX line 99\n" in text and "kernel.py:0\n" in text and "SASS 0x5000\n" in text


def test_without_texts_the_places_still_show() -> None:
    text = shown(finding(ptx_line=2, sass_offset=16), listing=None)
    assert "PTX line 2" in text and "SASS 0x0010" in text


def test_errors_come_first_and_witnesses_show() -> None:
    text = shown(
        finding(Severity.INFO, message="aside"),
        finding(Severity.WARNING, message="careful"),
        finding(thread="cta=(0,0,0) thread=(3,0,0)", address=0x1234, count=7),
    )
    assert text.index("it breaks") < text.index("careful") < text.index("aside")
    assert "first seen at cta=(0,0,0) thread=(3,0,0), address 0x1234" in text and "(7 times)" in text


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    assert "[bold]x[/bold] [rd1]" in shown(finding(message="[bold]x[/bold] [rd1]"))


def test_without_a_disassembler_the_offset_still_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(cubin: bytes) -> str:
        raise MissingToolError("nvdisasm is not installed")

    monkeypatch.setattr(sass, "disassemble", missing)
    assert "SASS 0x0010\n" in shown(finding(sass_offset=16), listing=Listing(cubin=b"x"))
