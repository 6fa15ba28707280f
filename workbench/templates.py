"""Templates: CuTe DSL sources with knobs, read without executing them.

A template is a Python file with a module-level literal `TEMPLATE = {...}` and a function
`build(axes, knobs)` that only the compile child ever calls. The literal is read with `ast`, so that
listing, searching and validating a space needs neither cutlass nor trust in the file:

    TEMPLATE = {
        "op": "rmsnorm",
        "summary": "one CTA a row, vector loads, two-stage reduction",
        "knobs": {"threads": [64, 128, 256], "vec": [2, 4, 8]},
        "default": {"threads": 128, "vec": 8},
        "constraints": ["N % (threads * vec) == 0"],
        "scratch": {"partial": {"shape": ["B", "threads // 32"], "dtype": "f32", "zeroed": False}},
    }

`constraints` and scratch shapes are integer expressions over axes and knobs (see `workbench.expressions`).
`build` returns the host function: a `@cute.jit` callable whose parameters carry the names of op buffers and
scratch buffers (each a `cute.Tensor`), the last being `stream`.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.artifact import BoundBuffer
from workbench.errors import ContentError, UnknownNameError, WorkbenchError
from workbench.expressions import Value, check, evaluate, names_in
from workbench.ops.dtypes import DType
from workbench.ops.model import Op, Role, Workload

Knobs = dict[str, Value]

MAX_POINTS = 1 << 18
"""Largest number of combinations of knob values, valid or not."""
MAX_SOURCE = 1 << 18
"""Characters of a template's text."""
MAX_SCRATCH_BYTES = 1 << 30
"""Largest scratch buffer."""


@dataclass(frozen=True)
class Space:
    """The valid points of a template at one workload, in a fixed order."""

    knobs: Mapping[str, tuple[Value, ...]]
    constraints: tuple[str, ...]
    axes: Mapping[str, int]
    path: Path | None = None
    """File of the template, for messages about its constraints."""

    def is_valid(self, knobs: Mapping[str, Value]) -> bool:
        """True if every knob has one of its values and every constraint holds.

        Raises:
            ContentError: if a constraint cannot be evaluated.
        """
        if knobs.keys() != self.knobs.keys() or any(v not in self.knobs[k] for k, v in knobs.items()):
            return False
        names = {**self.axes, **knobs}
        return all(self._holds(c, names) for c in self.constraints)

    def why_invalid(self, knobs: Mapping[str, Value]) -> str | None:
        """Return the first reason that `knobs` is not a point of the space, or None."""
        for name in knobs:
            if name not in self.knobs:
                return str(UnknownNameError("knob", name, self.knobs))
        for name, values in self.knobs.items():
            if name not in knobs:
                return f"knob {name!r} is not set; values: {list(values)}"
            if knobs[name] not in values:
                return f"knob {name}={knobs[name]!r} is not one of {list(values)}"
        names = {**self.axes, **knobs}
        return next(
            (f"constraint {c!r} does not hold" for c in self.constraints if not self._holds(c, names)), None
        )

    def _holds(self, constraint: str, names: Mapping[str, Value]) -> bool:
        try:
            return bool(evaluate(constraint, names))
        except ValueError as e:
            raise ContentError(self.path or "template", f"in its constraints: {e}") from e

    def points(self) -> Iterator[Knobs]:
        """All valid points in lexicographic order of the declared values."""
        order = list(self.knobs)
        # A constraint is tried as soon as its knobs are set: that rules out whole parts of the space.
        due: list[list[str]] = [[] for _ in order]
        for c in self.constraints:
            at = [order.index(n) for n in names_in(c) if n in self.knobs]
            if at:
                due[max(at)].append(c)

        def extend(point: Knobs) -> Iterator[Knobs]:
            if len(point) == len(order):
                if self.is_valid(point):
                    yield dict(point)
                return
            name, tests = order[len(point)], due[len(point)]
            for value in self.knobs[name]:
                longer = {**point, name: value}
                if not any(_is_false(c, {**self.axes, **longer}) for c in tests):
                    yield from extend(longer)

        yield from extend({})

    def nearest(self, knobs: Mapping[str, Value]) -> Knobs | None:
        """The first of the valid points that differ from `knobs` in fewest knobs; None if there is none."""
        return min(self.all_points, key=lambda p: sum(v != knobs.get(k) for k, v in p.items()), default=None)

    @cached_property
    def all_points(self) -> tuple[Knobs, ...]:
        """All valid points, enumerated once."""
        return tuple(self.points())


