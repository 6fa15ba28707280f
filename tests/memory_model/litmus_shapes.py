"""Classic shapes and small random programs that can run as kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as count_from

from hypothesis import strategies as st

from workbench import memory_model as mm
from workbench.memory_model import program as p
from workbench.memory_model.condition import Every

TWO = ("cta 0,gpu 0", "cta 1,gpu 0")
ONE = ("cta 0,gpu 0", "cta 0,gpu 0")


def shape(places: tuple[str, ...], *columns: str, declared: str = "x=0; y=0; f=0;") -> mm.Litmus:
    """A test from its columns, instructions separated by `;`."""
    code = [[part.strip() for part in column.split(";")] for column in columns]
    rows = [" | ".join(f"P{n}@{place}" for n, place in enumerate(places))]
    for k in range(max(map(len, code))):
        rows.append(" | ".join(c[k] if k < len(c) else "" for c in code))
    table = "".join(f"{row} ;\n" for row in rows)
    return mm.parse(f"PTX shape\n{{ {declared} }}\n{table}exists (true)\n")


def _shapes() -> dict[str, mm.Litmus]:
    found = {}
    for scope in ("cta", "gpu"):
        for where, places in (("one", ONE), ("two", TWO)):
            name = f"{scope}-{where}"
            found[f"MP-{name}"] = shape(
                places,
                f"st.weak x, 1; st.release.{scope} f, 1",
                f"ld.acquire.{scope} r0, f; ld.weak r1, x",
            )
            found[f"MP-guarded-{name}"] = shape(
                places,
                f"st.weak x, 1; st.release.{scope} f, 1",
                f"ld.acquire.{scope} r0, f; bne r0, 1, E; ld.weak r1, x; E:",
            )
            found[f"MP-spin-{name}"] = shape(
                places,
                f"st.weak x, 1; st.release.{scope} f, 1",
                f"L:; ld.acquire.{scope} r0, f; bne r0, 1, L; ld.weak r1, x",
            )
            found[f"MP-fences-{name}"] = shape(
                places,
                f"st.weak x, 1; fence.acq_rel.{scope}; st.relaxed.{scope} f, 1",
                f"L:; ld.relaxed.{scope} r0, f; bne r0, 1, L; fence.acq_rel.{scope}; ld.weak r1, x",
            )
            found[f"MP-no-acquire-{name}"] = shape(
                places,
                f"st.weak x, 1; st.release.{scope} f, 1",
                f"L:; ld.relaxed.{scope} r0, f; bne r0, 1, L; ld.weak r1, x",
            )
            found[f"MP-no-release-{name}"] = shape(
                places,
                f"st.weak x, 1; st.relaxed.{scope} f, 1",
                f"L:; ld.acquire.{scope} r0, f; bne r0, 1, L; ld.weak r1, x",
            )
            found[f"SB-sc-{name}"] = shape(
                places,
                f"st.relaxed.{scope} x, 1; fence.sc.{scope}; ld.relaxed.{scope} r0, y",
                f"st.relaxed.{scope} y, 1; fence.sc.{scope}; ld.relaxed.{scope} r0, x",
            )
            found[f"LB-{name}"] = shape(
                places,
                f"ld.relaxed.{scope} r0, x; st.relaxed.{scope} y, 1",
                f"ld.relaxed.{scope} r0, y; st.relaxed.{scope} x, 1",
            )
            found[f"CoRR-{name}"] = shape(
                places,
                f"st.relaxed.{scope} x, 1; st.relaxed.{scope} x, 2",
                f"ld.relaxed.{scope} r0, x; ld.relaxed.{scope} r1, x",
            )
            found[f"counter-{name}"] = shape(
                places,
                f"st.weak x, 1; atom.acq_rel.{scope}.add r0, f, 1; bne r0, 1, E; ld.weak r1, y; E:",
                f"st.weak y, 1; atom.acq_rel.{scope}.add r0, f, 1; bne r0, 1, E; ld.weak r1, x; E:",
            )
            found[f"lock-{name}"] = shape(
                places,
                f"L:; atom.acquire.{scope}.cas r0, f, 0, 1; bne r0, 0, L; ld.weak r1, x; add r1, r1, 1;"
                f"st.weak x, r1; st.release.{scope} f, 0",
                f"L:; atom.acquire.{scope}.cas r0, f, 0, 1; bne r0, 0, L; ld.weak r1, x; add r1, r1, 1;"
                f"st.weak x, r1; st.release.{scope} f, 0",
            )
            found[f"red-{name}"] = shape(
                places, f"st.weak x, 1; red.release.{scope}.add f, 1",
                f"L:; ld.acquire.{scope} r0, f; bne r0, 1, L; ld.weak r1, x",
            )  # fmt: skip
            found[f"red-acquire-{name}"] = shape(
                places, f"st.weak x, 1; st.release.{scope} f, 1",
                f"L:; ld.relaxed.{scope} r0, f; bne r0, 1, L; red.acq_rel.{scope}.add f, 1; ld.weak r1, x",
            )  # fmt: skip
            found[f"release-sequence-{name}"] = shape(
                (*places, places[1]),
                f"st.weak x, 1; st.release.{scope} f, 1",
                f"L:; ld.acquire.{scope} r0, f; bne r0, 2, L; ld.weak r1, x",
                f"L:; atom.relaxed.{scope}.cas r0, f, 1, 2; bne r0, 1, L",
            )
            found[f"ISA2-{name}"] = shape(
                (*places, places[0]),
                f"st.weak x, 1; st.release.{scope} f, 1",
                f"L:; ld.acquire.{scope} r0, y; bne r0, 1, L; ld.weak r1, x",
                f"L:; ld.acquire.{scope} r0, f; bne r0, 1, L; st.release.{scope} y, 1",
            )
    found["WW"] = shape(TWO, "st.weak x, 1", "st.weak x, 2")
    found["RR"] = shape(TWO, "ld.weak r0, x", "ld.weak r0, x")
    found["weak-strong"] = shape(TWO, "st.weak x, 1", "ld.acquire.gpu r0, x")
    found["barrier"] = shape(ONE, "st.weak x, 1; bar.cta.sync 1", "bar.cta.sync 1; ld.weak r0, x")
    found["barrier-late-store"] = shape(ONE, "bar.cta.sync 1; st.weak x, 1", "bar.cta.sync 1; ld.weak r0, x")
    found["barrier-arrive"] = shape(ONE, "st.weak x, 1; bar.cta.arrive 1", "bar.cta.sync 1; ld.weak r0, x")
    found["barrier-arrive-back"] = shape(
        ONE, "bar.cta.arrive 1; st.weak x, 1", "ld.weak r0, x; bar.cta.sync 1"
    )
    found["barrier-other-id"] = shape(
        (*ONE, ONE[0]),
        "st.weak x, 1; bar.cta.sync 1",
        "bar.cta.sync 2; ld.weak r0, x",
        "bar.cta.sync 1; bar.cta.sync 2",
    )
    found["barrier-other-id-racy"] = shape(
        (*ONE, ONE[0]),
        "st.weak x, 1; bar.cta.sync 1",
        "bar.cta.sync 2; ld.weak r0, x",
        "bar.cta.sync 2; bar.cta.sync 1",
    )
    found["barrier-twice"] = shape(
        ONE,
        "st.weak x, 1; bar.cta.sync 1; ld.weak r0, y; bar.cta.sync 1; st.weak x, 2",
        "st.weak y, 1; bar.cta.sync 1; ld.weak r0, x; bar.cta.sync 1; st.weak y, 2",
    )
    found["barrier-once-missing"] = shape(
        ONE,
        "st.weak x, 1; bar.cta.sync 1; ld.weak r0, y; st.weak x, 2",
        "st.weak y, 1; bar.cta.sync 1; ld.weak r0, x; st.weak y, 2",
    )
    m = "x=0; y=0; m @ mbarrier 1;"
    found["mbarrier"] = shape(
        ONE, "st.weak x, 1; mbarrier.arrive m", "mbarrier.try_wait.parity m, 0; ld.weak r0, x", declared=m
    )
    found["mbarrier-relaxed"] = shape(
        ONE, "st.weak x, 1; mbarrier.arrive.relaxed.cta m", "mbarrier.try_wait.parity m, 0; ld.weak r0, x",
        declared=m,
    )  # fmt: skip
    found["mbarrier-wrong-parity"] = shape(
        ONE, "st.weak x, 1; mbarrier.arrive m", "mbarrier.try_wait.parity m, 1; ld.weak r0, x", declared=m
    )
    found["mbarrier-two"] = shape(
        (*ONE, ONE[0]),
        "st.weak x, 1; mbarrier.arrive m",
        "mbarrier.try_wait.parity m, 0; ld.weak r0, x; ld.weak r1, y",
        "st.weak y, 1; mbarrier.arrive m",
        declared="x=0; y=0; m @ mbarrier 2;",
    )
    found["mbarrier-elected"] = shape(
        (*ONE, ONE[0]),
        "st.weak x, 1; mbarrier.arrive m",
        "mbarrier.try_wait.parity m, 0; ld.weak r0, y",
        "st.weak y, 1",
        declared=m,
    )
    ring = "x=0; m @ mbarrier 1; n @ mbarrier 1;"
    found["mbarrier-ring"] = shape(
        ONE,
        "st.weak x, 1; mbarrier.arrive m; mbarrier.try_wait.parity n, 0; st.weak x, 2; mbarrier.arrive m",
        "mbarrier.try_wait.parity m, 0; ld.weak r0, x; mbarrier.arrive n; mbarrier.try_wait.parity m, 1;"
        "ld.weak r1, x",
        declared=ring,
    )
    found["mbarrier-ring-early"] = shape(
        ONE,
        "st.weak x, 1; mbarrier.arrive m; mbarrier.try_wait.parity n, 0; st.weak x, 2; mbarrier.arrive m",
        "mbarrier.try_wait.parity m, 0; mbarrier.arrive n; ld.weak r0, x; mbarrier.try_wait.parity m, 1;"
        "ld.weak r1, x",
        declared=ring,
    )
    cluster = ("cta 0,cluster 0,gpu 0", "cta 1,cluster 0,gpu 0")
    wait = "barrier.cluster.wait"
    found["cluster"] = shape(
        cluster,
        f"st.weak x, 1; barrier.cluster.arrive; {wait}",
        f"barrier.cluster.arrive; {wait}; ld.weak r0, x",
    )
    found["cluster-relaxed"] = shape(
        cluster,
        f"st.weak x, 1; barrier.cluster.arrive.relaxed; {wait}",
        f"barrier.cluster.arrive.relaxed; {wait}; ld.weak r0, x",
    )
    found["cluster-between"] = shape(
        cluster,
        f"barrier.cluster.arrive; st.weak x, 1; {wait}",
        f"barrier.cluster.arrive; {wait}; ld.weak r0, x",
    )
    for scope in ("cta", "cluster"):
        found[f"cluster-scope-{scope}"] = shape(
            cluster,
            f"st.weak x, 1; st.release.{scope} f, 1",
            f"L:; ld.acquire.{scope} r0, f; bne r0, 1, L; ld.weak r1, x",
        )
    return found


SHAPES = _shapes()


# -- random programs ------------------------------------------------------------------------------------

_SCOPES = [p.Scope.CTA, p.Scope.GPU, p.Scope.SYS]
_PLACES = ["x", "y"]
_registers = st.sampled_from(["r0", "r1"]).map(p.Register)
_small = st.integers(0, 2)


@st.composite
def _accesses(draw: st.DrawFn, scopes: list[p.Scope], fresh: Iterator[int] | None) -> p.Instruction:
    """An access or a fence; `fresh` has a value for each write, without it they are any."""
    values = _small if fresh is None else st.builds(next, st.just(fresh))
    scope = draw(st.sampled_from(scopes))
    address = p.Address(draw(st.sampled_from(_PLACES)))
    match draw(st.integers(0, 9)):
        case 0 | 1 | 2:
            order = draw(st.sampled_from([p.Order.WEAK, p.Order.RELAXED, p.Order.ACQUIRE]))
            kept = None if order is p.Order.WEAK else scope
            return p.Load((draw(_registers),), address, order, kept)
        case 3 | 4 | 5:
            order = draw(st.sampled_from([p.Order.WEAK, p.Order.RELAXED, p.Order.RELEASE]))
            kept = None if order is p.Order.WEAK else scope
            value = draw(values if fresh is not None else st.one_of(_small, _registers))
            return p.Store(address, (value,), order, kept)
        case 6 | 7:
            operations = ["add", "exch"] if fresh is not None else ["add", "exch", "cas", "max"]
            operation = draw(st.sampled_from(operations))
            orders = [p.Order.RELAXED, p.Order.RELEASE, p.Order.ACQUIRE, p.Order.ACQ_REL]
            operands = (draw(_small), draw(values)) if operation == "cas" else (draw(values),)
            order = draw(st.sampled_from(orders))
            if fresh is not None and order.acquires:
                address = p.Address("f")
            return p.Atomic(operation, draw(_registers), address, operands, order, scope)
        case 8:
            orders = [p.Order.RELAXED, p.Order.RELEASE, p.Order.ACQ_REL]
            order = draw(st.sampled_from(orders))
            return p.Atomic("add", None, address, (draw(values) or 1,), order, scope)
        case _:
            order = draw(st.sampled_from([p.Order.SC, p.Order.ACQ_REL, p.Order.RELEASE, p.Order.ACQUIRE]))
            return p.Fence(order, scope)


@st.composite
def small_programs(draw: st.DrawFn, distinct: bool = False) -> mm.Litmus:
    """Two or three threads over two locations, in one or two CTAs, perhaps with barriers.

    `distinct`: for the comparison of races; every write changes its location, and what
    `test_cross_check_races.test_known_differences` lists does not occur.
    """
    fresh = (1 << n for n in count_from(2)) if distinct else None
    count = draw(st.sampled_from([2, 2, 3]))
    spread = draw(st.sampled_from(["one", "two", "cluster"]))
    scopes = [*_SCOPES, p.Scope.CLUSTER] if spread == "cluster" else _SCOPES
    length = 4 if count == 2 else 3
    codes: list[list[p.Instruction]] = [
        draw(st.lists(_accesses(scopes, fresh), min_size=1, max_size=length)) for _ in range(count)
    ]
    places = []
    for number in range(count):
        cta = 0 if spread == "one" else number % 2
        places.append(p.Place(cta, 0, 0 if spread == "cluster" else None))
    joint = spread == "one" and draw(st.booleans())
    if joint:
        for instance in range(1, draw(st.integers(2, 3))):
            for code in codes:
                if draw(st.integers(0, 3)):
                    code.insert(draw(st.integers(0, len(code))), p.Barrier("cta", True, instance))
    if spread == "cluster" and draw(st.booleans()):
        order = draw(st.sampled_from([p.Order.RELEASE, p.Order.RELAXED]))
        for code in codes:
            first = draw(st.integers(0, len(code)))
            code.insert(first, p.ClusterBarrier(False, order))
            code.insert(draw(st.integers(first + 1, len(code))), p.ClusterBarrier(True, p.Order.ACQUIRE))
    threads = tuple(p.Thread(f"P{n}", places[n], tuple(codes[n])) for n in range(count))
    locations = tuple(p.Location(name) for name in (*_PLACES, "f"))
    return mm.parse(mm.render(p.Litmus("random", locations, threads, p.Quantifier.EXISTS, Every(()))))


SKELETONS = (
    "Wx Ry | Wy Rx",
    "Wx Wy | Ry Rx",
    "Rx Wy | Ry Wx",
    "Wx Wy | Wy Wx",
    "Wx Wy | Wy Rx",
    "Wx Wy | Ry Wx",
    "Wx | Rx Rx",
    "Wx Wx | Rx Rx",
    "Wx | Rx Wx",
    "Wx Rx | Wx Rx",
    "Ux | Ux Rx",
    "Wx Wy | Uy | Ry Rx",
    "Wx | Rx Wy | Ry Rx",
    "Wx Wy | Ry Wx | Rx",
    "Wx | Ux Ry | Wy Ux",
    "Ux Ry | Uy Rx",
    "Ux Uy | Uy Ux",
    "Wx Uy | Uy Rx",
    "Wx Wy Wy | Ry Rx",
    "Wx Wy | Ry Ry Rx",
    "Wx | Wx | Rx Rx",
    "Wx Wy | Wy Ry Rx",
)
"""Threads with their accesses: write, read or update (an atomic) of x or y."""


@st.composite
def decorated_programs(draw: st.DrawFn) -> mm.Litmus:
    """A classic skeleton with semantics, scopes and fences drawn; every read and write stays visible.

    Its threads are in CTAs of one GPU or of two.
    """
    columns = [column.split() for column in draw(st.sampled_from(SKELETONS)).split("|")]
    strong = draw(st.booleans())
    gpus = draw(st.sampled_from([1, 1, 2]))
    scopes = st.sampled_from(
        [p.Scope.GPU] * 5 + [p.Scope.CTA] if gpus == 1 else [p.Scope.SYS] * 5 + [p.Scope.GPU]
    )
    fences = draw(st.sampled_from([0, 1, 2]))
    weak = [] if strong else [p.Order.WEAK] * 2
    values = count_from(1)
    threads = []
    for number, column in enumerate(columns):
        code: list[p.Instruction] = []
        for step, (kind, where) in enumerate(column):
            if step and draw(st.integers(0, 2)) < fences:
                order = draw(st.sampled_from([p.Order.SC, p.Order.SC, p.Order.ACQ_REL]))
                code.append(p.Fence(order, draw(scopes)))
            address, register, scope = p.Address(where), p.Register(f"r{step}"), draw(scopes)
            if kind == "R":
                order = draw(st.sampled_from([*weak, p.Order.RELAXED, p.Order.ACQUIRE]))
                code.append(p.Load((register,), address, order, None if order is p.Order.WEAK else scope))
            elif kind == "W":
                order = draw(st.sampled_from([*weak, p.Order.RELAXED, p.Order.RELEASE]))
                value: p.Operand = next(values)
                if step and column[step - 1][0] == "R" and draw(st.integers(0, 3)) == 0:
                    value = p.Register(f"r{step - 1}")
                kept = None if order is p.Order.WEAK else scope
                code.append(p.Store(address, (value,), order, kept))
            else:
                order = draw(st.sampled_from([p.Order.RELAXED, p.Order.ACQ_REL]))
                operation = draw(st.sampled_from(["add", "exch"]))
                code.append(p.Atomic(operation, register, address, (next(values),), order, scope))
        cta = number if draw(st.integers(0, 3)) else 0
        threads.append(p.Thread(f"P{number}", p.Place(cta, number % gpus), tuple(code)))
    locations = tuple(p.Location(name) for name in _PLACES)
    test = p.Litmus("decorated", locations, tuple(threads), p.Quantifier.EXISTS, Every(()))
    return mm.parse(mm.render(test))


@st.composite
def dependent_programs(draw: st.DrawFn) -> mm.Litmus:
    """Two or three grids, each a programmatic dependent of the one before, of one or two threads each.

    Each thread has a weak access or two, perhaps a fence, a trigger, a wait, and barriers with its CTA.
    """
    fresh = count_from(1)
    threads: list[p.Thread] = []
    grids = draw(st.sampled_from([2, 2, 3]))
    for grid in range(grids):
        count = draw(st.sampled_from([1, 1, 2])) if len(threads) < 3 else 1
        codes: list[list[p.Instruction]] = []
        for _ in range(count):
            code: list[p.Instruction] = []
            for step in range(draw(st.integers(1, 2)) if grids == 2 else 1):
                address = p.Address(draw(st.sampled_from(_PLACES)))
                if draw(st.booleans()):
                    code.append(p.Store(address, (next(fresh),), p.Order.WEAK, None))
                else:
                    code.append(p.Load((p.Register(f"r{step}"),), address, p.Order.WEAK, None))
            if draw(st.booleans()):
                order = draw(st.sampled_from([p.Order.ACQ_REL, p.Order.ACQ_REL, p.Order.SC]))
                scope = draw(st.sampled_from([p.Scope.GPU, p.Scope.GPU, p.Scope.CTA]))
                code.insert(draw(st.integers(0, len(code))), p.Fence(order, scope))
            if draw(st.booleans()):
                code.insert(draw(st.integers(0, len(code))), p.GridControl(False))
            if grid and draw(st.integers(0, 2)):
                code.insert(draw(st.integers(0, len(code))), p.GridControl(True))
            codes.append(code)
        if count == 2 and draw(st.booleans()):
            for code in codes:
                code.insert(draw(st.integers(0, len(code))), p.Barrier("cta", True, 0))
        apart = count == 2 and not any(isinstance(i, p.Barrier) for i in codes[0]) and draw(st.booleans())
        for n, code in enumerate(codes):
            place = p.Place(n if apart else 0, 0, None, grid)
            threads.append(p.Thread(f"P{len(threads)}", place, tuple(code)))
    locations = tuple(p.Location(name) for name in _PLACES)
    edges = tuple(p.GridEdge(n, n - 1, True) for n in range(1, grids))
    test = p.Litmus("dependent", locations, tuple(threads), p.Quantifier.EXISTS, Every(()), grids=edges)
    return mm.parse(mm.render(test))
