"""An audit as people read it: both places with lines around, what made the code, what is assumed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from workbench.findings import Severity
from workbench.isa import sass
from workbench.report.audits import print_audit
from workbench.report.findings import Listing
from workbench.verify.ordering.files import AuditDocument, AuditFinding, AuditTarget, Coverage, Unreadable
from workbench.verify.report import Verdict

PTX = "".join(f"line{n};\n" for n in range(1, 31))
SOURCE = "import x\n\ndef k():\n    load()\n    wait()\n"
SASS = """\
.section .text.k,"ax",@progbits
.text.k:
        /*0000*/                   LDG.E R2, desc[UR4][R2.64] ; /* 0x1 */
        /*0010*/                   ACQBULK ;  /* 0x2 */
        /*0020*/                   EXIT ;  /* 0x3 */
"""


@pytest.fixture(autouse=True)
def disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassemble", lambda cubin: SASS)


def found(**more: object) -> AuditFinding:
    fields: dict[str, object] = {
        "rule": "some-rule", "severity": Severity.ERROR, "ptx_line": 10, "sass_offset": 0x10,
        "source": "k.py:4", "buffer": "x", "message": "reads what line 20 writes", "fix": "wait first",
    }  # fmt: skip
    return AuditFinding.model_validate(fields | more)


def shown(*findings: AuditFinding, unreadable: tuple[Unreadable, ...] = (), targets: int = 1) -> str:
    made = tuple(
        AuditTarget(
            target=f"f{n}.ptx",
            kernel="k",
            arch="sm_103a",
            verdict=Verdict.FAIL,
            findings=findings,
            coverage=Coverage(accesses=3, proved=2, unknown=1),
            toolchain="ptxas 13.5.37",
            assumptions=("buffers do not overlap", "flags are zero"),
        )
        for n in range(targets)
    )
    out = io.StringIO()
    listing = Listing(ptx=PTX, cubin=b"cubin", source=SOURCE, source_name="k.py")
    document = AuditDocument(targets=made, unreadable=unreadable)
    print_audit(document, Console(file=out, width=200), (listing,) * targets)
    return out.getvalue()


def test_both_places_are_shown_with_lines_around() -> None:
    text = shown(found())
    for n in (8, 9, 10, 11, 12, 18, 19, 20, 21, 22):
        assert f"line{n};" in text
    assert "> 10  line10;" in text and "> 20  line20;" in text and "line13;" not in text
    assert "> 0010  ACQBULK ;" in text and "0000  LDG.E" in text
    assert "> 4      load()" in text or "> 4  " in text
    assert "fix: wait first" in text and "docs/rules/some-rule.md" in text


def test_what_made_the_code_and_what_is_assumed_is_said_once() -> None:
    text = shown(found(), targets=2)
    assert text.count("made by: ptxas 13.5.37") == 1
    assert text.count("buffers do not overlap") == 1 and "flags are zero" in text


def test_findings_that_say_the_same_are_one() -> None:
    text = shown(found(), found(ptx_line=25, sass_offset=None, source=None, count=2))
    assert text.count("error some-rule") == 1
    assert "(3 times)" in text and "the same at PTX line 25" in text


def test_asides_are_short() -> None:
    text = shown(found(severity=Severity.INFO, rule="undecided"))
    assert "line9;" not in text and "PTX line 10" in text


def test_a_source_line_of_another_file_is_not_quoted() -> None:
    text = shown(found(source="other.py:4"))
    assert "other.py:4" in text and "load()" not in text


def test_files_that_could_not_be_audited_are_named() -> None:
    text = shown(unreadable=(Unreadable(target="b.ptx", message="b.ptx: is not a text file"),))
    assert "not audited b.ptx: is not a text file" in text
