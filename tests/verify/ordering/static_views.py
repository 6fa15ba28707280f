"""Views of a PTX text for tests of single static rules, without running the kernel."""

from __future__ import annotations

from pathlib import Path

from workbench.isa.ptx import parse
from workbench.verify.contract import load_contract
from workbench.verify.ordering.static import contract_launch, kernel_forms
from workbench.verify.ordering.view import PtxView


def ptx_view(folder: Path, text: str, terms: str | None) -> PtxView:
    """The view of the only kernel of a PTX text."""
    module = parse(text)
    (kernel,) = module.kernels
    forms = kernel_forms(module, None, None, kernel.name, None)
    found = None
    if terms is not None:
        path = folder / "contract.toml"
        path.write_text(terms)
        found = load_contract(path).find(kernel.name, 1)
    return PtxView.of(module, kernel, contract_launch(forms, found), forms.layout)
