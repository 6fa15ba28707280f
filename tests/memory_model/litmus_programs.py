"""Random litmus tests for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from workbench.memory_model import program as p
from workbench.memory_model.assembler import ARITHMETIC as ALU
from workbench.memory_model.assembler import ATOMICS, BRANCHES, PROXY_FENCES
from workbench.memory_model.condition import RELATIONS, Compare, Condition, Every, Not, Some, Term

LOCATIONS = (
    p.Location("x"),
    p.Location("y", (3,)),
    p.Location("a", (1, 2, 3, 4), array=True),
    p.Location("z", (), aliases="x"),
    p.Location("s", (), aliases="x", proxy=p.Proxy.SURFACE),
    p.Location("b", (), aliases="a", proxy=p.Proxy.ASYNC),
)
MBARRIERS = (p.Mbarrier("m", 1), p.Mbarrier("n", 2))
registers = st.sampled_from(["r0", "r1", "r2"]).map(p.Register)
integers = st.one_of(st.integers(0, 4), st.integers(0, p.MASK))
operands: st.SearchStrategy[p.Operand] = st.one_of(integers, registers)
scopes = st.sampled_from(list(p.Scope))
addresses = st.one_of(
    st.sampled_from(["x", "y", "z", "s"]).map(p.Address),
    st.builds(p.Address, st.sampled_from(["a", "b"]), st.one_of(st.integers(0, 3), registers)),
)
arrays = st.sampled_from(["a", "b"]).map(p.Address)


@st.composite
def accesses(draw: st.DrawFn) -> p.Instruction:
    loads = draw(st.booleans())
    elements = draw(st.sampled_from([1, 1, 2, 4]))
    proxies = [p.Proxy.GENERIC] * 3 + (
        [p.Proxy.SURFACE, p.Proxy.TEXTURE, p.Proxy.CONSTANT, p.Proxy.ASYNC, p.Proxy.TENSORMAP]
        if loads
        else [p.Proxy.SURFACE, p.Proxy.ASYNC]
    )
    proxy = draw(st.sampled_from(proxies))
    strongest = p.Order.ACQUIRE if loads else p.Order.RELEASE
    orders = [p.Order.WEAK, p.Order.RELAXED, strongest] if proxy is p.Proxy.GENERIC else [p.Order.WEAK]
    order = draw(st.sampled_from(orders))
    scope = None if order is p.Order.WEAK else draw(scopes)
    address = draw(addresses if elements == 1 else arrays)
    values = tuple(draw(registers if loads else operands) for _ in range(elements))
    if loads:
        return p.Load(values, address, order, scope, proxy)  # type: ignore[arg-type]
    return p.Store(address, values, order, scope, proxy)


@st.composite
def atomics(draw: st.DrawFn) -> p.Instruction:
    target = draw(st.one_of(st.none(), registers))
    names = ATOMICS if target is not None else tuple(o for o in ATOMICS if o not in ("exch", "cas"))
    name = draw(st.sampled_from(names))
    orders = [p.Order.RELAXED, p.Order.RELEASE, p.Order.ACQ_REL]
    orders += [p.Order.ACQUIRE] if target is not None else []
    values = tuple(draw(operands) for _ in range(2 if name == "cas" else 1))
    return p.Atomic(name, target, draw(addresses), values, draw(st.sampled_from(orders)), draw(scopes))


@st.composite
def barriers(draw: st.DrawFn) -> p.Instruction:
    if draw(st.integers(0, 3)) == 0:
        return p.Barrier("warp", True, 0)
    more = draw(st.integers(0, 2))
    extra = [draw(operands) if n < more else None for n in range(2)]
    return p.Barrier("cta", draw(st.booleans()), draw(operands), *extra)


names = st.sampled_from(["m", "n"])
cta_orders = st.sampled_from([p.Order.RELEASE, p.Order.RELAXED])
instructions: st.SearchStrategy[p.Instruction] = st.one_of(
    accesses(),
    accesses(),
    atomics(),
    barriers(),
    st.builds(
        p.Fence,
        st.sampled_from([p.Order.ACQUIRE, p.Order.RELEASE, p.Order.ACQ_REL, p.Order.SC]),
        scopes,
    ),
    st.sampled_from(PROXY_FENCES).map(p.ProxyFence),
    st.builds(
        p.ProxyFence, st.just("tensormap"), st.sampled_from([p.Order.ACQUIRE, p.Order.RELEASE]), scopes
    ),
    st.sampled_from(
        [
            p.ClusterBarrier(False, p.Order.RELEASE),
            p.ClusterBarrier(False, p.Order.RELAXED),
            p.ClusterBarrier(True, p.Order.ACQUIRE),
            p.GridControl(True),
            p.GridControl(False),
            p.CommitGroup(True),
            p.CommitGroup(False),
            p.WaitGroup(False, -1),
        ]
    ),
    st.builds(p.MbarrierArrive, names, cta_orders, scopes, st.integers(1, 3)),
    st.builds(p.MbarrierArrive, names, cta_orders, scopes, st.just(1), st.integers(1, 2)),
    st.builds(
        p.MbarrierArrive, names, st.just(p.Order.RELAXED), st.just(p.Scope.CTA), st.just(0), st.integers(0, 2)
    ),
    st.builds(p.MbarrierWait, names, operands, st.sampled_from([p.Order.ACQUIRE, p.Order.RELAXED]), scopes),
    st.builds(p.Copy, st.just("cp.async"), addresses, addresses),
    st.builds(p.Copy, st.just("bulk"), addresses, addresses, st.one_of(st.none(), names)),
    st.builds(p.Copy, st.just("st.async"), addresses, operands, names),
    names.map(p.CopyArrive),
    st.builds(p.WaitGroup, st.just(True), st.integers(0, 2), st.booleans()),
    st.builds(p.WaitGroup, st.just(False), st.integers(0, 2)),
    st.builds(p.Arithmetic, st.just("mov"), registers, st.tuples(operands)),
    st.builds(p.Arithmetic, st.sampled_from(ALU), registers, st.tuples(operands, operands)),
    st.builds(p.Branch, st.just(None), st.just(()), st.sampled_from(["L0", "L1"])),
    st.builds(
        p.Branch, st.sampled_from(BRANCHES), st.tuples(operands, operands), st.sampled_from(["L0", "L1"])
    ),
)


@st.composite
def programs(draw: st.DrawFn, most: int = 5) -> p.Litmus:
    """A litmus test with every construct of the dialect; it means nothing in particular."""
    threads = []
    for number in range(draw(st.integers(1, 3))):
        code = draw(st.lists(instructions, max_size=most))
        for label in ("L0", "L1"):
            code.insert(draw(st.integers(0, len(code))), p.Label(label))
        small = st.integers(0, 1)
        optional = st.one_of(st.none(), small)
        place = p.Place(draw(small), draw(small), draw(optional), draw(small), draw(optional))
        threads.append(p.Thread(f"P{number}", place, tuple(code)))
    count = len(threads)
    terms = st.one_of(
        integers,
        st.builds(Term, st.sampled_from(["r0", "r1"]), st.integers(0, count - 1)),
        st.sampled_from(["x", "y", "z", "s"]).map(Term),
        st.builds(Term, st.sampled_from(["a", "b"]), st.none(), st.integers(0, 3)),
    )
    leaves = st.builds(Compare, terms, st.sampled_from(sorted(RELATIONS)), terms)

    def deeper(inner: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return st.one_of(inner.map(Not), several.map(Every), several.map(Some))

    conditions = st.recursive(leaves, deeper, max_leaves=4)
    grids = (p.GridEdge(1, 0, draw(st.booleans())),) if draw(st.booleans()) else ()
    return p.Litmus(
        name="random",
        locations=LOCATIONS,
        threads=tuple(threads),
        quantifier=draw(st.sampled_from(list(p.Quantifier))),
        condition=draw(conditions),
        registers=((0, "r0", draw(integers)),),
        mbarriers=MBARRIERS,
        grids=grids,
        filter=draw(st.one_of(st.none(), conditions)),
        comments=("made at random",),
    )
