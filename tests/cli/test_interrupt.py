"""Ctrl-C costs what was being evaluated, and the run goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from workbench.workspace import Workspace

POINT = ["--op", "rmsnorm", "--workload", "small_b1", "--rounds", "2", "--batch", "3", "--workers", "1"]


def test_an_interrupted_run_is_continued(run: Any, workspace: Workspace) -> None:
    command = [sys.executable, "-m", "workbench", "propose", *POINT, "--json"]
    with subprocess.Popen(
        command,
        cwd=workspace.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell inherit an interrupt that is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if "#1 " in line:
                break
        process.send_signal(signal.SIGINT)
        rest, out = process.stderr.read(), process.stdout.read()
        assert process.wait() == 130 and out == ""
    last = rest.strip().splitlines()[-1]
    (run_folder,) = workspace.runs.iterdir()
    assert last == f"workbench: interrupted; continue with `workbench propose --resume {run_folder.name}`"
    assert "Traceback" not in rest
    done = sorted(p.name for p in (run_folder / "candidates").iterdir())
    kept = {name: (run_folder / "candidates" / name).read_bytes() for name in done}
    assert len(done) >= 2

    result = run("propose", "--resume", run_folder.name, "--json")
    document = result.json("propose")
    assert result.code == 0 and len(document["candidates"]) == 6 and document["exported"]
    assert f"{len(done)} candidates are known" in result.err
    assert {name: (run_folder / "candidates" / name).read_bytes() for name in done} == kept
    assert json.loads((run_folder / "run.json").read_text())["rounds"] == 2
    assert Path(document["exported"], "manifest.json").is_file()
