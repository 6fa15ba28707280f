"""Each command's way to success, its exit codes and its JSON document, on the smallest workload."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.api import LEVELS
from workbench.verify.verify import Level
from workbench.workspace import Workspace

KERNEL = ("row", "--op", "rmsnorm", "--workload", "small_b1")
WAIT = "        cute.arch.griddepcontrol_wait()\n"
SUMS = "        for r in range_constexpr(self.rows):\n            v = held"
EARLY = ((WAIT, ""), (SUMS, WAIT + SUMS))
"""Loads the activation before the wait."""


def test_doctor_proves_what_it_says(run: Any, workspace: Workspace) -> None:
    result = run("doctor", "--json")
    document = result.json("doctor")
    status = {c["name"]: c["status"] for c in document["capabilities"]}
    assert document["can_compile"] and document["can_simulate"] and result.code == 0
    assert status["compile"] == status["simulate"] == status["ptxas"] == "ok"
    assert document["can_measure"] == (status["CUDA device"] == "ok")
    for capability in document["capabilities"]:
        assert capability["status"] == "ok" or capability["fix"]


def test_doctor_fails_where_something_is_missing(run: Any, workspace: Workspace) -> None:
    workspace.tuning_db.mkdir()
    (workspace.tuning_db / "records.sqlite").write_text("no database")
    result = run("doctor", "--json")
    capabilities = {c["name"]: c["status"] for c in result.json("doctor")["capabilities"]}
    assert result.code == 1 and capabilities["tuning records"] == "missing"
    assert run("doctor", "--quiet").code == 1


def test_doctor_fails_without_a_compiler(
    run: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.report import doctor

    def broken() -> str:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(doctor, "_compiles", broken)
    result = run("doctor", "--json")
    document = result.json("doctor")
    assert result.code == 1 and not document["can_compile"]
    assert {c["name"]: c["detail"] for c in document["capabilities"]}[
        "compile"
    ] == "RuntimeError: no compiler at all"
    assert run("doctor").out.count("missing") == 1


def test_ops_lists_and_describes(run: Any, workspace: Workspace) -> None:
    listing = run("ops", "--json").json("ops")
    assert [op["name"] for op in listing["ops"]] == ["moe_topk", "rmsnorm"]
    contract = run("ops", "rmsnorm", "--json").json("op")
    assert {b["name"]: b["role"] for b in contract["buffers"]} == {
        "x": "activation",
        "weight": "weight",
        "out": "output",
    }
    (workload,) = [w for w in contract["workloads"] if w["name"] == "tp8_b8"]
    assert workload["axes"] == {"B": 8, "N": 7168} and workload["compulsory_bytes"] == 2 * 7168 * 17
    assert workload["roofline_us"] == pytest.approx(workload["compulsory_bytes"] / 8e6)
    assert {b["name"]: b["nbytes"] for b in workload["buffers"]}["x"] == 8 * 7168 * 2
    text = run("ops", "rmsnorm").out
    assert "predicted for gb300" in text and "tp8_b8" in text and "threads" in text


def test_init_makes_a_workspace_to_work_in(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = run("init", str(tmp_path / "new"), "--json").json("init")
    assert "verifiers/rmsnorm.py" in document["files"] and "templates/rmsnorm/row.py" in document["files"]
    assert "notebooks/01_first_kernel.ipynb" in document["files"]
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.delenv("WORKBENCH_ROOT", raising=False)
    assert "rmsnorm" in {op["name"] for op in run("ops", "--json").json("ops")["ops"]}


def test_verify_passes_a_right_kernel(run: Any, workspace: Workspace) -> None:
    result = run("verify", *KERNEL, "--knob", "threads=64", "--strict", "--json")
    report = result.json("verify")
    assert result.code == 0 and report["verdict"] == "pass" and report["knobs"]["threads"] == 64
    names = {c["name"] for c in report["checks"]}
    assert {"ordering/static", "memory", "determinism", "numerics/ordinary"} <= names
    assert "verifying rmsnorm/row" in result.err


def test_quiet_says_nothing_and_json_still_answers(run: Any, workspace: Workspace) -> None:
    result = run("verify", *KERNEL, "--level", "screen", "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")
    result = run("verify", *KERNEL, "--level", "screen", "--quiet", "--json")
    assert result.err == "" and result.json("verify")["verdict"] == "pass"


def edited(workspace: Workspace, *edits: tuple[str, str]) -> str:
    """A candidate file: the template with some of its text replaced."""
    source = workspace.template("rmsnorm", "row").read_text()
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new, 1)
    path = workspace.root / "candidate.py"
    path.write_text(source)
    return str(path)


def test_verify_fails_a_wrong_kernel_and_shows_where(run: Any, workspace: Workspace) -> None:
    hasty = edited(workspace, *EARLY)
    result = run("verify", hasty, "--workload", "small_b1", "--json")
    report = result.json("verify")
    assert result.code == 1 and report["verdict"] == "fail"
    rules = {f["rule"] for c in report["checks"] for f in c["findings"] if f["severity"] == "error"}
    assert "pdl-load-before-wait" in rules
    text = run("verify", hasty, "--workload", "small_b1", "--level", "screen").out
    assert "error" in text and "PTX line" in text and "ld.global" in text


def test_audit_takes_templates_ptx_cubins_and_exports(run: Any, workspace: Workspace) -> None:
    result = run("audit", "templates/rmsnorm/row.py", "--workload", "small_b1", "--json")
    document = result.json("audit")
    assert result.code == 0
    (target,) = document["targets"]
    assert target["verdict"] == "pass" and target["arch"] == "sm_103a"
    assert target["coverage"]["accesses"] == target["coverage"]["proved"] > 0

    folder = Path(run("export", *KERNEL, "--json").json("export")["folder"])
    for file in (folder, folder / "kernel.ptx", folder / "kernel.cubin"):
        result = run("audit", str(file), "--json")
        assert result.json("audit")["targets"][0]["target"] == str(file)

    hasty = edited(workspace, *EARLY)
    result = run("audit", hasty, "--workload", "small_b1", "--json")
    findings = result.json("audit")["targets"][0]["findings"]
    assert result.code == 1 and any(f["severity"] == "error" and f["buffer"] == "x" for f in findings)
    text = run("audit", hasty, "--workload", "small_b1").out
    assert "fail" in text and "fix:" in text
    assert "ld.global" in text and "LDG" in text and "candidate.py:" in text, "the code is quoted"


def test_audit_of_one_kernel_of_a_file(run: Any, workspace: Workspace) -> None:
    everything = run("audit", "templates/rmsnorm/row.py", "--workload", "small_b1", "--json").json("audit")
    name = everything["targets"][0]["kernel"]
    chosen = run("audit", f"templates/rmsnorm/row.py:{name}", "--workload", "small_b1", "--json").json(
        "audit"
    )
    assert chosen == everything
    complaint = run("audit", "templates/rmsnorm/row.py:nonsense", "--workload", "small_b1").complaint
    assert "unknown kernel 'nonsense'" in complaint


def test_audit_with_a_contract(run: Any, workspace: Workspace) -> None:
    folder = Path(run("export", *KERNEL, "--json").json("export")["folder"])
    launch = json.loads((folder / "manifest.json").read_text())["launches"][0]
    contract = [f"[[kernel]]\ngrid = {launch['grid']}\nblock = {launch['block']}\npdl = true\n"]
    for i, (name, role, nbytes) in enumerate(
        [("x", "activation", 512), ("weight", "weight", 512), ("out", "output", 512)]
    ):
        contract.append(
            f'[[kernel.buffer]]\nparam = {i}\nname = "{name}"\nrole = "{role}"\nbytes = {nbytes}\n'
        )
    Path("c.toml").write_text("".join(contract))
    ptx = str(folder / "kernel.ptx")
    assert (
        run("audit", ptx, "--contract", "c.toml", "--strict", "--json").json("audit")["targets"][0]["verdict"]
        == "pass"
    )
    Path("c.toml").write_text("[[kernel]\n")
    assert "c.toml" in run("audit", ptx, "--contract", "c.toml").complaint


def test_undecided_is_3_under_strict_alone(run: Any, workspace: Workspace) -> None:
    folder = Path(run("export", *KERNEL, "--json").json("export")["folder"])
    ptx = str(folder / "kernel.ptx")
    verdict = run("audit", ptx, "--json").json("audit")["targets"][0]["verdict"]
    assert verdict == "unknown", "without a contract nothing is known of the buffers"
    assert run("audit", ptx).code == 0 and run("audit", ptx, "--strict").code == 3


def test_export_then_verify_and_refuse_what_does_not_fit(run: Any, workspace: Workspace) -> None:
    document = run("export", *KERNEL, "--json").json("export")
    folder = workspace.root / document["folder"]
    assert (folder / "manifest.json").is_file() and document["waived"] == []
    assert set(document["files"]) == {p.name for p in folder.iterdir()}
    result = run("verify", document["folder"], "--json")
    assert result.code == 0 and result.json("verify")["artifact_key"] == document["key"]
    assert "leave --workload out" in run("verify", document["folder"], "--workload", "tp8_b1").complaint
    assert "leave --knob out" in run("verify", document["folder"], "--knob", "threads=64").complaint
    (folder / "kernel.cubin").write_bytes(b"\x7fELF")
    assert "kernel.cubin" in run("verify", document["folder"]).complaint


def test_export_refuses_a_kernel_that_fails(run: Any, workspace: Workspace) -> None:
    result = run("export", edited(workspace, *EARLY), "--workload", "small_b1")
    assert result.code == 2 and "failed" in result.err.splitlines()[-1] and result.out == ""
    assert not workspace.generated.exists() or not list(workspace.generated.rglob("manifest.json"))


@pytest.fixture(scope="module")
def proposed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A small run in a process of its own: its workspace, its document and its standard error."""
    import shutil

    repository = Path(__file__).parents[2]
    root = tmp_path_factory.mktemp("space")
    (root / "verifiers").mkdir()
    shutil.copy(repository / "verifiers" / "rmsnorm.py", root / "verifiers")
    shutil.copytree(repository / "templates" / "rmsnorm", root / "templates" / "rmsnorm")
    words = ["propose", *KERNEL[1:], "--rounds", "2", "--batch", "3", "--seed", "5", "--json"]
    command = [sys.executable, "-m", "workbench", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout), done.stderr


