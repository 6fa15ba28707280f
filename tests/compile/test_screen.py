"""What the screen refuses and what it lets through; the sandbox is tested apart."""

from pathlib import Path

import pytest
from candidates import SCALE, copy, request

from workbench.compile import CompileError, CompileServer, compile_candidate, screen

TRICKS = {
    "import os": "os",
    "import os.path as p": "os.path",
    "import sys": "sys",
    "import math, subprocess": "subprocess",
    "from os import system": "os",
    "from ctypes import CDLL": "ctypes",
    "import importlib": "importlib",
    "import socket": "socket",
    "import threading": "threading",
    "import pickle": "pickle",
    "import gc": "gc",
    "import torch": "torch",
    "import numpy": "numpy",
    "import workbench.verify": "workbench.verify",
    "import cuda.bindings.runtime": "cuda.bindings.runtime",
    "import cutlass.base_dsl.compiler": "machinery",
    "from cutlass import base_dsl": "machinery",
    "from cutlass.torch import from_dlpack": "machinery",
    "from . import x": "relative",
    "from math import *": "name what is used",
    "x = eval('1')": "eval",
    "exec('import os')": "exec",
    "x = compile('1', 'f', 'eval')": "compile",
    "open('/etc/passwd')": "open",
    "x = __import__('os')": "__import__",
    "x = __builtins__": "__builtins__",
    "x = globals()": "globals",
    "x = vars()": "vars",
    "f = getattr": "literal name",
    "x = getattr(int, '__sub' + 'classes__')": "literal name",
    "x = getattr(int, '__subclasses__')": "literal name",
    "setattr(int, 'x', 1)": "setattr",
    "x = ().__class__.__base__.__subclasses__()": "__subclasses__",
    "x = (lambda: 0).__globals__": "__globals__",
    "x = build.__code__": "__code__",
    "x = (i for i in ()).gi_frame": "gi_frame",
    "x = '{0.__class__}'.format(1)": "__class__",
    "import cutlass\nx = cutlass.cute.os": ".os",
    "import dataclasses\nx = dataclasses.sys.modules": ".",
    "import functools as f\nx = f.__loader__": "__loader__",
    "from dataclasses import sys": "sys",
    "from enum import sys as s": "sys",
    "async def f(): pass": "asynchronous",
    "class C:\n    def __getattr__(self, n): pass": "__getattr__",
    "class C:\n    def __del__(self): pass": "__del__",
    "def __getattr__(n): pass": "__getattr__",
    "breakpoint()": "breakpoint",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_are_rejected_with_their_line(trick: str) -> None:
    source = "import math\n\n" + trick + "\n" + copy()
    with pytest.raises(CompileError) as caught:
        screen(source)
    assert caught.value.kind == "rejected" and caught.value.line is not None
    assert 3 <= caught.value.line < 3 + len(trick.splitlines())
    assert TRICKS[trick] in caught.value.message


def test_rejected_source_never_runs(tmp_path: Path) -> None:
    unused = CompileServer()
    with pytest.raises(CompileError, match="rejected"):
        compile_candidate(request("import os\n" + copy()), server=unused)
    assert unused.pid is None


@pytest.mark.parametrize(
    "text",
    [
        "from __future__ import annotations",
        "import math, operator, functools, enum, itertools",
        "from collections.abc import Callable",
        "from dataclasses import dataclass",
        "import cuda.bindings.driver as cuda",
        "from cutlass._mlir.dialects import llvm",
        "from cutlass.cute.nvgpu import cpasync, warp, tcgen05",
        "from cutlass.cutlass_dsl import T, dsl_user_op",
        "import cutlass\nx = getattr(cutlass, 'Float32')",
        'class C:\n    """Sets __init__ and __call__."""\n    def __init__(self): self.compile = 1',
    ],
)
def test_kernels_may_use_what_they_need(text: str) -> None:
    screen(text + "\n" + SCALE)


def test_templates_pass() -> None:
    paths = sorted((Path(__file__).parents[2] / "templates").glob("*/*.py"))
    for path in paths:
        screen(path.read_text())


@pytest.mark.parametrize(
    "source", ["def f(:", "x = '\n", "\0", "(" * 5000 + ")" * 5000, "x = " + "-" * 100_000 + "1"]
)
def test_unreadable_source_is_the_users(source: str) -> None:
    with pytest.raises(CompileError) as caught:
        screen(source)
    assert caught.value.kind == "user"


def test_huge_source_is_rejected() -> None:
    with pytest.raises(CompileError, match="MiB"):
        screen("x = 1\n" * (1 << 18))
