"""Loads kernel modules of installed packages on a machine without a GPU.

Their `__init__` files import whole serving stacks. Only kernel modules are wanted, so packages are made bare:
they have a path but no code, and a name that is asked of them is a stand-in that cannot be called. The few
questions a compile asks of the device are answered for sm_103a.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCH = "sm_103a"
BARE = ("vllm", "flashinfer", "quack")
"""Packages, with all their subpackages, whose `__init__` files are not run."""


STAND_INS = ("vllm.v1.attention.backends.utils", "vllm.logger", "vllm.tracing", "vllm.triton_utils")
"""Modules of host code that are bare as well."""


class Absent:
    """What a bare package has in place of a name; an error when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} is not there: the package is loaded without its host code")

    def __mro_entries__(self, bases: Any) -> Any:
        return (object,)


class _Platform:
    """Answers for a Blackwell device."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("is_", "has_")):
            return lambda *args, **kwargs: not name.startswith(("is_rocm", "is_xpu", "is_cpu", "is_tpu"))
        raise AttributeError(name)


class _Finder:
    """Makes the packages of `BARE` bare; modules in them are loaded as they are."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        top = name.split(".")[0]
        if top not in BARE:
            return None
        if name in STAND_INS:
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        where = path if path is not None else sys.path
        for entry in where:
            folder = Path(entry) / name.rsplit(".", 1)[-1]
            if folder.is_dir() and not folder.with_suffix(".py").is_file():
                spec = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
                spec.submodule_search_locations = [str(folder)]
                return spec
        return None


class _Loader:
    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)

        def missing(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Absent(f"{spec.name}.{attribute}")

        module.__getattr__ = missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "vllm.platforms":
            module.current_platform = _Platform()
        if module.__name__ == "vllm.v1.attention.backends.utils":
            module.NULL_BLOCK_ID = 0


def installed() -> str | None:
    """Version of the package under test, None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def prepare() -> None:
    """Make the package importable and have the DSL compile for sm_103a; call before anything imports it."""
    import os

    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    import cutlass
    import cutlass.cute.runtime as runtime
    import torch

    plain = runtime.make_fake_stream
    runtime.make_fake_stream = lambda **_: plain()
    torch.accelerator.device_index = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (10, 3)  # type: ignore[assignment]
    cutlass.utils.HardwareInfo.get_max_active_clusters = lambda *_, **__: 8
    host = importlib.import_module("vllm.models.kimi_k3.nvidia.specialized_decode.cutedsl.common.host")
    host.prepare_shared_carveout = lambda compiled, *_: compiled
    _choose_carveouts("vllm.models.kimi_k3.nvidia.specialized_decode.cutedsl.kda.kernel")


def _choose_carveouts(name: str) -> None:
    """Have a kernel module's launches name the shared-memory carveout that a minimum of CTAs an SM asks for.

    Without one the DSL asks the driver how large an SM's shared memory is and chooses; with one
    (`preferred_smem_carveout`, a launch option of its own) it asks nobody. The PTX is the same.
    """
    module = importlib.import_module(name)
    plain = module.launch

    def launch(*args: Any, **options: Any) -> None:
        if options.get("min_blocks_per_mp", 0) > 1:
            options.setdefault("preferred_smem_carveout", 100)
        plain(*args, **options)

    module.launch = launch


def layout(tensor: Any) -> tuple[Any, ...]:
    """Shape, strides and dtype, as the package's compile functions take them."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
