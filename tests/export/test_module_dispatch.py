"""The exported package's own table and dispatch, every batch asked for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.export.conftest import TUNED
from tests.export.module_winners import SimulatedProgram, put
from workbench.artifact import Artifact
from workbench.errors import ContentError
from workbench.export.module import write_module
from workbench.export.module.k3_decode.dispatch import Request, decide
from workbench.export.module.k3_decode.table import Kernel, Op, Table
from workbench.isa.cubin import read_cubin
from workbench.workspace import Workspace

BATCHES = range(1, 65)
OPS = sorted(p.stem for p in (Path(__file__).parents[2] / "verifiers").glob("*.py"))
SHAPES = ("tp8", "tp16")


def meta(package: ModuleType, op: Op, batch: int, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Tensors of an op's real sizes without memory."""
    whole = {**axes, "B": batch}
    for b in op.buffers:  # sizes of caches, which no shape's name tells
        for extent in b.shape:
            if isinstance(extent, str) and extent.isidentifier():
                whole.setdefault(extent, batch + 1)
    return {
        b.name: torch.empty(
            package.ops.storage_shape(b, whole), dtype=getattr(torch, b.torch_dtype), device="meta"
        )
        for b in op.buffers
    }


@pytest.fixture
def pretended(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(package.ops, "pretended_arch", "sm_103a")
    package.ops._plans.clear()
    yield package
    package.ops._plans.clear()


# The table as it was exported


@pytest.mark.parametrize("op", OPS)
def test_calls_are_planned_as_explained_at_every_batch(pretended: ModuleType, op: str) -> None:
    """The path of a call, with tensors of real sizes, and `explain` answer alike."""
    known = pretended.table().ops[op]
    shapes = [s for s in known.shapes if s.endswith(SHAPES)]
    assert any(s.endswith("tp8") for s in shapes)
    for shape in shapes:
        axes = dict(known.shapes[shape])
        for batch in BATCHES:
            tensors = meta(pretended, known, batch, axes)
            decision = pretended.ops.plan(known, tensors, {a: axes[a] for a in known.given}).decision
            told = pretended.explain(op, parallelism=shape, batch=batch, arch="sm_103a")
            assert (decision.kernel.key if decision.kernel else None) == told.kernel, (shape, batch)
            assert bool(told.kernel) != bool(decision.reason)
            if op == "rmsnorm":
                fitting = min((b for b in TUNED if b >= batch), default=None)
                assert (decision.kernel.batch if decision.kernel else None) == fitting
                assert decision.padded == (batch not in TUNED and batch <= 32)
                over = f"batch: {batch} rows are more than the largest verified batch, 32"
                assert decision.reason == (over if batch > 32 else "")


def test_a_batch_of_24_runs_at_32_and_one_of_33_by_reference_and_both_are_counted(
    package: ModuleType, simulated: type[SimulatedProgram], caplog: pytest.LogCaptureFixture
) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(7168, generator=rng).to(torch.bfloat16)
    (of_32,) = [k for k in package.table().kernels if k.op == "rmsnorm" and k.batch == 32]
    with caplog.at_level(logging.INFO, logger="k3_decode"):
        for batch in (24, 33, 24, 33, 32):
            x = torch.randn(batch, 7168, generator=rng).to(torch.bfloat16)
            out = package.ops.run("rmsnorm", {"x": x, "weight": weight})["out"].double()
            exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            assert torch.allclose(out, exact, rtol=8e-3, atol=1e-3), batch
    counts = package.counts()
    assert counts.kernels == {("rmsnorm", of_32.key): 3} and len(simulated.calls) == 3
    assert counts.padded == {("rmsnorm", 24, 32): 2}
    reason = "batch: 33 rows are more than the largest verified batch, 32"
    assert counts.fallbacks == {("rmsnorm", reason): 2}
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        "rmsnorm: 24 rows run as 32, for which a kernel was verified",
        f"rmsnorm runs by reference: {reason}",
    ], "each is said once"
    package.reset()
    assert not package.counts().padded


def test_cubins_are_of_the_arch_that_the_table_says(package: ModuleType) -> None:
    for kernel in package.table().kernels:
        cubin = read_cubin(kernel.load())
        assert f"sm_{cubin.sm}a" == kernel.arch and kernel.cubin.startswith(f"kernels/{kernel.arch}/")
    assert {k.arch for k in package.table().kernels} == {"sm_100a", "sm_103a"}


