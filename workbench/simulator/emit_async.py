"""mbarriers, clusters and asynchronous operations: translation to calls.

Must be asked before `emit_memory`: `st.async`, `red.async` and `cp.async.bulk` share opcodes with it.
"""

from __future__ import annotations

from typing import Any

from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Sink
from workbench.simulator import bulk, cluster, mbarrier
from workbench.simulator.access import Site
from workbench.simulator.emit_memory import _address
from workbench.simulator.emitter import Emitter

NAMES: dict[str, Any] = {
    "mbarrier_init": mbarrier.init,
    "mbarrier_inval": mbarrier.inval,
    "mbarrier_arrive": mbarrier.arrive,
    "mbarrier_change_tx": mbarrier.change_tx,
    "mbarrier_test": mbarrier.test,
    "mbarrier_pending_count": mbarrier.pending_count,
    "map_address": cluster.map_address,
    "rank_of": cluster.rank_of,
    **bulk.NAMES,
}
_SCOPES = frozenset(("cta", "cluster", "relaxed", "release", "acquire", "shared", "shared::cta", "shared::cluster"))


def emit(e: Emitter, item: Instruction) -> bool:
    """Translate `item`; False if it does not belong here."""
    opcode, m = item.opcode, item.modifiers
    if opcode == "mbarrier":
        return _mbarrier(e, item)
    if opcode == "mapa":
        return _map(e, item)
    if opcode == "getctarank":
        return _rank(e, item)
    if opcode == "barrier" and m[:1] == ("cluster",):
        return _cluster_arrive(e, item)
    return False


def here(e: Emitter, operand: Operand, size: int, *, narrow: bool) -> tuple[str, str]:
    """Return the site and the address array of a shared-memory operand.

    Args:
        e: the emitter.
        operand: the address.
        size: bytes; what the address must be a multiple of.
        narrow: the address is in a shared window; otherwise it is generic.
    """
    if not isinstance(operand, Address):
        e.fail("no address")
    a, offset = _address(e, operand, "shared")
    site = Site(e.instruction, "cluster" if narrow else "generic", size, offset)
    e.context.sites.append(site)
    return e.context.global_name("X", site), a


def is_narrow(item: Instruction) -> bool:
    """Whether the mbarrier operand has a state space of its own."""
    return any(m in ("shared", "shared::cta", "shared::cluster") for m in item.modifiers)


def _check(e: Emitter, modifiers: tuple[str, ...], allowed: frozenset[str] = frozenset()) -> None:
    for m in modifiers:
        if m not in _SCOPES and m not in allowed:
            e.fail(f"modifier .{m}")


def _mbarrier(e: Emitter, item: Instruction) -> bool:
    kind, *rest = item.modifiers
    modifiers = tuple(rest)
    operands = list(item.operands)
    narrow = is_narrow(item)
    if kind == "pending_count":
        state = e.fetch(operands[1], "u64")
        e.put(operands[0], "u32", e.code.let(f"mbarrier_pending_count({state})"))
        return True
    if kind in ("init", "inval"):
        _check(e, modifiers, frozenset(("b64",)))
        site, a = here(e, operands[0], 8, narrow=narrow)
        count = f"{e.fetch(operands[1], 'u32')}, " if kind == "init" else ""
        e.code.do(f"mbarrier_{kind}({site}, {a}, {count}co, ck)")
        return True
    if kind in ("arrive", "arrive_drop"):
        _check(e, modifiers, frozenset(("b64", "expect_tx", "noComplete")))
        destination: Operand = Sink() if isinstance(operands[0], Address) else operands.pop(0)
        site, a = here(e, operands.pop(0), 8, narrow=narrow)
        count, tx = e.context.constant(1, "u32"), "None"
        if "expect_tx" in modifiers:
            tx = e.fetch(operands.pop(0), "u32")
        elif operands:
            count = e.fetch(operands.pop(0), "u32")
        call = f"mbarrier_arrive({site}, {a}, {count}, {tx}, {kind == 'arrive_drop'}, "
        call += f"{'noComplete' in modifiers}, co, ck)"
        if isinstance(destination, Sink):
            e.code.do(call)
        else:
            e.put(destination, "u64", e.code.let(call))
        return True
    if kind in ("expect_tx", "complete_tx"):
        _check(e, modifiers, frozenset(("b64",)))
        site, a = here(e, operands[0], 8, narrow=narrow)
        amount = e.fetch(operands[1], "u32")
        e.code.do(f"mbarrier_change_tx({site}, {a}, {amount}, {1 if kind == 'expect_tx' else -1}, co, ck)")
        return True
    if kind in ("test_wait", "try_wait"):
        _check(e, modifiers, frozenset(("b64", "parity")))
        site, a = here(e, operands[1], 8, narrow=narrow)
        parity = "parity" in modifiers
        state = e.fetch(operands[2], "u32" if parity else "u64")
        call = f"mbarrier_test({site}, {a}, {state}, {parity}, {kind == 'try_wait'}, co, ck)"
        e.put(operands[0], "b", e.code.let(call))
        return True
    return False


def _map(e: Emitter, item: Instruction) -> bool:
    kind = item.modifiers[-1]
    if kind not in ("u32", "u64") or item.modifiers[:-1] not in ((), ("shared::cluster",)):
        return False
    d, a, rank = item.operands
    address = e.fetch(a, kind)
    e.put(d, kind, e.code.let(f"map_address({address}, {e.fetch(rank, 'u32')})"))
    return True


def _rank(e: Emitter, item: Instruction) -> bool:
    kind = item.modifiers[-1]
    if kind not in ("u32", "u64"):
        return False
    d, a = item.operands
    e.put(d, "u32", e.code.let(f"rank_of({e.fetch(a, kind)}, co)"))
    return True


def _cluster_arrive(e: Emitter, item: Instruction) -> bool:
    if "arrive" not in item.modifiers or not set(item.modifiers) <= {
        "cluster", "arrive", "relaxed", "release", "aligned",
    }:  # fmt: skip
        return False
    e.code.do(f"ck.cluster.arrive(co, {e.context.global_name('I', item)})")
    return True


def immediate(operand: Operand) -> int | None:
    """Return the value of an immediate."""
    return operand.value if isinstance(operand, Imm) else None
