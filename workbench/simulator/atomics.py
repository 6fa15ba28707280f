"""Atomic operations: lanes take turns in order of CTA and thread (PTX ISA 9.7.13.15, 9.7.13.16)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction, Reg
from workbench.simulator.access import SHARED_WINDOW, WINDOW, Site
from workbench.simulator.arith import lookup

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]


@cache
def _arithmetic(op: str, kind: str) -> tuple[Callable[..., Array], str]:
    """Return the function of `op` on floating-point numbers and the dtype it takes."""
    for modifiers in ((kind,), ("rn", kind), ("rn", "noftz", kind), ("noftz", kind)):
        semantics = lookup(Instruction(op, modifiers, (Reg("d"), Reg("a"), Reg("b")), 0))
        if semantics is not None:
            return semantics.function, semantics.operands[0]
    raise KeyError(f"{op}.{kind}")


def combine(op: str, kind: str, old: Array, operands: list[Array]) -> Array:
    """Return what an operation makes of raw items and its operands."""
    b = operands[0]
    if op == "exch":
        return b
    if op == "cas":
        return np.where(old == b, operands[1], old)
    if op == "inc":
        return np.where(old >= b, np.zeros_like(old), old + np.ones_like(old))
    if op == "dec":
        return np.where((old == 0) | (old > b), b, old - np.ones_like(old))
    if "f" in kind:
        function, dtype = _arithmetic(op, kind)
        result: Array = function(old[None].view(dtype), b[None].view(dtype))[0].view(old.dtype)
        return result
    if op in ("min", "max") and kind[0] == "s":
        signed = np.dtype(f"int{8 * old.itemsize}")
        function = np.minimum if op == "min" else np.maximum
        chosen: Array = function(old.view(signed), b.view(signed)).view(old.dtype)
        return chosen
    simple: dict[str, Callable[[Array, Array], Array]] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    return simple[op](old, b)


def supported(op: str, kind: str) -> bool:
    """Whether the operation exists for the type."""
    if op in ("exch", "cas"):
        return kind[0] == "b" and kind in ("b16", "b32", "b64")
    if op in ("inc", "dec"):
        return kind == "u32"
    if op in ("and", "or", "xor"):
        return kind in ("b32", "b64")
    if "f" in kind:
        if op not in ("add", "min", "max") or (kind in ("f32", "f64") and op != "add"):
            return False
        try:
            _arithmetic(op, kind)
        except KeyError:
            return False
        return True
    return kind[0] in "us" and kind in ("u32", "s32", "u64", "s64")


def atomic(
    site: Site,
    space: str,
    op: str,
    kind: str,
    address: Array,
    groups: tuple[tuple[Array, ...], ...],
    wanted: bool,
    co: Cohort,
    ck: Chunk,
) -> list[Array]:
    """Execute atom or red and return the old values, one array an element (raw bits), if `wanted`."""
    if ck.watched:
        ck.watch(site, address, co)
    if space == "generic":
        a = address + site.k
        shared = (a >= SHARED_WINDOW) & (a < SHARED_WINDOW + WINDOW)
        if shared.any():
            if bool((shared & (a >= SHARED_WINDOW + (1 << 24))).any()):
                space = "cluster"
            if not shared.all():
                ck.unsupported(site.instruction, "an atomic on shared and global memory at once")
            space = "cluster" if space == "cluster" else "shared"
            site = site.inside(space)
        else:
            space, site = "global", site.inside("global")
    store = ck.space_shared if space == "shared" else ck.space_global
    if space == "cluster":
        store, site, address = ck.cluster.remote(site, address, co)
    width = site.size // max(len(groups[0]), 1)
    lanes = np.broadcast_to(address, co.shape)
    at = np.broadcast_to(store.prepare(site, lanes, co, ck, write=True), co.shape)
    raw = np.dtype(f"uint{8 * width}")
    view, shadow = store.data[width], store.shadow[width]
    shift = width.bit_length() - 1
    olds = []
    wrote = np.ones(co.shape, bool)
    for k in range(len(groups[0])):
        operands = [np.broadcast_to(np.ascontiguousarray(g[k]).view(raw), co.shape).ravel() for g in groups]
        index = (at >> shift).ravel() + k
        old = _serialised(view, index, op, kind, operands, wanted, ck)
        shadow[index] = int("01" * width, 16)
        olds.append(old.reshape(co.shape))
        if op == "cas":
            wrote = old.reshape(co.shape) == operands[0].reshape(co.shape)
    if ck.order is not None:
        if space == "global":
            ck.order.atomic(site, "global", at, wrote, wanted, co, None)
        elif int(at.max()) < ck.space_shared.banks * ck.space_shared.stride:
            bank = at // ck.space_shared.stride
            own = bool((bank == co.rows()).all())
            ck.order.atomic(
                site, "shared", at - bank * ck.space_shared.stride, wrote, wanted, co, None if own else bank
            )
    if space == "global":
        store.data[1][0:32] = 0
        store.shadow[1][0:32] = 0
    return olds


def _serialised(
    view: Array, index: Array, op: str, kind: str, operands: list[Array], wanted: bool, ck: Chunk
) -> Array:
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.ones(len(index), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(first)
    segment = np.cumsum(first) - 1
    rank = np.arange(len(index)) - starts[segment]
    rounds = int(rank.max()) + 1
    old = np.empty(len(index), view.dtype)
    before = view[ordered[starts]].copy()
    if rounds > 32 and op == "add" and "f" not in kind:
        values = operands[0][order]
        sums = np.cumsum(values, dtype=view.dtype)
        exclusive = sums - values
        old[order] = exclusive - exclusive[starts][segment] + before[segment]
        ends = np.append(starts[1:], len(index)) - 1
        view[ordered[starts]] = sums[ends] - exclusive[starts] + before
    elif rounds > 32 and kind == "f32" and op == "add" and not wanted:
        np.add.at(view.view(np.float32), index, operands[0].view(np.float32))
    else:
        by_round = np.argsort(rank, kind="stable")
        bounds = np.searchsorted(rank[by_round], np.arange(rounds + 1))
        for r in range(rounds):
            lanes = order[by_round[bounds[r] : bounds[r + 1]]]
            where = index[lanes]
            now = view[where]
            old[lanes] = now
            view[where] = combine(op, kind, now, [o[lanes] for o in operands])
    if (view[ordered[starts]] != before).any():
        ck.progress += 1
    return old
