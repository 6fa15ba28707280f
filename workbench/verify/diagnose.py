"""Why an output is wrong: unwritten parts, known mistakes, other rows' values, a lost factor, or noise.

Each step is a comparison that can be checked; when none fits, the finding is the plain `numerics` with the
pattern of wrong elements.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.ops.compare import Comparison, Standard, compare, measure, wrong_class, wrong_elements
from workbench.ops.dtypes import DType
from workbench.ops.model import Buffer, Op, Role
from workbench.ops.trivial import POISONS

TIME_LIMIT = 30.0
"""Seconds after which no further known mistake is tried."""
NOISE = 0.1
"""Largest rms error that is called a matter of rounding."""
BF16_NOISE = 2.0**-8
"""Relative error that rounding to bf16 once more may add."""
ROWS_TRIED = 64
"""Wrong rows that are looked for among the other rows."""

_COVER = "cover the whole extent"


@dataclass(frozen=True)
class Diagnosis:
    """Rule id, sentence and advice for one wrong output."""

    rule: str
    message: str
    fix: str = ""


def diagnose(
    op: Op,
    axes: Mapping[str, int],
    standard: Standard,
    got: Mapping[str, torch.Tensor],
    failed: Mapping[str, Comparison],
    inputs: Mapping[str, torch.Tensor] | None,
    poison: int | None,
) -> dict[str, Diagnosis]:
    """Explain every failed output; see `workbench.verify.numerics.judge` for the arguments."""
    buffers = {b.name: b for b in op.outputs}
    found: dict[str, Diagnosis] = {}
    for name in failed:
        golden, out = standard.golden[name], got[name]
        if out.shape != golden.shape:
            found[name] = Diagnosis("numerics", "the output has the wrong shape")
        elif poison is not None and buffers[name].role is Role.OUTPUT:
            unwritten = _unwritten(buffers[name], golden, out, poison)
            if unwritten is not None:
                found[name] = unwritten
    rest = [name for name in failed if name not in found]
    if rest and inputs is not None:
        known = _known_mistake(op, axes, standard, got, rest, inputs)
        if known:
            found |= dict.fromkeys(rest, known)
    for name in failed:
        if name not in found:
            found[name] = _pattern(op, buffers[name], standard, got[name], failed[name], poison)
    return found


def _unwritten(b: Buffer, golden: torch.Tensor, out: torch.Tensor, poison: int) -> Diagnosis | None:
    """Elements that still hold the poison and should not."""
    width = out.element_size()
    raw = out.contiguous().view(-1).view(torch.uint8).view(-1, width)
    still = (raw == poison).all(-1).view(out.shape)
    pattern = torch.full((width,), poison, dtype=torch.uint8).view(out.dtype)[0].to(golden.dtype)
    same = golden.isnan() if bool(pattern.isnan()) else golden == pattern
    mask = still & ~same
    if not mask.any():
        return None
    if still.all():
        return Diagnosis("output-not-written", f"nothing was written to {b.name}", "store the result")
    tail = _tail(mask, b)
    if tail:
        return Diagnosis("dropped-tail", f"{b.name} was not written {tail}", _COVER)
    words = f"{_share(mask)} elements of {b.name} were not written, {_where(mask, b)}"
    return Diagnosis("output-not-written", words, _COVER)


def _known_mistake(
    op: Op,
    axes: Mapping[str, int],
    standard: Standard,
    got: Mapping[str, torch.Tensor],
    names: list[str],
    inputs: Mapping[str, torch.Tensor],
) -> Diagnosis | None:
    """The first known mistake whose result all of `names` match within the op's own tolerance."""
    if any((got[n].isnan() & standard.golden[n].isfinite()).any() for n in names):
        return None  # poison was read; what else is wrong cannot be seen
    end = time.monotonic() + TIME_LIMIT
    for fault in op.faults.values():
        if time.monotonic() > end:
            break
        if not fault.applies(axes):
            continue
        wrong = fault.reference(inputs, axes)
        if all(
            compare(wrong[n], got[n], op.tolerances[n], standard.honest[n]).passed
            and not compare(standard.golden[n], wrong[n], op.tolerances[n], standard.honest[n]).passed
            for n in names
        ):
            return Diagnosis(fault.rule, f"the result is what one gets when {fault.summary}")
    return None


