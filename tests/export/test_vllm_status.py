"""Registration and what the plugin says about itself, beside a stand-in for vLLM's registry."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module as module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from workbench.export.module import k3_decode_plugin

ARCHITECTURE = "KimiLinearForCausalLM"


class Lazy:
    """vLLM's registry entry of a class that is not imported yet."""

    def __init__(self, place: str) -> None:
        self.module_name, _, self.class_name = place.partition(":")

    def load_model_cls(self) -> Any:
        return getattr(module(self.module_name), self.class_name)


class Stock:
    """vLLM's own class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.vllm_config, self.prefix = vllm_config, prefix
        self.specialized_decode_config = None

    def build_specialized_decode(self) -> None:
        self.built = "stock"


class Registry:
    def __init__(self) -> None:
        self.models: dict[str, Any] = {ARCHITECTURE: SimpleNamespace(load_model_cls=lambda: Stock)}

    def register_model(self, name: str, place: str) -> None:
        self.models[name] = Lazy(place)


@pytest.fixture
def registry(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """vLLM 0.33 as far as the plugin looks at it."""
    made = Registry()
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    holder = ModuleType("vllm.model_executor.models.registry")
    holder.ModelRegistry = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.33.0" if n == "vllm" else known(n))
    found = [SimpleNamespace(name="k3_decode")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    module("k3_decode.vllm.state").reset()
    monkeypatch.setattr(module("k3_decode.vllm.registering"), "_before", None)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    yield made
    module("k3_decode.vllm.state").reset()
    sys.modules.pop("k3_decode.vllm.model", None)


def plugin() -> Any:
    return module("k3_decode.vllm")


def test_it_registers_once_however_often_it_is_called(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    assert plugin().status().state == "not loaded" and not plugin().status().ok
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            plugin().register()
    entry = registry.models[ARCHITECTURE]
    assert (entry.module_name, entry.class_name) == ("k3_decode.vllm", ARCHITECTURE)
    assert entry.load_model_cls().__mro__[1] is Stock
    status = plugin().status()
    assert status.state == "registered" and status.ok and "9 kernels for sm_100a, sm_103a" in status.detail
    assert plugin().status_of(None)["state"] == "registered"
    assert [r.message for r in caplog.records if "vLLM plugin registered" in r.message][1:] == []


def test_without_the_key_the_model_is_stocks(registry: Registry) -> None:
    plugin().register()
    cls = registry.models[ARCHITECTURE].load_model_cls()
    for extra in ({}, {"k3_decode": None}, {"k3_decode": False}, {"other": {}}, "hash"):
        made = cls(vllm_config=SimpleNamespace(additional_config=extra), prefix="p")
        made.build_specialized_decode()
        assert made.built == "stock" and made.specialized_decode_config is None and made.prefix == "p"


def test_with_the_key_all_reasons_stand_in_one_message(registry: Registry) -> None:
    plugin().register()
    cls = registry.models[ARCHITECTURE].load_model_cls()
    config = SimpleNamespace(additional_config={"k3_decode": {"mode": "x", "of": []}})
    with pytest.raises(ValueError, match="k3_decode does not support this deployment, for 3 reasons") as e:
        cls(vllm_config=config)
    told = str(e.value)
    assert "mode is 'x'" in told and "there is no setting 'of'; nearest: off" in told
    assert "vLLM 0.33.0 cannot be asked for its settings" in told
    assert plugin().status().state == "refused" and not plugin().status().ok


def test_what_stands_in_the_way_is_told(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,another")
    assert plugin().status().state == "filtered" and "add k3_decode" in plugin().status().detail
    monkeypatch.setenv("VLLM_PLUGINS", "other,k3_decode")
    assert plugin().status().state == "not loaded"
    plugin().register()
    registry.register_model(ARCHITECTURE, "else:where")
    assert plugin().status().state == "overridden"
    module("k3_decode.vllm.state").reset()
    registry.models.clear()
    plugin().register()
    status = plugin().status()
    assert status.state == "broken" and f"vLLM 0.33.0 has no architecture {ARCHITECTURE}" in status.detail
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    module("k3_decode.vllm.state").reset()
    assert plugin().status().state == "not installed"


def test_another_vllm_is_refused_where_it_is_asked_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.34.1")
    plugin().register()
    assert plugin().status().state == "broken" and "vLLM 0.34.1 is not a version" in plugin().status().detail
    cls = registry.models[ARCHITECTURE].load_model_cls()
    cls(vllm_config=SimpleNamespace(additional_config={}))
    with pytest.raises(ValueError, match=r"for 1 reason; .*\n  - vLLM 0\.34\.1 is not a version"):
        cls(vllm_config=SimpleNamespace(additional_config={"k3_decode": {}}))


def test_the_entry_point_stands_in_for_a_package_that_cannot_be_loaded(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "k3_decode.vllm", None)
    monkeypatch.setattr(k3_decode_plugin, "_before", None)
    monkeypatch.setitem(sys.modules, k3_decode_plugin.__name__, k3_decode_plugin)
    k3_decode_plugin._refusing.cache_clear()
    for _ in range(2):
        k3_decode_plugin.register()
    assert "ModuleNotFoundError" in k3_decode_plugin.problem()
    assert "vLLM plugin broken: it cannot be loaded" in caplog.text
    cls = registry.models[ARCHITECTURE].load_model_cls()
    assert cls.__name__ == ARCHITECTURE and cls.__mro__[1] is Stock
    assert cls(vllm_config=SimpleNamespace(additional_config={})).prefix == ""
    with pytest.raises(ValueError, match="the plugin is broken and cannot be loaded: ModuleNotFoundError"):
        cls(vllm_config=SimpleNamespace(additional_config={"k3_decode": {}}))


def test_the_export_has_the_plugin_and_its_entry_point(project: Path) -> None:
    assert (project / "entry_points.txt").read_text().splitlines() == [
        "[vllm.general_plugins]", "k3_decode = k3_decode_plugin:register",
    ]  # fmt: skip
    assert (project / "k3_decode" / "vllm" / "executor.py").is_file()
    assert "additional-config" in (project / "README.md").read_text()
    code = "import k3_decode_plugin as p; p.register(); print(p.problem() or 'whole')"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(project)!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "whole" and "vLLM plugin broken: nothing is registered" in done.stderr
