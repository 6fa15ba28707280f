"""Bad input of every kind: exit code 2 and one line that says what is wrong and what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import MissingToolError
from workbench.workspace import Workspace


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("ops rmsnrm", "unknown op 'rmsnrm'; nearest: rmsnorm"),
        ("ops rmsnorm --machine gb30", "unknown machine 'gb30'; nearest: gb300"),
        ("verify row --op rmsnrm", "unknown op 'rmsnrm'; nearest: rmsnorm"),
        ("verify rwo --op rmsnorm", "unknown template 'rwo'; nearest: row"),
        ("verify row --op rmsnorm --workload tp8_b2", "unknown workload 'tp8_b2'; nearest: tp8_b"),
        ("verify row --op rmsnorm --arch sm_103", "unknown arch 'sm_103'; nearest: sm_103a"),
        ("verify row --op rmsnorm --arch sm_107a", "unknown arch 'sm_107a'; nearest: sm_10"),
        ("verify row --op rmsnorm --knob thread=64", "unknown knob 'thread'; nearest: threads"),
        ("verify row --op rmsnorm --knob threads=65", "threads=65 is not one of [32, 64,"),
        ("verify row --op rmsnorm --knob threads", "name=value"),
        ("verify row --op rmsnorm --device cudo", "unknown device 'cudo'; nearest: cuda"),
        ("verify row --op rmsnorm --workload small_b1 --level half", "unknown level 'half'; nearest:"),
        ("verify row", "--op OP"),
        ("verify no/such.py", "no/such.py: cannot be read"),
        ("verify no/such", "no such file or folder"),
        ("verify templates", "templates/manifest.json: there is no such manifest"),
        ("export rwo --op rmsnorm", "unknown template 'rwo'; nearest: row"),
        ("propose", "--op"),
        ("propose --op rmsnrm", "unknown op 'rmsnrm'; nearest: rmsnorm"),
        ("propose --op rmsnorm --workload tp9", "unknown workload 'tp9'"),
        ("propose --op rmsnorm --arch sm_90", "unknown arch 'sm_90'; nearest: sm_90a"),
        ("propose --op rmsnorm --template rwo", "unknown template 'rwo'; nearest: row"),
        ("propose --op rmsnorm --machine h20", "unknown machine 'h20'; nearest: h200"),
        ("propose --op rmsnorm --agent offlin", "unknown agent 'offlin'; nearest: offline"),
        ("propose --resume never", "unknown run 'never'"),
        ("tune --op rmsnorm --template rwo", "unknown template 'rwo'; nearest: row"),
        ("tune --op rmsnorm --objective measred", "unknown objective 'measred'; nearest: predicted"),
        ("report never", "unknown run 'never'"),
        ("report last", "no runs yet"),
        ("report --schema verfy", "unknown schema 'verfy'; nearest: verify"),
        ("replay missing.json", "missing.json: cannot be read"),
        ("replay missing.json --sampler tpx", "unknown sampler 'tpx'; nearest: tpe"),
        ("db import missing.jsonl", "cannot read missing.jsonl"),
        ("audit missing.ptx", "missing.ptx"),
        ("init .", "verifiers exists already"),
        ("ops --machine h200", "--machine is of an op's rooflines"),
        ("report --schema verify last", "--schema prints a schema and nothing else"),
        ("report --schema verify --claim k3-published", "--schema prints a schema and nothing else"),
        ("audit missing", "missing: there is no such file or folder"),
        ("db list --op rmsnrm", "unknown op 'rmsnrm'; nearest: rmsnorm"),
        ("verify row --op rmsnorm --trace thread=-1:0", "cannot trace 'thread=-1:0'"),
        ("export --to module --out o --machine h200", "--machine does not go with --to module"),
        ("export --to vllm --out o --seed 3", "--seed does not go with --to vllm"),
        ("propose --op rmsnorm --max-usd 2", "--max-usd is of language models"),
        ("propose --op rmsnorm --strategy chan", "--strategy is of language models"),
        ("propose --op rmsnorm --agent m --batch 6", "--batch is of the offline proposer"),
        ("propose --op rmsnorm --agent m --base-url nonsense", "'nonsense' is no address of a server"),
        ("propose --op rmsnorm --agent=", "unknown agent ''; nearest: offline"),
        ("propose --replay t.jsonl --resume last", "--resume does not go with --replay"),
        ("propose --replay verifiers/rmsnorm.py", "there is no run.json beside it"),
        ("evidence check b.tar --sha256 abcd", "'abcd' is no SHA-256"),
        ("evidence check b.tar --summary b.tar", "the command uses this file already"),
        ("evidence run b.tar --summary templates", "it is a folder"),
        ("evidence make --out b.tar --summary b.tar", "the command uses this file already"),
        ("evidence make --out b.tar --summary verifiers/rmsnorm.py/s.md", "rmsnorm.py is no folder"),
    ],
)
def test_a_wrong_name_or_path_is_one_line(run: Any, workspace: Workspace, arguments: str, says: str) -> None:
    assert says in run(*arguments.split()).complaint


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("TEMPLATE = {", "TEMPLATE = {{", None, "templates/rmsnorm/row.py:"),
        ('"vec": 8,', '"vec": os.x,', "TEMPLATE = {", "must be a literal"),
        ('"summary"', '"sumary"', "TEMPLATE = {", "unknown field 'sumary'"),
        ("def build(", "def biuld(", None, "has no function `build(axes, knobs)`"),
    ],
)
def test_an_error_in_a_template_names_file_and_line(
    run: Any, workspace: Workspace, old: str, new: str, line: str | None, says: str
) -> None:
    path = workspace.template("rmsnorm", "row")
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new, 1))
    for command in ("verify row --op rmsnorm", "ops rmsnorm", "propose --op rmsnorm"):
        complaint = run(*command.split()).complaint
        assert "templates/rmsnorm/row.py" in complaint and says in complaint
        if line is not None:
            number = source[: source.index(line)].count("\n") + 1
            assert f"row.py:{number}:" in complaint


HEAD = 'TEMPLATE = {"op": "rmsnorm", "summary": "s", "knobs": {"a": [1]}, "default": {"a": 1}}\n'


@pytest.mark.parametrize(
    ("name", "content", "command", "says"),
    [
        ("k.py", b"\xff\xfe\x00", "verify k.py", "k.py: cannot be read"),
        ("k.py", b'x = "', "verify k.py", "k.py:1: unterminated string"),
        ("k.py", b"", "verify k.py", "has no `TEMPLATE"),
        (
            "k.py",
            HEAD.replace("}\n", ', "constraints": ["1 // 0 == a"]}\n'),
            "verify k.py",
            "k.py: in its constraints: ",
        ),
        (
            "k.py",
            HEAD.replace("}\n", ', "constraints": ["a == nope"]}\n'),
            "verify k.py",
            "unknown name 'nope'",
        ),
        (
            "k.py",
            HEAD.replace("}\n", ', "scratch": {"s": {"shape": ["a // 0"], "dtype": "f32"}}}\n'),
            "verify k.py",
            "k.py: in its scratch buffer 's'",
        ),
        ("k.py", HEAD.replace("rmsnorm", "rmsnrm"), "verify k.py", "unknown op 'rmsnrm'; nearest: rmsnorm"),
        ("k.py", HEAD.replace('"a": 1}', '"a": 7}'), "verify k.py", "knob a=7 is not one of [1]"),
        ("k.py", HEAD, "verify k.py --op moe_topk", "is a template of op 'rmsnorm', not of 'moe_topk'"),
        ("k.py", HEAD, "verify k.py", "k.py: user: `build` must return"),
        ("k.py", HEAD + "import os\n", "verify k.py", "k.py:2: rejected: import of 'os'"),
        ("k.txt", b"hello", "verify k.txt", "has no `TEMPLATE"),
        ("k.txt", b"hello", "audit k.txt", "neither a .ptx nor a .cubin"),
        ("k.ptx", b"\xff\x00", "audit k.ptx", "k.ptx: is not a text file"),
        ("k.ptx", b"", "audit k.ptx", "k.ptx: PTX line 1"),
        ("k.ptx", b"hello", "audit k.ptx", "k.ptx: PTX line 1"),
        ("k.cubin", b"", "audit k.cubin", "k.cubin: not a cubin"),
        ("k.cubin", b"\x7fELF", "audit k.cubin", "k.cubin: not a cubin"),
        ("k.ptx", b"hello", "audit k.ptx --knob a=1", "is compiled already"),
        ("k.py", HEAD, "audit k.py --contract c.toml", "leave the contract out"),
        ("run.html", b"", "report --to run.html", "--to needs a run"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    run: Any, workspace: Workspace, name: str, content: bytes | str, command: str, says: str
) -> None:
    if isinstance(content, str):
        content = (content + "def build(axes, knobs):\n    return 1\n").encode()
    Path(name).write_bytes(content)
    assert says in run(*command.split()).complaint


def test_an_empty_name_is_said(run: Any, workspace: Workspace) -> None:
    assert "name is empty" in run("verify", "", "--op", "rmsnorm").complaint
    assert "unknown workload ''" in run("verify", "row", "--op", "rmsnorm", "--workload", "").complaint
    assert "unknown op ''" in run("ops", "").complaint


def test_a_point_that_breaks_a_constraint_is_never_compiled(run: Any, workspace: Workspace) -> None:
    path = workspace.template("rmsnorm", "row")
    source = path.read_text()
    path.write_text(source.replace('"constraints": [', '"constraints": ["threads * 2 == 64",', 1))
    complaint = run("verify", "row", "--op", "rmsnorm", "--knob", "threads=64").complaint
    assert "constraint 'threads * 2 == 64' does not hold" in complaint


def test_a_kernel_that_does_not_compile_names_its_line(run: Any, workspace: Workspace) -> None:
    path = workspace.template("rmsnorm", "row")
    source = path.read_text()
    line = "        thread, _, _ = cute.arch.thread_idx()\n"
    assert line in source
    path.write_text(source.replace(line, line + "        undefined_name + thread\n", 1))
    number = source[: source.index(line)].count("\n") + 2
    result = run("verify", "row", "--op", "rmsnorm", "--workload", "small_b1")
    complaint = result.err.strip().splitlines()[-1]
    assert result.code == 2 and "undefined_name" in complaint and str(number) in complaint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("OP = (", "never closed"),
        ("import nonsense_module\nOP = 1", "nonsense_module"),
        ("OP = 3", "OP"),
        ("OP = 1\n1 / 0", ":2"),
    ],
)
def test_an_error_in_a_verifier_names_its_file(run: Any, workspace: Workspace, text: str, says: str) -> None:
    (workspace.verifiers / "broken.py").write_text(text)
    complaint = run("ops", "broken").complaint
    assert "verifiers/broken.py" in complaint and says in complaint
    listing = run("ops", "--json")
    assert listing.code == 0
    errors = {op["name"]: op["error"] for op in listing.json("ops")["ops"]}
    assert "verifiers/broken.py" in errors["broken"] and errors["rmsnorm"] is None


def damaged(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)


def foreign(path: Path) -> None:
    path.write_text("this is no database\n" * 50)


def newer(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("create table records (x)")
        db.execute(f"pragma application_id = {0x57424442}")
        db.execute("pragma user_version = 999")


@pytest.mark.parametrize("spoil", [damaged, foreign, newer])
@pytest.mark.parametrize(
    "command", ["db list", "db export out.jsonl", "db import in.jsonl", "propose --op rmsnorm"]
)
def test_a_database_that_cannot_be_used_is_left_untouched(
    run: Any, workspace: Workspace, spoil: Any, command: str
) -> None:
    workspace.tuning_db.mkdir()
    path = workspace.tuning_db / "records.sqlite"
    spoil(path)
    Path("in.jsonl").write_text("")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    complaint = run(*command.split(), *(["--quiet"] if command.startswith("propose") else [])).complaint
    assert "records.sqlite" in complaint and "left as it is" in complaint.replace(
        "was left as it is", "left as it is"
    )
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert sorted(p.name for p in workspace.tuning_db.iterdir()) == ["records.sqlite"]


def test_lines_of_an_import_that_cannot_be_used_are_named(run: Any, workspace: Workspace) -> None:
    Path("in.jsonl").write_text('{"schema": 1}\nnot json\n')
    result = run("db", "import", "in.jsonl", "--json")
    assert result.code == 1
    document = result.json("db-import")
    assert document["added"] == 0 and [s["line"] for s in document["skipped"]] == [1, 2]


def test_a_folder_that_cannot_be_written_is_named(run: Any, workspace: Workspace) -> None:
    Path("tuning_db").write_text("a file stands where the folder should be")
    assert "tuning_db" in run("propose", "--op", "rmsnorm", "--quiet").complaint
    assert run("doctor", "--quiet").code in (0, 1)


def test_a_report_that_cannot_be_written_is_named(run: Any, workspace: Workspace) -> None:
    Path("taken").write_text("")
    assert "taken" in run("db", "export", "taken/records.jsonl").complaint


def test_without_ptxas_it_says_what_to_install(
    run: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.compile import ptxas

    def missing() -> Path:
        raise MissingToolError("ptxas is not installed; pip install nvidia-cuda-nvcc")

    monkeypatch.setattr(ptxas, "find_ptxas", missing)
    complaint = run("verify", "row", "--op", "rmsnorm", "--workload", "small_b1", "--quiet").complaint
    assert "pip install" in complaint


def test_a_damaged_run_is_named(run: Any, workspace: Workspace) -> None:
    folder = workspace.runs / "torn"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    assert "run.json" in run("report", "torn").complaint
    assert "run.json" in run("propose", "--resume", "torn").complaint
    listing = run("report", "--json")
    assert listing.code == 0 and listing.json("runs")["runs"] == []


def test_an_unfinished_run_says_how_to_go_on(run: Any, workspace: Workspace) -> None:
    settings = {
        "format": 1, "run_id": "half", "op": "rmsnorm", "workload": "small_b1", "arch": "sm_103a",
        "machine": "gb300", "agent": "offline", "seed": 0, "rounds": 1, "batch": 1, "templates": ["row"],
        "template_hashes": ["x"], "verifier_hash": "y",
    }  # fmt: skip
    folder = workspace.runs / "half"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(settings))
    assert "--resume half" in run("report", "half").complaint
    assert "other templates or another verifier" in run("propose", "--resume", "half").complaint
    (run_summary,) = run("report", "--json").json("runs")["runs"]
    assert run_summary["run_id"] == "half" and run_summary["finished"] is False


def test_a_run_goes_on_with_its_own_settings_alone(run: Any, workspace: Workspace) -> None:
    settings = {
        "format": 1, "run_id": "half", "op": "rmsnorm", "workload": "small_b1", "arch": "sm_103a",
        "machine": "gb300", "agent": "offline", "seed": 0, "rounds": 2, "batch": 1, "templates": ["row"],
        "template_hashes": ["x"], "verifier_hash": "y",
    }  # fmt: skip
    folder = workspace.runs / "half"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(settings))
    same = ["--op=rmsnorm", "--workload=small_b1", "--rounds=2", "--seed=0", "--template=row", "--workers=1"]
    assert "other templates or another verifier" in run("propose", "--resume", "half", *same).complaint
    for other, was in (
        ("--op=moe_topk", "--op rmsnorm"),
        ("--rounds=3", "--rounds 2"),
        ("--seed=1", "--seed 0"),
        ("--max-usd=2", "no --max-usd"),
        ("--agent=m", "--agent offline"),
    ):
        complaint = run("propose", "--resume", "half", other).complaint
        assert f"begun with {was} and goes on" in complaint


def test_a_thread_that_no_launch_has_is_not_traced(run: Any, workspace: Workspace) -> None:
    kernel = ["row", "--op", "rmsnorm", "--workload", "small_b1", "--quiet"]
    for place in ("1:0", "0:256", "0,0,1:0", "0:0,1,0"):
        complaint = run("verify", *kernel, "--trace", f"thread={place}").complaint
        assert "no launch has CTA" in complaint and "grid (1, 1, 1)" in complaint


def test_what_export_would_miss_at_the_end_is_said_at_the_start(
    run: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench import api

    def simulate(*_: object, **__: object) -> None:
        raise AssertionError("verified before the rest was looked at")

    monkeypatch.setattr(api, "simulate", simulate)
    kernel = ["export", "row", "--op", "rmsnorm", "--workload", "small_b1", "--quiet"]
    assert "nearest: gb300" in run(*kernel, "--machine", "gb30").complaint
    assert "it is a folder" in run(*kernel, "--draft-waivers", "templates").complaint


def test_expected_verdicts_of_other_tests_are_said(run: Any, workspace: Workspace) -> None:
    source = Path(__file__).parents[1] / "memory_model" / "litmus"
    shutil.copy(next(source.glob("*.litmus")), "t.litmus")
    Path("e.csv").write_text("other.litmus,1\n")
    assert "names none of these tests" in run("litmus", "t.litmus", "--expected", "e.csv").complaint


def test_an_empty_name_of_a_folder_is_said(run: Any, workspace: Workspace) -> None:
    assert "the folder's name is empty" in run("init", "").complaint


def test_an_op_without_a_template_is_said(run: Any, workspace: Workspace) -> None:
    shutil.rmtree(workspace.templates / "rmsnorm")
    assert "has no template" in run("propose", "--op", "rmsnorm").complaint