def _pattern(
    op: Op, b: Buffer, standard: Standard, out: torch.Tensor, c: Comparison, poison: int | None
) -> Diagnosis:
    """What the places and sizes of the errors say."""
    golden, limit = standard.golden[b.name], c.limits.worst
    if op.tolerances[b.name].exact:
        wrong = wrong_elements(golden, out, 0.0)
        return Diagnosis("numerics", f"{_share(wrong)} elements are wrong, {_where(wrong, b)}")
    out = out.to(torch.float64)
    nans = out.isnan() & ~golden.isnan()
    if nans.any():
        return _nan(op, b, nans, poison)
    strange = wrong_class(golden, out)
    if strange.any():
        words = f"{_share(strange)} elements have the wrong kind of number, {_where(strange, b)}"
        return Diagnosis("numerics", words)
    if not out.any():
        return Diagnosis("numerics", f"{b.name} is zero throughout")
    wrong = wrong_elements(golden, out, limit)
    if not wrong.any():  # only the rms is too large: look at where most of it is
        wrong = wrong_elements(golden, out, limit / 2)
    known = _scaled(golden, out, c) or _moved_rows(b, golden, out, wrong, limit)
    if known:
        return known
    tail = _tail(wrong, b) if wrong.any() else None
    if tail:
        return Diagnosis("dropped-tail", f"{b.name} is wrong {tail}", _COVER)
    if c.errors.rms <= NOISE:
        return Diagnosis(
            "wrong-rounding",
            f"small errors all over {b.name}: an intermediate or an accumulator has too few bits, "
            "or a few terms of a sum are missing",
            "accumulate in float32 and round only where the op's contract rounds",
        )
    return Diagnosis("numerics", f"{_share(wrong)} elements are wrong, {_where(wrong, b)}")


def _nan(op: Op, b: Buffer, nans: torch.Tensor, poison: int | None) -> Diagnosis:
    """NaN is the poison of experts that were not chosen, and perhaps of memory that was never written."""
    words = f"{_share(nans)} elements of {b.name} are NaN, {_where(nans, b)}"
    experts = any(i.dtype is DType.E8M0 and i.role is Role.WEIGHT for i in op.inputs)
    rows = nans.reshape(-1, nans.shape[-1])
    whole = bool((rows.all(-1) | ~rows.any(-1)).all())
    if not experts or not whole:
        return Diagnosis("numerics", words)
    sure = poison is not None and poison != POISONS[0]
    other = "" if sure else ", unless memory was read before it was written"
    return Diagnosis(
        "wrong-expert",
        f"{words}: the scales of experts that were not chosen are NaN, so one of them was read{other}",
        "index the weights and their scales with the chosen id",
    )


def _moved_rows(
    b: Buffer, golden: torch.Tensor, out: torch.Tensor, wrong: torch.Tensor, limit: float
) -> Diagnosis | None:
    """Wrong rows that hold what belongs to another row."""
    if golden.dim() < 2 or golden.shape[-1] < 8:
        return None
    rows, others = out.reshape(-1, out.shape[-1]), golden.reshape(-1, golden.shape[-1])
    bad = [int(r) for r in wrong.reshape(rows.shape).any(-1).nonzero()]
    if not bad:
        return None
    moves = {}
    for r in bad[:ROWS_TRIED]:
        distance = (others - rows[r]).square().sum(-1)
        source = int(distance.nan_to_num(torch.inf).argmin())
        if source == r or bool(wrong_elements(others[source], rows[r], 2 * limit).any()):
            return None
        moves[r] = source
    to, source = next(iter(moves.items()))
    lead = golden.shape[:-1]
    return Diagnosis(
        "wrong-expert" if "K" in b.shape[:-1] else "wrong-row",
        f"{len(bad)} of {len(rows)} rows of {b.name} hold what belongs to another row: "
        f"row {_unravel(to, lead)} has the values of row {_unravel(source, lead)}",
    )


def _scaled(golden: torch.Tensor, out: torch.Tensor, c: Comparison) -> Diagnosis | None:
    """The result is a constant times the expected one."""
    finite = golden.isfinite()
    g, o = golden[finite], out[finite]
    power = float(g.square().sum())
    if g.numel() < 2 or not power:
        return None
    factor = float((g * o).sum()) / power
    noise = max(c.limits.rms, BF16_NOISE)
    if abs(factor - 1) < 4 * noise or not factor or measure(g * factor, o).rms > noise:
        return None
    words = f"the result is {factor:.6g} times the expected one"
    return Diagnosis("missing-scale", words, "apply every factor once")


def _tail(mask: torch.Tensor, b: Buffer) -> str | None:
    """Words for a mask that is the end of one axis, or None."""
    for axis in range(mask.dim() - 1, -1, -1):
        others = [d for d in range(mask.dim()) if d != axis]
        share = mask.double().mean(dim=others) if others else mask.double()
        first = int(share.nonzero()[0])
        if first > 0 and bool((share[first:] > 0.5).all()):
            return f"from index {first} of {len(share)} on along {b.shape[axis]}"
    return None


def _where(mask: torch.Tensor, b: Buffer) -> str:
    """First index, and for each outer axis the touched indices if not all are."""
    words = f"the first at {mask.nonzero()[0].tolist()}" if mask.any() else "nowhere beyond the limit"
    for axis in range(mask.dim() - 1):
        others = tuple(d for d in range(mask.dim()) if d != axis)
        touched = mask.any(dim=others).nonzero().flatten().tolist()
        if len(touched) < mask.shape[axis]:
            shown = ", ".join(map(str, touched[:8])) + (", ..." if len(touched) > 8 else "")
            words += f", only at {b.shape[axis]} = {shown}"
    return words


def _share(mask: torch.Tensor) -> str:
    return f"{int(mask.sum())} of {mask.numel()}"


def _unravel(index: int, shape: torch.Size) -> list[int]:
    where: list[int] = []
    for extent in reversed(shape):
        where.insert(0, index % extent)
        index //= extent
    return where
