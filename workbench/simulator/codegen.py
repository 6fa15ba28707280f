"""One Python function per basic block, generated as source and compiled once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.isa.ptx.model import Instruction, Kernel, Module, Reg, Vector
from workbench.simulator import (
    emit_alu,
    emit_async,
    emit_control,
    emit_matrix,
    emit_memory,
    emit_multimem,
    emit_tcgen05,
    emit_tensor,
    emit_warp,
    emit_wgmma,
    runtime,
    trace,
)
from workbench.simulator.access import LOCAL_BASE, SHARED_BASE
from workbench.simulator.classes import Cost, cost_of
from workbench.simulator.emitter import Context, Emitter
from workbench.simulator.ordering.layers import Layout, layout_of
from workbench.simulator.program import Block, UnsupportedInstruction, lower
from workbench.simulator.values import NUMPY, Fact

_FAMILIES = (
    emit_tensor, emit_async, emit_memory, emit_multimem, emit_warp, emit_matrix, emit_wgmma, emit_tcgen05,
    emit_control, emit_alu,
)  # fmt: skip


@dataclass(slots=True)
class Program:
    """A kernel ready to run."""

    kernel: Kernel
    blocks: tuple[Block, ...]
    functions: list[Any]
    """One a block: `f(cohort, chunk)` updates registers and returns what the block's action needs."""
    costs: tuple[Cost, ...]
    context: Context
    live: tuple[frozenset[str], ...]
    """Keys of the registers that are live at the start of each block."""
    dtypes: dict[str, str]
    """NumPy dtype of each register key."""
    shared_static: int
    """Bytes of shared variables, from `SHARED_BASE` on."""
    dynamic_shared: bool
    local_bytes: int
    spins: bool
    """Has loops that poll memory other than mbarriers."""
    communicates: bool
    """CTAs may depend on each other: atomics, polling loops."""
    source: str
    """The generated Python, for those who debug it."""
    layers: Layout
    """What clocks of happens-before consist of in this kernel."""


def _pair_registers(kernel: Kernel) -> frozenset[str]:
    names: set[str] = set()
    for item in kernel.instructions:
        if "f32x2" not in item.modifiers:
            continue
        for operand in item.operands:
            if isinstance(operand, Reg):
                names.add(operand.name)
    return frozenset(n for n in names if kernel.registers[n].endswith("64"))


