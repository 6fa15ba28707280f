from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from workbench.cli.app import main
from workbench.report.documents import json_schema
from workbench.workspace import Workspace

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self, schema: str) -> Any:
        """The one document on standard output, valid under its published schema."""
        document = json.loads(self.out)
        jsonschema.validate(document, json_schema(schema))
        return document

    @property
    def complaint(self) -> str:
        """The one line that a command ends with when its input is bad."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == "", self.out
        lines = self.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("workbench: "), self.err
        return lines[0]


Run = Callable[..., Result]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A copy of the repository's rmsnorm and top-k in a folder of its own, which is also the current one."""
    root = tmp_path / "space"
    for op in ("rmsnorm", "moe_topk"):
        (root / "verifiers").mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "verifiers" / f"{op}.py", root / "verifiers")
        shutil.copytree(
            REPOSITORY / "templates" / op,
            root / "templates" / op,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    monkeypatch.chdir(root)
    monkeypatch.delenv("WORKBENCH_ROOT", raising=False)
    return Workspace(root)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process and return exit code and both streams."""

    def go(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(list(arguments))
        streams = capfd.readouterr()
        return Result(int(code), streams.out, streams.err)

    return go
