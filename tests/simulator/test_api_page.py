"""The page on the simulator as a tool of its own: its examples run and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

from tests.simulator.kernels import kernel
from workbench.errors import UnknownNameError, WorkbenchError
from workbench.simulator import Unwritten, run_ptx

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def test_the_examples_of_the_page_run_and_print_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    said = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for k, block in enumerate(blocks):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, names)
        if k < len(said):
            assert printed.getvalue() == said[k]
        else:
            assert "out-of-bounds 0x00000064 100" in printed.getvalue()


ADD = """
mov.u32 %r1, %tid.x;
mul.wide.u32 %d1, %r1, 4;
add.s64 %d2, %x, %d1;
ld.global.u32 %r2, [%d2];
add.u32 %r2, %r2, %n;
add.s64 %d3, %y, %d1;
st.global.u32 [%d3], %r2;
"""
TEXT = kernel(ADD, ["x", "y", "n:u32"])


def test_arguments_by_position_and_by_name():
    x = np.arange(32, dtype=np.uint32)
    for wrap in (list, lambda a: dict(zip(("p_x", "p_y", "p_n"), a, strict=True))):
        y = np.zeros(32, np.uint32)
        outcome = run_ptx(TEXT, "k", 1, 32, wrap([x, y, 5]))
        assert outcome.findings == ()
        np.testing.assert_array_equal(y, x + 5)


def test_arrays_of_any_shape_and_stride_are_updated_in_place():
    x = np.arange(64, dtype=np.uint32)[::2].reshape(4, 8)
    y = np.zeros((8, 8), np.uint32)
    assert run_ptx(TEXT, arguments=[x, y[:, ::2], np.uint32(1)]).findings == ()
    np.testing.assert_array_equal(y[:, ::2].ravel(), x.ravel() + 1)
    assert not y[:, 1::2].any()


def test_unwritten_and_read_only_arrays_are_watched():
    x = np.zeros(32, np.uint32)
    y = np.zeros(32, np.uint32)
    assert [f.rule for f in run_ptx(TEXT, arguments=[Unwritten(x), Unwritten(y), 1]).findings] == [
        "uninitialized-read"
    ]
    y.flags.writeable = False
    outcome = run_ptx(TEXT, arguments=[np.zeros(32, np.uint32), y, 1])
    assert [(f.rule, f.buffer) for f in outcome.findings] == [("read-only-write", "p_y")]
    assert not y.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([1], "3 parameters"),
        ({"p_x": 1, "p_y": 1}, "no argument for p_n"),
        ([np.zeros(1), np.zeros(1), np.zeros(1)], "no pointer"),
        ([0, 0, 1 << 40], "does not fit"),
        ([0, 0, b"123"], "has 4 bytes, not 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(WorkbenchError, match=message):
        run_ptx(TEXT, arguments=arguments)


def test_unknown_names_and_bad_extents_are_refused():
    with pytest.raises(UnknownNameError, match="nearest: p_x"):
        run_ptx(TEXT, arguments={"p_xx": 1})
    with pytest.raises(UnknownNameError, match="kernel"):
        run_ptx(TEXT, "scale", arguments=[0, 0, 0])
    with pytest.raises(WorkbenchError, match="extent"):
        run_ptx(TEXT, grid=(1, 0), arguments=[0, 0, 0])
    two = TEXT + TEXT[TEXT.index(".visible") :].replace("k(", "other(")
    with pytest.raises(WorkbenchError, match="k, other"):
        run_ptx(two, arguments=[0, 0, 0])
