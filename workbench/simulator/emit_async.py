"""mbarriers, clusters and asynchronous operations: translation to calls.

Must be asked before `emit_memory`: `st.async`, `red.async` and `cp.async.bulk` share opcodes with it.
"""

from __future__ import annotations

from typing import Any

from workbench.isa.ptx.model import Address, Imm, Instruction, Operand, Reg, Sink, Vector
from workbench.simulator import atomics, bulk, cluster, mbarrier
from workbench.simulator.access import Site
from workbench.simulator.emit_memory import _address, _site
from workbench.simulator.emitter import Emitter
from workbench.simulator.values import INTEGERS, Value

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
_SCOPES = frozenset(
    ("cta", "cluster", "relaxed", "release", "acquire", "shared", "shared::cta", "shared::cluster")
)


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
    if opcode in ("st", "red") and m[:1] == ("async",):
        return _remote_store(e, item)
    if opcode == "cp" and "tensor" not in m:
        return _copy(e, item)
    if opcode == "clusterlaunchcontrol":
        return _launch_control(e, item)
    if opcode == "ld" and m[-1] == "b128":
        return _wide_load(e, item)
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


_COMPLETION = "mbarrier::complete_tx::bytes"
_REMOTE_OPS = {"add": ("u32", "s32", "u64"), "min": ("u32", "s32"), "max": ("u32", "s32"), "inc": ("u32",),
               "dec": ("u32",), "and": ("b32",), "or": ("b32",), "xor": ("b32",)}  # fmt: skip


