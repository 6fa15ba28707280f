"""First fence: what a candidate's source may say, decided on its syntax tree before anything runs.

An allow-list of imports, of what may be used of them, and a short list of names and attributes that lead out
of the kernel. It stops mistakes and plain tricks with a clear line; the sandbox
(`workbench.compile.sandbox`) is what holds.
"""

from __future__ import annotations

import ast
import importlib
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from workbench.compile.request import CompileError

LIBRARY = frozenset({
    "__future__", "abc", "collections", "collections.abc", "dataclasses", "enum", "functools", "itertools",
    "math", "numbers", "operator", "typing",
})  # fmt: skip
"""Modules of the standard library that may be imported; of each only the public names, as `module.name`."""
DRIVER = "cuda.bindings.driver"
ALLOWED_MODULES = LIBRARY | {DRIVER, "cutlass"}
"""Modules that may be imported; `cutlass` with everything below it except what `_CLOSED_MODULES` names."""

_CLOSED_MODULES = ("cutlass.base_dsl", "cutlass.torch", "cutlass.jax", "cutlass.testing", "cutlass.runtime")
_CLOSED_PUBLIC = frozenset({
    # They take names or code as strings, or make classes and functions out of them.
    "attrgetter", "methodcaller", "make_dataclass", "update_wrapper", "wraps", "singledispatch",
    "singledispatchmethod", "get_type_hints", "ForwardRef",
})  # fmt: skip
_CLOSED_NAMES = frozenset({
    "eval", "exec", "compile", "open", "input", "breakpoint", "globals", "locals", "vars", "setattr",
    "delattr", "memoryview", "exit", "quit", "help", "dir", "license", "credits", "copyright",
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
    # Ways from a generator, traceback or function to its frame and namespace.
    "gi_frame", "gi_code", "gi_yieldfrom", "ag_frame", "ag_code", "cr_frame", "cr_code", "f_globals",
    "f_locals", "f_back", "f_builtins", "f_code", "f_trace", "tb_frame", "tb_next", "func_globals",
    "func_code", "mro",
    # Modules that the DSL's own modules hold under these names.
    "argparse", "ast", "atexit", "base_dsl", "bltns", "builtins", "contextlib", "ctypes", "cuda_driver",
    "cuda_runtime", "cudart", "dis", "ExecutionEngine", "execution_engine", "gc", "glob", "hashlib",
    "importlib", "inspect", "json", "linecache", "logging", "modules", "multiprocessing", "np", "nvrtc", "os",
    "pathlib", "pickle", "shlex", "shutil", "signal", "socket", "stdlib_re", "subprocess", "sys", "tempfile",
    "textwrap", "threading", "uuid", "warnings", "weakref", "zlib",
})  # fmt: skip
_CLOSED_IN_STRINGS = (
    "__globals__", "__builtins__", "__subclasses__", "__import__", "__class__", "__mro__", "__code__",
    "__dict__", "__loader__", "__spec__", "__traceback__", "f_globals", "f_builtins", "tb_frame", "gi_frame",
)  # fmt: skip
MAX_SOURCE_BYTES = 256 << 10


def screen(source: str) -> None:
    """Refuse a source that uses what a kernel has no use for.

    Raises:
        CompileError: kind `rejected` with the line; kind `user` if the source is no Python.
    """
    _check_text(source)
    try:
        tree = ast.parse(source)
    except SyntaxError as e:
        raise CompileError("user", f"SyntaxError: {e.msg}", e.lineno) from e
    except (ValueError, RecursionError, MemoryError) as e:
        raise CompileError("user", f"the source cannot be read: {e}") from e
    nodes = list(ast.walk(tree))
    context = _Context(nodes)
    for node in nodes:
        reason = _reason(node, context)
        if reason is not None:
            raise CompileError("rejected", reason, getattr(node, "lineno", None))


def _check_text(source: str) -> None:
    """Refuse a text that is too long, or that Python would read otherwise than as it is shown here."""
    try:
        data = source.encode()
    except UnicodeEncodeError as e:
        raise CompileError("user", "the source is no valid Unicode text") from e
    if len(data) > MAX_SOURCE_BYTES:
        raise CompileError("rejected", f"the source is larger than {MAX_SOURCE_BYTES >> 10} KiB")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as e:
        raise CompileError("rejected", f"the source declares an encoding that is not UTF-8: {e}", 1) from e
    if encoding not in ("utf-8", "utf-8-sig"):
        raise CompileError("rejected", f"the source declares the encoding {encoding!r}; it must be UTF-8", 1)


