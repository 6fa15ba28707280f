"""Two kernels under programmatic dependent launch: do loads issue past `griddepcontrol.wait`?

The primary releases its dependents at once, spins, and only then stores. The secondary is resident meanwhile:
every thread reads the clock, waits, reads the clock, loads what the primary stored, and reads the clock when the
value is there. A load that ran ahead of the wait would bring the old value (zero), or come back at once.

Variants differ in the load, and in who waits. Controls load before the wait: they must bring the old value, or the
two grids did not overlap and nothing is learned.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_check.probes.builder import ARCH, Builder, _ptxas
from workbench.devices.launch import Launch
from workbench.devices.model import launch_to_json, pointers
from workbench.errors import WorkbenchError
from workbench.isa.sass import disassemble

THREADS, CTAS = 128, 8
TRIALS = 2000
DELAY_NS = 50_000
"""How long the primary spins after it has released its dependents."""
VALUE = 0x600DF00D


@dataclass(frozen=True)
class Variant:
    """One secondary."""

    name: str
    load: str
    """Loads `[%d2]` to `%r9`."""
    wait: str = "griddepcontrol.wait;"
    place: str = "after"
    """`after` the wait, or `before` it: a control."""
    clock_between: bool = True
    """Read the clock between the wait and the load; without it nothing stands between them."""
    free: bool = False
    """ptxas may place the load before the wait or the barrier; where it did so is reported."""
    doc: str = ""


_ELECTED = "setp.lt.u32 %p1, %r0, 32;\n@%p1 griddepcontrol.wait;\nbar.sync 0;"
VARIANTS = (
    Variant("control: ld.global before the wait", "ld.global.b32 %r9, [%d2];", place="before",
            doc="brings the old value if the grids overlap"),
    Variant("control: ld.volatile.global before the wait", "ld.volatile.global.b32 %r9, [%d2];", place="before",
            doc="brings the old value if the grids overlap"),
    Variant("ld.global", "ld.global.b32 %r9, [%d2];"),
    Variant("ld.global, nothing in between", "ld.global.b32 %r9, [%d2];", clock_between=False),
    Variant("ld.global.nc", "ld.global.nc.b32 %r9, [%d2];"),
    Variant("ld.global.nc, nothing in between", "ld.global.nc.b32 %r9, [%d2];", clock_between=False, free=True,
            doc="ptxas may move the load above the wait: rule nc-load-of-mutable"),
    Variant("ld.volatile.global", "ld.volatile.global.b32 %r9, [%d2];"),
    Variant("ld.relaxed.gpu.global", "ld.relaxed.gpu.global.b32 %r9, [%d2];"),
    Variant("ld.global.L1::no_allocate", "ld.global.L1::no_allocate.b32 %r9, [%d2];"),
    Variant("cp.async", "cp.async.ca.shared.global [%r5], [%d2], 4;\ncp.async.wait_all;\nld.shared.b32 %r9, [%r5];"),
    Variant("one warp waits, barrier, ld.global", "ld.global.b32 %r9, [%d2];", _ELECTED,
            doc="what PTX orders through the barrier"),
    Variant("one warp waits, barrier, ld.global.nc", "ld.global.nc.b32 %r9, [%d2];", _ELECTED,
            clock_between=False, free=True, doc="ptxas may move the load above the barrier: rule nc-load-of-mutable"),
)  # fmt: skip

_PRIMARY = f"""griddepcontrol.launch_dependents;
mov.u64 %d10, %globaltimer;
SPIN:
mov.u64 %d11, %globaltimer;
sub.u64 %d12, %d11, %d10;
setp.lt.u64 %p1, %d12, {DELAY_NS};
@%p1 bra SPIN;
mul.wide.u32 %d1, %r1, 4;
add.s64 %d2, %d1, %data;
mov.u32 %r5, {VALUE};
st.global.b32 [%d2], %r5;
mov.u64 %d13, %globaltimer;
mul.wide.u32 %d3, %r1, 8;
add.s64 %d4, %d3, %stored;
st.global.b64 [%d4], %d13;
"""
_SECONDARY = """mul.wide.u32 %d1, %r1, 4;
add.s64 %d2, %d1, %data;
mov.u32 %r5, s;
mad.lo.u32 %r5, %r0, 4, %r5;
mov.u64 %d10, %globaltimer;
BEFORE
mov.u64 %d20, %clock64;
WAIT
mov.u64 %d21, %clock64;
AFTER
xor.b32 %r10, %r9, 0;
add.u32 %r11, %r10, 1;
mov.u64 %d22, %clock64;
add.s64 %d3, %d1, %seen;
st.global.b32 [%d3], %r9;
sub.u64 %d23, %d21, %d20;
sub.u64 %d24, %d22, %d21;
mul.wide.u32 %d4, %r1, 24;
add.s64 %d5, %d4, %times;
st.global.b64 [%d5], %d10;
st.global.b64 [%d5+8], %d23;
st.global.b64 [%d5+16], %d24;
"""
# The clock after the load must depend on the value: the third reading follows a branch that the value decides.
_AFTER = "{load}\nsetp.eq.u32 %p5, %r9, 0x7fffffff;\n@%p5 trap;"


def secondary(variant: Variant) -> str:
    """The body of a variant's secondary."""
    load = _AFTER.format(load=variant.load)
    text = _SECONDARY.replace("WAIT\n", f"{variant.wait}\n")
    if not variant.clock_between:
        text = text.replace("mov.u64 %d21, %clock64;\n", "mov.u64 %d21, %d20;\n")
    text = text.replace("BEFORE\n", f"{load}\n" if variant.place == "before" else "")
    return text.replace("AFTER\n", f"{load}\n" if variant.place == "after" else "")


