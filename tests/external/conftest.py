"""Everything here needs the virtual environment of `make external`."""

from __future__ import annotations

from pathlib import Path

import corpus
import kernel_package
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = kernel_package.installed() is None
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.external)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed; run `make external`"))


@pytest.fixture(scope="session")
def index() -> dict[str, dict[str, object]]:
    """The compiled corpus: family, modules and error of each entry."""
    return corpus.build()
