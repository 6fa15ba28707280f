"""The whole corpus: how much compiles, that all of it parses and lowers, what the static audit says of it."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import corpus
import kernel_modules
import pytest
from audit_contracts import write_contract
from audit_corpus import Row, audited, modules, share, unknown_instructions

from workbench.isa.ptx import parse, print_module
from workbench.verify.ordering import audit_file
from workbench.verify.report import Verdict

ARGUED = {("recover_verify_h12_q8", "warning tcgen05-order")}
"""Findings that docs/external.md explains."""
FAMILIES = tuple(dict.fromkeys(e.family for e in kernel_modules.entries()))


def test_over_a_hundred_modules_compile(index: dict[str, dict[str, Any]]) -> None:
    made = [m for entry in index.values() for m in entry["modules"]]
    assert len(made) > 100 and len(set(made)) == len(made)
    for name, entry in index.items():
        assert not entry["error"], f"{name}: {entry['error']}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_parses_and_lowers(family: str, index: dict[str, dict[str, Any]]) -> None:
    for entry in index.values():
        for name in entry["modules"] if entry["family"] == family else ():
            module = parse((corpus.folder() / name / "kernel.ptx").read_text())
            assert parse(print_module(module)).kernels[0].registers == module.kernels[0].registers
            assert unknown_instructions(module) == [], name


@pytest.fixture(scope="module")
def audits(index: dict[str, dict[str, Any]]) -> tuple[list[Row], float]:
    """Every module audited under its contract, and the seconds that took in two processes."""
    return audited(modules(index))


def test_no_audit_crashes(audits: tuple[list[Row], float]) -> None:
    assert [(r.name, r.messages) for r in audits[0] if r.verdict == "crash"] == []


def test_no_error_and_only_the_warnings_of_the_ledger(audits: tuple[list[Row], float]) -> None:
    loud = [(r.name, m) for r in audits[0] for m in r.messages if m.startswith(("error", "warning"))]
    assert [(name, m) for name, m in loud if (name, " ".join(m.split()[:2])) not in ARGUED] == []


def test_few_accesses_are_undecided(audits: tuple[list[Row], float]) -> None:
    rows, seconds = audits
    reasons: collections.Counter[str] = collections.Counter()
    for r in rows:
        reasons.update(r.reasons)
    print(f"{share(rows):.2%} of {sum(r.accesses for r in rows)} accesses undecided, in {seconds:.0f} s")
    print("\n".join(f"{n} {why}" for why, n in reasons.most_common()))
    assert share(rows) < 0.05


def test_front_gemms_lose_their_prefetch(audits: tuple[list[Row], float]) -> None:
    front = [r for r in audits[0] if r.name.startswith("front_gemm")]
    assert len(front) >= 8
    for r in front:
        assert r.findings == {"performance prefetch-sunk": 1}, r.name
        assert "the SASS only 0" in r.messages[0]


@pytest.mark.parametrize(
    "name, said",
    [
        ("kda_tp16_b16", "256 bytes a thread of f_b before griddepcontrol.wait, the SASS only 48"),
        ("kda_tp16_verify_b2_q8", "128 bytes a thread of f_b before griddepcontrol.wait, the SASS only 32"),
    ],
)
def test_kda_keeps_a_part_of_its_prefetch(audits: tuple[list[Row], float], name: str, said: str) -> None:
    (row,) = (r for r in audits[0] if r.name == name)
    assert row.verdict == "pass" and said in row.messages[0]


@pytest.mark.parametrize(
    "name", ["dense_situ_tp8", "skinny_b1", "mla_tp8_b1_2", "splitk_64_8_4_8", "kda_tp8_b1"]
)
def test_the_same_kernel_without_its_wait_fails(
    name: str, index: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """That nothing is wrong with the corpus would say little if nothing could be found."""
    text = (corpus.folder() / name / "kernel.ptx").read_text()
    assert "griddepcontrol.wait;" in text
    path = tmp_path / "kernel.ptx"
    path.write_text(text.replace("griddepcontrol.wait;", ""))
    document = audit_file(path, write_contract(name))
    assert document.verdict is Verdict.FAIL
    assert "pdl-wait-missing" in {f.rule for t in document.targets for f in t.findings}
