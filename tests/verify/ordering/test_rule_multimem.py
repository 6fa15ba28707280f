"""Multicast memory where only the SASS is there: a multimem load has an opcode of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairing import PAIRS

from workbench.compile import DEFAULT_PTXAS_FLAGS, Limits
from workbench.compile.ptxas import assemble
from workbench.verify.ordering import audit_file
from workbench.verify.report import Verdict

PAIR = "residual_beside_the_partials"


@pytest.mark.parametrize(("side", "verdict"), [("wrong", Verdict.FAIL), ("right", Verdict.PASS)])
def test_an_ordinary_load_in_a_bare_cubin(tmp_path: Path, side: str, verdict: Verdict) -> None:
    folder = PAIRS / "multimem-order"
    cubin = tmp_path / "k.cubin"
    text = (folder / f"{PAIR}.{side}.ptx").read_text()
    cubin.write_bytes(assemble(text, "sm_103a", DEFAULT_PTXAS_FLAGS, Limits()).cubin)
    document = audit_file(cubin, folder / f"{PAIR}.toml")
    assert document.verdict is verdict
    found = [f.rule for t in document.targets for f in t.findings]
    assert ("multimem-order" in found) == (side == "wrong")
