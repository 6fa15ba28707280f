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
    # Ways round the list: through the allowed modules, through patterns, through names made at run time.
    "import enum\nenum.bltns.exec('1')": "`bltns` of 'enum'",
    "from enum import bltns": "`bltns` of 'enum'",
    "import enum as e\nm = e": "only as `e.NAME`",
    "import collections\ncollections._sys": "`_sys` of 'collections'",
    "from operator import attrgetter": "attrgetter",
    "import operator\nf = operator.attrgetter": "attrgetter",
    "import functools\nfunctools.update_wrapper(build, build, ('a',))": "update_wrapper",
    "import typing\ntyping.get_type_hints(build)": "get_type_hints",
    "from dataclasses import make_dataclass": "make_dataclass",
    "import cuda.bindings.driver as cuda\ncuda.cuInit(0)": "cuInit",
    "import cutlass\ncutlass.base_dsl": "base_dsl",
    "import cutlass\ncutlass.cute.core._builtins": "_builtins",
    "import cutlass.cute as cute\ncute.compile = None": "must not be changed",
    "import cutlass.cute as cute\ncute.arch.table['x'] = None": "must not be changed",
    "import cutlass.cute as cute\ndel cute.compile": "must not be changed",
    "match build:\n    case object(__globals__=g): pass": "__globals__",
    "match build:\n    case object(gi_frame=g): pass": "gi_frame",
    "import math as __builtins__": "__builtins__",
    "def f(__class__): pass": "__class__",
    "class C(metaclass=type): pass": "metaclass",
    "class C:\n    def __init_subclass__(cls): pass": "__init_subclass__",
    "class C:\n    def __class_getitem__(cls, i): pass": "__class_getitem__",
    "t = type('C', (), {})": "one argument",
    "t = type": "one argument",
    "x = ('{0.__cl' + 'ass__}').format(1)": "literal string",
    "f = str.format": "literal string",
    "x = ｅｖａｌ('1')": "eval",
    "def f():\n    global __builtins__": "__builtins__",
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
        "x = isinstance(type(1), (type, int))\ndef f(t: type[int]): pass",
        "import collections.abc\nx = collections.abc.Mapping",
        "import cutlass.cute as cute\nx = {}\nx['a'] = cute\nx['a']: int = 1",
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


@pytest.mark.parametrize(
    "head",
    [
        "# -*- coding: utf-7 -*-\n# +AAo-import os\n",
        "\n# vim: set fileencoding=latin-1 :\n",
        "\ufeff# coding: rot13\n",
    ],
)
def test_source_must_be_read_by_python_as_it_is_read_here(head: str) -> None:
    with pytest.raises(CompileError) as caught:
        screen(head + copy())
    assert caught.value.kind == "rejected" and "encoding" in caught.value.message


def test_huge_source_is_rejected() -> None:
    with pytest.raises(CompileError, match="KiB"):
        screen("x = 1\n" * (1 << 18))
