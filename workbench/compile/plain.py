"""A Python file with a CuTe DSL kernel that is no template: what it launches, and on what arguments.

The file is read as a syntax tree, never run here. Its host functions are the module's `@cute.jit` functions
that launch a kernel; what they are given is said by a literal `ARGUMENTS` in the file, the contract, or both:

    ARGUMENTS = {
        "x": {"shape": [8, 1024], "dtype": "bf16", "role": "activation"},
        "n": 8,
    }

A host function is compiled as a candidate is: the file's text, with a few lines at its end that bind the
arguments, goes through `workbench.compile.compile_candidate`, so that line numbers stay those of the file.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from workbench.artifact import BoundBuffer
from workbench.compile.request import ARCHITECTURES, CompileRequest
from workbench.errors import ContentError, UnknownNameError
from workbench.ops.dtypes import DType
from workbench.ops.model import Role

Scalar = int | float | bool
_Extent = Annotated[int, Field(ge=1)]
_WRAPPER = "_audited_host"
_CUTLASS_NAMES = {d.cutlass_name.lower(): d for d in reversed(DType)}


class TensorArgument(BaseModel):
    """A tensor: compact, row-major, static in shape."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    shape: tuple[_Extent, ...] = Field(min_length=1)
    dtype: DType
    role: Role | None = None
    """What it is for; where nobody says so, rules that depend on it stay undecided."""
    align: int = Field(default=256, ge=1)
    zeroed: bool = False
    """Zero before the first launch; a flag always is."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _either_name(cls, value: object) -> object:
        """Take the DSL's names too, such as `BFloat16`."""
        return _CUTLASS_NAMES.get(value.lower(), value) if isinstance(value, str) else value

    def bind(self, name: str) -> BoundBuffer:
        """The tensor as a buffer; a role that nobody gave is held as `state`, see `PlainFile.untold`."""
        role = self.role or Role.STATE
        zeroed = self.zeroed or role is Role.FLAG
        return BoundBuffer(
            name=name, shape=self.shape, dtype=self.dtype, role=role, align=self.align, zeroed=zeroed
        )


Argument = TensorArgument | Scalar


@dataclass(frozen=True)
class Host:
    """A `@cute.jit` function of the module that launches kernels."""

    name: str
    parameters: tuple[str, ...]
    """Those that need an argument, the stream left out."""
    optional: tuple[str, ...]
    """Those with a default; given only what the arguments say of them."""
    order: tuple[str, ...]
    """All positional parameters in order, the stream among them."""
    stream: str | None
    """Name of the parameter that is the stream."""
    tensors: frozenset[str]
    """Parameters annotated as tensors."""
    line: int


@dataclass(frozen=True)
class PlainFile:
    """A file as it was read."""

    path: Path
    source: str
    hosts: tuple[Host, ...]
    kernels: tuple[str, ...]
    """Names of the `@cute.kernel` functions and methods."""
    arguments: Mapping[str, Argument] = field(default_factory=dict)

    def host(self, name: str) -> Host | None:
        """The host function of this name, if there is one."""
        return next((h for h in self.hosts if h.name == name), None)

    @cached_property
    def untold(self) -> frozenset[str]:
        """Tensors whose role nobody gave."""
        tensors = {n: a for n, a in self.arguments.items() if isinstance(a, TensorArgument)}
        return frozenset(n for n, a in tensors.items() if a.role is None)

    def request(self, host: Host, arch: str = ARCHITECTURES[0]) -> CompileRequest:
        """What is compiled for one host function.

        Raises:
            ContentError: if an argument of it is not known.
            UnknownNameError: for an unknown arch.
        """
        for p in host.parameters:
            if p not in self.arguments:
                raise ContentError(
                    self.path,
                    f"nothing says what argument {p!r} of {host.name} is: add "
                    f'ARGUMENTS = {{"{p}": {{"shape": [...], "dtype": "f32", "role": "activation"}}}} to the '
                    "file, or an [[argument]] to the contract",
                    host.line,
                )
        given = {p: self.arguments[p] for p in (*host.parameters, *host.optional) if p in self.arguments}
        tensors = {p: a for p, a in given.items() if isinstance(a, TensorArgument)}
        return CompileRequest(
            op="plain",
            workload="plain",
            axes={},
            template=self.path.stem,
            knobs={},
            arch=arch,
            source=self.source + _wrapper(host, given),
            buffers=tuple(a.bind(n) for n, a in tensors.items()),
        )


def _wrapper(host: Host, arguments: Mapping[str, Argument]) -> str:
    """What is added to the file: a host function of the tensors and the stream alone, and `build`."""
    tensors = [n for n, a in arguments.items() if isinstance(a, TensorArgument)]
    said_of = {n: n if n in tensors else repr(a) for n, a in arguments.items()}
    if host.stream is not None:
        said_of[host.stream] = "stream"
    # By position as far as that goes: the DSL takes keywords for what has a default.
    first = list(itertools.takewhile(said_of.__contains__, host.order))
    given = [said_of[n] for n in first] + [f"{n}={v}" for n, v in said_of.items() if n not in first]
    return (
        "\n\nimport cutlass.cute as _audited_cute\n\n\n@_audited_cute.jit\n"
        f"def {_WRAPPER}({', '.join([*tensors, 'stream'])}):\n    {host.name}({', '.join(given)})\n\n\n"
        f"def build(axes, knobs):\n    return {_WRAPPER}\n"
    )