def write(folder: Path) -> None:
    """Assemble all variants and write them with what their SASS looks like.

    Raises:
        WorkbenchError: if ptxas refuses one, or a variant has not the SASS that the experiment needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = []
    for n, v in enumerate(VARIANTS):
        ptx = _module(v)
        cubin, log = _ptxas(ptx)
        if cubin is None:
            raise WorkbenchError(f"the experiment {v.name!r} does not assemble: {log[:300]}")
        grid, block = (CTAS, 1, 1), (THREADS, 1, 1)
        launches = (
            Launch("primary", grid, block, parameters=pointers(("data", "stored"))),
            Launch("secondary", grid, block, pdl=True, parameters=pointers(("data", "seen", "times"))),
        )
        order = sass_order(disassemble(cubin))
        if v.place == "after" and not v.free and not order["load_after_wait"]:
            raise WorkbenchError(
                f"ptxas placed the load of {v.name!r} before the wait; it shows nothing then"
            )
        (folder / f"{n}.cubin").write_bytes(cubin)
        (folder / f"{n}.ptx").write_text(ptx)
        described.append(
            {"variant": asdict(v), "launches": [launch_to_json(x) for x in launches], "sass": order}
        )
    (folder / "pdl.json").write_text(
        json.dumps({"threads": THREADS, "ctas": CTAS, "trials": TRIALS, "delay_ns": DELAY_NS, "value": VALUE,
                    "arch": ARCH, "variants": described}) + "\n"
    )  # fmt: skip


def sass_order(text: str) -> dict[str, object]:
    """Where the wait, the first load of the data, the barrier and the clock readings stand in the secondary."""
    body = text[text.index("secondary") :]
    if ".text.secondary" in text:
        body = text[text.index(".text.secondary") :]
        if ".text.primary" in body:
            body = body[: body.index(".text.primary")]
    places: dict[str, list[int]] = {}
    for name, pattern in (
        ("ACQBULK", r"\bACQBULK\b"), ("load", r"\bLDG(?:STS)?\.|\bLDGSTS\b"), ("BAR", r"\bBAR\.SYNC"), ("clock", r"CS2R|SR_CLOCK"),
    ):  # fmt: skip
        places[name] = [m.start() for m in re.finditer(pattern, body)]
    wait = places["ACQBULK"][0] if places["ACQBULK"] else -1
    load = places["load"][0] if places["load"] else -1
    barrier = places["BAR"][0] if places["BAR"] else -1
    return {
        "load_after_wait": wait >= 0 and load > wait,
        "load_after_barrier": load > barrier if barrier >= 0 else None,
        "clock_readings": len(places["clock"]),
    }


def _module(v: Variant) -> str:
    b = Builder("pdl", "")
    for name in ("data", "stored", "seen", "times"):
        b.give(name, [0])
    b.entry("primary", _PRIMARY, ("data", "stored"))
    b.entry("secondary", secondary(v), ("data", "seen", "times"),
            variables=f".shared .align 16 .b8 s[{4 * THREADS}];")  # fmt: skip
    head = f".version 9.2\n.target {ARCH}\n.address_size 64\n"
    first, second = b.entries
    return (
        head
        + first.text.replace(".entry k0(", ".entry primary(")
        + second.text.replace(".entry k1(", ".entry secondary(")
    )
