from __future__ import annotations

import pkgutil

import pytest

import workbench as wb


def test_every_name_of_the_notebook_loads() -> None:
    for name in wb.__all__:
        assert getattr(wb, name) is not None
    assert set(wb.__all__) <= set(dir(wb))


def test_no_name_hides_a_package_or_is_hidden_by_one() -> None:
    """Importing `workbench.x` binds the module to `x` in the package, whatever was there."""
    assert not set(wb.__all__) & {m.name for m in pkgutil.iter_modules(wb.__path__)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        wb.nonsense  # noqa: B018
