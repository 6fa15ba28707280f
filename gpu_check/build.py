"""Writes the folder that travels to the GPU: whole or not at all. Runs on a CPU, with the whole workbench.

python -m gpu_check build/gpu-check
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import workbench
from gpu_check import family
from gpu_check.conduct import DEADLINE_S, Section
from gpu_check.probes import arithmetic, copies, matrix, memory, pdl, warp
from gpu_check.probes.builder import ARCH, Builder
from gpu_check.templates_build import Built, Choice, build_templates, opcodes
from workbench.compile.ptxas import find_ptxas, ptxas_version
from workbench.devices import SimulatedDevice, execute
from workbench.errors import WorkbenchError
from workbench.workspace import Workspace

FORMAT = 1
_HERE = Path(__file__).resolve().parent
_WORKBENCH = Path(workbench.__file__).resolve().parent
_CODE = (
    "__init__.py", "compare.py", "conduct.py", "family.py", "machine.py", "report.py", "running.py",
    "sections/__init__.py", "sections/instructions.py", "sections/ordering.py", "sections/overhead.py",
    "sections/templates.py",
)  # fmt: skip
"""Of this package; the rest is the build's."""
_MODULES = ("__init__.py", "errors.py", "expressions.py", "workspace.py", "devices/*.py", "ops/*.py")
"""Of the workbench: what needs neither pydantic nor a compiler."""
_NOT_TRAVELLING = {"devices/simulated.py"}

Say = Callable[[str], None]


def build(workspace: Workspace, out: Path, say: Say = print, choice: Choice | None = None) -> dict[str, Any]:
    """Write the folder `out`; the plan that stands in it.

    Args:
        workspace: whose templates and verifiers are checked.
        out: a new folder, or one that an earlier build wrote; replaced.
        say: told what is going on.
        choice: which kernels; a test takes few.

    Raises:
        WorkbenchError: if `out` holds something else, or a kernel does not build or simulate.
    """
    if out.exists() and not (out / "plan.json").is_file():
        raise WorkbenchError(f"{out} exists and no build of this wrote it; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    staging.chmod(0o755)
    try:
        plan = _fill(workspace, staging, say, choice or Choice())
        if out.exists():
            shutil.rmtree(out)
        staging.rename(out)
    except OSError as e:
        raise WorkbenchError(
            f"cannot write {out}: {e.strerror or e}; free space or choose another folder"
        ) from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return plan


def builders(wanted: Collection[str] | None = None) -> Iterator[Builder]:
    """Every family of instructions, or those that are wanted."""
    yield from arithmetic.builders(wanted)
    for module in (warp, memory, copies, matrix):
        yield from (b for b in module.builders() if wanted is None or b.name in wanted)


def _fill(workspace: Workspace, out: Path, say: Say, choice: Choice) -> dict[str, Any]:
    _copy_code(workspace, out)
    sections: list[Section] = []
    covered: set[str] = set()
    dropped: dict[str, str] = {}
    for builder in builders(choice.families):
        made = builder.family()
        (simulated,) = execute(SimulatedDevice(), made.kernel, made.inputs)
        name = builder.name.replace(" ", "-").replace(".", "-")
        family.save(out / "instructions" / name, made, simulated)
        covered |= set(made.covers)
        dropped |= builder.dropped
        say(f"{builder.name}: {len(made.parts)} results of {len(made.kernel.launches)} kernels simulated")
        sections.append(Section(f"instructions/{name}", f"instructions: {builder.name}", 4, 40))
    pdl.write(out / "ordering")
    covered |= {"griddepcontrol.wait", "griddepcontrol.launch_dependents"}
    sections.append(Section("ordering", "loads and griddepcontrol.wait", 8, 60))
    built = build_templates(workspace, out / "templates", say, choice)
    sections += _template_sections(built)
    if _module(workspace, out, built, say):
        sections.append(Section("overhead/package", "host time of a call: the package's op", 12, 60))
        sections.append(Section("package", "the exported package by its contracts", 15, 60))
    used = opcodes(built)
    plan = {
        "format": FORMAT,
        "deadline_s": DEADLINE_S,
        "built": {
            "arch": ARCH,
            "ptxas": ptxas_version(find_ptxas()),
            "opcodes": len(used),
            "uncovered": sorted(used - covered),
            "not_on_this_arch": dropped,
            "templates_not_built": built.failed,
        },
        "sections": [dataclasses.asdict(s) for s in sections],
    }
    (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    return plan


def _template_sections(built: Built) -> list[Section]:
    """Numerics, then times, of every op; the longest last, so that it costs no other its time."""
    found = []
    ops = list(dict.fromkeys(k["op"] for k in built.kernels))
    for op in ops:
        mine = [k for k in built.kernels if k["op"] == op]
        # The references were timed here; the rest is uploads and launches.
        runs = sum(len(k["generators"]) for k in mine)
        references = {k["workload"]: k["standard_s"] * len(k["generators"]) for k in mine}
        estimate = round(6 + 0.15 * runs + sum(references.values()), 1)
        found.append(Section(f"numerics/{op}", f"numerics: {op}", estimate, 120))
    found.sort(key=lambda s: s.estimate_s)
    for op in [s.name.split("/")[1] for s in found]:
        timed = [k for k in built.kernels if k["op"] == op and k["predicted"] is not None]
        if timed:
            found.append(Section(f"timing/{op}", f"measured time: {op}", 4 + 1.5 * len(timed), 60))
    if any(not k["real"] for k in built.kernels):
        found.append(Section("overhead/launcher", "host time of a call: the launcher", 4, 30))
    return found


def _copy_code(workspace: Workspace, out: Path) -> None:
    for name in _CODE:
        target = out / "gpu_check" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_HERE / name, target)
    for pattern in _MODULES:
        for path in sorted(_WORKBENCH.glob(pattern)):
            relative = path.relative_to(_WORKBENCH)
            if relative.as_posix() in _NOT_TRAVELLING:
                continue
            target = out / "workbench" / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (out / "verifiers").mkdir()
    for path in sorted(workspace.verifiers.glob("*.py")):
        shutil.copyfile(path, out / "verifiers" / path.name)
    (out / "templates").mkdir()
    shutil.copyfile(_HERE / "entry.py", out / "run.py")


def _module(workspace: Workspace, out: Path, built: Built, say: Say) -> bool:
    """The exported package of the kernels that are verified here; false if there is none."""
    from workbench.export import export_winner
    from workbench.export.module import write_module

    if not built.winners:
        return False
    with tempfile.TemporaryDirectory() as folder:
        space = Workspace(Path(folder))
        shutil.copytree(workspace.verifiers, space.verifiers)
        space.templates.mkdir()
        for artifact, report, prediction in built.winners:
            export_winner(space, artifact, report, prediction)
        document = write_module(space, out / "module")
    shutil.rmtree(out / "module" / "dist")
    say(f"package {document.version} with {len(document.kernels)} kernels for {ARCH}")
    return True