def read_plain(path: Path) -> PlainFile:
    """Read a Python file with CuTe DSL kernels without running it.

    Raises:
        ContentError: if it cannot be read, launches nothing, or its ARGUMENTS are wrong.
    """
    try:
        source = path.read_text()
    except UnicodeDecodeError as e:
        raise ContentError(path, "is not a text file") from e
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror}") from e
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as e:
        raise ContentError(path, getattr(e, "msg", str(e)), getattr(e, "lineno", None)) from e
    except (RecursionError, MemoryError) as e:
        raise ContentError(path, "is nested too deeply to be read") from e
    kernels = tuple(f.name for f in _functions(tree) if _decorated(f, "kernel"))
    hosts = _hosts(tree)
    if not hosts:
        what = "a @cute.kernel, but no" if kernels else "no"
        raise ContentError(
            path, f"has {what} @cute.jit function at module level that launches one with .launch(...)"
        )
    return PlainFile(path, source, hosts, kernels, _arguments(tree, path))


def is_kernel_file(path: Path) -> bool:
    """True if a Python file declares a template or a CuTe DSL kernel, or cannot be read as Python."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return True
    return _assigned(tree, "TEMPLATE") is not None or any(_decorated(f, "kernel") for f in _functions(tree))


def declares_template(path: Path) -> bool:
    """True if a Python file assigns TEMPLATE; False also if it cannot be read."""
    try:
        return _assigned(ast.parse(path.read_text()), "TEMPLATE") is not None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def with_arguments(plain: PlainFile, more: Mapping[str, Argument]) -> PlainFile:
    """The file with further arguments; where both say something, `more` is taken."""
    return PlainFile(plain.path, plain.source, plain.hosts, plain.kernels, {**plain.arguments, **more})


def choose_hosts(plain: PlainFile, name: str | None) -> tuple[tuple[Host, ...], str | None]:
    """Host functions that `FILE.py:NAME` means, and the kernel to keep of their launches.

    Raises:
        UnknownNameError: if `name` is neither a host function nor a kernel of the file.
    """
    if name is None:
        return plain.hosts, None
    host = plain.host(name)
    if host is not None:
        return (host,), None
    if name in plain.kernels:
        return plain.hosts, name
    raise UnknownNameError("kernel", name, {*plain.kernels, *(h.name for h in plain.hosts)})


# -- the syntax tree -------------------------------------------------------------------------------


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def _decorated(function: ast.FunctionDef, name: str) -> bool:
    for d in function.decorator_list:
        target = d.func if isinstance(d, ast.Call) else d
        if (isinstance(target, ast.Attribute) and target.attr == name) or (
            isinstance(target, ast.Name) and target.id == name
        ):
            return True
    return False


def _hosts(tree: ast.Module) -> tuple[Host, ...]:
    """Host functions that no other one calls; one that launches nothing itself counts if it calls one."""
    jitted = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef) and _decorated(n, "jit")}
    uses = {n: {m.id for m in ast.walk(f) if isinstance(m, ast.Name)} for n, f in jitted.items()}
    launching = {n for n, f in jitted.items() if any(_is_launch(c) for c in ast.walk(f))}
    classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef) and any(map(_is_launch, ast.walk(n)))}
    todo = True
    while todo:
        more = {n for n in jitted if n not in launching and uses[n] & (launching | classes)}
        launching |= more
        todo = bool(more)
    called = {m for n in launching for m in uses[n] if m != n}
    return tuple(_host(jitted[n]) for n in jitted if n in launching and n not in called)


def _is_launch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "launch"


def _host(function: ast.FunctionDef) -> Host:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    optional = {p.arg for p in positional[len(positional) - len(a.defaults) :]}
    optional |= {p.arg for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    every = [*positional, *a.kwonlyargs]
    streams = [p.arg for p in every if p.arg == "stream" or "CUstream" in _annotation(p)]
    return Host(
        function.name,
        tuple(p.arg for p in every if p.arg not in streams and p.arg not in optional),
        tuple(p.arg for p in every if p.arg not in streams and p.arg in optional),
        tuple(p.arg for p in positional),
        streams[0] if streams else None,
        frozenset(p.arg for p in every if _annotation(p).endswith("Tensor")),
        function.lineno,
    )


def _annotation(parameter: ast.arg) -> str:
    return ast.unparse(parameter.annotation) if parameter.annotation is not None else ""


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node.value
    return None


def _arguments(tree: ast.Module, path: Path) -> dict[str, Argument]:
    node = _assigned(tree, "ARGUMENTS")
    if node is None:
        return {}
    try:
        spec: Any = ast.literal_eval(node)
    except (ValueError, TypeError) as e:
        raise ContentError(path, "ARGUMENTS must be a literal", node.lineno) from e
    if not isinstance(spec, dict) or not all(isinstance(n, str) for n in spec):
        raise ContentError(path, "ARGUMENTS must map names of arguments to what they are", node.lineno)
    found: dict[str, Argument] = {}
    for name, value in spec.items():
        if isinstance(value, int | float):
            found[name] = value
            continue
        try:
            found[name] = TensorArgument.model_validate(value)
        except ValidationError as e:
            raise ContentError(path, f"argument {name!r}: {said(e)}", node.lineno) from e
    return found


def said(error: ValidationError) -> str:
    """The first thing that is wrong with an entry, on one line."""
    first = error.errors()[0]
    place = ".".join(str(p) for p in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])
