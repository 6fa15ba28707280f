"""Inline assembly in Python source, found in its syntax tree: calls of `inline_asm` and of their wrappers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAMES = frozenset(("inline_asm",))
_ASM, _CONSTRAINTS, _EFFECTS = "asm_string", "constraints", "has_side_effects"
_ROUNDS = 4
_HOLE = "?"
"""Stands for text that only the run knows."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Block:
    """One block of inline assembly."""

    assembly: str
    line: int
    side_effects: bool | None
    """None if it cannot be told."""
    clobbers_memory: bool | None
    language: str
    """`python`, `cuda` or `mlir`."""


@dataclass(frozen=True)
class _Wrapper:
    """A function that passes its arguments on to inline assembly."""

    parameters: tuple[str, ...]
    defaults: dict[str, ast.expr]
    call: ast.Call
    positions: dict[str, ast.expr | None]
    """The expressions of the three parts in the wrapper's body."""
    scope: _Scope


@dataclass
class _Scope:
    """What is assigned to names in a function or module."""

    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    outer: _Scope | None = None


def python_blocks(text: str) -> list[Block]:
    """All blocks whose text is known, also through functions of the file that wrap `inline_asm`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return list(dict.fromkeys(_Reader(tree).blocks()))


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.calls: list[tuple[ast.Call, _Scope, _Function | None]] = []
        self.wrappers: dict[str, _Wrapper] = {}
        module = _scope(tree, None, ())
        self._collect(tree, module, None)

    def _collect(self, node: ast.AST, scope: _Scope, function: _Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _Function):
                names = tuple(
                    a.arg for a in (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs)
                )
                self._collect(child, _scope(child, scope, names), child)
                continue
            if isinstance(child, ast.Call):
                self.calls.append((child, scope, function))
            self._collect(child, scope, function)

    def blocks(self) -> Iterator[Block]:
        for call, scope, function in self.calls:
            if _callee(call) in _NAMES:
                parts = _direct(call)
                yield from self._block(call, parts, scope, function)
        for _ in range(_ROUNDS):
            known = dict(self.wrappers)
            for call, scope, function in self.calls:
                wrapper = known.get(_callee(call))
                if wrapper is not None and wrapper.call is not call:
                    yield from self._block(call, _through(wrapper, call), scope, function)
            if known.keys() == self.wrappers.keys():
                return

    def _block(
        self, call: ast.Call, parts: dict[str, ast.expr | None], scope: _Scope, function: _Function | None
    ) -> Iterator[Block]:
        assembly = _text(parts[_ASM], scope)
        if assembly is None:
            passed = isinstance(parts[_ASM], ast.Name) and parts[_ASM].id in scope.parameters  # type: ignore[union-attr]
            if passed and function is not None and function.name not in self.wrappers:
                self.wrappers[function.name] = _wrapper(function, call, parts, scope)
            return
        constraints = _text(parts[_CONSTRAINTS], scope)
        effects = _truth(parts[_EFFECTS], scope)
        clobbers = None if constraints is None else "memory" in constraints
        yield Block(assembly, call.lineno, effects, clobbers, "python")


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _direct(call: ast.Call) -> dict[str, ast.expr | None]:
    """The three parts of a call of `inline_asm(result, operands, asm_string, constraints, ...)`."""
    named = {k.arg: k.value for k in call.keywords if k.arg is not None}
    at = dict(enumerate(call.args))
    opaque = any(k.arg is None for k in call.keywords)
    effects = named.get(_EFFECTS, None if opaque else ast.Constant(False))
    return {
        _ASM: named.get(_ASM, at.get(2)),
        _CONSTRAINTS: named.get(_CONSTRAINTS, at.get(3)),
        _EFFECTS: effects,
    }


def _wrapper(
    function: _Function, call: ast.Call, parts: dict[str, ast.expr | None], scope: _Scope
) -> _Wrapper:
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            defaults[a.arg] = default
    if positional[:1] == ["self"]:
        positional = positional[1:]
    return _Wrapper(tuple(positional), defaults, call, parts, scope)


def _through(wrapper: _Wrapper, call: ast.Call) -> dict[str, ast.expr | None]:
    """The parts that a call of a wrapper hands on."""
    given = dict(zip(wrapper.parameters, call.args, strict=False))
    given |= {k.arg: k.value for k in call.keywords if k.arg is not None}
    found: dict[str, ast.expr | None] = {}
    for part, expression in wrapper.positions.items():
        if isinstance(expression, ast.Name) and expression.id in wrapper.scope.parameters:
            found[part] = given.get(expression.id, wrapper.defaults.get(expression.id))
            continue
        text = _text(expression, wrapper.scope)
        found[part] = expression if text is None else ast.Constant(text)
    return found


def _scope(node: ast.AST, outer: _Scope | None, parameters: tuple[str, ...]) -> _Scope:
    scope = _Scope({}, parameters, outer)
    todo = list(ast.iter_child_nodes(node))[::-1]
    while todo:
        child = todo.pop()
        if isinstance(child, (_Function, ast.Lambda)):
            continue
        if isinstance(child, ast.Assign):
            for target in child.targets:
                if isinstance(target, ast.Name):
                    scope.assigned.setdefault(target.id, []).append(child.value)
        elif (
            isinstance(child, (ast.AugAssign, ast.AnnAssign))
            and isinstance(child.target, ast.Name)
            and child.value is not None
        ):
            scope.assigned.setdefault(child.target.id, []).append(child.value)
        todo += list(ast.iter_child_nodes(child))[::-1]
    return scope


def _text(node: ast.expr | None, scope: _Scope, depth: int = 0) -> str | None:
    """The text of an expression, with holes; alternatives and later additions one after the other."""
    if node is None or depth > 12:
        return None
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                str(p.value) if isinstance(p, ast.Constant) else _inner(p, scope, depth) for p in parts
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _text(left, scope, depth + 1), _text(right, scope, depth + 1)
            return None if a is None and b is None else (a or _HOLE) + (b or _HOLE)
        case ast.BinOp(left=left):
            return _text(left, scope, depth + 1)
        case ast.IfExp(body=body, orelse=orelse):
            either = [t for t in (_text(body, scope, depth + 1), _text(orelse, scope, depth + 1)) if t]
            return "\n".join(either) or None
        case ast.Call(func=ast.Attribute(value=value, attr="format" | "strip" | "replace")):
            return _text(value, scope, depth + 1)
        case ast.Call(
            func=ast.Attribute(value=value, attr="join"), args=[ast.List(elts=items) | ast.Tuple(elts=items)]
        ):
            return "\n".join(_text(i, scope, depth + 1) or _HOLE for i in items)
        case ast.Name(id=name):
            return _named(name, scope, depth)
        case _:
            return None


def _inner(part: ast.expr, scope: _Scope, depth: int) -> str:
    """The text of a replacement field, if it is known."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return _text(value, scope, depth + 1) or _HOLE


def _named(name: str, scope: _Scope, depth: int) -> str | None:
    at: _Scope | None = scope
    while at is not None:
        if name in at.assigned:
            texts = [_text(v, at, depth + 1) for v in at.assigned[name]]
            known = [t for t in texts if t is not None]
            return "\n".join(known) if known else None
        if name in at.parameters:
            return None
        at = at.outer
    return None


def _truth(node: ast.expr | None, scope: _Scope) -> bool | None:
    match node:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Name(id=name):
            at: _Scope | None = scope
            while at is not None:
                if name in at.assigned:
                    values = {_truth(v, at) for v in at.assigned[name] if not isinstance(v, ast.Name)}
                    return values.pop() if len(values) == 1 else None
                if name in at.parameters:
                    return None
                at = at.outer
            return None
        case _:
            return None
