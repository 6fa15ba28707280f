from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from workbench.export import load_manifest
from workbench.export.layout import content_root, lay_out

NOTEBOOKS = sorted((content_root() / "notebooks").glob("*.ipynb"))


def test_there_is_a_first_notebook() -> None:
    assert "01_first_kernel.ipynb" in {p.name for p in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_in_a_new_workspace(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORKBENCH_ROOT", raising=False)
    lay_out(tmp_path / "space")
    folder = tmp_path / "space" / "notebooks"
    notebook = nbformat.read(folder / path.name, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    if path.stem == "01_first_kernel":
        assert sum("image/png" in o.get("data", {}) for o in outputs) == 2, (
            "one plot of the search, one roofline"
        )
        (manifest,) = (tmp_path / "space" / "generated_kernels").rglob("manifest.json")
        assert load_manifest(manifest).op == "rmsnorm"
        printed = "".join(o.get("text", "") for o in outputs)
        assert "pdl-load-before-wait" in printed and str(tmp_path) not in printed
