"""The whole corpus: how much compiles, that all of it parses and lowers."""

from __future__ import annotations

from typing import Any

import corpus
import kernel_modules
import pytest
from audit_corpus import unknown_instructions

from workbench.isa.ptx import parse, print_module

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
