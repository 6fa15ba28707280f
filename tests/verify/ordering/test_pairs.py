"""Every rule on pairs of kernels: the wrong one is found under the rule, its right twin passes.

Pairs stand in `pairs/<rule>/` and in the pages of `docs/rules`; `pairing` says how they are written.
"""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pairing import PAIRS, STAGES, Pair, Source, nvcc, pairs, severities, to_ptx, unmatched

from workbench import api
from workbench.errors import ContentError
from workbench.findings import Finding, Severity
from workbench.verify.ordering import RULES, AuditTarget, files, launches, static
from workbench.verify.report import Verdict
from workbench.workspace import Workspace

HAS_DYNAMIC = hasattr(files, "run_contract")
WORKSPACE = Workspace(Path(__file__).resolve().parents[3])


def _params(found: tuple[Pair, ...]) -> list[object]:
    """All pairs; those beyond the page's and the first two of a rule are slow tests."""
    seen: Counter[str] = Counter()
    params = []
    for p in found:
        page = p.name.startswith("page")
        seen[p.rule] += not page
        slow = not page and seen[p.rule] > 2
        params.append(pytest.param(p, id=p.id, marks=pytest.mark.slow if slow else ()))
    return params


Stages = dict[str, list[Finding]]


@cache
def audited(pair: Pair, side: str, root: Path) -> tuple[tuple[AuditTarget, ...], Stages]:
    """Audit one side of a pair; also what each stage found, as the audit joins them."""
    source: Source = pair.wrong if side == "wrong" else pair.right
    folder = root / pair.id.replace(".", "_") / side
    folder.mkdir(parents=True)
    text, suffix = source.text, source.suffix
    if suffix == ".cu":
        if nvcc() is None:
            pytest.skip("nvcc needs a host compiler, and there is none")
        text, suffix = to_ptx(text, folder), ".ptx"
    kernel = folder / f"k{suffix}"
    kernel.write_text(text)
    contract = folder / "contract.toml" if pair.contract is not None else None
    if contract is not None and pair.contract is not None:
        contract.write_text(pair.contract)
    stages: Stages = {"static": [], "dynamic": []}
    with pytest.MonkeyPatch.context() as patch:
        _record(patch, stages)
        return api.audit(kernel, contract, workspace=WORKSPACE).targets, stages


def _record(patch: pytest.MonkeyPatch, stages: Stages) -> None:
    """Note the findings of the static audit and of the runs where the one is joined with the other."""
    for module in (files, launches):
        if not hasattr(module, "joined"):
            continue

        def note(audit: static.KernelAudit, ran: Any, join: Any = module.joined) -> Any:
            stages["static"] += audit.findings
            stages["dynamic"] += ran.findings if ran is not None else ()
            return join(audit, ran)

        patch.setattr(module, "joined", note)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.mark.parametrize("pair", _params(pairs()))
def test_the_wrong_kernel_is_found_under_its_rule(pair: Pair, root: Path) -> None:
    if "static" not in pair.stages and not HAS_DYNAMIC:
        pytest.skip("found only by running it, and the audit does not run kernels")
    if "dynamic" not in pair.stages and pair.rule not in RULES:
        pytest.skip(f"the static audit does not decide {pair.rule}")
    targets, stages = audited(pair, "wrong", root)
    wanted = severities(pair.rule)
    hits = [f for t in targets for f in t.findings if f.rule == pair.rule and f.severity in wanted]
    assert hits, [(f.rule, f.severity.value, f.ptx_line, f.message) for t in targets for f in t.findings]
    for f in hits:
        assert f.message and f.fix
    if Severity.ERROR in {f.severity for f in hits}:
        assert any(t.verdict is Verdict.FAIL for t in targets)
    for stage in pair.stages if HAS_DYNAMIC and pair.rule in RULES and pair.wrong.suffix == ".ptx" else ():
        assert pair.rule in {f.rule for f in stages[stage]}, f"not found by the {stage} audit"


@pytest.mark.parametrize("pair", _params(pairs()))
def test_the_right_twin_passes(pair: Pair, root: Path) -> None:
    for t in audited(pair, "right", root)[0]:
        said = [(f.rule, f.severity.value, f.ptx_line, f.sass_offset, f.message) for f in t.findings]
        assert t.verdict is Verdict.PASS, said
        assert not [s for s in said if s[1] == Severity.ERROR.value or s[0] == pair.rule], said


def test_every_file_belongs_to_a_pair() -> None:
    assert unmatched() == []


def test_every_pair_says_how_it_is_found() -> None:
    for p in pairs():
        assert set(p.stages) <= set(STAGES)


def test_twins_differ_in_little() -> None:
    """A right twin that is another kernel proves nothing about the rule."""
    for p in pairs():
        wrong, right = p.wrong.text.splitlines()[1:], p.right.text.splitlines()
        blocks = SequenceMatcher(None, wrong, right, autojunk=False).get_matching_blocks()
        changed = len(wrong) + len(right) - 2 * sum(b.size for b in blocks)
        assert 0 < changed <= max(14, len(right) // 2), (p.id, changed)


def test_a_page_or_folder_holds_no_pair_of_another_kind() -> None:
    assert all(p.is_dir() for p in PAIRS.glob("*")) if PAIRS.is_dir() else True


@pytest.mark.skipif(nvcc() is None, reason="nvcc needs a host compiler, and there is none")
def test_cuda_that_does_not_compile_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="error"):
        to_ptx('extern "C" __global__ void k(', tmp_path)


def test_a_pair_that_does_not_parse_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(".version 9.0\n.target sm_103a\n.address_size 64\n.visible .entry k(\n")
    with pytest.raises(ContentError):
        api.audit(path, workspace=WORKSPACE)
