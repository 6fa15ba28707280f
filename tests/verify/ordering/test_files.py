"""`audit_file` and contracts: several kernels, siblings, what is missing, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from snippets import LOAD_W, LOAD_X, STORE, WAIT, contract, entry, head, ptx

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.errors import ContentError, MissingToolError, UnknownNameError
from workbench.verify.contract import load_contract
from workbench.verify.ordering import AuditDocument, audit_file, files
from workbench.verify.report import Verdict

GOOD, BAD = WAIT + LOAD_X + STORE, LOAD_X + WAIT + STORE


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cubin(text: str, arch: str = "sm_103a") -> bytes:
    return assemble(text, arch, DEFAULT_PTXAS_FLAGS, Limits()).cubin


def test_each_kernel_of_a_file_has_its_own_verdict(tmp_path: Path) -> None:
    path = write(tmp_path, "m.ptx", head("sm_103a") + entry(GOOD, "good") + entry(BAD, "bad"))
    terms = write(tmp_path, "m.toml", contract(name="good") + contract(name="bad"))
    document = audit_file(path, terms)
    assert {t.kernel: t.verdict for t in document.targets} == {"good": Verdict.PASS, "bad": Verdict.FAIL}
    assert document.verdict is Verdict.FAIL


def test_kernels_of_a_contract_are_a_chain(tmp_path: Path) -> None:
    early, nothing = LOAD_W + WAIT + LOAD_X + STORE, "griddepcontrol.launch_dependents;"
    path = write(tmp_path, "m.ptx", head("sm_103a") + entry(nothing, "a") + entry(early, "b"))
    chain = contract(name="a", w="activation") + contract(name="b", w="activation")
    document = audit_file(path, write(tmp_path, "m.toml", chain))
    assert {t.kernel: [f.rule for f in t.findings] for t in document.targets} == {
        "a": ["pdl-chain-not-transitive"],
        "b": ["pdl-load-before-wait"],
    }
    settled = chain.replace('role = "activation"', 'role = "activation"\nsettled = true')
    assert audit_file(path, write(tmp_path, "m.toml", settled)).targets[1].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("condition", "rules"),
    [
        ("setp.ne.u32 %p5, %r3, 0;", []),
        ("setp.ne.u32 %p5, %r3, 7;", []),
        ("setp.ne.u32 %p5, %r3, 8;", ["undecided"]),
        ("ld.global.u32 %r10, [%rd2]; setp.ne.u32 %p5, %r10, 0;", ["pdl-chain-not-transitive"]),
    ],
)
def test_one_cta_that_waits_is_enough_for_a_chain(tmp_path: Path, condition: str, rules: list[str]) -> None:
    body = condition + "@%p5 bra L; " + WAIT + "L:"
    good = entry(GOOD, "c").replace("P2", "Q").replace("P0", "P2").replace("Q", "P0")  # c(out, w, x)
    path = write(tmp_path, "m.ptx", head("sm_103a") + entry(GOOD, "a") + entry(body, "b") + good)
    terms = contract(name="a") + contract(name="b") + contract(name="c")
    document = audit_file(path, write(tmp_path, "m.toml", terms))
    assert [f.rule for f in document.targets[1].findings] == rules


def test_the_document_is_the_documented_json(tmp_path: Path) -> None:
    document = audit_file(write(tmp_path, "k.ptx", ptx(BAD)), write(tmp_path, "k.toml", contract()))
    data = json.loads(document.model_dump_json())
    assert set(data) == {"targets", "unreadable"}
    (target,) = data["targets"]
    assert set(target) >= {"target", "kernel", "arch", "verdict", "findings", "coverage"}
    assert set(target["coverage"]) == {"accesses", "proved", "unknown"}
    assert set(target["findings"][0]) >= {
        "rule",
        "severity",
        "ptx_line",
        "sass_offset",
        "source",
        "buffer",
        "message",
        "fix",
    }
    assert AuditDocument.model_validate(data) == document


def test_a_bare_cubin(tmp_path: Path) -> None:
    terms = write(tmp_path, "k.toml", contract())
    for arch in ("sm_103a", "sm_90a"):
        bad = audit_file(write(tmp_path, "bad.cubin", cubin(ptx(BAD, arch=arch), arch)), terms)
        assert [f.rule for f in bad.targets[0].findings] == ["pdl-load-before-wait"]
        assert bad.targets[0].findings[0].ptx_line is None
        good = audit_file(write(tmp_path, "good.cubin", cubin(ptx(GOOD, arch=arch), arch)), terms)
        assert good.verdict is Verdict.PASS
        assert good.targets[0].coverage.accesses == 2


def test_nc_in_a_bare_cubin_is_an_error_behind_an_elected_wait(tmp_path: Path) -> None:
    body = "@!%p2 bra L; griddepcontrol.wait;\nL: bar.sync 0; ld.global.nc.f32 %f1, [%rd5];" + STORE
    document = audit_file(write(tmp_path, "k.cubin", cubin(ptx(body))), write(tmp_path, "k.toml", contract()))
    assert document.verdict is Verdict.FAIL


def test_siblings_are_audited_together(tmp_path: Path) -> None:
    path = write(tmp_path, "k.ptx", ptx(GOOD))
    write(tmp_path, "k.cubin", cubin(ptx(LOAD_X + STORE)))  # the wait was compiled out
    document = audit_file(path, write(tmp_path, "k.toml", contract()))
    (finding,) = document.targets[0].findings
    assert finding.rule == "pdl-wait-missing"
    assert "ACQBULK" in finding.message
    assert audit_file(tmp_path / "k.cubin", tmp_path / "k.toml") == document.model_copy(
        update={"targets": (document.targets[0].model_copy(update={"target": str(tmp_path / "k.cubin")}),)}
    )


def test_a_sibling_for_another_target_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "k.ptx", ptx(GOOD))
    write(tmp_path, "k.cubin", cubin(ptx(GOOD, arch="sm_90a"), "sm_90a"))
    with pytest.raises(ContentError, match="is for sm_90a, the PTX beside it for sm_103a"):
        audit_file(path)


def test_without_a_disassembler_the_verdict_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(data: bytes) -> str:
        raise MissingToolError("nvdisasm is not installed; pip install 'nvidia-cuda-nvdisasm>=13.0'")

    monkeypatch.setattr(files, "disassemble", absent)
    terms = write(tmp_path, "k.toml", contract())
    good = audit_file(write(tmp_path, "k.ptx", ptx(GOOD)), terms)
    assert good.verdict is Verdict.UNKNOWN
    assert "nvdisasm is not installed" in good.targets[0].findings[0].message
    bad = audit_file(write(tmp_path, "k.ptx", ptx(BAD)), terms)
    assert bad.verdict is Verdict.FAIL


def test_scalars_decide_who_waits(tmp_path: Path) -> None:
    body = "setp.lt.u32 %p5, %r1, %r9; @!%p5 bra S; griddepcontrol.wait;\nS:\n" + LOAD_X + STORE
    path = write(tmp_path, "k.ptx", ptx(body))
    assert audit_file(path, write(tmp_path, "k.toml", contract())).verdict is Verdict.PASS
    half = contract().replace("value = 1024", "value = 64")
    assert audit_file(path, write(tmp_path, "k.toml", half)).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("block = [128, 1, 1]", "block = [128, 1]"), "kernel.0.block"),
        (("block = [128, 1, 1]", "block = [0, 1, 1]"), "kernel.0.block.0"),
        (("block = [128, 1, 1]", "block = [64, 64, 1]"), "4096 threads"),
        (('role = "activation"', 'role = "actor"'), "kernel.0.buffer.0.role"),
        (("pdl = true", "pdl = maybe"), "is not TOML"),
        (("pdl = true", "pld = true"), "kernel.0.pld"),
        (("param = 1", "param = 0"), "parameter 0 is given twice"),
        (("param = 3", "param = 2"), "parameter 2 is both a buffer and a scalar"),
        (("param = 3", "param = 9"), "gives parameter 9 of 'k', which has 4"),
        (("value = 1024", "value = 5000000000"), "5000000000 does not fit"),
    ],
)
def test_a_wrong_contract_is_one_clear_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    terms = write(tmp_path, "c.toml", contract().replace(*change, 1))
    with pytest.raises(ContentError) as caught:
        audit_file(write(tmp_path, "k.ptx", ptx(GOOD)), terms)
    assert words in str(caught.value)
    assert "c.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_contract_for_a_kernel_that_is_not_there(tmp_path: Path) -> None:
    terms = write(tmp_path, "c.toml", contract(name="kk"))
    with pytest.raises(UnknownNameError, match="nearest: k"):
        audit_file(write(tmp_path, "k.ptx", ptx(GOOD)), terms)


def test_a_name_may_be_left_out_of_a_contract_for_one_kernel(tmp_path: Path) -> None:
    nameless = contract().replace('name = "k"\n', "", 1)
    terms = write(tmp_path, "c.toml", nameless)
    assert audit_file(write(tmp_path, "k.ptx", ptx(BAD)), terms).verdict is Verdict.FAIL
    two = write(tmp_path, "two.ptx", head("sm_103a") + entry(GOOD, "a") + entry(GOOD, "b"))
    with pytest.raises(ContentError, match="needs a name"):
        audit_file(two, terms)


def test_contract_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ContentError, match="cannot be read"):
        load_contract(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("k.txt", "", "neither a .ptx nor a .cubin"),
        ("k.ptx", "hello", "PTX line 1: expected '.version'"),
        ("k.ptx", b"\xff\xfe\x00", "not a text file"),
        ("k.ptx", head("sm_103a"), "has no kernel"),
        ("k.cubin", b"not an object", "k.cubin"),
        ("k.cubin", b"\x7fELF" + bytes(60), "k.cubin"),
    ],
)
def test_files_that_cannot_be_audited(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(ContentError) as caught:
        audit_file(write(tmp_path, name, content))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ContentError, match="there is no such file"):
        audit_file(tmp_path / "none.ptx")


def test_a_call_in_a_bare_cubin_is_undecided(tmp_path: Path) -> None:
    printing = (
        ".reg .b64 %c<3>; .reg .b32 %q<3>; mov.b64 %c1, text; cvta.global.u64 %c2, %c1;\n"
        "{ .param .b64 p0; .param .b64 p1; .param .b32 r0; st.param.b64 [p0], %c2; st.param.b64 [p1], 0;\n"
        "call.uni (r0), vprintf, (p0, p1); ld.param.b32 %q1, [r0]; }\n"
    )
    before = (
        ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n"
        ".global .align 1 .b8 text[3] = {104, 105, 0};\n"
    )
    text = ptx(printing + GOOD).replace(".visible", before + ".visible", 1)
    terms = write(tmp_path, "k.toml", contract())
    assert audit_file(write(tmp_path, "both.ptx", text), terms).verdict is Verdict.PASS
    data = cubin(text)
    assert audit_file(write(tmp_path, "bare.cubin", data), terms).verdict is Verdict.UNKNOWN
