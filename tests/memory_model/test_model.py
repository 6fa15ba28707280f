"""The checker against an independent one, against interleavings, and against what must be monotone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, note, settings

from tests.memory_model import oracle
from tests.memory_model.litmus_programs import programs
from tests.memory_model.litmus_shapes import decorated_programs, small_programs
from workbench import memory_model as mm
from workbench.memory_model import program as p

LIMIT = 3_000


def registers(test: p.Litmus) -> set[tuple[frozenset[tuple[str, int]], ...]]:
    try:
        found = mm.outcomes(test, limit=LIMIT)
    except mm.UndecidedError:
        assume(False)
    return {tuple(frozenset(r) for r in o.registers) for o in found if not any(o.hung)}


def straight(test: p.Litmus) -> p.Litmus:
    """Without barriers."""
    threads = tuple(
        replace(t, code=tuple(i for i in t.code if not isinstance(i, p.Barrier | p.ClusterBarrier)))
        for t in test.threads
    )
    return replace(test, threads=threads)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(decorated_programs())
def test_an_independent_checker_decides_skeletons_the_same(test: p.Litmus) -> None:
    note(mm.render(test))
    assert registers(test) == oracle.ends(test)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs())
def test_an_independent_checker_finds_the_same_ends(test: p.Litmus) -> None:
    test = straight(test)
    reads = sum(isinstance(i, p.Load | p.Atomic) for t in test.threads for i in t.code)
    writes = sum(isinstance(i, p.Store | p.Atomic) for t in test.threads for i in t.code)
    assume(reads <= 5 and writes <= 5)
    note(mm.render(test))
    assert registers(test) == oracle.ends(test)


def interleaved(
    test: p.Litmus,
) -> set[tuple[tuple[frozenset[tuple[str, int]], ...], tuple[tuple[str, int], ...]]]:
    """Ends of every interleaving, each instruction in one step."""
    ends = set()
    first = (
        (0,) * len(test.threads),
        tuple(frozenset[tuple[str, int]]() for _ in test.threads),
        tuple((loc.name, loc.initial[0]) for loc in test.locations),
    )
    stack, seen = [first], {first}
    while stack:
        at, rows, cells = stack.pop()
        done = True
        for number, thread in enumerate(test.threads):
            if at[number] == len(thread.code):
                continue
            done = False
            i = thread.code[at[number]]
            row, memory = dict(rows[number]), dict(cells)
            match i:
                case p.Load():
                    row[i.targets[0].name] = memory[i.address.name]
                case p.Store():
                    value = i.values[0]
                    memory[i.address.name] = value if isinstance(value, int) else row.get(value.name, 0)
                case p.Atomic():
                    old = memory[i.address.name]
                    values = [o if isinstance(o, int) else row.get(o.name, 0) for o in i.operands]
                    new = {
                        "add": old + values[0],
                        "exch": values[0],
                        "max": max(old, values[0]),
                        "cas": values[-1] if old == values[0] else old,
                    }[i.operation]
                    memory[i.address.name] = new
                    if i.target is not None:
                        row[i.target.name] = old
            state = (
                tuple(a + (n == number) for n, a in enumerate(at)),
                tuple(frozenset(row.items()) if n == number else r for n, r in enumerate(rows)),
                tuple(sorted(memory.items())),
            )
            if state not in seen:
                seen.add(state)
                stack.append(state)
        if done:
            ends.add((rows, tuple(sorted(cells))))
    return ends


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs())
def test_every_interleaving_is_allowed(test: p.Litmus) -> None:
    test = straight(test)
    note(mm.render(test))
    names = tuple(location.name for location in test.locations)
    try:
        found = mm.outcomes(test, names, limit=LIMIT)
    except mm.UndecidedError:
        assume(False)
    ends = {
        (tuple(frozenset(r) for r in o.registers), tuple((name, values[0]) for name, values in o.memory))
        for o in found
    }
    assert interleaved(test) <= ends


def weakened(i: p.Instruction) -> p.Instruction:
    """With less order: weak accesses, narrower scopes, no fences."""
    match i:
        case p.Load() | p.Store():
            return replace(i, order=p.Order.WEAK, scope=None)
        case p.Atomic():
            return replace(i, order=p.Order.RELAXED)
        case p.Fence():
            return replace(i, order=p.Order.ACQ_REL, scope=p.Scope.CTA)
    return i


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(decorated_programs())
def test_less_order_allows_no_less(test: p.Litmus) -> None:
    test = straight(test)
    note(mm.render(test))
    strong = registers(test)
    for number, thread in enumerate(test.threads):
        for at, instruction in enumerate(thread.code):
            less = weakened(instruction)
            if less == instruction:
                continue
            code = (*thread.code[:at], less, *thread.code[at + 1 :])
            threads = tuple(replace(t, code=code) if n == number else t for n, t in enumerate(test.threads))
            assert strong <= registers(replace(test, threads=threads)), (number, at)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_programs())
def test_allows_says_what_outcomes_lists(test: p.Litmus) -> None:
    names = tuple(location.name for location in test.locations)
    try:
        found = [o for o in mm.outcomes(test, names, limit=LIMIT) if not any(o.hung)]
        for outcome in found[:3]:
            asked = {(t, n): v for t, row in enumerate(outcome.registers) for n, v in row}
            assert mm.allows(test, asked, dict(outcome.memory), LIMIT)
            assert not mm.allows(test, asked, {"x": (77,)}, LIMIT)
            if asked:
                key = next(iter(asked))
                assert not mm.allows(test, {**asked, key: 99}, None, LIMIT)
    except mm.UndecidedError:
        assume(False)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_any_program_is_decided_or_given_up(test: p.Litmus) -> None:
    """Every construct at once: no crash, no hang, and a verdict that the executions bear out."""
    decision = mm.decide(test, 300)
    assert (decision.holds is None) == bool(decision.reason)
    try:
        mm.races(test, 100)
    except mm.UndecidedError:
        return
