"""Copies the ops' contracts into the package: verifiers and the arithmetic they share, imports renamed.

What travels is the code that judged the kernels, so that the fallback and the check are one thing. Only
import statements change. A module that imports anything of the workbench beyond the ops cannot travel.
"""

from __future__ import annotations

import ast
from pathlib import Path

from workbench.errors import ContentError
from workbench.ops.model import Op
from workbench.workspace import Workspace

_PACKAGE = Path(__file__).resolve().parents[2]
_STAYS = frozenset({"loader"})
"""Modules of workbench.ops that only the workbench needs."""
_TARGET = "k3_decode.contract"
_HEADER = '"""The ops\' contracts, as the kernels were verified against them; copied by the export."""\n'


def contract_files(workspace: Workspace, ops: dict[str, Op]) -> dict[str, bytes]:
    """The files of `k3_decode/contract/` by path relative to it.

    Raises:
        ContentError: if a verifier uses something of the workbench that does not travel.
    """
    files = {"__init__.py": _HEADER, "verifiers/__init__.py": _HEADER}
    for name in ("expressions", "errors"):
        path = _PACKAGE / f"{name}.py"
        files[f"{name}.py"] = _renamed(path, path.read_text())
    for path in sorted((_PACKAGE / "ops").glob("*.py")):
        if path.stem not in _STAYS:
            files[f"ops/{path.name}"] = _renamed(path, path.read_text())
    torch_only = Path(__file__).parent / "mxfp4_torch.py"
    files["ops/mxfp4.py"] = _renamed(torch_only, torch_only.read_text())
    for name in ops:
        path = workspace.verifier(name)
        files[f"verifiers/{name}.py"] = _renamed(path, path.read_text())
    known = {Path(f).with_suffix("").as_posix().removesuffix("/__init__") for f in files}
    for file, text in files.items():
        _check_imports(file, text, known)
    return {name: text.encode() for name, text in files.items()}


def _renamed(path: Path, text: str) -> str:
    """The source with `workbench` in import statements renamed, those of modules that stay left out."""
    lines = text.splitlines(keepends=True)
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda n: -n.lineno):
        where = slice(node.lineno - 1, node.end_lineno)
        statement = "".join(lines[where])
        if isinstance(node, ast.Import):
            if any(a.name.split(".")[0] == "workbench" for a in node.names):
                problem = "imports the workbench by name; write `from workbench... import ...`"
                raise ContentError(path, problem, node.lineno)
        elif node.module in {f"workbench.ops.{s}" for s in _STAYS}:
            lines[where] = []
        elif node.module and node.module.split(".")[0] == "workbench":
            moved = _TARGET + node.module.removeprefix("workbench")
            lines[where] = [statement.replace(f"from {node.module} ", f"from {moved} ", 1)]
    text = "".join(lines)
    return text.replace('    "load_op",\n', "") if path.name == "__init__.py" else text


def _check_imports(file: str, text: str, known: set[str]) -> None:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.startswith(_TARGET):
            module = node.module.removeprefix(_TARGET).strip(".").replace(".", "/")
            if module and module not in known:
                wanted = node.module.replace(_TARGET, "workbench")
                raise ContentError(file, f"needs {wanted}, which does not travel", node.lineno)
