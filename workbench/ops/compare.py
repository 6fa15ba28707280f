"""The comparison of one output with golden: strict about NaN and infinity, relative to the output's own
scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.ops.model import Op, Tensors, Tolerance

if TYPE_CHECKING:
    import torch

Index = tuple[int, ...]


@dataclass(frozen=True)
class Errors:
    """Error of finite elements: `rms(out - g) / rms(g)` and `max |out - g| / (|g| + rms(g))`."""

    rms: float
    worst: float
    worst_index: Index = ()


@dataclass(frozen=True)
class Standard:
    """What one set of inputs is judged by."""

    golden: Tensors
    honest: Mapping[str, Errors]
    """By output: the largest error of the baseline and of the op's other honest computations."""
    least: Mapping[str, float]
    """By output: the smallest rms error among them."""


def standard_of(op: Op, inputs: Tensors, axes: Mapping[str, int]) -> Standard:
    """Compute golden and the honest computations' errors. `inputs` holds the state as it is before the op."""
    golden = op.reference(inputs, axes)
    honest = [run(inputs, axes) for run in (op.baseline, *op.honest)]
    errors = {b.name: [measure(golden[b.name], h[b.name]) for h in honest] for b in op.outputs}
    return Standard(
        golden,
        honest={name: _largest(es) for name, es in errors.items()},
        least={name: min(e.rms for e in es) for name, es in errors.items()},
    )


def _largest(errors: Sequence[Errors]) -> Errors:
    return Errors(max(e.rms for e in errors), max(e.worst for e in errors))


@dataclass(frozen=True)
class Limits:
    """What the two measures may reach."""

    rms: float
    worst: float

    @staticmethod
    def of(tolerance: Tolerance, honest: Errors) -> Limits:
        """`factor` times the honest computations' own error, at least the floors, at most the caps."""
        t = tolerance
        return Limits(
            min(max(t.floor_rms, t.factor * honest.rms), t.cap_rms),
            min(max(t.floor_worst, t.factor * honest.worst), t.cap_worst),
        )


@dataclass(frozen=True)
class Comparison:
    """Outcome for one output. `reason` is empty if it passed; `index`, `expected` and `got` show the
    first bad element."""

    reason: str
    errors: Errors
    limits: Limits
    index: Index = ()
    expected: float = 0.0
    got: float = 0.0
    bad: int = 0
    """Elements that are wrong by themselves (class of number, exact value, or beyond the worst-element
    limit)."""

    @property
    def passed(self) -> bool:
        """True if the output is acceptable."""
        return not self.reason


def measure(golden: torch.Tensor, out: torch.Tensor) -> Errors:
    """Errors over the elements where both are finite; 0 if there are none.

    If golden is zero throughout, any other value is an infinite error.
    """

    both, relative, worst = _relative(golden, out)
    if not relative.any():
        return Errors(0.0, 0.0)
    rms = float(relative.square().sum().div(both.sum()).sqrt())
    return Errors(rms, float(worst.max()), _first(worst == worst.max()))


def compare(golden: torch.Tensor, out: torch.Tensor, tolerance: Tolerance, honest: Errors) -> Comparison:
    """Judge `out` against `golden` (float64 or exact integers) by the error that honest computations have.

    A NaN passes only where golden is NaN; an infinity only where golden is the same infinity and the
    tolerance allows it.
    """
    if out.shape != golden.shape:
        reason = f"has shape {list(out.shape)}, not {list(golden.shape)}"
        return Comparison(reason, Errors(0.0, 0.0), Limits(0.0, 0.0))
    if tolerance.exact:
        return _compare_exactly(golden, out)
    limits = Limits.of(tolerance, honest)
    errors = measure(golden, out)
    strange = wrong_class(golden, out, tolerance.allow_inf)
    beyond = strange | _beyond(golden, out, limits.worst)
    if strange.any():
        return _failed("is not a number of the right kind", golden, out, errors, limits, strange, beyond)
    if tolerance.positive_zero:
        negative = (out == 0) & out.signbit()
        if negative.any():
            return _failed(
                "is -0, which marks an empty slot", golden, out, errors, limits, negative, beyond | negative
            )
    if beyond.any():
        reason = f"is wrong by {errors.worst:.3g} of its scale, limit {limits.worst:.3g}"
        at = errors.worst_index
        return Comparison(reason, errors, limits, at, float(golden[at]), float(out[at]), int(beyond.sum()))
    if errors.rms > limits.rms:
        reason = f"has a root-mean-square error of {errors.rms:.3g} of its scale, limit {limits.rms:.3g}"
        at = errors.worst_index
        return Comparison(reason, errors, limits, at, float(golden[at]), float(out[at]), 0)
    return Comparison("", errors, limits)


def wrong_class(golden: torch.Tensor, out: torch.Tensor, allow_inf: bool = True) -> torch.Tensor:
    """Boolean mask of elements whose kind (finite, +inf, -inf, NaN) differs, or that are infinite and
    must not be."""
    same = (golden.isnan() & out.isnan()) | (golden.isfinite() & out.isfinite())
    if allow_inf:
        same |= golden.isinf() & out.isinf() & ((golden > 0) == (out > 0))
    return ~same


def wrong_elements(golden: torch.Tensor, out: torch.Tensor, limit: float) -> torch.Tensor:
    """Boolean mask of elements of the wrong kind or off by more than `limit` of the scale."""
    return wrong_class(golden, out) | _beyond(golden, out, limit)


def _beyond(golden: torch.Tensor, out: torch.Tensor, limit: float) -> torch.Tensor:
    return _relative(golden, out)[2] > limit


def _relative(golden: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask of elements where both are finite, `|out - g| / rms(g)` and `|out - g| / (|g| + rms(g))` there.

    Elsewhere the errors are 0; if golden is zero throughout, any difference is an infinite error.
    """
    import torch

    both = golden.isfinite() & out.isfinite()
    g, o = torch.where(both, golden, 0.0).double(), torch.where(both, out, 0.0).double()
    largest = max(float(g.abs().max()), float(o.abs().max())) if g.numel() else 0.0
    if largest:  # so that no sum or square overflows
        g, o = g / largest, o / largest
    difference = (o - g).abs()
    scale = float(g.square().sum().div(both.sum()).sqrt()) if largest else 0.0
    if scale == 0.0:
        infinite = torch.where(difference > 0, torch.inf, 0.0).double()
        return both, infinite, infinite
    return both, difference / scale, difference / (g.abs() + scale)


def _compare_exactly(golden: torch.Tensor, out: torch.Tensor) -> Comparison:
    wrong = golden != out
    if golden.is_floating_point():
        wrong &= ~(golden.isnan() & out.isnan())
    zero, none = Errors(0.0, 0.0), Limits(0.0, 0.0)
    if not wrong.any():
        return Comparison("", zero, none)
    return _failed("is not exact", golden, out, zero, none, wrong, wrong)


def _failed(
    reason: str,
    golden: torch.Tensor,
    out: torch.Tensor,
    errors: Errors,
    limits: Limits,
    shown: torch.Tensor,
    wrong: torch.Tensor,
) -> Comparison:
    at = _first(shown)
    return Comparison(reason, errors, limits, at, float(golden[at]), float(out[at]), int(wrong.sum()))


def _first(mask: torch.Tensor) -> Index:
    return tuple(int(i) for i in mask.nonzero()[0])
