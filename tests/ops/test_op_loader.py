"""Loading verifiers: good ones are cached, bad ones are one clear line, loose tolerances are refused."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from workbench.errors import ContentError, UnknownNameError
from workbench.ops import load_op
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]

GOOD = """
    import torch
    from workbench.ops import Buffer, DType, Op, Role, Tolerance, Workload
    from workbench.ops.rounding import to_bf16

    def double(inputs, axes):
        return {"y": to_bf16(inputs["x"].double() * 2).double()}

    def ordinary(axes, seed, allocate):
        x = allocate("x")
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        return {"x": x}

    OP = Op(
        name="toy",
        doc="twice x",
        buffers=(
            Buffer("x", ("B", "N"), DType.BF16, Role.ACTIVATION),
            Buffer("y", ("B", "N"), DType.BF16, Role.OUTPUT),
        ),
        workloads=(Workload("big", {"B": 4, "N": 512}), Workload("small", {"B": 1, "N": 64})),
        reference=double,
        baseline=double,
        generators={"ordinary": ordinary},
        tolerances={"y": Tolerance()},
        flops=lambda axes: axes["B"] * axes["N"],
        compulsory_bytes=lambda axes: 4 * axes["B"] * axes["N"],
    )
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "templates").mkdir()
    return Workspace(tmp_path)


def write(workspace: Workspace, *changes: tuple[str, str]) -> Path:
    text = textwrap.dedent(GOOD)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = workspace.verifiers / "toy.py"
    path.write_text(text)
    return path


def test_a_good_verifier_is_loaded_once_for_its_content(workspace: Workspace) -> None:
    path = write(workspace)
    op = load_op(workspace, "toy")
    assert op.name == "toy" and load_op(workspace, "toy") is op
    path.write_text(path.read_text() + "\n# changed\n")
    assert load_op(workspace, "toy") is not op


def test_the_real_ops_load() -> None:
    workspace = Workspace(ROOT)
    assert {"moe", "moe_experts", "moe_topk", "rmsnorm"} <= set(workspace.op_names())
    for name in workspace.op_names():
        assert load_op(workspace, name).name == name


def test_unknown_name(workspace: Workspace) -> None:
    write(workspace)
    with pytest.raises(UnknownNameError, match="toy"):
        load_op(workspace, "toyy")


