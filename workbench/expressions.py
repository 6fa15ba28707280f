"""Integer expressions over axes and knobs, evaluated without trusting their text.

Allowed: integers, strings, booleans, names, `+ - * // % & | << >>`, comparisons, `in`, `and`, `or`, `not`,
conditional expressions, tuples, `min`, `max`, `abs`. Nothing else.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

Value = int | str | bool

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}
_LARGEST = 1 << 62
MAX_LENGTH = 1000
"""Characters of an expression."""
MAX_NODES = 300
"""Nodes of an expression's syntax tree; with it evaluation takes microseconds."""
_LEAVES = (ast.Constant, ast.Name, ast.expr_context)
_INNER = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Compare, ast.Call)
_OPERATORS = (*_BINARY, *_COMPARE, ast.USub, ast.Not, ast.And, ast.Or)


def evaluate(expression: str, names: Mapping[str, Value]) -> Any:
    """Evaluate a constraint or extent over `names`.

    Raises:
        ValueError: if the expression uses anything but the operators listed in the module's docstring, an
            unknown name, divides by zero, or leaves the range of 62 bits.
    """

    def go(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | str() | bool() as v):
                return v
            case ast.Name(id=name):
                if name not in names:
                    raise ValueError(f"unknown name {name!r} in {expression!r}")
                return names[name]
            case ast.BinOp(left=a, op=op, right=b) if type(op) in _BINARY:
                left, right = go(a), go(b)
                if not (isinstance(left, int) and isinstance(right, int)):
                    raise ValueError(f"{expression!r} does arithmetic on something that is not an integer")
                if isinstance(op, ast.LShift | ast.RShift) and not 0 <= right < 62:
                    raise ValueError(f"{expression!r} shifts by {right}")
                try:
                    value = _BINARY[type(op)](left, right)
                except ZeroDivisionError:
                    raise ValueError(f"{expression!r} divides by zero") from None
                if abs(value) > _LARGEST:
                    raise ValueError(f"{expression!r} overflows")
                return value
            case ast.UnaryOp(op=ast.USub(), operand=a):
                value = go(a)
                if not isinstance(value, int):
                    raise ValueError(f"{expression!r} does arithmetic on something that is not an integer")
                return -value
            case ast.UnaryOp(op=ast.Not(), operand=a):
                return not go(a)
            case ast.BoolOp(op=ast.And(), values=values):
                return all(go(v) for v in values)
            case ast.BoolOp(op=ast.Or(), values=values):
                return any(go(v) for v in values)
            case ast.IfExp(test=t, body=a, orelse=b):
                return go(a) if go(t) else go(b)
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return tuple(go(e) for e in elts)
            case ast.Compare(left=first, ops=ops, comparators=rest) if all(type(o) in _COMPARE for o in ops):
                values = [go(first), *(go(r) for r in rest)]
                pairs = itertools.pairwise(values)
                try:
                    return all(_COMPARE[type(o)](a, b) for o, (a, b) in zip(ops, pairs, strict=True))
                except TypeError as e:
                    raise ValueError(f"{expression!r}: {e}") from None
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                try:
                    return _FUNCTIONS[name](*[go(a) for a in args])
                except TypeError as e:
                    raise ValueError(f"{expression!r}: {e}") from None
            case _:
                raise ValueError(f"{ast.unparse(node)!r} is not allowed in {expression!r}")

    return go(_parse(expression))


def check(expression: str) -> None:
    """Raise ValueError if an expression cannot be read, is too long, or uses what is not allowed."""
    for node in ast.walk(_parse(expression)):
        if not isinstance(node, (*_LEAVES, *_INNER, *_OPERATORS)):
            raise ValueError(f"{type(node).__name__} is not allowed in {_short(expression)}")
        if isinstance(node, ast.Call) and (
            node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS
        ):
            raise ValueError(f"only min, max and abs can be called in {_short(expression)}")


def _short(expression: str) -> str:
    return repr(expression if len(expression) <= 100 else expression[:97] + "...")


def names_in(expression: str) -> frozenset[str]:
    """Names of axes and knobs that an expression refers to; raises ValueError if it cannot be read."""
    nodes = list(ast.walk(_parse(expression)))
    called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    return frozenset(n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in called)


@functools.lru_cache(maxsize=1024)
def _parse(expression: str) -> ast.expr:
    """The syntax tree of an expression; a space evaluates the same few constraints at thousands of points."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"{_short(expression)} has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as e:
        raise ValueError(f"cannot read {_short(expression)}: {e.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError(f"cannot read {_short(expression)}: it is nested too deeply") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError(f"{_short(expression)} has more than {MAX_NODES} parts")
    return tree
