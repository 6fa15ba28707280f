from __future__ import annotations

import json
import shlex
import zipfile
from pathlib import Path

import jsonschema
import pytest

from tests.export.module_winners import put
from workbench.artifact import Artifact
from workbench.cli.app import main
from workbench.report.documents import json_schema
from workbench.workspace import Workspace


@pytest.fixture
def workspace(artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = put(Workspace(tmp_path / "space"), artifact)
    monkeypatch.setenv("WORKBENCH_ROOT", str(made.root))
    monkeypatch.chdir(tmp_path)
    return made


def test_the_document_and_the_table(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--to", "module", "--out", "out", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, json_schema("export-module"))
    assert document["folder"] == "out" and [k["op"] for k in document["kernels"]] == ["rmsnorm"]
    assert Path("out", document["wheel"]).stat().st_size == document["wheel_nbytes"]
    assert "moe" in document["by_reference"] and "rmsnorm" not in document["by_reference"]
    assert main(["export", "--to", "module", "--out", "out"]) == 0
    told = capsys.readouterr().out
    assert f"k3_decode {document['version']} written to out" in told and "wheel dist/" in told


def test_the_vllm_plugin_comes_with_its_entry_point_and_goes_with_it(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = []
    for target, there in (("vllm", True), ("module", False)):
        assert main(["export", "--to", target, "--out", "out", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        versions.append(document["version"])
        with zipfile.ZipFile(Path("out", document["wheel"])) as wheel:
            held = {n.split("/", 1)[-1] for n in wheel.namelist()}
        for file in ("entry_points.txt", "vllm/executor.py", "k3_decode_plugin.py"):
            assert (file in held) == there, file
        assert Path("out", "entry_points.txt").exists() == there
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "give the KERNEL to verify and export, or --to module --out DIR"),
        ("--to module", "--to module needs --out DIR"),
        ("--to modle --out x", "unknown target 'modle'; nearest: module"),
        ("row --to module --out x", "KERNEL does not go with --to module"),
        ("--to module --out x --waive memory", "--waive does not go with --to module"),
        ("--to module --out x --knob a=1", "--knob does not go with --to module"),
        ("row --op rmsnorm --out x", "--out and --pick go with --to module"),
        ("--to module --out x --pick zzz", "unknown winner 'zzz'"),
        ("--to module --out x --pick ''", "the key of the winner is empty"),
        ("--to vllm --out x --pick=", "the key of the winner is empty"),
        ("--to module --out space", "space holds generated_kernels, which no export wrote"),
        ("--to module --out file/below", "cannot"),
    ],
)
def test_bad_input_is_one_line(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    Path("file").write_text("x")
    assert main(["export", *shlex.split(arguments)]) == 2
    got = capsys.readouterr()
    assert got.out == "" and len(got.err.strip().splitlines()) == 1 and said in got.err, got.err
    assert sorted(p.name for p in Path().iterdir()) == ["file", "space"]
