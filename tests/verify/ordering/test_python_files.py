"""Auditing Python files that are no templates: what they launch, on what, and what is wrong with bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import api
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.verify.report import Verdict

HEAD = "import cutlass\nimport cutlass.cute as cute\n\n"
ARGUMENTS = """ARGUMENTS = {
    "x": {"shape": [1024], "dtype": "f32", "role": "activation"},
    "out": {"shape": [1024], "dtype": "Float32", "role": "output"},
    "n": 1000,
}
"""
KERNEL = """
@cute.kernel
def scale(x: cute.Tensor, out: cute.Tensor, n: cutlass.Int32):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * 128 + tid
    FIRST
    SECOND
    if i < n:
        out[i] = v * 2.0

"""
HOST = """
@cute.jit
def host(x: cute.Tensor, out: cute.Tensor, n: cutlass.Int32):
    scale(x, out, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
"""
WAIT, LOAD = "cute.arch.griddepcontrol_wait()", "v = x[i]"
WRONG = HEAD + ARGUMENTS + KERNEL.replace("FIRST", LOAD).replace("SECOND", WAIT) + HOST
RIGHT = HEAD + ARGUMENTS + KERNEL.replace("FIRST", WAIT).replace("SECOND", LOAD) + HOST
BARE = WRONG.replace(ARGUMENTS, "")


def write(folder: Path, text: str, name: str = "k.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_arguments_said_in_the_file(tmp_path: Path) -> None:
    (wrong,) = api.audit(write(tmp_path, WRONG)).targets
    assert wrong.verdict is Verdict.FAIL and wrong.arch == "sm_103a"
    (finding,) = [f for f in wrong.findings if f.rule == "pdl-load-before-wait"]
    line = next(n for n, text in enumerate(WRONG.splitlines(), 1) if text.strip() == LOAD)
    assert (finding.source, finding.buffer) == (f"k.py:{line}", "x")
    assert finding.ptx_line is not None and finding.sass_offset is not None
    assert wrong.toolchain is not None and "CuTe DSL 4." in wrong.toolchain and "ptxas" in wrong.toolchain
    (right,) = api.audit(write(tmp_path, RIGHT)).targets
    assert right.verdict is Verdict.PASS and not right.findings


def test_arguments_said_in_the_contract(tmp_path: Path) -> None:
    path = write(tmp_path, BARE)
    terms = write(
        tmp_path,
        '[[argument]]\nname = "x"\nshape = [1024]\nrole = "ROLE"\n'
        '[[argument]]\nname = "out"\nshape = [8, 128]\nrole = "output"\n'
        '[[argument]]\nname = "n"\nvalue = 7\n',
        "k.toml",
    )
    text = terms.read_text().replace("[8, 128]", "[1024]")
    for role, verdict in (("activation", Verdict.FAIL), ("weight", Verdict.PASS)):
        terms.write_text(text.replace("ROLE", role))
        assert api.audit(path, terms).verdict is verdict


def test_buffers_of_a_contract_that_carry_the_names_of_arguments(tmp_path: Path) -> None:
    path = write(
        tmp_path, BARE.replace(", n: cutlass.Int32", "").replace("out, n)", "out)").replace("< n", "< 9")
    )
    terms = (
        '[[kernel]]\nname = "scale"\ngrid = [8, 1, 1]\nblock = [128, 1, 1]\npdl = PDL\n'
        '[[kernel.buffer]]\nparam = 0\nname = "x"\nrole = "activation"\nbytes = 4096\n'
        '[[kernel.buffer]]\nparam = 1\nname = "out"\nrole = "output"\nbytes = 4096\n'
    )
    for pdl, verdict in (("true", Verdict.FAIL), ("false", Verdict.PASS)):
        document = api.audit(path, write(tmp_path, terms.replace("PDL", pdl), "k.toml"))
        assert document.verdict is verdict
        assert any("x is a one-dimensional f32 tensor" in a for a in document.targets[0].assumptions)
    wide = write(tmp_path, terms.replace("PDL", "true").replace("grid = [8", "grid = [9"), "k.toml")
    with pytest.raises(ContentError, match=r"grid is \[9, 1, 1\], but k.py launches \[8, 1, 1\]"):
        api.audit(path, wide)
    other = write(tmp_path, terms.replace("PDL", "true").replace('"scale"', '"scael"'), "k.toml")
    with pytest.raises(UnknownNameError, match="nearest: scale"):
        api.audit(path, other)


def test_a_role_that_nobody_gave_leaves_it_undecided(tmp_path: Path) -> None:
    document = api.audit(write(tmp_path, WRONG.replace(', "role": "activation"', "")))
    assert document.verdict is Verdict.UNKNOWN
    assert "give a contract" in document.targets[0].findings[0].message


def test_a_stream_a_constexpr_and_a_default(tmp_path: Path) -> None:
    host = """
@cute.jit
def host(x: cute.Tensor, out: cute.Tensor, stream, n: cutlass.Int32, threads: cutlass.Constexpr = 64):
    scale(x, out, n).launch(grid=[1024 // threads, 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=True)
"""
    text = (
        RIGHT.replace(HOST, host).replace('"n": 1000', '"n": 1000, "threads": 256').replace("* 128", "* 256")
    )
    assert api.audit(write(tmp_path, text)).verdict is Verdict.PASS


def test_every_launch_of_every_host_function_and_one_by_name(tmp_path: Path) -> None:
    second = KERNEL.replace("FIRST", WAIT).replace("SECOND", LOAD).replace("def scale", "def copy")
    more = "\n@cute.jit\ndef other(x: cute.Tensor, out: cute.Tensor, n: cutlass.Int32):\n"
    more += "    copy(x, out, n).launch(grid=[8, 1, 1], block=[128, 1, 1])\n"
    path = write(tmp_path, WRONG + second + more)
    assert [t.verdict for t in api.audit(path).targets] == [Verdict.FAIL, Verdict.PASS]
    for name in ("other", "copy"):
        (target,) = api.audit(f"{path}:{name}").targets
        assert target.verdict is Verdict.PASS and "copy" in target.kernel
    with pytest.raises(UnknownNameError, match="nearest: copy"):
        api.audit(f"{path}:cpoy")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def (", "k.py:1: invalid syntax"),
        ("x = 1\n", "has no @cute.jit function"),
        (HEAD + KERNEL, "has a @cute.kernel, but no @cute.jit function"),
        (BARE, "nothing says what argument 'x' of host is"),
        (WRONG.replace("[1024]", "[0]", 1), "argument 'x': shape"),
        (WRONG.replace('"f32"', '"f33"'), "argument 'x': dtype"),
        (WRONG.replace("ARGUMENTS = {", "ARGUMENTS = {**a, "), "ARGUMENTS must be a literal"),
        ("import socket\n" + WRONG, "k.py:1: rejected: import of 'socket' is not allowed"),
        (WRONG.replace("x[i]", "y[i]"), "y"),
        (WRONG.replace("block=[128", "block=[2048"), "not launchable"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ContentError, match=r"^[^\n]+$") as error:
        api.audit(write(tmp_path, text))
    assert said in str(error.value) and "k.py" in str(error.value)


def test_knobs_and_workloads_are_for_templates(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="declares no TEMPLATE"):
        api.audit(write(tmp_path, WRONG), knobs={"a": 1})


def test_a_folder_is_one_document(tmp_path: Path) -> None:
    from snippets import LOAD_X, STORE, contract, ptx
    from snippets import WAIT as PTX_WAIT

    write(tmp_path, WRONG, "wrong.py")
    write(tmp_path, RIGHT, "right.py")
    write(tmp_path, "def helper():\n    return 1\n", "helper.py")
    inner = tmp_path / "inner"
    inner.mkdir()
    write(inner, ptx(PTX_WAIT + LOAD_X + STORE), "a.ptx")
    write(inner, contract(), "a.toml")
    document = api.audit(tmp_path)
    assert [(Path(t.target).name, t.verdict.value) for t in document.targets] == [
        ("a.ptx", "pass"),
        ("right.py", "pass"),
        ("wrong.py", "fail"),
    ]
    assert document.unreadable == ()
    write(tmp_path, "nonsense", "broken.ptx")
    write(tmp_path, "def (", "broken.py")
    document = api.audit(tmp_path)
    assert [Path(u.target).name for u in document.unreadable] == ["broken.ptx", "broken.py"]
    assert len(document.targets) == 3
    with pytest.raises(WorkbenchError, match="takes its contract from"):
        api.audit(tmp_path, inner / "a.toml")
    empty = tmp_path / ".empty"
    empty.mkdir()
    with pytest.raises(ContentError, match=r"holds no \.ptx"):
        api.audit(empty)
