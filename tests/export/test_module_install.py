from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.export.module_winners import compiled, put
from workbench.export.module import write_module
from workbench.workspace import Workspace

CHECK = """
import importlib.util, json, sys
assert importlib.util.find_spec("workbench") is None
import k3_decode, torch
held = k3_decode.table()
results = {}
from k3_decode.contracts import contract
from k3_decode.contract.ops.trivial import zero_inputs
for name, op in held.ops.items():
    c = contract(name)
    axes = next(w.axes for w in c.workloads if not w.real)
    storage = zero_inputs(c, axes)
    made = c.generators["ordinary"](axes, 0, storage.__getitem__)
    tensors = []
    for b in op.buffers:
        dtype = getattr(torch, b.torch_dtype)
        if b.name in made:
            tensors.append(made[b.name].view(dtype))
        else:
            tensors.append(torch.zeros(k3_decode.ops.storage_shape(b, axes), dtype=dtype))
    call = getattr(torch.ops.k3_decode, name).default
    results[name] = torch.library.opcheck(call, (*tensors, *(axes[a] for a in op.given)))
assert "workbench" not in sys.modules
print(json.dumps({
    "file": k3_decode.__file__, "version": k3_decode.__version__, "results": results,
    "explain": str(k3_decode.explain("rmsnorm", parallelism=8, batch=1)),
}))
"""


def others(folder: Path) -> Path:
    """The packages of this environment by link, torch among them, without the workbench."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "workbench" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.slow
def test_it_installs_offline_in_a_clean_environment_without_the_workbench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = put(Workspace(tmp_path / "space"), compiled("rmsnorm", "tp8_b1"), compiled("moe", "small_b1"))
    document = write_module(workspace, tmp_path / "project")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    install = ["install", "--no-index", "--no-deps", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), *install]
    subprocess.run([*pip, str(tmp_path / "project")], check=True, cwd=tmp_path, env=clean)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inside = Path(subprocess.check_output([str(python), "-c", where], text=True).strip())
    assert sorted(p.name for p in inside.iterdir()) == [
        "k3_decode", f"k3_decode-{document.version}.dist-info",
    ]  # fmt: skip
    (inside / "others.pth").write_text(f"{others(tmp_path / 'others')}\n")
    done = subprocess.run(
        [str(python), "-c", CHECK], capture_output=True, text=True, cwd=tmp_path, env=clean, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert Path(told["file"]).is_relative_to(inside) and told["version"] == document.version
    assert len(told["results"]) == 13 and "no CUDA device" in told["explain"]
    assert all(set(r.values()) == {"SUCCESS"} for r in told["results"].values())
    check = subprocess.run([str(python), "-m", "k3_decode"], capture_output=True, text=True, env=clean)
    assert check.returncode == 0 and check.stdout.count("intact") == 2
    wheel = tmp_path / "project" / document.wheel
    assert wheel.stat().st_size == document.wheel_nbytes < 2_000_000
    with capsys.disabled():
        print(f"\nwheel {wheel.name}: {document.wheel_nbytes} bytes, {len(document.kernels)} kernels")


@pytest.mark.slow
def test_the_wheel_that_pip_builds_is_the_one_that_was_written(tmp_path: Path) -> None:
    document = write_module(
        put(Workspace(tmp_path / "space"), compiled("rmsnorm", "small_b1")), tmp_path / "p"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--quiet",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(tmp_path / "p")], check=True)
    built = tmp_path / Path(document.wheel).name
    assert built.read_bytes() == (tmp_path / "p" / document.wheel).read_bytes()
    with zipfile.ZipFile(built) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert any(n.endswith(".cubin") for n in names) and not [n for n in names if "workbench" in n]
