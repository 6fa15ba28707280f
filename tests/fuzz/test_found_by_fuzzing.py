"""What fuzzing found, and the seeds it began with: every text parses or raises the typed error."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from workbench.errors import WorkbenchError

ROOT = Path(__file__).parents[2]
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*/*"))


def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_readers", ROOT / "fuzz" / "readers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_the_reader_parses_it_or_raises_the_typed_error(path: Path) -> None:
    read = harness().reader(path.parent.name)
    try:
        read(path.read_bytes().decode("utf-8", "replace"))
    except WorkbenchError as error:
        assert str(error).strip()


@pytest.mark.parametrize("kind", ["ptx", "sass", "litmus", "contract", "audit"])
def test_each_reader_is_fuzzed_from_seeds_that_it_takes(kind: str) -> None:
    fuzz = harness()
    read, seeds = fuzz.reader(kind), fuzz.seeds(kind)
    assert seeds
    read(min(seeds, key=len))


def test_the_mutator_changes_texts_and_keeps_to_the_size() -> None:
    mutate = harness().mutator(["add %r1, %r2;\nbar.sync 0;"])
    found = {mutate(b"ld.global.f32 %f1, [%rd1];\nret;", 60, seed) for seed in range(50)}
    assert len(found) > 30 and max(map(len, found)) <= 60
