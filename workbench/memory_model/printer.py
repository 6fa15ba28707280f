"""Prints a litmus test in the dialect that `parse` reads."""

from __future__ import annotations

from itertools import zip_longest

from workbench.memory_model import program as p
from workbench.memory_model.assembler import LOADS, STORES
from workbench.memory_model.condition import Compare, Condition, Every, Not, Some, Term

_LOADS = {proxy: name for name, proxy in LOADS.items()}
_STORES = {proxy: name for name, proxy in STORES.items()}


def render(test: p.Litmus) -> str:
    """The test as text; `parse` of it gives an equal test."""
    lines = [f"PTX {test.name}", *(f'"{comment}"' for comment in test.comments), "{"]
    lines += [_declaration(location) for location in test.locations]
    lines += [f"{m.name} @ mbarrier {m.count};" for m in test.mbarriers]
    for edge in test.grids:
        kind = "programmatic" if edge.programmatic else "stream"
        lines.append(f"grid {edge.later} @ {kind} after {edge.earlier};")
    lines += [f"{test.threads[n].name}:{register}={value};" for n, register, value in test.registers]
    lines.append("}")
    lines += _table(test)
    if test.filter is not None:
        lines.append(f"filter ({_condition(test.filter, test)})")
    lines.append(f"{test.quantifier.value} ({_condition(test.condition, test)})")
    return "\n".join(lines) + "\n"


def _declaration(location: p.Location) -> str:
    if location.aliases is not None:
        return f"{location.name} @ {location.proxy.name.lower()} aliases {location.aliases};"
    if location.array:
        values = ", ".join(map(str, location.initial))
        return f"{location.name}[{len(location.initial)}]={{{values}}};"
    return f"{location.name}={location.initial[0]};"


def _table(test: p.Litmus) -> list[str]:
    columns = [[_place(t), *map(_instruction, t.code)] for t in test.threads]
    widths = [max(map(len, column)) for column in columns]
    rows = zip_longest(*columns, fillvalue="")
    return [" " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " ;" for row in rows]


def _place(thread: p.Thread) -> str:
    place = thread.place
    parts = [f"cta {place.cta}", f"gpu {place.gpu}"]
    if place.cluster is not None:
        parts.append(f"cluster {place.cluster}")
    if place.warp is not None:
        parts.append(f"warp {place.warp}")
    if place.grid:
        parts.append(f"grid {place.grid}")
    return f"{thread.name}@{','.join(parts)}"


def _operand(operand: p.Operand) -> str:
    return operand.name if isinstance(operand, p.Register) else str(operand)


def _address(address: p.Address) -> str:
    return address.name if address.index is None else f"{address.name}[{_operand(address.index)}]"


def _access(name: str, order: p.Order, scope: p.Scope | None, elements: int) -> str:
    parts = [name, order.value]
    if scope is not None:
        parts.append(scope.name.lower())
    if elements > 1:
        parts.append(f"v{elements}")
    return ".".join(parts)


def _values(values: tuple[p.Operand, ...]) -> str:
    return _operand(values[0]) if len(values) == 1 else "{" + ", ".join(map(_operand, values)) + "}"


def _instruction(i: p.Instruction) -> str:
    match i:
        case p.Label():
            return f"{i.name}:"
        case p.Branch(test=None):
            return f"goto {i.target}"
        case p.Branch():
            return f"{i.test} {_operand(i.operands[0])}, {_operand(i.operands[1])}, {i.target}"
        case p.Arithmetic():
            return f"{i.operation} {i.target.name}, {', '.join(map(_operand, i.operands))}"
        case p.Load():
            name = _access(_LOADS[i.proxy], i.order, i.scope, len(i.targets))
            return f"{name} {_values(i.targets)}, {_address(i.address)}"
        case p.Store():
            name = _access(_STORES[i.proxy], i.order, i.scope, len(i.values))
            return f"{name} {_address(i.address)}, {_values(i.values)}"
        case p.Atomic():
            name = "red" if i.target is None else "atom"
            target = "" if i.target is None else f"{i.target.name}, "
            operands = ", ".join(map(_operand, i.operands))
            scope = i.scope.name.lower()
            return f"{name}.{i.order.value}.{scope}.{i.operation} {target}{_address(i.address)}, {operands}"
        case _:
            return _ordering(i)


def _ordering(i: p.Instruction) -> str:
    match i:
        case p.Fence():
            return f"fence.{i.order.value}.{i.scope.name.lower()}"
        case p.ProxyFence(order=None):
            return f"fence.proxy.{i.kind}"
        case p.ProxyFence(order=order, scope=scope):
            assert order is not None
            assert scope is not None
            return f"fence.proxy.tensormap::generic.{order.value}.{scope.name.lower()}"
        case p.Barrier(level="warp"):
            return "bar.warp.sync"
        case p.Barrier():
            operands = [o for o in (i.instance, i.logical, i.quorum) if o is not None]
            return f"bar.cta.{'sync' if i.blocks else 'arrive'} {', '.join(map(_operand, operands))}"
        case p.ClusterBarrier():
            return f"barrier.cluster.{'wait' if i.waits else 'arrive'}.{i.order.value}"
        case p.MbarrierArrive(count=0):
            return f"mbarrier.expect_tx {i.barrier}, {i.expect}"
        case p.MbarrierArrive():
            name = f"{i.order.value}.{i.scope.name.lower()}"
            if i.expect:
                return f"mbarrier.arrive.expect_tx.{name} {i.barrier}, {i.expect}"
            return f"mbarrier.arrive.{name} {i.barrier}, {i.count}"
        case p.MbarrierWait():
            name = f"mbarrier.try_wait.parity.{i.order.value}.{i.scope.name.lower()}"
            return f"{name} {i.barrier}, {_operand(i.parity)}"
        case p.Copy(kind="st.async"):
            assert not isinstance(i.source, p.Address)
            return f"st.async {_address(i.target)}, {_operand(i.source)}, {i.barrier}"
        case p.Copy():
            assert isinstance(i.source, p.Address)
            name = "cp.async.bulk" if i.kind == "bulk" else "cp.async"
            barrier = "" if i.barrier is None else f", {i.barrier}"
            return f"{name} {_address(i.target)}, {_address(i.source)}{barrier}"
        case p.CopyArrive():
            return f"cp.async.mbarrier.arrive.noinc {i.barrier}"
        case p.CommitGroup():
            return f"cp.async.{'bulk.' if i.bulk else ''}commit_group"
        case p.WaitGroup(pending=-1):
            return "cp.async.wait_all"
        case p.WaitGroup():
            return f"cp.async.{'bulk.' if i.bulk else ''}wait_group{'.read' if i.read else ''} {i.pending}"
        case p.GridControl():
            return f"griddepcontrol.{'wait' if i.waits else 'launch_dependents'}"
    raise AssertionError(type(i))


def _condition(condition: Condition, test: p.Litmus) -> str:
    match condition:
        case Compare():
            left, right = _term(condition.left, test), _term(condition.right, test)
            return f"{left} {condition.relation} {right}"
        case Not():
            return f"~({_condition(condition.operand, test)})"
        case Every(parts=()):
            return "true"
        case Some(parts=()):
            return "false"
    sign = " /\\ " if isinstance(condition, Every) else " \\/ "
    return sign.join(f"({_condition(part, test)})" for part in condition.parts)


def _term(term: Term | int, test: p.Litmus) -> str:
    if isinstance(term, int):
        return str(term)
    if term.thread is not None:
        return f"{test.threads[term.thread].name}:{term.name}"
    return term.name if term.index is None else f"{term.name}[{term.index}]"