def _remote_store(e: Emitter, item: Instruction) -> bool:
    m = item.modifiers
    known = {"async", "weak", "relaxed", "cluster", "shared::cluster", _COMPLETION, "v2", "v4"}
    kind, op, count = m[-1], "", 1
    for x in m[:-1]:
        if item.opcode == "red" and x in _REMOTE_OPS:
            op = x
        elif x not in known:
            e.fail(f"modifier .{x}")
        count = {"v2": 2, "v4": 4}.get(x, count)
    if _COMPLETION not in m:
        e.fail()
    if item.opcode == "red" and (kind not in _REMOTE_OPS.get(op, ()) or count > 1):
        e.fail(f"operation .{op} on .{kind}")
    if kind[1:] not in ("32", "64"):
        e.fail(f"type .{kind}")
    width = int(kind[1:])
    target, source, barrier = item.operands
    elements = source.elements if isinstance(source, Vector) else (source,)
    if len(elements) != count:
        e.fail("vector length")
    narrow = "shared::cluster" in m
    site, a = here(e, target, count * width // 8, narrow=narrow)
    values = ", ".join(e.view(e.operand(x, width), INTEGERS[width]) for x in elements)
    signal, at = here(e, barrier, 8, narrow=narrow)
    e.code.do(f"remote_store({site}, {a}, ({values},), {signal}, {at}, {op!r}, {kind!r}, co, ck)")
    return True


def _launch_control(e: Emitter, item: Instruction) -> bool:
    """All CTAs of a grid run from its start here, so no launch is left to cancel."""
    m = item.modifiers
    if m[0] == "try_cancel":
        every = "multicast::cluster::all" in m
        rest = tuple(x for x in m[1:] if x not in ("multicast::cluster::all", "shared::cta"))
        if rest != ("async", _COMPLETION, "b128"):
            return False
        narrow = "shared::cta" in m
        to, a = here(e, item.operands[0], 16, narrow=narrow)
        signal, at = here(e, item.operands[1], 8, narrow=narrow)
        e.code.do(f"try_cancel({to}, {a}, {signal}, {at}, {every}, co, ck)")
        return True
    if m[0] != "query_cancel" or m[-1] != "b128":
        return False
    response = item.operands[1]
    if not isinstance(response, Reg):
        return False
    low = e.part(e.value(response.name), 0)
    if m[1:] == ("is_canceled", "pred", "b128"):
        e.put(item.operands[0], "b", e.code.let(f"{e.view(low, 'u64')} != {e.context.constant(0, 'u64')}"))
        return True
    nothing = Value(32, {"u32": e.context.constant(0xFFFF_FFFF, "u32")})
    if m[1].startswith("get_first_ctaid"):
        first = item.operands[0]
        for x in first.elements if isinstance(first, Vector) else (first,):
            e.assign(x, nothing)
        return True
    return False


def _wide_load(e: Emitter, item: Instruction) -> bool:
    if item.modifiers not in (("shared", "b128"), ("shared::cta", "b128")):
        return False
    a, offset = _address(e, item.operands[1], "shared")
    raw = e.code.let(f"load_shared({_site(e, item, 'shared', 16, offset)}, {a}, co, ck)")
    low, high = e.code.let_many(2, f"planes({raw}, u64, 2)")
    e.assign(item.operands[0], Value(128, pair=(Value(64, {"u64": low}), Value(64, {"u64": high}))))
    return True


_REDUCTIONS = frozenset(("and", "or", "xor", "add", "inc", "dec", "min", "max"))
_BULK = frozenset(
    (
        "reduce", "async", "bulk", "global", "shared::cta", "shared::cluster", _COMPLETION, "bulk_group",
        "multicast::cluster", "L2::cache_hint", "cp_mask", "noftz",
    )
)  # fmt: skip


def _copy(e: Emitter, item: Instruction) -> bool:
    m = item.modifiers
    if m[:3] == ("async", "mbarrier", "arrive"):
        if not set(m[3:]) <= {"noinc", "shared", "shared::cta", "b64"}:
            return False
        site, a = here(e, item.operands[0], 8, narrow=is_narrow(item))
        e.code.do(f"copies_arrive({site}, {a}, {'noinc' not in m}, co, ck)")
        return True
    if m == ("async", "bulk", "commit_group"):
        e.code.do("ck.asyncs.commit(co)")
        return True
    if m[:3] == ("async", "bulk", "wait_group") and m[3:] in ((), ("read",)):
        count = item.operands[0]
        if not isinstance(count, Imm):
            return False
        e.code.do(f"ck.asyncs.wait(co, {count.value}, {'read' in m})")
        return True
    if "bulk" not in m or "prefetch" in m:
        return False
    return _bulk(e, item)


def _bulk(e: Emitter, item: Instruction) -> bool:
    m = item.modifiers
    reduction = None
    if m[0] == "reduce":
        op = next((x for x in m if x in _REDUCTIONS), "")
        reduction = (op, m[-1])
        if not atomics.supported(op, m[-1]) and not (op in ("and", "or", "xor") and m[-1] in ("b32", "b64")):
            e.fail(f"operation .{op} on .{m[-1]}")
    for x in m:
        if x not in _BULK and (reduction is None or x not in reduction):
            e.fail(f"modifier .{x}")
    spaces = [x for x in m if x in ("global", "shared::cta", "shared::cluster")]
    if len(spaces) != 2:
        e.fail("state spaces")
    operands = list(item.operands)
    target, source, size = operands[:3]
    rest = operands[3:]
    amount = e.fetch(size, "u32")
    if spaces[0] == "global":
        if spaces[1] != "shared::cta" or "bulk_group" not in m:
            e.fail("direction")
        octets = "None"
        if "cp_mask" in m:
            octets = e.fetch(rest.pop(), "u16")
        if len(rest) != ("L2::cache_hint" in m):
            e.fail("operands")
        to, a = _global(e, target)
        origin, at = here(e, source, 16, narrow=True)
        e.code.do(f"bulk_store({to}, {a}, {origin}, {at}, {amount}, {octets}, {reduction!r}, co, ck)")
        return True
    if _COMPLETION not in m or spaces[1] == "shared::cluster":
        e.fail("direction")
    to, a = here(e, target, 16, narrow=True)
    origin, at = _global(e, source) if spaces[1] == "global" else here(e, source, 16, narrow=True)
    signal, bar = here(e, rest.pop(0), 8, narrow=True)
    mask = e.fetch(rest.pop(0), "u16") if "multicast::cluster" in m else "None"
    if len(rest) != ("L2::cache_hint" in m):
        e.fail("operands")
    e.code.do(
        f"bulk_load({to}, {a}, {origin}, {at}, {amount}, {signal}, {bar}, {mask}, {reduction!r}, co, ck)"
    )
    return True


def _global(e: Emitter, operand: Operand) -> tuple[str, str]:
    a, offset = _address(e, operand, "global")
    return _site(e, e.instruction, "global", 16, offset), a
