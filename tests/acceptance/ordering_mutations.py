"""Makes every single removal or weakening of what orders memory in a PTX kernel.

A mutant changes one instruction: a wait, fence, barrier or arrival is taken out, its scope narrowed, its
semantics made relaxed, a count or parity made wrong, or a load put outside the memory model. What it needs
to be legal PTX (a predicate that a try_wait no longer gives) is filled in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One changed kernel."""

    label: str
    """What was done, the instruction, and which of several equal ones."""
    text: str


_DROPPED = (
    r"griddepcontrol\.wait",
    r"griddepcontrol\.launch_dependents",
    r"bar\.sync|bar\.arrive|bar\.warp\.sync|barrier\.cta\.sync",
    r"barrier\.cluster\.(arrive|wait)",
    r"fence\.|membar\.",
    r"cp\.async\.(wait_group|wait_all|commit_group)",
    r"cp\.async\.bulk\.(wait_group|commit_group)",
    r"mbarrier\.arrive",
    r"tcgen05\.(wait|fence|commit|dealloc|relinquish_alloc_permit)",
    r"wgmma\.(fence|commit_group|wait_group)",
)
_DROP = re.compile("|".join(_DROPPED))
_SCOPES = {"sys": "gpu", "gpu": "cta", "cluster": "cta"}
_SPACES = ("shared::cluster", "mbarrier_init")
"""Qualifiers that hold the word of a scope and are none."""


def mutants(text: str) -> Iterator[Mutant]:
    """Yield every mutant of a kernel, in the order of its lines."""
    lines = text.splitlines()
    seen: dict[str, int] = {}
    for n, line in enumerate(lines):
        code = line.split("//")[0].strip()
        for what, new in _changes(code, lines, n):
            label = f"{what}: {code}"
            seen[label] = seen.get(label, 0) + 1
            if seen[label] > 1:
                label += f" ({seen[label]})"
            yield Mutant(label, "\n".join([*lines[:n], new, *lines[n + 1 :]]) + "\n")


def _changes(code: str, lines: list[str], n: int) -> Iterator[tuple[str, str]]:
    if not code or code.startswith((".", "$", "{", "}", "//")):
        return
    instruction = re.sub(r"^@!?%\w+\s+", "", code)
    name = instruction.split()[0].rstrip(";")
    if _DROP.match(instruction):
        yield "drop", "    // dropped"
    if re.match(r"(mbarrier\.(try|test)_wait)", instruction):
        predicate = re.search(r"%p\w*", instruction)
        assert predicate is not None
        yield "drop", f"    setp.eq.u32 {predicate[0]}, 0, 0;"
        if re.search(r",\s*[01];", instruction):
            yield "flip the parity", _flipped(code)
    if code.startswith("@") and "bra" in code and _polls(lines, n):
        yield "poll once", "    // polled once"
    for semantics in ("acquire", "release"):
        if f".{semantics}" in name and not name.startswith(("fence", "barrier.cluster.wait")):
            yield f"relax {semantics}", code.replace(f".{semantics}", ".relaxed", 1)
    for scope, narrower in _SCOPES.items():
        bare = name
        for space in _SPACES:
            bare = bare.replace(space, "")
        if f".{scope}" in bare and not name.startswith(("fence.mbarrier_init", "barrier.cluster")):
            yield f"narrow {scope} to {narrower}", _narrowed(code, scope, narrower)
    if (groups := re.search(r"wait_group(?:\.read)? (\d+)", instruction)) is not None:
        wider = groups[0].replace(groups[1], str(int(groups[1]) + 1))
        yield "one group more", code.replace(groups[0], wider)
    if name.startswith("mbarrier.init"):
        count = re.search(r",\s*(\d+);", code)
        if count is not None:
            if int(count[1]) > 1:
                yield "count one less", code.replace(count[0], f", {int(count[1]) - 1};")
            yield "count one more", code.replace(count[0], f", {int(count[1]) + 1};")
    if "expect_tx" in name:
        size = re.search(r",\s*(\d+);", code)
        if size is not None:
            yield "expect half", code.replace(size[0], f", {int(size[1]) // 2};")
            yield "expect double", code.replace(size[0], f", {int(size[1]) * 2};")
    if re.match(r"ld\.global\.(v\d\.)?[fbus]\d", instruction):
        yield "read only", code.replace("ld.global", "ld.global.nc")


def _flipped(code: str) -> str:
    return re.sub(r",\s*([01]);", lambda m: f", {1 - int(m[1])};", code)


def _narrowed(code: str, scope: str, narrower: str) -> str:
    return re.sub(rf"\.{scope}(?=[.\s;])(?!::)", f".{narrower}", code, count=1)


def _polls(lines: list[str], n: int) -> bool:
    """Whether a branch goes back a few lines to a load or an mbarrier wait."""
    target = re.search(r"(\$\w+)", lines[n])
    if target is None:
        return False
    body: list[str] = []
    for line in reversed(lines[max(0, n - 4) : n]):
        body.append(line)
        if line.strip() == f"{target[1]}:":
            return any("ld." in x for x in body)
    return False
