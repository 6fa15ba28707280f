from collections.abc import Iterator

import pytest

from workbench.compile import CompileServer


@pytest.fixture(scope="package")
def server() -> Iterator[CompileServer]:
    with CompileServer() as s:
        yield s