def _is_false(constraint: str, names: Mapping[str, Value]) -> bool:
    """True if a constraint fails; one that cannot be evaluated is left to the check of the whole point."""
    try:
        return not evaluate(constraint, names)
    except ValueError:
        return False


@dataclass(frozen=True)
class Template:
    """A template read from its file; `source` is the whole text."""

    op: str
    name: str
    path: Path
    source: str
    summary: str
    knobs: Mapping[str, tuple[Value, ...]]
    default: Knobs
    constraints: tuple[str, ...]
    scratch: Mapping[str, Mapping[str, Any]]

    @property
    def source_hash(self) -> str:
        """SHA-256 of the source text."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def space(self, axes: Mapping[str, int]) -> Space:
        """The template's space at one workload."""
        return Space(self.knobs, self.constraints, axes, self.path)

    def bind(self, op: Op, workload: Workload, knobs: Mapping[str, Value]) -> tuple[BoundBuffer, ...]:
        """Op buffers and scratch buffers with their shapes at `workload` and `knobs`.

        Raises:
            WorkbenchError: if `knobs` is not a valid point.
            ContentError: if a constraint or the shape of a scratch buffer cannot be evaluated.
        """
        reason = self.space(workload.axes).why_invalid(knobs)
        if reason:
            raise WorkbenchError(f"{self.op}/{self.name} at {workload.name}: {reason}")
        axes = workload.axes
        bound = [
            BoundBuffer(name=b.name, shape=b.resolve(axes), dtype=b.dtype, role=b.role, align=b.align)
            for b in op.buffers
        ]
        names = {**workload.axes, **knobs}
        for name, spec in self.scratch.items():
            try:
                shape = tuple(e if isinstance(e, int) else int(evaluate(e, names)) for e in spec["shape"])
                role = Role(spec.get("role", "scratch"))
            except (TypeError, ValueError) as e:
                raise ContentError(self.path, f"in its scratch buffer {name!r}: {e}") from e
            if name in {b.name for b in op.buffers}:
                raise ContentError(self.path, f"scratch {name!r} has the name of one of the op's buffers")
            if min(shape) < 1 or DType(spec["dtype"]).nbytes(math.prod(shape)) > MAX_SCRATCH_BYTES:
                raise ContentError(
                    self.path,
                    f"scratch {name!r} has the shape {shape}; extents are at least 1, and it holds at most "
                    f"{MAX_SCRATCH_BYTES >> 30} GiB",
                )
            bound.append(BoundBuffer(name=name, shape=shape, dtype=DType(spec["dtype"]), role=role,
                                     zeroed=bool(spec.get("zeroed", role is Role.FLAG))))  # fmt: skip
        return tuple(bound)


_FIELDS = {"op", "summary", "knobs", "default", "constraints", "scratch"}


def load_template(path: Path) -> Template:
    """Read a template's declaration without running it.

    Raises:
        ContentError: naming the file and line of the first thing that is wrong.
    """
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ContentError(path, f"cannot be read: {e}") from e
    return parse_template(source, path)