BAD = [
    ([('return {"x": x}', 'return {"x": x')], r"toy\.py:\d+: syntax error"),
    (
        [("import torch\n", "import torch\nraise RuntimeError('no')\n")],
        r"toy\.py:3: the file raises RuntimeError: no",
    ),
    ([("OP = Op(", "OPERATION = Op(")], r"has no `OP = Op"),
    ([("OP = Op(", "OP = dict(")], r"OP is a dict, not an Op"),
    ([('name="toy"', 'name="tool"')], r"OP.name is 'tool'; it must be 'toy'"),
    ([('Buffer("y", ("B", "N")', 'Buffer("x", ("B", "N")')], r"buffer 'x' is declared twice"),
    (
        [('Buffer("y", ("B", "N")', 'Buffer("y", ("B", "M")')],
        r"buffer 'y' at workload 'big': unknown name 'M'",
    ),
    (
        [('Buffer("y", ("B", "N")', 'Buffer("y", ("B", "N - 64")')],
        r"'y' at workload 'small' has the shape \[1, 0\]",
    ),
    ([('{"B": 1, "N": 64}', '{"B": 1}')], r"'small' and 'big' differ in the axes: N"),
    ([('{"B": 1, "N": 64}', '{"B": 0, "N": 64}')], r"small: axis B is 0"),
    ([('Workload("small"', 'Workload("big"')], r"workload 'big' is declared twice"),
    ([('{"y": Tolerance()}', "{}")], r"no tolerance for y"),
    (
        [('{"y": Tolerance()}', '{"y": Tolerance(), "z": Tolerance()}')],
        r"tolerance for z, which is no output",
    ),
    ([('{"ordinary": ordinary}', '{"usual": ordinary}')], r"generator `ordinary` is missing"),
    ([('return {"x": x}', "return {}")], r"generator 'ordinary' returns no 'x'"),
    ([('return {"x": x}', 'return {"x": x.clone()}')], r"did not get from allocate"),
    ([('return {"y": to', 'return {"z": to')], r"the reference returns no 'y'"),
    (
        [('inputs["x"].double() * 2', 'inputs["x"].double()[:, :3]')],
        r"'y' has the shape \[1, 3\], not \[1, 64\]",
    ),
    ([("* 2).double()", "* 2)")], r"'y' is torch.bfloat16, not float64"),
    ([('inputs["x"].double()', 'inputs["q"].double()')], r"toy\.py:7: the reference raises KeyError"),
    ([('inputs["x"].double()', 'inputs["x"].add_(1).double()')], r"changes 'x'"),
    ([('lambda axes: axes["B"] *', "lambda axes: 0 *")], r"flops at 'big' is 0"),
    ([('lambda axes: 4 * axes["B"]', 'lambda axes: 4 * axes["C"]')], r"compulsory_bytes raises KeyError"),
    (
        [("    baseline=double", '    constants={"N": 3},\n    baseline=double')],
        r"N is both an axis and a constant",
    ),
    (
        [("    baseline=double", "    baseline=lambda i, a: {'y': i['x'] * 2.1}")],
        r"the op's own baseline is refused: 'y' has a root-mean",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_bad_verifier_is_one_line_with_its_place(
    workspace: Workspace, changes: list[tuple[str, str]], message: str
) -> None:
    path = write(workspace, *changes)
    with pytest.raises(ContentError, match=message) as caught:
        load_op(workspace, "toy")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    with pytest.raises(ContentError, match=message):
        load_op(workspace, "toy")  # not accepted the second time


LOOSE = "Tolerance(floor_rms={0}, floor_worst={0}, cap_rms={0}, cap_worst={0})"
TRIVIAL = [
    # rms and worst of the trivial output are just below the limit that is set
    ("* 2)", LOOSE.format(1.01), "zeros"),
    ("* 0.02 + 1)", LOOSE.format(0.1), "ones"),
    ("* 0.01 + 7)", LOOSE.format(0.02), "the mean"),
    ("* 1.001)", LOOSE.format(0.01), "a copy of x"),
    # the bytes 5A5A are the bfloat16 1.536e16
    ("* 1e12 + 1.536e16)", LOOSE.format(0.05), "the mean|a no-op"),
]


@pytest.mark.parametrize(("formula", "tolerance", "trivial"), TRIVIAL)
def test_a_tolerance_that_accepts_a_trivial_output_is_refused(
    workspace: Workspace, formula: str, tolerance: str, trivial: str
) -> None:
    write(workspace, ("* 2)", formula), ("Tolerance()", tolerance))
    with pytest.raises(ContentError, match=f"too loose: ({trivial}).* would pass as 'y' at workload 'small'"):
        load_op(workspace, "toy")


def test_a_no_op_on_a_state_that_hardly_changes_is_refused(workspace: Workspace) -> None:
    write(
        workspace,
        (
            'Buffer("x", ("B", "N"), DType.BF16, Role.ACTIVATION)',
            'Buffer("y", ("B", "N"), DType.BF16, Role.STATE)',
        ),
        (
            'Buffer("y", ("B", "N"), DType.BF16, Role.OUTPUT)',
            'Buffer("x", ("B", "N"), DType.BF16, Role.ACTIVATION)',
        ),
        ('inputs["x"].double() * 2', 'inputs["y"].double() * 1.001'),
        ('return {"x": x}', 'return {"x": x, "y": allocate("y").copy_(x * 3)}'),
        ("Tolerance()", LOOSE.format(0.01)),
    )
    with pytest.raises(ContentError, match="too loose: a no-op would pass as 'y'"):
        load_op(workspace, "toy")


def test_tiny_values_do_not_hide_behind_an_absolute_tolerance(workspace: Workspace) -> None:
    """Outputs of 1e-6 are judged relative to themselves: zeros do not pass."""
    write(workspace, ("* 2)", "* 1e-6)"))
    load_op(workspace, "toy")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, workbench.ops, workbench.ops.loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