def test_propose_ends_in_an_exported_winner(
    run: Any, proposed: tuple[Path, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import jsonschema

    from workbench.report.documents import json_schema

    root, document, progress = proposed
    jsonschema.validate(document, json_schema("propose"))
    points = [json.dumps(c["proposal"]["knobs"], sort_keys=True) for c in document["candidates"]]
    assert len(points) == len(set(points)) == 6
    winner = document["candidates"][document["winner"]]
    assert winner["status"] == "verified" and winner["report"]["verdict"] == "pass"
    times = [c["prediction"]["us"] for c in document["candidates"] if c["status"] == "verified"]
    assert winner["prediction"]["us"] == min(times)
    assert "round 2" in progress and "winner exported" in progress

    monkeypatch.chdir(root)
    monkeypatch.delenv("WORKBENCH_ROOT", raising=False)
    assert run("verify", document["exported"], "--level", "screen", "--quiet").code == 0


def test_a_run_is_listed_shown_and_written(
    run: Any, proposed: tuple[Path, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, document, _ = proposed
    monkeypatch.chdir(root)
    monkeypatch.delenv("WORKBENCH_ROOT", raising=False)
    run_id = document["settings"]["run_id"]
    (listed,) = run("report", "--json").json("runs")["runs"]
    assert listed["run_id"] == run_id and listed["finished"] and listed["candidates"] == 6
    assert run("report", "last", "--json").json("propose") == document
    assert "winner" in run("report", run_id).out
    for name in ("run.html", "run.md"):
        assert run("report", "last", "--to", name, "--quiet").code == 0
        text = Path(name).read_text()
        assert run_id in text and str(root) not in text
    assert ".html or .md" in run("report", "last", "--to", "run.pdf").complaint


def test_records_of_a_run_travel(
    run: Any,
    proposed: tuple[Path, dict[str, Any], str],
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, _, _ = proposed
    monkeypatch.chdir(root)
    listed = run("db", "list", "--op", "rmsnorm", "--json").json("db-list")
    assert listed["total"] == len(listed["records"]) == 6 and listed["unusable"] == 0
    assert {r["objective"] for r in listed["records"]} == {"predicted"}
    assert "'rmsnrm'" in run("db", "list", "--op", "rmsnrm").complaint
    file = str(workspace.root / "out.jsonl")
    assert run("db", "export", file, "--json").json("db-export")["records"] == 6
    monkeypatch.chdir(workspace.root)
    assert run("db", "import", file, "--json").json("db-import") == {"added": 6, "known": 0, "skipped": []}
    assert run("db", "import", file, "--json").json("db-import")["known"] == 6
    assert "6 of 6 records" in run("db", "list").out


def test_tune_exports_nothing(run: Any, workspace: Workspace) -> None:
    result = run("tune", *KERNEL[1:], "--template", "row", "--trials", "3", "--json")
    document = result.json("propose")
    assert result.code == 0 and len(document["candidates"]) == 3
    assert document["exported"] is None and document["winner"] is not None
    assert not workspace.generated.exists()


def test_replay_scores_a_sampler(run: Any, tmp_path: Path) -> None:
    points = [{"a": a, "b": b, "time": 1.0 + (a - 3) ** 2 + b} for a in range(8) for b in range(4)]
    space = {
        "tune_params_keys": ["a", "b"],
        "tune_params": {"a": list(range(8)), "b": list(range(4))},
        "cache": {f"{p['a']},{p['b']}": p for p in points},
    }
    (tmp_path / "space.json").write_text(json.dumps(space))
    words = ("replay", str(tmp_path / "space.json"), "--budget", "32", "--seeds", "2", "--sampler")
    document = run(*words, "random", "--json").json("replay")
    assert document["space"] == "space" and document["fraction_of_optimum"]["32"] == 1.0
    assert "fraction of the optimum" in run(*words, "tpe").out


def test_levels_are_those_of_verification() -> None:
    assert set(LEVELS) == {level.value for level in Level}
