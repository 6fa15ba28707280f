"""Right kernels of many kinds, compiled from the CUDA beside them by nvcc: none may be suspected."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.findings import Severity
from workbench.verify.ordering import audit_file
from workbench.verify.report import Verdict

MODULES = sorted((Path(__file__).parent / "right_kernels").glob("*.ptx"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_every_kernel_passes(path: Path) -> None:
    document = audit_file(path, path.with_suffix(".toml"))
    assert len(document.targets) > 5
    for target in document.targets:
        serious = [f for f in target.findings if f.severity in (Severity.ERROR, Severity.WARNING)]
        assert (target.verdict, serious) == (Verdict.PASS, []), target.kernel