def _layout(module: Module, kernel: Kernel) -> tuple[dict[str, int], int, int, bool]:
    """Place shared, local and parameter symbols; return addresses, shared and local bytes, whether one is
    dynamic.
    """
    symbols: dict[str, int] = {}
    shared, local = SHARED_BASE, LOCAL_BASE
    dynamic = []
    used = {o.name for i in kernel.instructions for o in _symbols(i)}
    for v in (*module.variables, *kernel.variables):
        if v.space == "shared":
            if v.elements is None or v.extern:
                dynamic.append(v)
            elif v.name in used or v in kernel.variables:
                shared = -(-shared // v.align) * v.align
                symbols[v.name] = shared
                shared += v.elements * int(v.type.lstrip("busfp")) // 8
        elif v.space == "local":
            local = -(-local // v.align) * v.align
            symbols[v.name] = local
            local += (v.elements or 1) * int(v.type.lstrip("busf")) // 8
    start = shared
    for v in dynamic:
        start = max(start, -(-shared // v.align) * v.align)
    for v in dynamic:
        symbols[v.name] = start
    for p in kernel.params:
        symbols[p.name] = p.offset
    return symbols, (start if dynamic else shared) - SHARED_BASE, local - LOCAL_BASE, bool(dynamic)


def _symbols(item: Instruction) -> list[Any]:
    from workbench.isa.ptx.model import Address, Symbol

    found: list[Any] = []
    stack = list(item.operands)
    while stack:
        o = stack.pop()
        if isinstance(o, Symbol):
            found.append(o)
        elif isinstance(o, Address):
            if isinstance(o.base, Symbol):
                found.append(o.base)
        elif isinstance(o, Vector):
            stack.extend(o.elements)
    return found


def _emit_block(context: Context, block: Block, traced: bool) -> Emitter:
    e = Emitter(context, block)
    for item in block.instructions:
        e.instruction = item
        read = trace.before(e, item) if traced else []
        emit_wgmma.before(e, item)
        for family in _FAMILIES:
            if family.emit(e, item):
                break
        else:
            raise UnsupportedInstruction(item)
        if traced:
            trace.after(e, item, read)
    if block.instruction is not None:
        e.instruction = block.instruction
        read = trace.before(e, block.instruction) if traced else []
        emit_control.finish(e, block)
        if traced:
            trace.after(e, block.instruction, read)
    e.finish()
    return e


def compile_kernel(module: Module, kernel: Kernel, traced: bool = False) -> Program:
    """Lower, translate and compile a kernel; `traced` code reports every instruction to the launch's tracer.

    Raises:
        UnsupportedInstruction: naming the first instruction that is not known.
    """
    kernel = emit_wgmma.with_accumulators(kernel)
    blocks = lower(kernel)
    symbols, shared, local, dynamic = _layout(module, kernel)
    context = Context(kernel, symbols, _pair_registers(kernel), compiled=module.compiled)
    context.names.update(runtime.NAMES)
    context.names.update(emit_async.NAMES)
    context.names.update(emit_matrix.NAMES)
    context.names.update(emit_tensor.NAMES)
    context.names.update({short: np.dtype(name) for short, name in NUMPY.items()})
    emitted: dict[int, Emitter] = {}
    todo = {b.index for b in blocks}
    while todo:
        for k in sorted(todo):
            emitted[k] = _emit_block(context, blocks[k], traced)
        todo = _update_facts(context, blocks, emitted)
    lines: list[str] = []
    for block in blocks:
        body = emitted[block.index].code.finished() or ["pass"]
        lines.append(f"def b{block.index}(co, ck):")
        if any("r[" in x or "r.pop" in x for x in body):
            lines.append(" r = co.registers")
        lines.extend(" " + x for x in body)
    source = "\n".join(lines)
    names = context.names
    exec(compile(source, f"<simulated {kernel.name[:60]}>", "exec"), names)  # our own generated source
    dtypes = {
        key: NUMPY[context.storage(register)]
        for register in kernel.registers
        if context.width(register) <= 64
        for key in context.keys(register)
    }
    live = tuple(frozenset(key for n in b.live_in for key in context.keys(n)) for b in blocks)
    items = [i for b in blocks for i in (*b.instructions, *((b.instruction,) if b.instruction else ()))]
    spins = any(b.polls_memory for b in blocks)
    atomics = any(_meets_others(i) for i in items)
    return Program(
        kernel=kernel,
        blocks=blocks,
        functions=[names[f"b{b.index}"] for b in blocks],
        costs=tuple(cost_of(b) for b in blocks),
        context=context,
        live=live,
        dtypes=dtypes,
        shared_static=shared,
        dynamic_shared=dynamic,
        local_bytes=local,
        spins=spins,
        communicates=spins or atomics,
        source=source,
        layers=layout_of(kernel),
    )


def _meets_others(item: Instruction) -> bool:
    """Whether an instruction combines values in memory that CTAs of other clusters share."""
    if item.opcode == "cp":
        return item.modifiers[0] == "reduce"
    shared = any(m.startswith("shared") for m in item.modifiers)
    return item.opcode in ("atom", "red", "multimem") and not shared


def _update_facts(context: Context, blocks: tuple[Block, ...], emitted: dict[int, Emitter]) -> set[int]:
    """Join what all writers say of each register; return the blocks that were translated under other
    premises.
    """
    facts: dict[str, Fact] = {}
    for e in emitted.values():
        for name, fact in e.joined.items():
            facts[name] = facts[name].join(fact) if name in facts else fact
    changed = set()
    for name, fact in facts.items():
        old = context.facts.get(name, Fact())
        new = old.join(fact)
        if new != old:
            context.facts[name] = new
            changed.add(name)
    return {b.index for b in blocks if not changed.isdisjoint(b.live_in | b.live_out)}
