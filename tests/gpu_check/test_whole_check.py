"""The whole check: built small, run against the simulator as the hardware, and as the folder that travels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpu_check import conduct, report
from gpu_check.build import build
from gpu_check.family import load
from gpu_check.sections import templates
from gpu_check.templates_build import Choice
from tests.devices.simulated_driver import SimulatedDriver
from workbench.devices import CudaDevice, Kernel
from workbench.errors import WorkbenchError
from workbench.report.claims.timings import CheckReport
from workbench.workspace import Workspace

REPOSITORY = Workspace(Path(__file__).parents[2])
SMALL = Choice(
    families=frozenset({"warp", "mbarrier", "approximate", "ldmatrix"}),
    ops=frozenset({"rmsnorm"}),
    workloads=("small_b1",),
    timed=("small_b1",),
    varied=("small_b1",),
    variants=2,
    winners=(("rmsnorm", "small_b1"),),
)
BLOCKED = ("pydantic", "optuna", "typer", "cutlass", "sqlalchemy", "openai")
"""Packages of the workbench that are absent on the GPU machine."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("check") / "gpu-check"
    build(REPOSITORY, out, say=lambda text: None, choice=SMALL)
    return out


def simulated(
    folder: Path, change: Callable[[str], str] = lambda ptx: ptx, overlap: bool = False
) -> Callable[[], CudaDevice]:
    """Opens a device that simulates the folder's kernels, their PTX changed."""

    def make() -> CudaDevice:
        driver = SimulatedDriver(overlap=overlap)
        kernels = [load(p)[0].kernel for p in (folder / "instructions").iterdir()]
        kernels += [templates.load(folder, e) for e in templates.kernels(folder)]
        for path in (folder / "ordering").glob("*.cubin"):
            ptx = path.with_suffix(".ptx").read_text()
            kernels.append(Kernel("pdl", "sm_90a", (), (), path.read_bytes(), ptx))
        for k in kernels:
            driver.knows(Kernel(k.name, k.arch, k.launches, k.slots, k.cubin, change(k.ptx)))
        return CudaDevice(driver=driver)

    return make


def run(
    folder: Path, change: Callable[[str], str] = lambda ptx: ptx, only: str = "", overlap: bool = False
) -> list[conduct.Result]:
    inside = conduct.in_process(folder, simulated(folder, change, overlap))

    def chosen(section: conduct.Section, limit: float) -> conduct.Result:
        if not section.name.startswith(only):
            return conduct.Result(section, "not run")
        return inside(section, limit)

    return conduct.conduct(folder, chosen)


def records(results: list[conduct.Result], kind: str) -> list[dict[str, Any]]:
    return [x for r in results for x in r.records if x["record"] == kind]


@pytest.fixture(scope="session")
def results(folder: Path) -> list[conduct.Result]:
    return run(folder)


def test_the_simulator_as_hardware_agrees_with_itself_everywhere(results: list[conduct.Result]) -> None:
    families = records(results, "family")
    assert {f["family"] for f in families} == SMALL.families
    for f in families:
        assert f["forms"] == f["equal"] > 5 and f["repeatable"] and f["elements"] > f["forms"]
    numerics = records(results, "numerics")
    assert all(n["passed"] and n["repeatable"] for n in numerics) and len(numerics) > 8
    compared = [n["simulator"] for n in numerics if n["simulator"]]
    assert len(compared) == 3 and all(c["compared"] and c["different"] == 0 for c in compared)
    assert report.faults(results) == []


def test_predicted_and_measured_stand_side_by_side_with_their_premises(results: list[conduct.Result]) -> None:
    timing = records(results, "timing")
    assert len(timing) == 3
    for t in timing:
        assert (
            t["predicted"]["us"] > 0 and t["predicted"]["machine"] == "h200" and t["predicted"]["assumptions"]
        )
        for method, m in t["measured"].items():
            # What the driver of the test says that a launch takes.
            assert m["median_us"] == pytest.approx(3.0) and len(m["samples_us"]) == 3
            assert f"{m['premises']['method']}, {m['premises']['l2']}" == method