def test_a_cubin_of_another_arch_than_its_manifest_is_not_exported(
    winners: list[Artifact], tmp_path: Path
) -> None:
    workspace = put(Workspace(tmp_path / "space"), winners[0])
    (manifest,) = workspace.generated.rglob("manifest.json")
    assert json.loads(manifest.read_text())["arch"] == "sm_103a"
    manifest.write_text(manifest.read_text().replace("sm_103a", "sm_100a"))
    with pytest.raises(ContentError, match="the PTX is for sm_103a, wanted sm_100a"):
        write_module(workspace, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_launches_that_do_not_fit_their_kernel_are_not_exported(
    winners: list[Artifact], tmp_path: Path
) -> None:
    workspace = put(Workspace(tmp_path / "space"), winners[0])
    (manifest,) = workspace.generated.rglob("manifest.json")
    raw = json.loads(manifest.read_text())
    raw["launches"][0]["params"].append(raw["launches"][0]["params"][0])
    manifest.write_text(json.dumps(raw))
    with pytest.raises(ContentError, match=r"is not what its manifest says: .* parameters"):
        write_module(workspace, tmp_path / "out")


# Tables with more in them, answered by the same code


def tuned(package: ModuleType, op: str, shape: str, batch: int, arch: str) -> Kernel:
    """An entry as an export would make it."""
    known, model = package.table().ops[op], package.table().kernels[0]
    return replace(
        model,
        key=f"{op}/{shape}/{batch}/{arch}",
        op=op,
        workload=f"{shape}_b{batch}",
        arch=arch,
        parallelism=(shape,),
        batch=batch,
        axes=known.shapes[shape],
        dtypes={b.name: b.torch_dtype for b in known.buffers},
    )


def full(package: ModuleType, arch: str, batches: tuple[int, ...]) -> list[Kernel]:
    """Kernels of all ops at TP8 and TP16."""
    ops = package.table().ops
    return [
        tuned(package, op, shape, batch, arch)
        for op in ops
        for shape in ops[op].shapes
        if shape.endswith(SHAPES)
        for batch in batches
    ]


def test_every_op_at_every_batch_and_parallelism(package: ModuleType) -> None:
    ops = package.table().ops
    kernels = full(package, "sm_103a", TUNED) + full(package, "sm_100a", (64, 2))
    table = Table(ops, tuple(kernels))
    asked = 0
    for kernel in {(k.op, k.parallelism[0]): k for k in kernels}.values():
        op, shape = kernel.op, kernel.parallelism[0]
        for arch, batches in (("sm_103a", TUNED), ("sm_100a", (2, 64))):
            for batch in BATCHES:
                found = decide(table, Request(op, arch, batch, ops[op].shapes[shape], parallelism=shape))
                above = min((b for b in batches if b >= batch), default=None)
                if above is None or (ops[op].padding and above != batch):
                    assert found.kernel is None and found.reason.startswith("batch: ")
                else:
                    assert found.kernel is not None
                    assert found.kernel.key == f"{op}/{shape}/{above}/{arch}"
                    assert found.padded == (above != batch)
                asked += 1
    assert asked >= 2 * 2 * 64 * 8


def test_a_better_fit_of_another_arch_or_shape_changes_nothing(package: ModuleType) -> None:
    ops = package.table().ops
    own = [tuned(package, "kda", "tp8", batch, "sm_103a") for batch in (1, 8)]
    foreign = full(package, "sm_100a", tuple(BATCHES)) + full(package, "sm_90a", tuple(BATCHES))
    other = [tuned(package, "kda", "tp16", batch, "sm_103a") for batch in BATCHES]
    for table in (Table(ops, (*own, *foreign, *other)), Table(ops, (*foreign, *other, *own))):
        for batch in BATCHES:
            alone = decide(Table(ops, tuple(own)), Request("kda", "sm_103a", batch, ops["kda"].shapes["tp8"]))
            among = decide(table, Request("kda", "sm_103a", batch, ops["kda"].shapes["tp8"]))
            assert among.kernel == alone.kernel
            if batch > 8:
                assert among.reason == f"batch: {batch} rows are more than the largest verified batch, 8"
    for arch in ("sm_103", "sm_103f", "SM_103A", "sm_120a", "sm_110a"):
        found = decide(Table(ops, tuple(own)), Request("kda", arch, 8, ops["kda"].shapes["tp8"]))
        assert found.reason == f"arch: {arch} is wanted, verified are sm_103a"


def test_axes_that_were_not_asked_for_are_told(package: ModuleType) -> None:
    ops = package.table().ops
    kernel = replace(tuned(package, "kda", "tp8", 8, "sm_103a"), axes={**ops["kda"].shapes["tp8"], "S": 9})
    found = decide(Table(ops, (kernel,)), Request("kda", "sm_103a", 8, ops["kda"].shapes["tp8"]))
    assert found.kernel is kernel
    assert str(found.requirements[-1]) == "ok   other axes: not asked for; verified at S=9"
    whole = Request("kda", "sm_103a", 8, kernel.axes)
    assert decide(Table(ops, (kernel,)), whole).requirements[-1].name == "batch"


# Pinned to the reference


def test_rows_pinned_to_the_reference(pretended: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    op = pretended.table().ops["rmsnorm"]

    def answered(said: str) -> list[int]:
        monkeypatch.setenv("K3_DECODE_DISABLE", said)
        decisions = {
            b: pretended.ops.plan(op, meta(pretended, op, b, {"N": 7168}), {}).decision for b in BATCHES
        }
        assert all((d.kernel is None) == bool(d.reason) for d in decisions.values())
        return [b for b, d in decisions.items() if d.kernel is not None]

    assert answered("") == list(range(1, 33))
    assert answered("rmsnorm@24") == [b for b in range(1, 33) if b != 24]
    assert answered("moe@1-64, rmsnorm@9-31 ,kda") == [*range(1, 9), 32]
    assert answered("all@1-16") == list(range(17, 33))
    assert answered("rmsnorm") == answered("all") == []
    monkeypatch.setenv("K3_DECODE_DISABLE", "rmsnorm@9-31")
    why = pretended.ops.plan(op, meta(pretended, op, 24, {"N": 7168}), {}).decision.reason
    assert why == "switch: K3_DECODE_DISABLE turns the kernels of rmsnorm off at 9 to 31 rows"


def test_a_switch_that_names_nothing_is_said(
    pretended: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = pretended.table().ops["rmsnorm"]
    for said in ("rmsnorm@", "rmsnorm@x", "rmsnorm@9-3", "rms norm"):
        caplog.clear()
        monkeypatch.setenv("K3_DECODE_DISABLE", said)
        assert pretended.ops.plan(op, meta(pretended, op, 8, {"N": 7168}), {}).decision.kernel is not None
        assert [r.getMessage() for r in caplog.records] == [
            f"K3_DECODE_DISABLE: {said!r} is none of all, OP, OP@ROWS, OP@FROM-TO; it turns nothing off"
        ]
    code = "import sys; sys.path.insert(0, '.'); import k3_decode"
    monkeypatch.setenv("K3_DECODE_DISABLE", "rmsnrm")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert "K3_DECODE_DISABLE names rmsnrm, which is no op: attn_res" in done.stderr


# Decisions that are kept


def test_a_decision_is_kept_for_nothing_that_it_was_not_made_for(
    pretended: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = pretended.table().ops["rmsnorm"]
    room = torch.zeros(3 * 9 * 7168, dtype=torch.bfloat16)
    start = (-room.data_ptr() % 256) // 2
    placed = [room[start + i * 8 * 7168 :][: 8 * 7168].view(8, 7168) for i in range(2)]
    right = {"x": placed[0], "weight": placed[0][0], "out": placed[1]}

    def plan(tensors: dict[str, torch.Tensor]) -> object:
        return pretended.ops.plan(op, tensors, {})

    first = plan(right)
    assert plan(dict(right)) is first, "asked again, it is the same"
    others = [
        {n: t[..., :3584] if n == "weight" else t[:, :3584].contiguous() for n, t in right.items()},
        {**right, "x": placed[0][:4], "out": placed[1][:4]},
        {n: t.to("meta") for n, t in right.items()},
        {**right, "weight": room[start + 1 :][:7168]},
        {**right, "x": placed[0].T.contiguous().T},
    ]
    assert all(plan(t) is not first for t in others)
    with pytest.raises(ValueError, match=r"x is torch\.float32, not torch\.bfloat16"):
        plan({**right, "x": right["x"].float()})
    monkeypatch.setattr(pretended.ops, "pretended_arch", "sm_100a")
    foreign = pretended.ops.plan(op, right, {}).decision
    assert foreign.kernel is not None and foreign.kernel.arch == "sm_100a" and foreign.kernel.batch == 64
    monkeypatch.setenv("K3_DECODE_DISABLE", "rmsnorm@8")
    assert pretended.ops.plan(op, right, {}).decision.kernel is None
    monkeypatch.delenv("K3_DECODE_DISABLE")
    monkeypatch.setattr(pretended.ops, "pretended_arch", "sm_103a")
    assert plan(right) is first
