"""The workspace: the folder that holds verifiers, templates, generated kernels and the tuning database.

This is the only module that knows the names of those folders.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import UnknownNameError, WorkbenchError

ENVIRONMENT_VARIABLE = "WORKBENCH_ROOT"


@dataclass(frozen=True)
class Workspace:
    """Paths of one workspace."""

    root: Path

    @staticmethod
    def find(start: Path | None = None) -> Workspace:
        """Find the workspace: `$WORKBENCH_ROOT`, else the nearest parent of `start` that is one.

        Raises:
            WorkbenchError: if there is none.
        """
        wanted = os.environ.get(ENVIRONMENT_VARIABLE)
        if wanted:
            if not Workspace(Path(wanted)).is_valid():
                raise WorkbenchError(f"{ENVIRONMENT_VARIABLE}={wanted} has no verifiers/ and templates/")
            return Workspace(Path(wanted).resolve())
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if Workspace(folder).is_valid():
                return Workspace(folder)
        raise WorkbenchError(f"no workspace at or above {here}; run `workbench init DIR` and work there")

    def is_valid(self) -> bool:
        """True if the folder holds verifiers and templates (a folder of tests for them does not count)."""
        verifiers = (p for p in self.verifiers.glob("*.py") if not p.name.startswith("test_"))
        return self.templates.is_dir() and any(verifiers)

    @property
    def verifiers(self) -> Path:
        """`verifiers/<op>.py`: what each op must compute."""
        return self.root / "verifiers"

    @property
    def templates(self) -> Path:
        """`templates/<op>/<name>.py`: kernels with knobs."""
        return self.root / "templates"

    @property
    def generated(self) -> Path:
        """`generated_kernels/<op>/...`: winners, written by export alone."""
        return self.root / "generated_kernels"

    @property
    def docs(self) -> Path:
        """`docs/`: pages an author may read, `docs/rules/<id>.md` among them."""
        return self.root / "docs"

    @property
    def tuning_db(self) -> Path:
        """`tuning_db/records.sqlite` and Optuna studies."""
        return self.root / "tuning_db"

    @property
    def cache(self) -> Path:
        """Content-addressed artifacts; safe to delete."""
        return self.root / ".workbench" / "cache"

    @property
    def runs(self) -> Path:
        """State of `propose` runs, for `--resume`."""
        return self.root / ".workbench" / "runs"

    def op_names(self) -> list[str]:
        """Names of the ops that have a verifier."""
        return sorted(p.stem for p in self.verifiers.glob("*.py") if not p.stem.startswith("_"))

    def verifier(self, op: str) -> Path:
        """Path of an op's verifier; raises UnknownNameError."""
        if op not in self.op_names():
            raise UnknownNameError("op", op, self.op_names())
        return self.verifiers / f"{op}.py"

    def template_names(self, op: str) -> list[str]:
        """Names of an op's templates."""
        return sorted(p.stem for p in (self.templates / op).glob("*.py") if not p.stem.startswith("_"))

    def template(self, op: str, name: str) -> Path:
        """Path of a template; raises UnknownNameError."""
        self.verifier(op)
        if name not in self.template_names(op):
            raise UnknownNameError("template", name, self.template_names(op))
        return self.templates / op / f"{name}.py"
