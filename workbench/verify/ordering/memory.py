"""Memory accesses and fences of a kernel in either form, with strength, scope and target (ISA 8.2 to 8.5).

PTX says it in qualifiers. SASS has fewer: a relaxed access is `STRONG` with the scope, a volatile one
`STRONG.SYS`; a release is a MEMBAR before the access, an acquire a CCTL.IVALL behind it, so that in SASS
fences and accesses are always two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from workbench.isa.ptx.dataflow import writes as ptx_writes
from workbench.isa.ptx.model import Address, Instruction, Operand, Reg, TensorAddress, Vector
from workbench.isa.ptx.variables import TYPE_BYTES
from workbench.isa.sass.dataflow import writes as sass_writes
from workbench.isa.sass.model import SassAddress, SassInstruction
from workbench.isa.values import UNKNOWN, RootKind, Value
from workbench.verify.ordering.program import Mode
from workbench.verify.ordering.view import PtxView, SassStep, SassView, Step


class Scope(IntEnum):
    """Which threads an access or fence is ordered for, the wider the greater."""

    CTA = 1
    CLUSTER = 2
    GPU = 3
    SYS = 4

    @property
    def words(self) -> str:
        """As it is written in PTX, with the dot."""
        return f".{self.name.lower()}"


class Space(StrEnum):
    """Where an address points."""

    GLOBAL = "global"
    SHARED = "shared"
    REMOTE = "remote"
    """Shared memory of another CTA of the cluster (an address made by mapa)."""
    OTHER = "other"
    """Local, constant or parameter memory, or not known."""


@dataclass(frozen=True, eq=False)
class Touch:
    """One access."""

    step: Step | SassStep
    mode: Mode
    space: Space
    address: Value
    names: frozenset[str]
    """Buffers, or module variables as `variable NAME`; empty if that cannot be told."""
    scope: Scope | None
    """None for a weak access."""
    acquires: bool = False
    releases: bool = False
    multimem: bool = False
    asynchronous: bool = False
    """Done by the async proxy or as a strong asynchronous operation: bulk copies, st.async."""
    read_only: bool = False
    nbytes: int = 0
    width: int = 1
    """Elements of a vector access."""
    results: tuple[str, ...] = ()
    """Registers it loads."""

    @property
    def index(self) -> int:
        """Instruction index."""
        return self.step.index

    @property
    def strong(self) -> bool:
        """Whether it is a strong operation."""
        return self.scope is not None

    @property
    def reads(self) -> bool:
        """Whether it reads memory."""
        return self.mode is not Mode.STORE

    @property
    def writes(self) -> bool:
        """Whether it writes memory."""
        return self.mode is not Mode.LOAD


@dataclass(frozen=True, eq=False)
class Fence:
    """A fence in the generic proxy."""

    step: Step | SassStep
    scope: Scope
    acquires: bool
    releases: bool


_SCOPES = {"cta": Scope.CTA, "cluster": Scope.CLUSTER, "gpu": Scope.GPU, "sys": Scope.SYS}
_MEMBAR = {"cta": Scope.CTA, "gl": Scope.GPU, "sys": Scope.SYS}
_MODES = {
    "ld": Mode.LOAD,
    "ldu": Mode.LOAD,
    "ldmatrix": Mode.LOAD,
    "st": Mode.STORE,
    "stmatrix": Mode.STORE,
}
_ACCESSES = (
    "ld",
    "ldu",
    "st",
    "atom",
    "red",
    "multimem",
    "cp",
    "ldmatrix",
    "stmatrix",
)
_SASS_SCOPES = {"SM": Scope.CTA, "CTA": Scope.CTA, "GPU": Scope.GPU, "SYS": Scope.SYS, "VC": Scope.GPU}
_SASS_ACCESSES = {
    "LDG": (Mode.LOAD, Space.GLOBAL),
    "LD": (Mode.LOAD, None),
    "LDS": (Mode.LOAD, Space.SHARED),
    "LDSM": (Mode.LOAD, Space.SHARED),
    "LDGMC": (Mode.LOAD, Space.GLOBAL),
    "LDGSTS": (Mode.LOAD, Space.GLOBAL),
    "STG": (Mode.STORE, Space.GLOBAL),
    "ST": (Mode.STORE, None),
    "STS": (Mode.STORE, Space.SHARED),
    "STSM": (Mode.STORE, Space.SHARED),
    "STAS": (Mode.STORE, Space.REMOTE),
    "ATOM": (Mode.ATOMIC, None),
    "ATOMG": (Mode.ATOMIC, Space.GLOBAL),
    "ATOMS": (Mode.ATOMIC, Space.SHARED),
    "RED": (Mode.ATOMIC, Space.GLOBAL),
    "REDG": (Mode.ATOMIC, Space.GLOBAL),
    "REDAS": (Mode.ATOMIC, Space.REMOTE),
    "UBLKCP": (Mode.LOAD, Space.GLOBAL),
    "UTMALDG": (Mode.LOAD, Space.GLOBAL),
    "UTMASTG": (Mode.STORE, Space.GLOBAL),
}
_SASS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def touches(view: PtxView | SassView) -> tuple[Touch, ...]:
    """All accesses of a kernel that some path reaches, in program order."""
    found: tuple[Touch, ...] | None = view.__dict__.get("_touches")
    if found is None:  # kept with the view: every rule asks
        if isinstance(view, PtxView):
            found = tuple(t for s in view.steps(*_ACCESSES) if (t := _ptx(view, s)) is not None)
        else:
            found = tuple(_sass(view, s) for s in view.steps(*_SASS_ACCESSES))
        view.__dict__["_touches"] = found
    return found


def fences(view: PtxView | SassView) -> tuple[Fence, ...]:
    """All fences of the generic proxy; `fence.proxy` and `fence.mbarrier_init` are none."""
    if isinstance(view, PtxView):
        return tuple(f for s in view.steps("fence", "membar") if (f := _ptx_fence(s)) is not None)
    found = []
    for s in view.steps("MEMBAR", "CCTL"):
        m = s.instruction.modifiers
        if s.instruction.opcode == "MEMBAR":
            scope = next((_SASS_SCOPES[x] for x in m if x in _SASS_SCOPES), Scope.GPU)
            found.append(Fence(s, scope, scope <= Scope.CTA, True))
        elif "IVALL" in m:
            found.append(Fence(s, Scope.SYS, True, False))
    return tuple(found)


def _ptx_fence(step: Step) -> Fence | None:
    i = step.instruction
    m = set(i.modifiers)
    if i.opcode == "membar":
        scope = next((_MEMBAR[x] for x in i.modifiers if x in _MEMBAR), None)
        return None if scope is None else Fence(step, scope, True, True)
    if "mbarrier_init" in m or any(x.startswith("proxy") for x in m):
        return None
    scope = next((_SCOPES[x] for x in i.modifiers if x in _SCOPES), Scope.SYS)
    return Fence(step, scope, "release" not in m, "acquire" not in m)


def _ptx(view: PtxView, step: Step) -> Touch | None:
    i = step.instruction
    m = set(i.modifiers)
    if i.opcode == "cp":
        return _copy(view, step)
    mode = {
        "ld": Mode.LOAD,
        "ldu": Mode.LOAD,
        "ldmatrix": Mode.LOAD,
        "st": Mode.STORE,
        "stmatrix": Mode.STORE,
    }
    kind = mode.get(i.opcode, Mode.ATOMIC)
    multimem = i.opcode == "multimem"
    if multimem:
        kind = Mode.LOAD if "ld_reduce" in m else Mode.STORE if "st" in m else Mode.ATOMIC
        if "cp" in m:
            return None
    at = next((n for n, o in enumerate(i.operands) if isinstance(o, Address)), None)
    if at is None:
        return None
    value = step.values[at]
    space = Space.GLOBAL if multimem else _space(view, i, value)
    scope: Scope | None = None
    if m & {"relaxed", "acquire", "release", "acq_rel", "mmio"} or (kind is Mode.ATOMIC and not multimem):
        scope = next((_SCOPES[x] for x in i.modifiers if x in _SCOPES), Scope.GPU)
    if "volatile" in m:
        scope = Scope.SYS
    return Touch(
        step,
        kind,
        space,
        value,
        names(view, value, space),
        scope,
        acquires=bool(m & {"acquire", "acq_rel"}),
        releases=bool(m & {"release", "acq_rel"}),
        multimem=multimem,
        asynchronous="async" in m,
        read_only=i.opcode == "ldu" or "nc" in m or "proxy::readonly" in m,
        nbytes=_bytes(i),
        width=next((int(x[1:]) for x in i.modifiers if x in ("v2", "v4", "v8")), 1),
        results=tuple(r.name for r in ptx_writes(i)) if kind is not Mode.STORE else (),
    )


def _copy(view: PtxView, step: Step) -> Touch | None:
    """cp.async and cp.async.bulk: the global side; copies between CTAs are stores to remote memory."""
    i = step.instruction
    m = i.modifiers
    if not m or {"commit_group", "wait_group", "wait_all", "prefetch", "mbarrier"} & set(m[1:3]):
        return None
    at = [n for n, o in enumerate(i.operands) if isinstance(o, (Address, TensorAddress))]
    if len(at) < 2:
        return None
    bulk = "bulk" in m
    spaces = [x for x in m if x in ("global", "shared", "shared::cta", "shared::cluster")]
    to_global = spaces[:1] == ["global"]
    if "global" not in spaces:
        value = step.values[at[0]]
        return Touch(step, Mode.STORE, Space.REMOTE, value, frozenset(), None, asynchronous=True)
    n = at[0] if to_global else at[1]
    value = step.values[n]
    tensor = isinstance(i.operands[n], TensorAddress)
    found = frozenset[str]() if tensor else names(view, value, Space.GLOBAL)
    if tensor:
        for site in view.analysis.sites:
            if site.event.index == step.index:
                found = site.buffers
    mode = Mode.ATOMIC if m[:1] == ("reduce",) else Mode.STORE if to_global else Mode.LOAD
    return Touch(step, mode, Space.GLOBAL, value, found, None, asynchronous=bulk)


def _space(view: PtxView, i: Instruction, value: Value) -> Space:
    for x in i.modifiers:
        if x == "global":
            return Space.GLOBAL
        if x in ("shared", "shared::cta", "shared::cluster"):
            return Space.REMOTE if mapped(value) else Space.SHARED
        if x in ("local", "param", "const") or x.startswith("param::"):
            return Space.OTHER
    if i.opcode in ("ldmatrix", "stmatrix"):
        return Space.SHARED
    if mapped(value):
        return Space.REMOTE
    spaces = {view.values.spaces.get(r.name, "") for r in value.roots if r.kind is RootKind.SYMBOL}
    pointers = any(r.kind is RootKind.PARAM for r in value.roots)
    if spaces and not pointers:
        if spaces == {"shared"}:
            return Space.SHARED
        if spaces == {"global"}:
            return Space.GLOBAL
        return Space.OTHER
    if any(r.kind is RootKind.PARAM_ADDRESS for r in value.roots):
        return Space.OTHER
    return Space.GLOBAL


def mapped(value: Value) -> bool:
    """True if an address was made by mapa: it may point into another CTA's shared memory."""
    return any(r.kind is RootKind.MAPPED for r in value.roots)