def parse_template(source: str, path: Path) -> Template:
    """Read a template's declaration from its text; `path` gives its name. Raises ContentError.

    The text may be a stranger's: what it can make the reader do is bounded, see the `MAX_` constants.
    """
    node, spec = _literal(source, path)

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ContentError(path, message, node.lineno)

    need(isinstance(spec, dict), "TEMPLATE must be a dict")
    for key in spec:
        need(key in _FIELDS, f"TEMPLATE has the unknown field {key!r}; fields: {sorted(_FIELDS)}")
    for key in ("op", "summary", "knobs", "default"):
        need(key in spec, f"TEMPLATE lacks the field {key!r}")
    for key in ("op", "summary"):
        need(isinstance(spec[key], str), f"TEMPLATE[{key!r}] must be a string")
    knobs = spec["knobs"]
    need(isinstance(knobs, dict) and all(isinstance(v, list) and v for v in knobs.values()),
         "TEMPLATE['knobs'] must map each knob to a list of values")  # fmt: skip
    for name, values in knobs.items():
        need(isinstance(name, str) and name.isidentifier(), f"knob {name!r} is not an identifier")
        need(
            all(isinstance(v, int | str) for v in values),
            f"knob {name!r} has a value that is no int, bool or str",
        )
        need(
            all(abs(v) < 1 << 63 if isinstance(v, int) else len(v) <= 100 for v in values),
            f"knob {name!r} has a value of more than 63 bits or 100 characters",
        )
        need(len(set(values)) == len(values), f"knob {name!r} lists a value twice")
    count = math.prod(map(len, knobs.values()))
    need(
        len(knobs) <= 64 and count <= MAX_POINTS,
        f"the knobs have more than {MAX_POINTS} combinations; declare fewer values",
    )
    default = spec["default"]
    need(
        isinstance(default, dict) and default.keys() == knobs.keys(),
        "TEMPLATE['default'] must set every knob",
    )
    need(all(isinstance(v, int | str) for v in default.values()), "a default is no int, bool or str")
    constraints = spec.get("constraints", [])
    need(
        isinstance(constraints, list) and all(isinstance(c, str) for c in constraints),
        "constraints must be strings",
    )
    need(len(constraints) <= 100, "there are more than 100 constraints")
    for c in constraints:
        try:
            check(c)
        except ValueError as e:
            need(False, f"constraint: {e}")
    scratch = spec.get("scratch", {})
    need(isinstance(scratch, dict) and all(isinstance(s, dict) and "shape" in s and "dtype" in s
                                           for s in scratch.values()),
         "TEMPLATE['scratch'] must map names to {'shape': [...], 'dtype': ...}")  # fmt: skip
    need(len(scratch) <= 64, "there are more than 64 scratch buffers")
    for name, s in scratch.items():
        need(_why_not_scratch(name, s) is None, f"scratch {name!r} {_why_not_scratch(name, s)}")
    return Template(
        op=str(spec["op"]),
        name=path.stem,
        path=path,
        source=source,
        summary=str(spec["summary"]),
        knobs={k: tuple(v) for k, v in knobs.items()},
        default=dict(default),
        constraints=tuple(constraints),
        scratch=scratch,
    )


def _literal(source: str, path: Path) -> tuple[ast.Assign, Any]:
    """The assignment to `TEMPLATE` and its value."""
    if len(source) > MAX_SOURCE:
        raise ContentError(path, f"is longer than {MAX_SOURCE >> 10} KiB")
    try:
        tree = ast.parse(source)
        assignments = (n for n in tree.body if isinstance(n, ast.Assign))
        node = next(
            (
                n
                for n in assignments
                if any(isinstance(t, ast.Name) and t.id == "TEMPLATE" for t in n.targets)
            ),
            None,
        )
        if node is None:
            raise ContentError(path, "has no `TEMPLATE = {...}` at module level")
        if not any(isinstance(n, ast.FunctionDef) and n.name == "build" for n in tree.body):
            raise ContentError(path, "has no function `build(axes, knobs)`")
        try:
            return node, ast.literal_eval(node.value)
        except (ValueError, TypeError, SyntaxError) as e:
            raise ContentError(path, f"TEMPLATE must be a literal: {str(e)[:200]}", node.lineno) from e
    except (SyntaxError, ValueError) as e:
        raise ContentError(path, getattr(e, "msg", str(e)), getattr(e, "lineno", None)) from e
    except (RecursionError, MemoryError) as e:
        raise ContentError(path, "is nested too deeply to be read") from e


def _why_not_scratch(name: object, s: Mapping[str, Any]) -> str | None:
    """What is wrong with the declaration of a scratch buffer, or None."""
    if not isinstance(name, str) or not name.isidentifier() or name == "stream":
        return "is not an identifier, or is `stream`"
    if unknown := [k for k in s if k not in ("shape", "dtype", "zeroed", "role")]:
        return f"has the unknown field {unknown[0]!r}"
    if s["dtype"] not in list(DType):
        return f"has the unknown dtype {s['dtype']!r}"
    if s.get("role", "scratch") not in ("scratch", "flag"):
        return f"has the role {s['role']!r}; it must be scratch or flag: anything else belongs to the op"
    if not isinstance(s["shape"], list) or not 0 < len(s["shape"]) <= 8:
        return "must have a list of 1 to 8 extents as its shape"
    for e in s["shape"]:
        if isinstance(e, bool) or not isinstance(e, int | str):
            return f"has the extent {e!r}, which is no integer and no expression"
        if isinstance(e, str):
            try:
                check(e)
            except ValueError as error:
                return f"has an extent that cannot be used: {error}"
    return None
