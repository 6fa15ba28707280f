"""First fence: what a candidate's source may say, decided on its syntax tree before anything runs.

An allow-list of imports, and a short list of names and attributes that lead out of the kernel. It stops
mistakes and plain tricks with a clear line; the sandbox (`workbench.compile.sandbox`) is what holds.
"""

from __future__ import annotations

import ast

from workbench.compile.request import CompileError

ALLOWED_MODULES = frozenset({
    "__future__", "abc", "collections", "collections.abc", "cuda.bindings.driver", "cutlass", "dataclasses",
    "enum", "functools", "itertools", "math", "numbers", "operator", "typing",
})  # fmt: skip
"""Modules that may be imported; `cutlass` with everything below it except what `_CLOSED_MODULES` names."""

_CLOSED_MODULES = ("cutlass.base_dsl", "cutlass.torch", "cutlass.jax", "cutlass.testing", "cutlass.runtime")
_CLOSED_NAMES = frozenset({
    "eval", "exec", "compile", "open", "input", "breakpoint", "globals", "locals", "vars", "setattr",
    "delattr", "memoryview", "exit", "quit", "help", "dir",
})  # fmt: skip
_OPEN_DUNDERS = frozenset({
    "__init__", "__call__", "__name__", "__post_init__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
    "__ge__", "__hash__", "__repr__", "__str__", "__bool__", "__len__", "__contains__", "__getitem__",
    "__iter__", "__next__", "__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__",
    "__neg__", "__radd__", "__rsub__", "__rmul__", "__enter__", "__exit__", "__doc__", "__all__", "__slots__",
    "__version__", "__annotations__", "__set_name__", "__extract_mlir_values__", "__get_mlir_types__",
    "__new_from_mlir_values__",
})  # fmt: skip
_CLOSED_ATTRIBUTES = frozenset({
    "gi_frame", "gi_code", "cr_frame", "f_globals", "f_locals", "f_back", "f_builtins", "tb_frame", "sys",
    "os", "func_globals", "func_code", "subprocess", "ctypes", "importlib", "socket", "threading", "builtins",
    "inspect", "modules", "ExecutionEngine", "linecache", "pathlib", "shutil", "tempfile", "multiprocessing",
    "signal",
})  # fmt: skip
_CLOSED_IN_STRINGS = (
    "__globals__", "__builtins__", "__subclasses__", "__import__", "__class__", "__mro__", "__code__",
)  # fmt: skip
MAX_SOURCE_BYTES = 1 << 20


def screen(source: str) -> None:
    """Refuse a source that uses what a kernel has no use for.

    Raises:
        CompileError: kind `rejected` with the line; kind `user` if the source is no Python.
    """
    if len(source.encode(errors="surrogatepass")) > MAX_SOURCE_BYTES:
        raise CompileError("rejected", f"the source is larger than {MAX_SOURCE_BYTES >> 20} MiB")
    try:
        tree = ast.parse(source)
    except SyntaxError as e:
        raise CompileError("user", f"SyntaxError: {e.msg}", e.lineno) from e
    except (ValueError, RecursionError, MemoryError) as e:
        raise CompileError("user", f"the source cannot be read: {e}") from e
    looked_up = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_plain_getattr(n)}
    for node in ast.walk(tree):
        reason = None if id(node) in looked_up else _reason(node)
        if reason is not None:
            raise CompileError("rejected", reason, getattr(node, "lineno", None))


def _reason(node: ast.AST) -> str | None:
    match node:
        case ast.Import(names=names):
            return next((r for a in names if (r := _module(a.name))), None)
        case ast.ImportFrom(module=module, names=names, level=level):
            if level or module is None:
                return "relative imports are not allowed; a candidate is one file"
            if any(a.name == "*" for a in names):
                return f"`from {module} import *` is not allowed; name what is used"
            return _module(module) or next((r for a in names if (r := _imported(module, a.name))), None)
        case ast.Name(id=name):
            return _name(name)
        case ast.Attribute(attr=name):
            if name in _CLOSED_ATTRIBUTES:
                return f"attribute `.{name}` is not allowed"
            return _dunder(name)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return _dunder(name)
        case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            return "asynchronous code is not allowed"
        case ast.Constant(value=str() as text):
            # `"{0.__class__}".format(x)` walks attributes too. Documentation may well say "__init__".
            return next((f"the string {c!r} is not allowed" for c in _CLOSED_IN_STRINGS if c in text), None)
        case _:
            return None


def _is_plain_getattr(node: ast.Call) -> bool:
    """True for `getattr(x, "name")` with a literal name that could be written as `x.name`."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str() as name), *_]):
            return name not in _CLOSED_ATTRIBUTES and _dunder(name) is None
        case _:
            return False


def _module(name: str) -> str | None:
    if any(name == c or name.startswith(c + ".") for c in _CLOSED_MODULES):
        return f"import of {name!r} is not allowed: it is the DSL's own machinery"
    if name in ALLOWED_MODULES or name.startswith("cutlass."):
        return None
    return (
        f"import of {name!r} is not allowed; allowed: {', '.join(sorted(ALLOWED_MODULES - {'__future__'}))}"
    )


def _imported(module: str, name: str) -> str | None:
    if name in _CLOSED_ATTRIBUTES or name in _CLOSED_NAMES:
        return f"import of {name!r} from {module!r} is not allowed"
    full = f"{module}.{name}"
    return _module(full) if full in _CLOSED_MODULES else _dunder(name) if module != "__future__" else None


def _name(name: str) -> str | None:
    if name == "getattr":
        return "`getattr` is allowed with a literal name only"
    if name in _CLOSED_NAMES:
        return f"`{name}` is not allowed"
    return _dunder(name)


def _dunder(name: str) -> str | None:
    if name.startswith("__") and name.endswith("__") and name not in _OPEN_DUNDERS:
        return f"`{name}` is not allowed"
    return None