def test_without_overlap_the_experiment_decides_nothing(results: list[conduct.Result]) -> None:
    variants, (verdict,) = records(results, "variant"), records(results, "verdict")
    assert len(variants) > 8 and all(v["wrong_values"] == 0 for v in variants)
    # Launches of the simulated driver end one after the other.
    assert verdict["answer"] == "undecided" and "did not overlap" in verdict["why"]
    placed = {v["variant"]: v["sass"] for v in variants}
    assert not placed["control: ld.global before the wait"]["load_after_wait"]
    assert placed["ld.global, nothing in between"]["load_after_wait"]


def test_where_grids_overlap_the_experiment_answers(folder: Path) -> None:
    found = run(folder, only="ordering", overlap=True)
    (verdict,) = records(found, "verdict")
    assert verdict["answer"] == "no", verdict["why"]
    for v in records(found, "variant"):
        assert v["overlapped"] == v["loads"] == 3 * 1024 and v["wrong_values"] == 0
        assert v["old_values"] == (v["loads"] if v["place"] == "before" else 0), v["variant"]


def test_loads_that_pass_the_wait_are_found(folder: Path) -> None:
    """Hardware that issues one kind of load before the wait has ended."""
    wait, load = "griddepcontrol.wait;\n", "ld.volatile.global.b32 %r9, [%d2];\n"
    clock = "mov.u64 %d21, %clock64;\n"

    def pass_it(ptx: str) -> str:
        return ptx.replace(wait + clock + load, load + wait + clock)

    found = run(folder, pass_it, only="ordering", overlap=True)
    (verdict,) = records(found, "verdict")
    assert verdict["answer"] == "yes" and "ld.volatile.global (3072 of 3072)" in verdict["why"]
    assert any("issue past ACQBULK" in f for f in report.faults(found))


def test_host_times_are_of_the_launcher(results: list[conduct.Result]) -> None:
    (overhead,) = records(results, "overhead")
    assert "launcher, 1 launch:" in overhead["what"] and overhead["calls"] == 40 and overhead["median_us"] > 0
    states = {r.section.name: (r.state, r.why) for r in results}
    # torch sees no device here; both sections say so instead of measuring something else.
    for name in ("overhead/package", "package"):
        assert states[name][0] == "not run" and "sees no CUDA device" in states[name][1]


def test_the_report_says_it_all(folder: Path, results: list[conduct.Result], tmp_path: Path) -> None:
    text = StringIO()
    machine = simulated(folder)().info.asdict()
    built = json.loads((folder / "plan.json").read_text())["built"]
    report.show(Console(file=text, width=200), results, machine, built)
    kernel, question = "rmsnorm small_b1 row #2", "do loads issue past ACQBULK? undecided"
    for said in ("Simulated GPU (sm_90a)", "warp", kernel, "measured (graph, warm)", "predicted", question):
        assert said in text.getvalue(), said
    report.write(tmp_path / "r.json", report.document(results, machine, built, 1.0))
    written = (tmp_path / "r.json").read_text()
    assert len(json.loads(written)["sections"]) == len(results)
    # Claims take measured times from it, with their premises.
    times = dict(CheckReport.model_validate_json(written).measurements())
    claim = times["rmsnorm small_b1 row #2/graph, flushed"]
    assert claim["kind"] == "measured" and float(claim["value"]) == pytest.approx(3.0)
    assert claim["premises"]["hardware"] == "Simulated GPU" and "l2=flushed" in claim["premises"]["protocol"]


@pytest.mark.parametrize(
    ("old", "new", "only", "family", "forms"),
    [
        ("redux.sync.min.s32", "redux.sync.max.s32", "instructions/warp", "warp", 2),
        ("m8n8.x2.shared", "m8n8.x2.trans.shared", "instructions/ldmatrix", "ldmatrix", 2),
    ],
)
def test_hardware_that_does_something_else_is_found(
    folder: Path, old: str, new: str, only: str, family: str, forms: int
) -> None:
    found = run(folder, lambda ptx: ptx.replace(old, new), only)
    (record,) = records(found, "family")
    assert (record["family"], record["differs"]) == (family, forms)
    assert all(old.split(".shared")[0] in d["name"] and d["example"] for d in record["not_equal"])
    assert len(report.faults(found)) == 1


