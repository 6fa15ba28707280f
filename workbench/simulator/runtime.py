"""Functions that generated code calls by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction, Reg
from workbench.simulator import atomics, multimem, warp
from workbench.simulator.access import LOCAL_WINDOW, PARAM_WINDOW, RAW, SHARED_WINDOW, WINDOW, Site
from workbench.simulator.arith import canonicalise_f32, canonicalise_f64, lookup

Array = npt.NDArray[Any]


def select(p: Array, a: Array, b: Array) -> Array:
    """Return `a` where `p`, else `b`; the very array when `p` is uniform."""
    if p.size == 1:
        return a if p[0, 0] else b
    if a.shape == b.shape == p.shape:
        if not p.any():
            return b
        if p.all():
            return a
    return np.where(p, a, b)


def planes(raw: Array, dtype: npt.DTypeLike, count: int) -> Array:
    """Take items apart: (rows, columns) of `count` values each become (count, rows, columns)."""
    rows, columns = raw.shape
    return np.ascontiguousarray(raw.view(dtype).reshape(rows, columns, count).transpose(2, 0, 1))


def interleave(values: tuple[Array, ...], size: int) -> Array:
    """Inverse of `planes`: join values of a lane into one raw item of `size` bytes."""
    shape = np.broadcast_shapes(*(v.shape for v in values))
    out = np.empty((*shape, len(values)), values[0].dtype)
    for k, v in enumerate(values):
        out[..., k] = v
    return out.view(RAW[size])[..., 0]


class Flags:
    """Whether a floating-point operation over- or underflowed since the last look.

    NumPy calls the instance when the CPU's flag is set, which costs nothing while it is not.
    """

    __slots__ = ("_fma", "clean")

    def __init__(self) -> None:
        self.clean = True
        item = Instruction("fma", ("rn", "f32"), (Reg("d"), Reg("a"), Reg("b"), Reg("c")), 0)
        semantics = lookup(item)
        assert semantics is not None
        self._fma = semantics.function

    def __call__(self, kind: str, flag: int) -> None:
        """Take note of an over- or underflow."""
        self.clean = False

    def redo(self, a: Array, b: Array, c: Array) -> Array:
        """Compute an FMA whose product may have been inexact in full."""
        self.clean = True
        result: Array = self._fma(a, b, c)
        self.clean = True
        return result


FLAGS = Flags()


def _function(opcode: str, *modifiers: str, operands: int) -> Any:
    item = Instruction(opcode, modifiers, tuple(Reg(f"r{k}") for k in range(operands)), 0)
    semantics = lookup(item)
    assert semantics is not None, item.name
    return semantics.function


def in_space(address: Array, space: str) -> Array:
    """isspacep: whether a generic address lies in a window."""
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
    if space in ("shared", "cluster") and address.size:
        end = SHARED_WINDOW + (WINDOW if space == "cluster" else 1 << 24)
        near: Array = (address >= SHARED_WINDOW) & (address < end)
        return near
    if space in window:
        result: Array = (address >= window[space]) & (address < window[space] + WINDOW)
        return result
    return ~(in_space(address, "cluster") | in_space(address, "local") | in_space(address, "param"))


def load_global(site: Site, address: Array, co: Any, ck: Any) -> Array:
    """ld.global and ld.const."""
    if ck.watched:
        ck.watch(site, address, co)
    result: Array = ck.space_global.load(site, address, co, ck)
    return result


def load_shared(site: Site, address: Array, co: Any, ck: Any) -> Array:
    """ld.shared."""
    if ck.watched:
        ck.watch(site, address, co)
    result: Array = ck.space_shared.load(site, address, co, ck)
    return result


def load_cluster(site: Site, address: Array, co: Any, ck: Any) -> Array:
    """ld.shared::cluster."""
    space, near, a = ck.cluster.remote(site, address, co)
    if ck.watched:
        ck.watch(near, a, co)
    result: Array = space.load(near, a, co, ck)
    return result


def store_cluster(site: Site, address: Array, value: Array, co: Any, ck: Any) -> None:
    """st.shared::cluster."""
    space, near, a = ck.cluster.remote(site, address, co)
    if ck.watched:
        ck.watch(near, a, co)
    space.store(near, a, value, co, ck)


def load_local(site: Site, address: Array, co: Any, ck: Any) -> Array:
    """ld.local."""
    result: Array = ck.space_local.load(site, address, co, ck)
    return result


def load_param(site: Site, address: Array, co: Any, ck: Any) -> Array:
    """ld.param through a register."""
    result: Array = ck.load_param(site, address, co)
    return result


def store_global(site: Site, address: Array, value: Array, co: Any, ck: Any) -> None:
    """st.global."""
    if ck.watched:
        ck.watch(site, address, co)
    ck.space_global.store(site, address, value, co, ck)


def store_shared(site: Site, address: Array, value: Array, co: Any, ck: Any) -> None:
    """st.shared."""
    if ck.watched:
        ck.watch(site, address, co)
    ck.space_shared.store(site, address, value, co, ck)


def store_local(site: Site, address: Array, value: Array, co: Any, ck: Any) -> None:
    """st.local."""
    ck.space_local.store(site, address, value, co, ck)


def _spaces(site: Site, address: Array) -> dict[str, Array]:
    """Return the lanes of each state space that generic addresses fall into."""
    a = address + site.k
    if a.size and int(a.min()) >= PARAM_WINDOW + WINDOW:
        return {"global": np.ones(a.shape, bool)}
    masks = {space: in_space(a, space) for space in ("shared", "local", "param", "global")}
    masks["cluster"] = in_space(a, "cluster") & ~masks["shared"]
    return {space: mask for space, mask in masks.items() if mask.any()}


def load_generic(site: Site, address: Array, co: Any, ck: Any) -> Array:
    """Ld without a state space."""
    parts = _spaces(site, address)
    if len(parts) == 1:
        (space,) = parts
        result: Array = _LOADS[space](site.inside(space), address, co, ck)
        return result
    address = np.broadcast_to(address, co.shape)
    out = np.zeros(co.shape, RAW[site.size])
    for space, mask in parts.items():
        mask = np.broadcast_to(mask, co.shape)
        some = co.select(mask, frozenset())
        value = _LOADS[space](site.inside(space), address[mask].reshape(some.shape), some, ck)
        out[mask] = np.broadcast_to(value, some.shape).ravel()
    return out


def store_generic(site: Site, address: Array, value: Array, co: Any, ck: Any) -> None:
    """St without a state space."""
    parts = _spaces(site, address)
    if len(parts) == 1:
        (space,) = parts
        _STORES[space](site.inside(space), address, value, co, ck)
        return
    address, value = np.broadcast_to(address, co.shape), np.broadcast_to(value, co.shape)
    for space, mask in parts.items():
        mask = np.broadcast_to(mask, co.shape)
        some = co.select(mask, frozenset())
        _STORES[space](
            site.inside(space), address[mask].reshape(some.shape), value[mask].reshape(some.shape), some, ck
        )


def _store_param(site: Site, address: Array, value: Array, co: Any, ck: Any) -> None:
    ck.fault("read-only-write", site, co, np.ones(address.shape, bool), address)


_LOADS = {
    "cluster": load_cluster,
    "global": load_global,
    "shared": load_shared,
    "local": load_local,
    "param": load_param,
}
_STORES = {
    "cluster": store_cluster,
    "global": store_global,
    "shared": store_shared,
    "local": store_local,
    "param": _store_param,
}


def order_fence(co: Any, ck: Any, item: Instruction) -> None:
    """Fence and membar."""
    if ck.order is not None:
        ck.order.fence(co, item)


def warp_barrier(mask: Array | None, co: Any, ck: Any, item: Instruction) -> None:
    """bar.warp.sync."""
    warp.check_mask(mask, co, ck, item)
    if ck.order is not None:
        ck.order.warp_barrier(co, mask)


NAMES: dict[str, Any] = {
    "order_fence": order_fence,
    "warp_barrier": warp_barrier,
    "FP": FLAGS,
    "canonical_f32": canonicalise_f32,
    "canonical_f64": canonicalise_f64,
    "fma_f32": _function("fma", "rn", "f32", operands=4),
    "f16_to_f32": _function("cvt", "f32", "f16", operands=2),
    "select": select,
    "planes": planes,
    "interleave": interleave,
    "in_space": in_space,
    "load_global": load_global,
    "load_shared": load_shared,
    "load_cluster": load_cluster,
    "store_cluster": store_cluster,
    "load_local": load_local,
    "load_param": load_param,
    "load_generic": load_generic,
    "store_generic": store_generic,
    "store_global": store_global,
    "store_shared": store_shared,
    "store_local": store_local,
    "atomic": atomics.atomic,
    **multimem.NAMES,
    "shuffle": warp.shuffle,
    "vote_ballot": warp.vote_ballot,
    "vote_all": warp.vote_all,
    "vote_any": warp.vote_any,
    "vote_uni": warp.vote_uni,
    "match_any": warp.match_any,
    "match_all": warp.match_all,
    "redux": warp.redux,
    "elect": warp.elect,
    "active_mask": warp.active_mask,
    "check_mask": warp.check_mask,
}
