from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.export.conftest import TUNED
from tests.export.module_winners import REPOSITORY_OPS, SimulatedProgram, put, tensors_of
from workbench.artifact import Artifact
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.export.module import write, write_module
from workbench.export.module.k3_decode import launch
from workbench.export.module.k3_decode.dispatch import Request, decide
from workbench.export.module.k3_decode.table import DamagedPackage, Kernel, Table, read
from workbench.workspace import Workspace

OPS = sorted(p.stem for p in (Path(__file__).parents[2] / "verifiers").glob("*.py"))


def norm(batch: int, width: int = 7168) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, width, generator=rng).to(torch.bfloat16)
    weight = torch.randn(width, generator=rng).to(torch.bfloat16)
    return {"x": x, "weight": weight}


# What is written


def test_the_same_winners_give_the_same_bytes(winners: list[Artifact], project: Path, tmp_path: Path) -> None:
    write_module(put(Workspace(tmp_path / "other"), *winners), tmp_path / "again", plugin=True)
    for path in sorted(p for p in project.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        assert (tmp_path / "again" / path.relative_to(project)).read_bytes() == path.read_bytes(), path


def test_nothing_written_names_this_machine_or_imports_the_workbench(project: Path) -> None:
    for path in (p for p in project.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        data = path.read_bytes()
        for place in (os.fsencode(Path.cwd()), os.fsencode(project.parent)):
            assert place not in data, path
        if path.suffix == ".py":
            lines = data.decode().splitlines()
            assert not [s for s in lines if s.lstrip().startswith(("from workbench", "import workbench"))], (
                path
            )


def test_a_folder_with_other_files_is_left_alone(winners: list[Artifact], tmp_path: Path) -> None:
    workspace = put(Workspace(tmp_path / "space"), winners[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(WorkbenchError, match=r"holds notes\.txt"):
        write_module(workspace, tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(WorkbenchError, match="is a file"):
        write_module(workspace, tmp_path / "file")


def test_an_earlier_export_is_replaced_whole(winners: list[Artifact], tmp_path: Path) -> None:
    workspace, out = put(Workspace(tmp_path / "space"), *winners[:2]), tmp_path / "out"
    write_module(workspace, out)
    shutil.rmtree(workspace.generated)
    write_module(put(workspace, winners[0]), out)
    assert len(list((out / "k3_decode" / "kernels").rglob("*.cubin"))) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "space"]


def test_a_full_disk_leaves_the_earlier_export(
    winners: list[Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, out = put(Workspace(tmp_path / "space"), winners[0]), tmp_path / "out"
    write_module(workspace, out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def full(project: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_backend", full)
    with pytest.raises(WorkbenchError, match="No space left on device"):
        write_module(workspace, out)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "space"]


def test_no_winner_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="no exported kernel"):
        write_module(put(Workspace(tmp_path / "space")), tmp_path / "out")


def test_a_damaged_winner_is_named(winners: list[Artifact], tmp_path: Path) -> None:
    workspace = put(Workspace(tmp_path / "space"), winners[0])
    cubin = next(workspace.generated.rglob("kernel.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"x")
    with pytest.raises(ContentError, match=r"kernel\.cubin"):
        write_module(workspace, tmp_path / "out")


def test_a_winner_of_another_contract_is_refused(winners: list[Artifact], tmp_path: Path) -> None:
    workspace = put(Workspace(tmp_path / "space"), winners[0])
    (workspace.root / "verifiers").unlink()
    (workspace.root / "verifiers").mkdir()
    text = (Path(__file__).parents[2] / "verifiers" / "rmsnorm.py").read_text()
    changed = text.replace('Buffer("weight", ("N",), DType.BF16', 'Buffer("weight", ("N",), DType.F32')
    assert changed != text
    (workspace.root / "verifiers" / "rmsnorm.py").write_text(changed)
    with pytest.raises(ContentError, match="another contract of rmsnorm: weight had the dtype bf16, now f32"):
        write_module(workspace, tmp_path / "out")


def test_winners_that_cannot_be_ranked_want_a_choice(tmp_path: Path) -> None:
    from workbench.compile import CompileRequest, compile_candidate
    from workbench.ops import load_op
    from workbench.templates import load_template

    op = load_op(Workspace(Path(__file__).parents[2]), "rmsnorm")
    template = load_template(Path(__file__).parents[2] / "templates" / "rmsnorm" / "row.py")
    points = list(template.space(op.workload("small_b1").axes).points())[:2]
    both = [compile_candidate(CompileRequest.of(op, "small_b1", template, p)) for p in points]
    workspace = put(Workspace(tmp_path / "space"), *both)
    with pytest.raises(
        WorkbenchError,
        match=rf"without a predicted time.*--pick {both[0].key[:12]} .* or --pick {both[1].key[:12]} ",
    ):
        write_module(workspace, tmp_path / "out")
    document = write_module(workspace, tmp_path / "out", pick=[both[1].key[:12]])
    assert [k.key for k in document.kernels] == [both[1].key] and document.passed_over == (both[0].key,)
    with pytest.raises(UnknownNameError, match="unknown winner"):
        write_module(workspace, tmp_path / "out", pick=["0123"])


# Import and self-check


def test_it_imports_without_torch_and_without_site_packages(project: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import k3_decode\n"
        "assert 'torch' not in sys.modules and 'workbench' not in sys.modules\n"
        "print(k3_decode.explain('rmsnorm', parallelism=8, batch=8).reason)\n"
        "print(k3_decode.explain('rmsnorm', parallelism=8, batch=8, arch='sm_103a').text)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert "device: no CUDA device" in done.stdout and "torch: cannot be imported" in done.stdout
    assert "launcher: cuda-bindings is not installed" in done.stdout
    assert "kernel" in done.stdout and "verified at 8" in done.stdout


def run_self_check(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "k3_decode"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


def test_the_self_check_prints_the_table_and_every_op(project: Path) -> None:
    done = run_self_check(project)
    assert done.returncode == 0, done.stderr
    assert "9 kernels" in done.stdout and done.stdout.count("intact") == 9
    for op in OPS:
        assert f"\n{op}, batch 1: " in done.stdout


def test_one_flipped_byte_is_named_and_that_kernel_alone_is_out(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "copy")
    cubin = next((tmp_path / "copy" / "k3_decode" / "kernels").rglob("rmsnorm-*.cubin"))
    data = bytearray(cubin.read_bytes())
    data[len(data) // 2] ^= 1
    cubin.write_bytes(data)
    done = run_self_check(tmp_path / "copy")
    assert done.returncode == 1 and done.stdout.count("intact") == 8
    assert f"{cubin.name} differs from what was exported" in done.stdout


def test_a_damaged_manifest_stops_no_import(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "copy")
    manifest = tmp_path / "copy" / "k3_decode" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"batch": 8', '"batch": 9'))
    done = run_self_check(tmp_path / "copy")
    assert done.returncode == 1 and "manifest.json differs from what was exported" in done.stdout
    code = "import k3_decode; print(k3_decode.explain('rmsnorm').reason)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path / "copy", capture_output=True, text=True, check=True
    )
    assert done.stdout == "package: manifest.json differs from what was exported\n"
    with pytest.raises(DamagedPackage):
        read(manifest.parent, "0" * 64)


# Dispatch


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("parallelism", [8, 16])
def test_every_batch_is_answered_or_explained(package: ModuleType, op: str, parallelism: int) -> None:
    for batch in range(1, 65):
        told = package.explain(op, parallelism=parallelism, batch=batch, arch="sm_103a")
        assert (told.kernel is None) == bool(told.reason)
        if op == "rmsnorm" and batch <= 32:
            kernel = next(k for k in package.table().kernels if k.key == told.kernel)
            assert kernel.arch == "sm_103a" and kernel.batch == min(b for b in TUNED if b >= batch)
            assert told.padded_to == (None if batch in TUNED else kernel.batch)
        else:
            assert told.kernel is None


def test_between_two_verified_batches_and_above_the_largest(package: ModuleType) -> None:
    told = package.explain("rmsnorm", parallelism=8, batch=24, arch="sm_103a")
    assert told.padded_to == 32 and "24 rows padded to 32" in told.text
    told = package.explain("rmsnorm", parallelism=16, batch=33, arch="sm_103a")
    assert told.reason == "batch: 33 rows are more than the largest verified batch, 32"
    assert package.explain("rmsnorm", batch=0, arch="sm_103a").reason == "batch: a batch of 0 has no rows"


def test_an_arch_never_gets_the_table_of_another(package: ModuleType) -> None:
    for batch in range(1, 65):
        told = package.explain("rmsnorm", parallelism=8, batch=batch, arch="sm_100a")
        kernel = next(k for k in package.table().kernels if k.key == told.kernel)
        assert kernel.arch == "sm_100a" and kernel.batch == 64
    for arch in ("sm_90a", "sm_110a", "sm_103", "sm_120a", ""):
        told = package.explain("rmsnorm", parallelism=8, batch=8, arch=arch)
        assert told.kernel is None and told.reason.startswith("arch: ")


def test_the_first_requirement_that_fails_is_named(package: ModuleType) -> None:
    ask = package.explain
    assert "there is no op 'rmsnrm'; nearest: rmsnorm" in ask("rmsnrm").reason
    assert ask("kda", arch="sm_103a").reason == "op: no kernel of kda was verified yet"
    assert ask("rmsnorm", parallelism="tp4").reason.startswith("parallelism: rmsnorm has no shape 'tp4'")
    told = ask("rmsnorm", parallelism="latent", arch="sm_103a")
    assert told.reason == "parallelism: latent is wanted, verified are latent_b3, tp8/tp16"
    assert ask("rmsnorm", axes={"N": 3584}, arch="sm_103a").reason == (
        "shape: N=3584 is wanted, verified are N=128, N=7168"
    )
    told = ask("rmsnorm", dtypes={"x": "float32"}, arch="sm_103a")
    assert told.reason == "dtypes: x=float32 is wanted, verified are x=bfloat16"
    told = ask("rmsnorm", layout="shuffled", arch="sm_103a")
    assert told.reason == "layout: shuffled is wanted, verified are row-major"
    told = ask("moe", parallelism="small", batch=2, arch="sm_103a")
    assert told.padded_to == 3


def test_an_op_whose_rows_depend_on_each_other_is_not_padded(package: ModuleType) -> None:
    table = package.table()
    stuck = replace(table.ops["rmsnorm"], padding="its rows meet")
    other = Table({"rmsnorm": stuck}, table.kernels)
    answer = decide(other, Request("rmsnorm", "sm_103a", 24, {"N": 7168}))
    assert answer.kernel is None and "rows cannot be added: its rows meet" in answer.reason
    assert decide(other, Request("rmsnorm", "sm_103a", 16, {"N": 7168})).kernel is not None


def test_the_table_is_immutable(package: ModuleType) -> None:
    table = package.table()
    with pytest.raises(AttributeError):
        table.kernels[0].batch = 64
    with pytest.raises(TypeError):
        table.ops["rmsnorm"].shapes["tp8"]["N"] = 1
    with pytest.raises(TypeError):
        table.ops["x"] = None


# The ops


def smallest(op: str) -> tuple[str, dict[str, int]]:
    contract = REPOSITORY_OPS(op)
    several = [w for w in contract.workloads if w.axes["B"] > 1 and not w.real]
    return several[0].name, dict(several[0].axes)


@pytest.mark.parametrize("op", OPS)
def test_opcheck(package: ModuleType, op: str) -> None:
    axes = smallest(op)[1]
    arguments = (*tensors_of(package, op, axes).values(), *(axes[a] for a in package.table().ops[op].given))
    results = torch.library.opcheck(getattr(torch.ops.k3_decode, op).default, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("op", OPS)
def test_the_fallback_is_the_verifiers_reference(package: ModuleType, op: str) -> None:
    axes, contract = smallest(op)[1], REPOSITORY_OPS(op)
    tensors = tensors_of(package, op, axes, seed=3)
    inputs = {
        b.name: tensors[b.name].clone().view(getattr(torch, b.dtype.torch_name)) for b in contract.inputs
    }
    golden = contract.reference(inputs, axes)
    package.reset()
    given = [axes[a] for a in package.table().ops[op].given]
    getattr(torch.ops.k3_decode, op)(*tensors.values(), *given)
    for b in contract.outputs:
        want = golden[b.name].to(getattr(torch, b.dtype.torch_name))
        got = tensors[b.name].view(want.dtype)
        assert torch.equal(torch.nan_to_num(got.double(), 7.0), torch.nan_to_num(want.double(), 7.0)), b.name
    assert sum(package.counts().fallbacks.values()) == 1 and not package.counts().kernels


@pytest.mark.parametrize("op", ["moe_experts", "moe"])
def test_mxfp4_decodes_alike_with_and_without_numpy(package: ModuleType, op: str) -> None:
    import importlib

    from workbench.ops import mxfp4

    travelled = importlib.import_module("k3_decode.contract.ops.mxfp4")
    rng = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (5, 64), generator=rng, dtype=torch.uint8)
    scale = torch.arange(20, dtype=torch.uint8).view(5, 4) * 13 + 8
    scale[0, 0], scale[1, 1], scale[2, 2] = 0, 254, 255
    for dtype in (torch.float64, torch.float32):
        for s in (scale, None):
            a, b = travelled.decode(packed, s, dtype), mxfp4.decode(packed, s, dtype)
            assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    assert math.isclose(travelled.E2M1_RMS, mxfp4.E2M1_RMS) and travelled.E2M1_VALUES == mxfp4.E2M1_VALUES


def test_under_torch_compile_mutation_is_seen(package: ModuleType) -> None:
    t = norm(2, 256)

    def body(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        before = out + 1
        torch.ops.k3_decode.rmsnorm(x, weight, out)
        return out + before

    want = body(**t)
    got = torch.compile(body, backend="aot_eager", fullgraph=True)(**t)
    assert torch.equal(got, want) and want.abs().sum() > 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 255, dtype=torch.bfloat16)}, "x has shape|weight has shape"),
        ({"x": torch.zeros(2, 2, 256, dtype=torch.bfloat16)}, "x has 3 dimensions"),
        ({"weight": torch.zeros(256)}, "weight is torch.float32, not torch.bfloat16"),
        ({"weight": torch.zeros(256, dtype=torch.bfloat16, device="meta")}, "one device"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    package: ModuleType, change: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        package.ops.run(
            "rmsnorm", {**norm(2, 256), "out": torch.zeros(2, 256, dtype=torch.bfloat16), **change}
        )


def test_calls_by_name_say_what_is_missing(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="nearest: rmsnorm"):
        package.ops.run("rmsnrm", {})
    with pytest.raises(ValueError, match="rmsnorm needs weight too"):
        package.ops.run("rmsnorm", {"x": norm(1)["x"]})
    gate_up = torch.zeros(2, 192, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="axis P does not follow"):
        package.ops.run("situ", {"gate_up": gate_up})
    assert package.ops.run("situ", {"gate_up": gate_up}, P=128)["out"].shape == (2, 128)


# Kernels, their PTX executed in the simulator in place of the cubin


@pytest.mark.parametrize("batch", [1, 5, 8, 24, 32])
def test_a_kernel_answers_and_padding_leaves_no_trace(
    package: ModuleType, simulated: type[SimulatedProgram], batch: int
) -> None:
    t = norm(batch)
    want = REPOSITORY_OPS("rmsnorm").reference(t, {"B": batch, "N": 7168})["out"]
    got = package.ops.run("rmsnorm", t)["out"]
    assert got.shape == want.shape and torch.allclose(got.double(), want, rtol=8e-3, atol=1e-3)
    assert list(package.counts().kernels.values()) == [1] and not package.counts().fallbacks
    # Rows that a copy staged are complete only when that copy has ended.
    assert simulated.calls == [("rmsnorm", batch not in TUNED)]


def test_a_gap_is_counted_and_explained(package: ModuleType, simulated: type[SimulatedProgram]) -> None:
    for _ in range(3):
        package.ops.run("rmsnorm", norm(33))
    package.ops.run("rmsnorm", norm(1, 256))
    assert package.counts().fallbacks == {
        ("rmsnorm", "batch: 33 rows are more than the largest verified batch, 32"): 3,
        ("rmsnorm", "shape: N=256 is wanted, verified are N=128, N=7168"): 1,
    }
    assert not simulated.calls


@pytest.mark.parametrize("batch", [2, 3])
def test_states_and_several_launches(
    package: ModuleType, simulated: type[SimulatedProgram], batch: int
) -> None:
    axes = {**smallest("moe")[1], "B": batch}
    tensors = tensors_of(package, "moe", axes)
    contract = REPOSITORY_OPS("moe")
    inputs = {b.name: tensors[b.name].clone() for b in contract.inputs}
    golden = contract.reference(inputs, axes)
    torch.ops.k3_decode.moe(*tensors.values(), axes["K"])
    for name in ("latent", "out"):
        assert torch.allclose(tensors[name].double(), golden[name].double(), rtol=4e-2, atol=2e-2), name
    assert simulated.calls == [("moe", batch == 2)]


def test_memory_is_made_before_a_capture_or_not_at_all(
    package: ModuleType, simulated: type[SimulatedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = norm(24)
    package.ops.run("rmsnorm", prepared)
    monkeypatch.setattr(package.runtime, "capturing", lambda device: True)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("memory is made inside a capture")

    tensors = {**prepared, "out": torch.empty_like(prepared["x"])}
    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "empty_like", "zeros_like", "clone", "cat"):
            patch.setattr(torch, name, refuse)
        package.ops.call(package.table().ops["rmsnorm"], tensors, {})
    assert tensors["out"].isfinite().all()
    with pytest.raises(package.runtime.NotPrepared, match="batch 8 is used for the first time"):
        package.ops.run("rmsnorm", norm(8))
    with pytest.raises(package.ops.reference.NotCapturable, match="more than the largest verified batch"):
        package.ops.run("rmsnorm", norm(40))


def test_layout_and_alignment_are_looked_at(package: ModuleType) -> None:
    kernel = next(k for k in package.table().kernels if k.op == "rmsnorm" and k.batch == 8)
    op = package.table().ops["rmsnorm"]
    room = torch.zeros(8 * 7168 + 256, dtype=torch.bfloat16)
    start = (-room.data_ptr() % 256) // 2
    flat = room[start : start + 8 * 7168]
    good = {"x": flat.view(8, 7168), "weight": flat[:7168], "out": flat.view(8, 7168)}
    assert package.ops._lies_right(kernel, False, op, good).met
    off = {**good, "weight": room[start + 1 : start + 7169]}
    assert package.ops._lies_right(kernel, False, op, off).detail == "weight is not aligned to 256 bytes"
    turned = {**good, "x": flat.view(7168, 8).T}
    assert package.ops._lies_right(kernel, False, op, turned).detail == "x is not contiguous"


def test_the_package_judges_its_own_kernels(
    package: ModuleType, simulated: type[SimulatedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    check = importlib.import_module("k3_decode.check")
    kernel = next(k for k in package.table().kernels if k.op == "moe_topk")
    results = list(check.check_kernel(kernel, torch.device("cpu")))
    generators = REPOSITORY_OPS("moe_topk").generators
    assert {r.case for r in results} == set(generators) and len(results) == 2 * (len(generators) + 1)
    assert not [str(r) for r in results if r.problem]
    assert {r.batch for r in results} == {2, 3}

    class Wrong(SimulatedProgram):
        def run(self, addresses: Any, stream: int, after_wait: bool = False) -> None:
            super().run(addresses, stream, after_wait)
            ctypes.memset(addresses["weights"], 0, 2)

    package.runtime.forget()
    monkeypatch.setattr(package.runtime, "make_program", Wrong)
    problems = [r for r in check.check_kernel(kernel, torch.device("cpu")) if r.problem]
    assert problems and {r.buffer for r in problems} == {"weights"}


def test_the_switch_turns_kernels_off(
    package: ModuleType, simulated: type[SimulatedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, off in (("moe", False), ("moe, rmsnorm", True), ("all", True), ("", False)):
        monkeypatch.setenv("K3_DECODE_DISABLE", value)
        package.reset()
        package.ops.run("rmsnorm", norm(8))
        assert bool(package.counts().fallbacks) == off
        if off:
            assert (
                "K3_DECODE_DISABLE turns the kernels of rmsnorm off"
                in next(iter(package.counts().fallbacks))[1]
            )


def test_a_module_that_the_driver_refuses_is_a_counted_fallback(
    package: ModuleType, simulated: type[SimulatedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(cubin: bytes, launches: Any) -> None:
        tried.append(1)
        raise package.ops.LaunchError("cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(package.runtime, "make_program", refuse)
    package.ops._plans.clear()
    for _ in range(3):
        package.ops.run("rmsnorm", norm(16))
    package.ops._plans.clear()
    reason = "driver: cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert package.counts().fallbacks == {("rmsnorm", reason): 3} and not package.counts().kernels
    assert 1 <= len(tried) <= 3


def test_a_cache_of_another_size_is_another_shape(package: ModuleType) -> None:
    norm_kernel = package.table().kernels[0]
    axes = {**package.table().ops["kda"].shapes["tp8"], "S": 9}
    dtypes = {b.name: b.torch_dtype for b in package.table().ops["kda"].buffers}
    kernel = replace(norm_kernel, op="kda", parallelism=("tp8",), batch=8, axes=axes, dtypes=dtypes)
    table = Table(package.table().ops, (kernel,))
    named = Request("kda", kernel.arch, 8, package.table().ops["kda"].shapes["tp8"], parallelism="tp8")
    assert decide(table, named).kernel is kernel
    assert decide(table, replace(named, axes=axes)).kernel is kernel
    assert decide(table, replace(named, axes={**axes, "S": 100})).kernel is None


# The launcher, on the driver's own structures


class RecordingDriver:
    """The launch structures of cuda.bindings, the calls recorded in place of a GPU."""

    def __init__(self, failing: str = "") -> None:
        import cuda.bindings.driver as real

        self.real, self.failing = real, failing
        self.launched: list[dict[str, Any]] = []
        self.attributes: list[tuple[str, int]] = []
        self.current = 0xC0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _result(self, name: str, *values: Any) -> Any:
        bad = name == self.failing
        return (
            self.real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU if bad else self.real.CUresult.CUDA_SUCCESS,
            *values,
        )

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return self._result("cuCtxGetCurrent", self.current)

    def cuCtxSetCurrent(self, context: Any) -> Any:  # noqa: N802
        self.current = int(context)
        return self._result("cuCtxSetCurrent")

    def cuModuleLoadData(self, data: bytes) -> Any:  # noqa: N802
        return self._result("cuModuleLoadData", hashlib.sha256(data).hexdigest())

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:  # noqa: N802
        return self._result("cuModuleGetFunction", name.decode())

    def cuFuncSetAttribute(self, function: str, which: Any, value: int) -> Any:  # noqa: N802
        self.attributes.append((which.name, value))
        return self._result("cuFuncSetAttribute")

    def cuLaunchKernelEx(self, config: Any, function: str, parameters: int, extra: int) -> Any:  # noqa: N802
        array = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        self.launched.append(
            {
                "function": function,
                "context": self.current,
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "smem": config.sharedMemBytes,
                "stream": int(config.hStream),
                "attributes": [a.id.name for a in config.attrs],
                "cluster": [
                    (a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z)
                    for a in config.attrs
                    if a.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
                ],
                "array": array,
            }
        )
        return self._result("cuLaunchKernelEx")


PDL = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"


def test_the_package_has_the_launcher_of_the_cuda_device(project: Path) -> None:
    from workbench.devices import launch as original

    text = (project / "k3_decode" / "launch.py").read_text()
    assert text == Path(original.__file__).read_text() and "import workbench" not in text


def test_every_launch_of_a_kernel_is_what_was_verified(package: ModuleType, winners: list[Artifact]) -> None:
    driver = RecordingDriver()
    artifact = winners[-1]
    kernel: Kernel = next(k for k in package.table().kernels if k.op == "moe")
    program = launch.Program(kernel.load(), kernel.launches, driver)
    addresses = {b.name: 0x7000_0000_0000 + 4096 * i for i, b in enumerate(artifact.buffers)}
    program.run(addresses, stream=77)
    program.run(addresses, stream=77, after_wait=True)
    count = len(artifact.launches)
    assert len(driver.launched) == 2 * count and count > 1
    for n, got in enumerate(driver.launched):
        want = artifact.launches[n % count]
        assert (got["function"], got["grid"], got["block"]) == (want.kernel, want.grid, want.block)
        assert (got["smem"], got["stream"]) == (want.smem_bytes, 77)
        assert (PDL in got["attributes"]) == (want.pdl and n != count)
        for i, p in enumerate(want.params):
            assert ctypes.string_at(got["array"][i], p.size) == p.bind(addresses)


def test_clusters_large_shared_memory_and_cooperative_launches() -> None:
    driver = RecordingDriver()
    launches = [
        launch.Launch("a", (16, 1, 1), (128, 1, 1), cluster=(16, 1, 1), smem_bytes=200 * 1024, pdl=True),
        launch.Launch("b", (4, 2, 1), (32, 1, 1), cooperative=True),
    ]
    launch.Program(b"", launches, driver).run({}, 0)
    first, second = driver.launched
    assert first["cluster"] == [(16, 1, 1)] and PDL in first["attributes"]
    assert second["attributes"] == ["CU_LAUNCH_ATTRIBUTE_COOPERATIVE"]
    assert driver.attributes == [
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 200 * 1024),
        ("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1),
    ]


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"])
def test_what_the_driver_refuses_is_named(call: str) -> None:
    driver = RecordingDriver(failing=call)
    with pytest.raises(launch.LaunchError, match=f"{call} failed: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        launch.Program(b"", [launch.Launch("a", (1, 1, 1), (32, 1, 1))], driver).run({}, 0)


def test_a_launch_from_another_thread_or_device_has_its_context_and_leaves_the_others() -> None:
    driver = RecordingDriver()
    program = launch.Program(b"", [launch.Launch("a", (1, 1, 1), (32, 1, 1))], driver)
    for before, after in ((0xC0, 0xC0), (0xD0, 0xD0), (0, 0xC0)):
        driver.current = before
        program.run({}, 0)
        assert driver.launched[-1]["context"] == 0xC0 and driver.current == after
    driver.current = 0
    with pytest.raises(launch.LaunchError, match="no CUDA context is current"):
        launch.Program(b"", [], driver)