def names(view: PtxView | SassView, value: Value, space: Space = Space.GLOBAL) -> frozenset[str]:
    """Buffers and module variables that a global address may point into."""
    if space is not Space.GLOBAL:
        return frozenset()
    found = set(view.buffers(value))
    for r in value.roots:
        if r.kind is RootKind.SYMBOL:
            in_ptx = isinstance(view, PtxView)
            if not in_ptx or view.values.spaces.get(r.name) == "global":  # type: ignore[union-attr]
                found.add(f"variable {r.name}")
    return frozenset(found)


def _bytes(i: Instruction) -> int:
    element = next((TYPE_BYTES[x] for x in reversed(i.modifiers) if x in TYPE_BYTES), 4)
    return element * next((int(x[1:]) for x in i.modifiers if x in ("v2", "v4", "v8")), 1)


def stored(touch: Touch) -> tuple[str, ...]:
    """Registers whose values an access writes to memory."""
    i = touch.step.instruction
    found: list[str] = []
    if isinstance(i, SassInstruction):
        for o in i.operands:
            if not isinstance(o, SassAddress) and getattr(o, "name", "").startswith(("R", "UR")):
                found.append(o.name)  # type: ignore[union-attr]
        return tuple(found)
    seen = False
    for op in i.operands:
        if isinstance(op, (Address, TensorAddress)):
            seen = True
        elif seen:
            found += _names_of(op)
    return tuple(found)


