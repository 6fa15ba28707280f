"""Loading `verifiers/<op>.py`: trusted code, but every mistake in it is one clear line.

A verifier is accepted only if its reference and baseline run at its smallest workload and if zeros, ones,
the mean, a copied input and a no-op all fail its own tolerance there.
"""

from __future__ import annotations

import ast
import hashlib
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from workbench.errors import ContentError
from workbench.ops.model import Fault, Op, Reference, Tensors, Workload, storage_shape
from workbench.workspace import Workspace

if TYPE_CHECKING:
    import torch

_cache: dict[tuple[Path, str], Op] = {}
_T = TypeVar("_T")


def load_op(workspace: Workspace, name: str) -> Op:
    """Load and check an op; the result is cached for the file's path and content.

    Raises:
        UnknownNameError: if the workspace has no such op.
        ContentError: naming the file and line of the first thing that is wrong.
    """
    path = workspace.verifier(name)
    try:
        source = path.read_bytes()
    except OSError as e:
        raise ContentError(path, f"cannot be read: {e.strerror}") from e
    key = (path.resolve(), hashlib.sha256(source).hexdigest())
    if key not in _cache:
        _cache[key] = _Loading(path, source, key[1]).load()
    return _cache[key]


class _Loading:
    """One verifier being loaded; knows the file for its messages."""

    def __init__(self, path: Path, source: bytes, digest: str) -> None:
        self.path, self.source = path, source
        self.module_name = f"workbench_verifier_{path.stem}_{digest[:16]}"
        self.line: int | None = None

    def load(self) -> Op:
        op = self._execute()
        self._check_declaration(op)
        smallest = min(op.workloads, key=lambda w: sum(math.prod(b.resolve(w.axes)) for b in op.buffers))
        self._check_behaviour(op, smallest)
        return op

    def _fail(self, message: str, line: int | None = None) -> ContentError:
        return ContentError(self.path, message, line or self.line)

    def _check(self, ok: bool, message: str) -> None:
        if not ok:
            raise self._fail(message)

    def _guard(self, what: str, call: Callable[[], _T]) -> _T:
        """Run verifier code; an exception becomes a ContentError at the line of the file that was running."""
        try:
            return call()
        except Exception as e:
            frames = traceback.extract_tb(e.__traceback__)
            here = [f.lineno for f in frames if f.filename == str(self.path)]
            where = here[-1] if here else None
            raise self._fail(f"{what} raises {type(e).__name__}: {e}", where) from e

    def _execute(self) -> Op:
        try:
            tree = ast.parse(self.source, filename=str(self.path))
        except (SyntaxError, ValueError) as e:
            reason = getattr(e, "msg", None) or str(e)
            raise self._fail(f"syntax error: {reason}", getattr(e, "lineno", None)) from e
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else getattr(node, "target", None)
            names = targets if isinstance(targets, list) else [targets]
            if any(isinstance(t, ast.Name) and t.id == "OP" for t in names):
                self.line = node.lineno
        self._check(self.line is not None, "has no `OP = Op(...)` at module level")
        module = ModuleType(self.module_name)
        module.__file__ = str(self.path)
        sys.modules[self.module_name] = module  # dataclasses and pickles look their module up by name
        try:
            self._guard("the file", lambda: exec(compile(tree, str(self.path), "exec"), module.__dict__))
        except ContentError:
            del sys.modules[self.module_name]
            raise
        op = module.__dict__["OP"]
        self._check(isinstance(op, Op), f"OP is a {type(op).__name__}, not an Op")
        assert isinstance(op, Op)
        return op

    def _check_declaration(self, op: Op) -> None:
        self._check(op.name == self.path.stem, f"OP.name is {op.name!r}; it must be {self.path.stem!r}")
        names = [b.name for b in op.buffers]
        for n in names:
            self._check(n.isidentifier(), f"buffer {n!r} is not an identifier")
            self._check(names.count(n) == 1, f"buffer {n!r} is declared twice")
        self._check(bool(op.outputs), "no buffer is an output or a state")
        self._check(bool(op.workloads), "there is no workload")
        axes = set(op.workloads[0].axes)
        for w in op.workloads:
            self._check(
                [v.name for v in op.workloads].count(w.name) == 1, f"workload {w.name!r} is declared twice"
            )
            odd = ", ".join(sorted(axes ^ set(w.axes)))
            self._check(
                not odd, f"workload {w.name!r} and {op.workloads[0].name!r} differ in the axes: {odd}"
            )
            for axis, extent in w.axes.items():
                self._check(isinstance(extent, int) and extent > 0, f"{w.name}: axis {axis} is {extent!r}")
            self._check_sizes(op, w)
        clash = sorted(axes & set(op.constants))
        self._check(not clash, f"{', '.join(clash)} is both an axis and a constant")
        judged = {b.name for b in op.outputs}
        missing, unknown = sorted(judged - set(op.tolerances)), sorted(set(op.tolerances) - judged)
        self._check(not missing, f"no tolerance for {', '.join(missing)}")
        self._check(not unknown, f"tolerance for {', '.join(unknown)}, which is no output or state")
        self._check("ordinary" in op.generators, "the generator `ordinary` is missing")
        for name, fault in op.faults.items():
            self._check(isinstance(fault, Fault), f"fault {name!r} is a {type(fault).__name__}, not a Fault")

    def _check_sizes(self, op: Op, w: Workload) -> None:
        for b in op.buffers:
            try:
                shape = storage_shape(b, w.axes)
            except ValueError as e:
                raise self._fail(f"buffer {b.name!r} at workload {w.name!r}: {e}") from e
            self._check(
                all(n > 0 for n in shape),
                f"buffer {b.name!r} at workload {w.name!r} has the shape {list(shape)}",
            )
        for what, function in (("flops", op.flops), ("compulsory_bytes", op.compulsory_bytes)):
            value = self._guard(what, lambda f=function: f(w.axes))  # type: ignore[misc]
            self._check(
                isinstance(value, int) and value > 0, f"{what} at {w.name!r} is {value!r}, not a positive int"
            )

    def _check_behaviour(self, op: Op, w: Workload) -> None:
        from workbench.ops.compare import compare, standard_of
        from workbench.ops.trivial import accepted_trivial, zero_inputs

        storage = zero_inputs(op, w.axes)
        given = self._guard(
            "generator 'ordinary'", lambda: op.generators["ordinary"](w.axes, 0, storage.__getitem__)
        )
        for b in op.inputs:
            self._check(b.name in given, f"generator 'ordinary' returns no {b.name!r}")
            same = given[b.name].data_ptr() == storage[b.name].data_ptr()
            self._check(same, f"generator 'ordinary' returns a {b.name!r} that it did not get from allocate")
        before = {k: v.clone() for k, v in storage.items()}
        golden = self._outputs(op, w, "reference", op.reference, storage)
        honest = [self._outputs(op, w, "baseline", run, storage) for run in (op.baseline, *op.honest)]
        for name, kept in before.items():
            self._check(_same_bytes(kept, storage[name]), f"the reference or the baseline changes {name!r}")
        standard = standard_of(op, storage, w.axes)
        for b in op.outputs:
            for out in honest:
                outcome = compare(golden[b.name], out[b.name], op.tolerances[b.name], standard.honest[b.name])
                self._check(outcome.passed, f"the op's own baseline is refused: {b.name!r} {outcome.reason}")
        trivial = accepted_trivial(op, w.axes, storage, standard)
        self._check(trivial is None, f"the tolerance is too loose: {trivial} at workload {w.name!r}")

    def _outputs(self, op: Op, w: Workload, what: str, run: Reference, inputs: Tensors) -> Tensors:
        import torch

        out = self._guard(f"the {what}", lambda: run(inputs, w.axes))
        for b in op.outputs:
            self._check(b.name in out, f"the {what} returns no {b.name!r}")
            shape, wanted = tuple(out[b.name].shape), b.resolve(w.axes)
            self._check(
                shape == wanted, f"the {what}'s {b.name!r} has the shape {list(shape)}, not {list(wanted)}"
            )
            if what == "reference" and b.dtype.is_float:
                right = out[b.name].dtype == torch.float64
                self._check(right, f"the reference's {b.name!r} is {out[b.name].dtype}, not float64")
        return out


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return bool((a.view(-1).view(torch.uint8) == b.view(-1).view(torch.uint8)).all())
