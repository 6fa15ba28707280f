"""What a clock tells of another class: in which layer it says what.

Layer 0 is happens-before. With asynchronous reads, layers 1 and 2 are the same, counting only what a
`fence.proxy.async` on the way has handed to the async proxy: of shared memory (1) and of global memory (2).

Kernels with flags have more. A fence makes what its thread has done and knows *released* at its scope: a
later relaxed store or atomic operation publishes that (ISA 8.8). In the other direction what a relaxed load
reads is *pending* until a fence of a scope that reaches the writer makes it known. Barriers hand both on: the
hardware makes a fence good for all that its thread was ordered after, so a kernel may fence in every thread,
meet at a barrier and count in one thread only. The ISA has that edge where the fence and the atomic operation
are in one thread; for the other case nothing is reported.

The last three layers excuse nothing. They tell what is missing: `unfenced` what relaxed reads brought,
`loose` what was stored with nothing released, `narrow` what a scope kept back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from workbench.isa.ptx.model import Instruction, Kernel

SCOPES = {"cta": 1, "cluster": 2, "gpu": 3, "sys": 4, "gl": 3}


@dataclass(frozen=True)
class Layout:
    """The layers of a launch's clocks.

    Args:
        base: 1, or 3 where the async proxy is of interest.
        scopes: of the kernel's fences, ascending.
        flags: something tells of what is missing.
    """

    base: int = 1
    scopes: tuple[int, ...] = ()
    flags: bool = False

    @staticmethod
    def of_all(layouts: Iterable[Layout]) -> Layout:
        """Return layers that serve several launches."""
        every = list(layouts)
        scopes = {s for one in every for s in one.scopes}
        return Layout(max(one.base for one in every), tuple(sorted(scopes)), any(one.flags for one in every))

    @cached_property
    def count(self) -> int:
        """Number of layers."""
        return self.base + len(self.scopes) * (1 + self.base) + 3 * self.flags

    def wide(self, scope: int) -> list[int]:
        """Return which of the scopes include `scope`."""
        return [k for k, s in enumerate(self.scopes) if s >= scope]

    def released(self, k: int) -> int:
        """Return the layer of what fences of `scopes[k]` or wider have released."""
        return self.base + k

    def pending(self, k: int) -> slice:
        """Return the layers of what a fence of `scopes[k]` will make known."""
        first = self.base + len(self.scopes) + k * self.base
        return slice(first, first + self.base)

    @property
    def all_pending(self) -> slice:
        """All layers of that kind."""
        first = self.base + len(self.scopes)
        return slice(first, first + len(self.scopes) * self.base)

    @property
    def unfenced(self) -> int:
        """What relaxed reads brought, whether a fence made it known or not."""
        return self.count - 3

    @property
    def loose(self) -> int:
        """What would be known had relaxed stores released."""
        return self.count - 2

    @property
    def narrow(self) -> int:
        """What would be known were all scopes wide."""
        return self.count - 1


def fence_scope(item: Instruction) -> int:
    """Return the scope of a fence or membar; 0 for other instructions and for proxy fences."""
    m = item.modifiers
    if item.opcode == "membar" and "proxy" not in m:
        return next((SCOPES[x] for x in m if x in SCOPES), 4)
    if item.opcode == "fence" and "proxy" not in m and "mbarrier_init" not in m:
        return next((SCOPES[x] for x in m if x in SCOPES), 4)
    return 0


def layout_of(kernel: Kernel) -> Layout:
    """Return the layers for a kernel."""
    asynchronous = any(
        i.opcode in ("wgmma", "tcgen05") or (i.opcode == "cp" and "bulk" in i.modifiers)
        for i in kernel.instructions
    )
    scopes = {fence_scope(i) for i in kernel.instructions} - {0}
    strong = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
    flags = any(
        i.opcode in ("atom", "red") or (i.opcode in ("ld", "st") and any(m in strong for m in i.modifiers))
        for i in kernel.instructions
    )
    return Layout(3 if asynchronous else 1, tuple(sorted(scopes)), flags or bool(scopes))
