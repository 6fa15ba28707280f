"""The async proxy's view of shared memory: which bytes ordinary stores wrote since the last proxy fence.

Tensor and bulk copies out of shared memory, wgmma and tcgen05 read it through the async proxy. What a CTA's
threads wrote there by ordinary stores is only sure to be seen after a `fence.proxy.async` (ORDERING rule
`proxy-fence-missing`). Here a fence of any thread of the CTA after the store counts, so the check errs on the
silent side: what it finds has no fence on any path. Stores of other CTAs, atomics and cp.async are not
followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction, Kernel

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
RULE = "proxy-fence-missing"
GRANULE = 16
"""Bytes that are followed together: what asynchronous reads are multiples of."""


def reads_asynchronously(item: Instruction) -> bool:
    """Whether an instruction may read shared memory through the async proxy."""
    if item.opcode == "cp":
        return "bulk" in item.modifiers and "shared::cta" in item.modifiers
    return item.opcode == "wgmma" or (item.opcode == "tcgen05" and item.modifiers[0] in ("mma", "cp"))


class Proxies:
    """When the granules of a chunk's shared memory were last written by ordinary stores.

    Args:
        banks: number of CTAs.
        stride: bytes from one CTA's memory to the next.
    """

    def __init__(self, banks: int, stride: int) -> None:
        self.stride = stride
        self._time = 1
        self._written = np.zeros(banks * stride // GRANULE + 4, np.uint32)
        """Time of the last ordinary store; 0: none, or something asynchronous since."""
        self._fenced = np.zeros(banks, np.uint32)
        """Time of the last fence of a thread of each CTA."""

    def wrote(self, at: Array, size: int) -> None:
        """Note ordinary stores of `size` bytes at byte offsets in the chunk's memory."""
        granules = at >> 4
        self._written[granules] = self._time
        if size > GRANULE:
            self._written[granules + 1] = self._time

    def forget(self, low: int, high: int) -> None:
        """Note that something asynchronous writes bytes `low` to `high` of some CTA."""
        grid = self._written[: len(self._fenced) * self.stride // GRANULE].reshape(len(self._fenced), -1)
        grid[:, low // GRANULE : -(-high // GRANULE)] = 0

    def fence(self, rows: Array) -> None:
        """fence.proxy.async by threads of the CTAs `rows`."""
        self._fenced[rows] = self._time
        self._time += 1

    def unfenced(self, row: int, granules: Array) -> int | None:
        """Return the first byte, counted in its CTA's memory, that no fence followed; None if there is none.

        Args:
            row: CTA in the chunk.
            granules: numbers of the 16-byte pieces read, counted in the chunk's memory.
        """
        stale = self._written.take(granules) > self._fenced[row]
        if not stale.any():
            return None
        return int(granules.ravel()[int(np.argmax(stale.ravel()))]) * GRANULE - row * self.stride

    @staticmethod
    def text(byte: int) -> str:
        """Say what is wrong with reading `byte`."""
        return (
            f"reads byte {byte} of shared memory through the async proxy after an ordinary store with no "
            "fence.proxy.async since"
        )


def proxy_fence_global(co: Cohort, ck: Chunk) -> None:
    """fence.proxy.async on global memory alone."""
    if ck.order is not None:
        ck.order.proxy_fence(co, (2,))


def proxy_fence_shared(co: Cohort, ck: Chunk) -> None:
    """fence.proxy.async on shared memory alone."""
    if ck.space_shared.proxies is not None:
        ck.space_shared.proxies.fence(co.ctas)
    if ck.order is not None:
        ck.order.proxy_fence(co, (1,))


def needed(kernel: Kernel) -> bool:
    """Whether a kernel reads shared memory through the async proxy at all."""
    return any(reads_asynchronously(i) for i in kernel.instructions)


def proxy_fence(co: Cohort, ck: Chunk) -> None:
    """fence.proxy.async on shared memory."""
    if ck.space_shared.proxies is not None:
        ck.space_shared.proxies.fence(co.ctas)
    if ck.order is not None:
        ck.order.proxy_fence(co, (1, 2))


NAMES: dict[str, Any] = {
    "proxy_fence": proxy_fence,
    "proxy_fence_global": proxy_fence_global,
    "proxy_fence_shared": proxy_fence_shared,
}
