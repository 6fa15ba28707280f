"""`workbench audit` of plain Python files and of folders: documents, exit codes, what stands on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.workspace import Workspace

KERNEL = """
import cutlass.cute as cute

ARGUMENTS = {
    "x": {"shape": [256], "dtype": "f32", "role": "activation"},
    "out": {"shape": [256], "dtype": "f32", "role": "output"},
}


@cute.kernel
def double(x: cute.Tensor, out: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * 128 + tid
    FIRST
    SECOND
    out[i] = v + v


@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    double(x, out).launch(grid=[2, 1, 1], block=[128, 1, 1], use_pdl=True)
"""
LOAD, WAIT = "v = x[i]", "cute.arch.griddepcontrol_wait()"
WRONG = KERNEL.replace("FIRST", LOAD).replace("SECOND", WAIT)
RIGHT = KERNEL.replace("FIRST", WAIT).replace("SECOND", LOAD)


def test_a_python_file_that_is_no_template(run: Any, workspace: Workspace) -> None:
    Path("double.py").write_text(WRONG)
    result = run("audit", "double.py", "--json")
    (target,) = result.json("audit")["targets"]
    assert result.code == 1 and target["verdict"] == "fail" and "CuTe DSL" in target["toolchain"]
    assert {f["rule"] for f in target["findings"]} == {"pdl-load-before-wait"}
    text = run("audit", "double.py:double").out
    assert "> " in text and "v = x[i]" in text and "ld.global" in text and "LDG" in text
    assert "docs/rules/pdl-load-before-wait.md" in text and "made by: CuTe DSL" in text
    Path("double.py").write_text(RIGHT)
    assert run("audit", "double.py", "--strict").code == 0
    Path("bare.py").write_text("\n".join(line for line in RIGHT.splitlines() if '": {"shape"' not in line))
    assert "nothing says what argument 'x' of host is" in run("audit", "bare.py").complaint


def test_a_folder_goes_on_after_a_file_that_cannot_be_read(run: Any, workspace: Workspace) -> None:
    folder = Path("kernels")
    folder.mkdir()
    (folder / "right.py").write_text(RIGHT)
    assert run("audit", "kernels").code == 0
    (folder / "wrong.py").write_text(WRONG)
    assert run("audit", "kernels").code == 1
    (folder / "broken.ptx").write_text("hello")
    result = run("audit", "kernels", "--json")
    document = result.json("audit")
    assert result.code == 2 and "broken.ptx: PTX line 1" in result.err
    assert len(document["targets"]) == 2 and document["unreadable"][0]["target"].endswith("broken.ptx")
    assert "leave contract" in run("audit", "kernels", "--contract", "c.toml").complaint