def test_approximate_functions_may_differ_within_the_bound_and_the_distance_is_told(folder: Path) -> None:
    form = "tanh.approx.f32 %r20, %r10;"
    found = run(folder, lambda ptx: ptx.replace(form, form + "\nadd.u32 %r20, %r20, 1;"), "instructions/appr")
    (record,) = records(found, "family")
    (d,) = [x for x in record["not_equal"] if x["name"] == "tanh.approx.f32"]
    assert d["max_ulp"] == 1 and d["different"] > 100 and d["bound"] == "2^-11 relative"


def test_a_wrong_kernel_is_wrong_by_its_contract(folder: Path) -> None:
    found = run(folder, lambda ptx: ptx.replace("rsqrt.approx.ftz.f32", "sqrt.approx.ftz.f32"), "numerics")
    judged = [n["passed"] for n in records(found, "numerics") if n["generator"] == "ordinary"]
    assert judged and not any(judged) and report.faults(found)


def test_a_kernel_that_faults_is_a_failed_section_with_its_reason(folder: Path) -> None:
    stores = "st.global.b32 [%d2"
    found = run(folder, lambda ptx: ptx.replace(stores, stores + "+16777216"), "instructions/warp")
    (failed,) = [r for r in found if r.state == "failed"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failed.why


def test_nothing_but_an_earlier_build_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(WorkbenchError, match="no build of this wrote it"):
        build(REPOSITORY, tmp_path, say=lambda text: None, choice=SMALL)
    assert (tmp_path / "mine.txt").exists()


# The folder by itself, in another process, without the workbench's packages


@pytest.fixture(scope="session")
def travelled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy elsewhere, and beside it a hook that blocks what the GPU machine does not have."""
    there = tmp_path_factory.mktemp("machine")
    shutil.copytree(folder, there / "gpu-check")
    hook = "import sys\nfor name in " + repr(BLOCKED) + ":\n    sys.modules[name] = None\n"
    (there / "sitecustomize.py").write_text(hook)
    return there


def alone(there: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.defpath, "PYTHONPATH": str(there), "HOME": str(there), **variables}
    return subprocess.run(
        [sys.executable, str(there / "gpu-check" / "run.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=there,
        env=environment,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_claims_nothing(travelled: Path) -> None:
    from workbench.devices import available

    if available():
        pytest.skip("there is a GPU here")
    done = alone(travelled)
    assert done.returncode == 0 and done.stdout.startswith("no GPU: ") and "nothing is claimed" in done.stdout
    assert not (travelled / "gpu-check" / "results.json").exists()


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `libcuda.so.1` whose launches do nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    out = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "stub_driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", out / "libcuda.so.1", source], check=True)
    return out


@pytest.mark.slow
def test_the_folder_runs_alone_on_the_real_bindings(travelled: Path, stub: Path, tmp_path: Path) -> None:
    log, to = tmp_path / "log", tmp_path / "results.json"
    done = alone(travelled, "--to", str(to), LD_LIBRARY_PATH=str(stub), STUB_DRIVER_LOG=str(log))
    # Kernels that do nothing are wrong, and said to be.
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(to.read_text())
    states = {s["name"]: s["state"] for s in found["sections"]}
    # torch does not see the stub.
    assert {n for n, s in states.items() if s != "run"} == {"overhead/package", "package"}, found["faults"]
    assert found["machine"]["name"] == "Stub GPU" and found["machine"]["arch"] == "sm_90a"
    differ = [x for s in found["sections"] for x in s["records"] if x["record"] == "family"]
    assert len(differ) == 4 and all(x["differs"] for x in differ)
    (verdict,) = [x for s in found["sections"] for x in s["records"] if x["record"] == "verdict"]
    assert verdict["answer"] == "undecided"
    launches = log.read_text().splitlines()
    assert any(n.startswith("secondary grid 8 1 1 block 128 1 1") and " pdl 1" in n for n in launches)
    assert any(n.startswith("primary ") and " pdl " not in n for n in launches)


def test_with_no_time_nothing_is_run_and_that_is_said(travelled: Path, stub: Path, tmp_path: Path) -> None:
    to = tmp_path / "results.json"
    done = alone(travelled, "--to", str(to), "--seconds", "1", LD_LIBRARY_PATH=str(stub))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {s["state"] for s in json.loads(to.read_text())["sections"]} == {"not run"}


def test_a_device_of_another_arch_runs_nothing(travelled: Path, stub: Path) -> None:
    plan = travelled / "gpu-check" / "plan.json"
    kept = plan.read_text()
    try:
        plan.write_text(kept.replace('"arch": "sm_90a"', '"arch": "sm_103a"'))
        done = alone(travelled, LD_LIBRARY_PATH=str(stub))
    finally:
        plan.write_text(kept)
    assert done.returncode == 2 and "the cubins are for sm_103a, Stub GPU is sm_90a" in done.stdout


def test_a_missing_package_is_named(travelled: Path, stub: Path, tmp_path: Path) -> None:
    hook = "import sys\nfor name in ('rich', 'ml_dtypes'):\n    sys.modules[name] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    done = alone(travelled, LD_LIBRARY_PATH=str(stub), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "cannot import rich, ml_dtypes" in done.stdout


@pytest.mark.slow
def test_every_instruction_of_every_template_is_exercised_by_a_family(tmp_path: Path) -> None:
    choice = Choice(workloads=("small", "small_b1"), timed=(), varied=(), winners=())
    plan = build(REPOSITORY, tmp_path / "all", say=lambda text: None, choice=choice)
    built = plan["built"]
    assert built["opcodes"] > 60 and built["uncovered"] == []
    families = [s["name"] for s in plan["sections"] if s["name"].startswith("instructions/")]
    assert len(families) == len(set(families)) == 18
    # What the simulator knows and sm_90a does not: later formats and three-operand forms, nothing else.
    assert built["not_on_this_arch"]
    for form, why in built["not_on_this_arch"].items():
        assert any(w in why for w in ("requires .target", "not supported on", "mismatch", "rguments")), (
            form,
            why,
        )
    templates_of = {
        e["op"] for e in json.loads((tmp_path / "all/templates/templates.json").read_text())["kernels"]
    }
    assert templates_of == {op for op in REPOSITORY.op_names() if REPOSITORY.template_names(op)}


def test_arrays_travel_as_npy(folder: Path) -> None:
    described, simulated_outputs = load(folder / "instructions" / "warp")
    assert set(simulated_outputs) == {"out"} and simulated_outputs["out"].dtype == np.uint8
    assert described.kernel.cubin[:4] == b"\x7fELF" and "redux.add.sync.u32" in described.covers


PACKAGE = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
sys.path.insert(0, str(folder / "module"))
import k3_decode.check
from gpu_check.sections import overhead

class Nothing:
    def __init__(self, cubin, launches): pass
    def run(self, addresses, stream, after_wait=False): pass

k3_decode.runtime.make_program = Nothing
k3_decode.ops.pretended_arch = "sm_90a"
found = [*overhead.package(folder, calls=64, where="cpu"), *overhead.judged(folder, where="cpu")]
print(json.dumps(found))
"""


def test_the_package_is_timed_and_judged_through_its_ops(travelled: Path) -> None:
    """In a process of its own, since ops are registered once; kernels that do nothing answer on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", PACKAGE, str(travelled / "gpu-check")],
        capture_output=True,
        text=True,
        cwd=travelled,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    overhead = [x for x in found if x["record"] == "overhead"]
    assert [x["what"].split(" ")[0] for x in overhead] == ["torch.add,", "torch.ops.k3_decode.rmsnorm"]
    assert all(x["calls"] == 64 and 0 < x["min_us"] <= x["median_us"] <= x["p90_us"] for x in overhead)
    judged = [x for x in found if x["record"] == "package"]
    assert judged and all(x["problem"] for x in judged), "kernels that do nothing are wrong"