class _Context:
    """What a verdict depends on beyond a node: imported names, and uses that are fine in their place."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        self.imported: set[str] = set()
        """Every name bound by an import."""
        self.library: dict[str, str] = {}
        """Names bound to a module of the standard library or the driver, of which only parts may be used."""
        self.excused: set[int] = set()
        """Ids of nodes that are fine where they stand, though not anywhere."""
        for node in nodes:
            match node:
                case ast.Import(names=names):
                    for a in names:
                        root = a.asname or a.name.split(".")[0]
                        self.imported.add(root)
                        if a.name in LIBRARY or a.name == DRIVER:
                            self.library[root] = a.name if a.asname else root
                case ast.ImportFrom(names=names):
                    self.imported |= {a.asname or a.name for a in names}
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id="getattr") as f) if _is_plain_getattr(node):
                    self.excused.add(id(f))
                case ast.Call(func=ast.Name(id="type") as f, args=[_], keywords=[]):
                    self.excused.add(id(f))
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                    self.excused |= {id(n) for n in ast.walk(kinds) if _is_type(n)}
                case ast.Subscript(value=ast.Name(id="type") as f):
                    self.excused.add(id(f))
                case ast.Attribute(value=ast.Name(id=name) as base) if name in self.library:
                    self.excused.add(id(base))


def _reason(node: ast.AST, context: _Context) -> str | None:
    for name in _identifiers(node):
        if (reason := _dunder(name)) is not None:
            return reason
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
            return None if id(node) in context.excused else _name(name, context)
        case ast.Attribute(value=value, attr=name, ctx=ctx):
            if not isinstance(ctx, ast.Load) and (root := _root(value)) in context.imported:
                return f"`{root}` is imported: what belongs to it must not be changed"
            if isinstance(value, ast.Name) and value.id in context.library:
                return _of_library(context.library[value.id], name)
            return _attribute(name, value)
        case ast.Subscript(value=value, ctx=ctx) if not isinstance(ctx, ast.Load):
            root = _root(value)
            of_import = root in context.imported and isinstance(value, ast.Attribute)
            return f"`{root}` is imported: what belongs to it must not be changed" if of_import else None
        case ast.MatchClass(kwd_attrs=names):
            return next((r for n in names if (r := _attribute(n))), None)
        case ast.ClassDef(keywords=keywords) if keywords:
            return "a class may have bases, but no metaclass and no other keywords"
        case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            return "asynchronous code is not allowed"
        case ast.Constant(value=str() as text):
            # `"{0.__class__}".format(x)` walks attributes too. Documentation may well say "__init__".
            return next((f"the string {c!r} is not allowed" for c in _CLOSED_IN_STRINGS if c in text), None)
        case _:
            return None


def _identifiers(node: ast.AST) -> Iterator[str]:
    """Names that a node gives or uses, whatever its kind: arguments, aliases, patterns, keywords, ..."""
    if isinstance(node, ast.Constant | ast.ImportFrom):
        return
    for field, value in ast.iter_fields(node):
        if field in ("type_comment", "kind") or (field == "name" and isinstance(node, ast.alias)):
            continue
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, str):
                yield item


def _root(node: ast.expr) -> str | None:
    """The name at the start of a chain of attributes, subscripts and calls."""
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case ast.Name(id=name):
                return name
            case _:
                return None


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "type"


def _is_plain_getattr(node: ast.Call) -> bool:
    """True for `getattr(x, "name")` with a literal name that could be written as `x.name`."""
    match node:
        case ast.Call(args=[value, ast.Constant(value=str() as name), *_]):
            return _attribute(name, value) is None
        case _:
            return False


def _module(name: str) -> str | None:
    if any(name == c or name.startswith(c + ".") for c in _CLOSED_MODULES):
        return f"import of {name!r} is not allowed: it is the DSL's own machinery"
    if name in ALLOWED_MODULES:
        return None
    if name.startswith("cutlass."):
        return next((r for part in name.split(".")[1:] if (r := _attribute(part))), None)
    return (
        f"import of {name!r} is not allowed; allowed: {', '.join(sorted(ALLOWED_MODULES - {'__future__'}))}"
    )


def _imported(module: str, name: str) -> str | None:
    if module == "__future__":
        return None
    if module in LIBRARY or module == DRIVER:
        return _of_library(module, name)
    if f"{module}.{name}" in _CLOSED_MODULES:
        return _module(f"{module}.{name}")
    if name in _CLOSED_NAMES or _attribute(name) is not None:
        return f"import of {name!r} from {module!r} is not allowed"
    return None


def _of_library(module: str, name: str) -> str | None:
    if module == DRIVER:
        ok = name.startswith("CU")
    else:
        ok = name in _public(module) or (module == "collections" and name == "abc")
    return None if ok and name not in _CLOSED_PUBLIC else f"`{name}` of {module!r} is not allowed"


@cache
def _public(module: str) -> frozenset[str]:
    """What a module of the standard library offers; not the modules that it uses itself."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [n for n in vars(found) if not n.startswith("_")]
    return frozenset(n for n in names if not isinstance(getattr(found, n, None), ModuleType))


def _name(name: str, context: _Context) -> str | None:
    if name == "getattr":
        return "`getattr` is allowed with a literal name only"
    if name == "type":
        return "`type` is allowed with one argument only"
    if name in _CLOSED_NAMES:
        return f"`{name}` is not allowed"
    if name in context.library:
        return f"the module `{name}` can be used only as `{name}.NAME`"
    return None


def _attribute(name: str, value: ast.expr | None = None) -> str | None:
    if name in _CLOSED_ATTRIBUTES or (name.startswith("_") and name.lstrip("_") in _CLOSED_ATTRIBUTES):
        return f"attribute `.{name}` is not allowed"
    if name in ("format", "format_map") and value is not None and not isinstance(value, ast.Constant):
        return f"`.{name}` is allowed on a literal string only"
    if name in ("attrgetter", "methodcaller", "update_wrapper", "get_type_hints"):
        return f"attribute `.{name}` is not allowed"
    return _dunder(name)


def _dunder(name: str) -> str | None:
    if name.startswith("__") and name.endswith("__") and name not in _OPEN_DUNDERS:
        return f"`{name}` is not allowed"
    return None
