"""Ten right kernels and every single weakening of what orders them: each is found, or does not matter."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from ordering_mutations import mutants

from workbench.findings import Severity
from workbench.verify.ordering import AuditTarget, audit_file
from workbench.verify.report import Verdict

HERE = Path(__file__).parent
KERNELS = sorted((HERE / "ordering_kernels").glob("*.ptx"))
EXPECTED = tomllib.loads((HERE / "ordering_mutants.toml").read_text())
CASES = [(k, m) for k in KERNELS for m in mutants(k.read_text())]


def audited(folder: Path, kernel: Path, text: str) -> AuditTarget:
    path = folder / kernel.name
    path.write_text(text)
    (target,) = audit_file(path, kernel.with_suffix(".toml")).targets
    return target


def errors(target: AuditTarget) -> set[str]:
    return {f.rule for f in target.findings if f.severity is Severity.ERROR}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.stem)
def test_the_kernel_itself_is_right(tmp_path: Path, kernel: Path) -> None:
    target = audited(tmp_path, kernel, kernel.read_text())
    assert (target.verdict, errors(target)) == (Verdict.PASS, set())


def test_the_list_of_mutants_is_complete() -> None:
    made = {(k.stem, m.label) for k, m in CASES}
    listed = {(name, label) for name, labels in EXPECTED.items() for label in labels}
    assert made == listed and len(KERNELS) == 10


@pytest.mark.parametrize(
    ("kernel", "text", "expected"),
    [
        pytest.param(
            k, m.text, set(EXPECTED.get(k.stem, {}).get(m.label, ["not listed"])), id=f"{k.stem}: {m.label}"
        )
        for k, m in CASES
    ],
)
def test_a_mutant_is_found_or_does_not_matter(
    tmp_path: Path, kernel: Path, text: str, expected: set[str]
) -> None:
    target = audited(tmp_path, kernel, text)
    assert errors(target) == expected, [f.message for f in target.findings]
    assert target.verdict is (Verdict.FAIL if expected else Verdict.PASS)