def _names_of(operand: Operand) -> list[str]:
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Vector):
        return [n for e in operand.elements for n in _names_of(e)]
    return []


def _sass(view: SassView, step: SassStep) -> Touch:
    i = step.instruction
    m = i.modifiers
    mode, space = _SASS_ACCESSES[i.opcode]
    at = [n for n, o in enumerate(i.operands) if isinstance(o, SassAddress)]
    n: int | None = at[0] if at else None
    if i.opcode == "LDGSTS" and len(at) > 1:
        n = at[1]
    bulk = i.opcode.startswith("U")
    if bulk and len(at) > 1:
        store = [x for x in m if x in ("S", "G")][:1] == ["G"]
        mode = Mode.STORE if store or i.opcode == "UTMASTG" else Mode.LOAD
        n = at[0] if store else at[1]
    value = step.values[n] if n is not None else UNKNOWN
    if space is None:
        space = Space.REMOTE if mapped(value) else Space.GLOBAL if value.roots else Space.OTHER
    scope: Scope | None = None
    if "STRONG" in m or "MMIO" in m or (mode is Mode.ATOMIC and not bulk):
        scope = next((_SASS_SCOPES[x] for x in m if x in _SASS_SCOPES), Scope.GPU)
    found = names(view, value, space)
    if bulk:
        found = next((s.buffers for s in view.analysis.sites if s.event.index == step.index), found)
    results = tuple(x for x in sass_writes(i) if x.startswith(("R", "UR"))) if mode is not Mode.STORE else ()
    return Touch(
        step,
        mode,
        space,
        value,
        found,
        scope,
        acquires=mode is Mode.LOAD and scope is Scope.CTA,  # ld.acquire.cta has no CCTL
        multimem=i.opcode == "LDGMC",
        asynchronous=bulk or i.opcode == "STAS",
        read_only="CONSTANT" in m,
        nbytes=next((_SASS_BYTES[x] for x in m if x in _SASS_BYTES), 4),
        results=results,
    )
