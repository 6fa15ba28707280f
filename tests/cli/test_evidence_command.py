from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import REPOSITORY, Run
from workbench.cli.app import main
from workbench.workspace import Workspace


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """generated_kernels/ of a workspace in which one kernel was exported."""
    root = tmp_path_factory.mktemp("exported")
    for folder in ("verifiers", "templates"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.delenv("WORKBENCH_ROOT", raising=False)
        assert main(["export", "row", "--op", "rmsnorm", "--workload", "small_b1", "--quiet"]) == 0
    return root / "generated_kernels"


@pytest.fixture
def bundle(exported: Path, workspace: Workspace, run: Run, tmp_path: Path) -> Path:
    """A bundle; the workspace that it was made in has no export any more."""
    shutil.copytree(exported, workspace.generated)
    made = run("evidence", "make", "--out", "b.tar", "--summary", "b.md", "--json")
    assert made.code == 0, made.err
    document = made.json("evidence-make")
    assert document["sha256"] in Path("b.md").read_text() and document["signature"] is None
    shutil.rmtree(workspace.generated)
    return workspace.root / "b.tar"


def test_make_check_run(bundle: Path, run: Run) -> None:
    checked = run("evidence", "check", "b.tar", "--summary", "c.md", "--json")
    document = checked.json("evidence-check")
    assert (checked.code, document["verdict"], document["problems"]) == (0, "pass", [])
    assert document["members"] == 12
    assert document["sha256"] in Path("c.md").read_text()
    again = run("evidence", "run", "b.tar", "--summary", "r.md", "--json", "--strict")
    document = again.json("evidence-run")
    assert (again.code, document["verdict"]) == (0, "pass"), document
    assert "timing not repeated, everything else was" in document["timing"]
    assert {p["status"] for p in document["points"] if p["kind"] == "result"} == {"agree"}
    assert "### Evidence repeated: pass" in Path("r.md").read_text()
    assert "compiling" in again.err and "verifying" in again.err


def test_a_changed_byte_is_named_and_the_exit_codes_say_so(bundle: Path, run: Run) -> None:
    data = bytearray(bundle.read_bytes())
    data[data.index(b"\x7fELF") + 100] ^= 1
    bundle.write_bytes(data)
    checked = run("evidence", "check", "b.tar")
    assert checked.code == 1 and "kernel.cubin: is not what SHA256SUMS says" in checked.out
    assert "bundle: fail" in checked.out
    assert "kernel.cubin: is not what SHA256SUMS says" in run("evidence", "run", "b.tar").complaint
    assert run("evidence", "check", "b.tar", "--quiet").out == ""


def test_the_tables_are_for_people(bundle: Path, run: Run) -> None:
    out = run("evidence", "check", "b.tar").out
    assert "rmsnorm small_b1" in out and "not measured" in out and "bundle: pass" in out
    assert "signature: none beside the bundle" in out
    Path("b.tar.minisig").touch()
    assert "b.tar.minisig was not checked; give --public-key" in run("evidence", "check", "b.tar").out
    wrong = run("evidence", "check", "b.tar", "--sha256", "0" * 64)
    assert wrong.code == 1 and "file: its SHA-256 is" in wrong.out


@pytest.mark.parametrize("command", ["make", "check", "run"])
def test_every_command_takes_json_and_quiet(run: Run, command: str) -> None:
    result = run("evidence", command, "--help")
    assert result.code == 0
    for option in ("--json", "--quiet", "--debug", "--summary"):
        assert option in result.out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("make",), "--out FILE"),
        (("make", "--out", "b.tar"), "workbench propose"),
        (("make", "zzz", "--out", "b.tar"), "unknown exported kernel 'zzz'"),
        (("make", "", "--out", "b.tar"), "the key of the exported kernel is empty"),
        (("make", "--out", "b.tar", "--sign", "gpg"), "unknown tool 'gpg'; nearest"),
        (("make", "--out", "b.tar", "--key", "k"), "--key goes with --sign"),
        (("make", "--out", "b.tar", "--sign", "minisign"), "minisign is not installed"),
        (("make", "--out", "b.tar", "--measure"), "nothing can be measured here"),
        (("check", "b.tar"), "no such file"),
        (("check", "verifiers"), "is a folder"),
        (("check", "verifiers/rmsnorm.py"), "no evidence bundle"),
        (("check", "b.tar", "--public-key", "RW"), "minisign is not installed"),
        (("check", "b.tar", "--signer", "me"), "--signer and --issuer go together"),
        (("check", "b.tar", "--signer", "me", "--issuer", "u"), "sigstore is not installed"),
        (("check", "b.tar", "--public-key", "RW", "--signer", "me"), "give one of them"),
        (("run", "b.tar"), "no such file"),
        (("run", "verifiers/rmsnorm.py"), "no evidence bundle"),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_bad_input_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], what: str
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    if "--measure" in arguments:
        from workbench import devices

        monkeypatch.setattr(devices, "available", lambda: devices.Availability((), "no driver"))
    assert what in run("evidence", *arguments).complaint
    assert not Path("b.tar").exists()


def test_an_undecided_finding_is_waived_in_a_file(
    workspace: Workspace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from workbench import api
    from workbench.findings import Finding, Severity
    from workbench.verify.report import Check, Verdict

    verified = api.simulate

    def undecided(*arguments: object, **options: object) -> object:
        found = verified(*arguments, **{**options, "level": "screen"})  # type: ignore[arg-type]
        finding = Finding(
            rule="undecided", severity=Severity.INFO, message="who waits cannot be told", ptx_line=7
        )
        check = Check(name="ordering/static", verdict=Verdict.UNKNOWN, findings=(finding,))
        rest = tuple(c for c in found.report.checks if c.name != check.name)
        return replace(found, report=found.report.model_copy(update={"checks": (check, *rest)}))

    monkeypatch.setattr(api, "simulate", undecided)
    export = ("export", "row", "--op", "rmsnorm", "--workload", "small_b1")
    refused = run(*export, "--draft-waivers", "waivers.toml", "--quiet")
    assert "or its findings in a file of waivers: finding" in refused.complaint
    assert not list(workspace.generated.rglob("manifest.json"))
    assert (
        "person: String should have at least 3"
        in run(*export, "--waivers", "waivers.toml", "--quiet").complaint
    )
    draft = Path("waivers.toml").read_text()
    filled = draft.replace('person = ""', 'person = "A. Reviewer"').replace(
        'reason = ""', 'reason = "looked"'
    )
    Path("waivers.toml").write_text(filled)
    done = run(*export, "--waivers", "waivers.toml", "--json")
    assert done.code == 0 and done.json("export")["waived"] == ["ordering/static"]
    assert run("evidence", "make", "--out", "b.tar").code == 0
    document = run("evidence", "check", "b.tar", "--json").json("evidence-check")
    assert document["kernels"][0]["waivers"][0]["person"] == "A. Reviewer"
    assert run("export", "--to", "module", "--out", "d", "--waivers", "waivers.toml").code == 2


@pytest.mark.slow
def test_a_fresh_clone_in_another_folder_repeats_a_bundle(bundle: Path, tmp_path: Path) -> None:
    clone = tmp_path / "fresh"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
    for command in (["check", str(bundle)], ["run", str(bundle)]):
        done = subprocess.run(
            [sys.executable, "-m", "workbench", "evidence", *command],
            cwd=clone,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "timing not repeated" in done.stdout and "0 differ" in done.stdout
