"""CTA barriers: bar and barrier with sync, arrive and red (PTX ISA 9.7.14.1).

A barrier without a count waits for all threads of the CTA that have not exited, as the hardware does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.program import Block

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
BARRIERS = 16


class Barriers:
    """The named barriers of every CTA in a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        rows = len(chunk.ctas)
        self.arrived = np.zeros((rows, BARRIERS), np.int64)
        self.expected = np.zeros((rows, BARRIERS), np.int64)
        """0: no one has arrived; -1: all threads."""
        self.holding = np.zeros((rows, BARRIERS), np.int64)
        self.voters = np.zeros((rows, BARRIERS), np.int64)
        self.exited = np.zeros(rows, np.int64)
        self.waiting: dict[int, list[tuple[Cohort, Block]]] = {}
        self.waits = 0

    def arrive(
        self, co: Cohort, block: Block, number: Array, count: Array | None, predicate: Array | None
    ) -> list[tuple[Cohort, int]]:
        """Let a cohort arrive; return cohorts that may go on, each with its block."""
        item = block.instruction
        assert item is not None
        for operand in (number, count):
            if operand is not None and operand.size > 1 and not bool((operand == operand[:1, :1]).all()):
                return self._arrive_apart(co, block, operand, number, count, predicate)
        n = int(number[0, 0])
        wanted = -1 if count is None else int(count[0, 0])
        if n >= BARRIERS or wanted == 0 or (wanted > 0 and wanted % 32):
            self.chunk.report(
                "barrier-divergence",
                item,
                f"barrier {n} with a count of {wanted}: ids go to 15, counts are multiples of 32",
                co,
                np.ones((1, 1), bool),
            )
            return []
        rows = co.ctas
        wait = "arrive" not in item.modifiers
        before = self.expected[rows, n]
        if ((before != 0) & (before != wanted)).any():
            self.chunk.report(
                "barrier-divergence", item, f"threads arrive at barrier {n} with different counts", co,
                np.ones((1, 1), bool),
            )  # fmt: skip
        if self.chunk.order is not None:
            self.chunk.order.arrive(co, n)
        weights = self.chunk.launch.barrier_weights[co.threads]
        if co.rectangular:
            self.arrived[rows, n] += int(weights.sum())
        else:
            np.add.at(self.arrived[:, n], rows, weights)
        self.expected[rows, n] = wanted
        if predicate is not None:
            p = np.broadcast_to(predicate, co.shape)
            if co.rectangular:
                self.holding[rows, n] += p.sum(axis=1)
                self.voters[rows, n] += co.shape[1]
            else:
                np.add.at(self.holding[:, n], rows, p[0].astype(np.int64))
                np.add.at(self.voters[:, n], rows, 1)
        out: list[tuple[Cohort, int]] = []
        if wait:
            self.waits += len(co.warps())
            self.waiting.setdefault(n, []).append((co, block))
        else:
            out.append((co, block.following))
        return out + self.release(n)

    def _arrive_apart(
        self,
        co: Cohort,
        block: Block,
        operand: Array,
        number: Array,
        count: Array | None,
        predicate: Array | None,
    ) -> list[tuple[Cohort, int]]:
        out: list[tuple[Cohort, int]] = []
        everything = frozenset(co.registers)
        spread = np.broadcast_to(operand, co.shape)
        for v in np.unique(operand):
            mask = spread == v
            some = co.select(mask, everything)

            def part(x: Array | None, mask: Array = mask, some: Cohort = some) -> Array | None:
                return None if x is None else np.broadcast_to(x, mask.shape)[mask].reshape(some.shape)

            chosen = part(number)
            assert chosen is not None
            out += self.arrive(some, block, chosen, part(count), part(predicate))
        return out

    def release(self, n: int) -> list[tuple[Cohort, int]]:
        """Free the waiting lanes of every CTA whose barrier `n` is complete."""
        total = 32 * self.chunk.launch.warps
        expected = self.expected[:, n]
        complete = np.where(
            expected < 0, self.arrived[:, n] + self.exited >= total, self.arrived[:, n] >= expected
        )
        complete &= expected != 0
        if not complete.any():
            return []
        out: list[tuple[Cohort, int]] = []
        left = []
        for co, block in self.waiting.get(n, []):
            go = complete[co.ctas]
            mask = go[:, None] if co.rectangular else go[None, :]
            live = frozenset(co.registers)
            free, held = co.split(mask, live, live)
            if free is not None:
                self._deliver(free, block, n)
                out.append((free, block.following))
            if held is not None:
                left.append((held, block))
        if left:
            self.waiting[n] = left
        else:
            self.waiting.pop(n, None)
        for table in (self.arrived, self.expected, self.holding, self.voters):
            table[complete, n] = 0
        if self.chunk.order is not None:
            self.chunk.order.pass_barrier(n, complete, [co for co, _ in out])
        self.chunk.progress += 1
        return out

    def _deliver(self, co: Cohort, block: Block, n: int) -> None:
        item = block.instruction
        assert item is not None
        if "red" not in item.modifiers:
            return
        holding, voters = self.holding[co.ctas, n], self.voters[co.ctas, n]
        if "popc" in item.modifiers:
            value: Array = holding.astype(np.uint32)
        else:
            value = holding == voters if "and" in item.modifiers else holding > 0
        self.chunk.write_register(co, item.operands[0], value[:, None] if co.rectangular else value[None, :])

    def retire(self, co: Cohort) -> list[tuple[Cohort, int]]:
        """Count exited threads; barriers that waited for them only are complete."""
        weights = self.chunk.launch.barrier_weights[co.threads]
        if co.rectangular:
            self.exited[co.ctas] += int(weights.sum())
        else:
            np.add.at(self.exited, co.ctas, weights)
        out: list[tuple[Cohort, int]] = []
        for n in list(self.waiting):
            out += self.release(n)
        return out

    def stuck(self) -> list[tuple[Cohort, Instruction, str]]:
        """Describe who waits at barriers that will never be complete."""
        out = []
        total = 32 * self.chunk.launch.warps
        for n, entries in self.waiting.items():
            for co, block in entries:
                assert block.instruction is not None
                row = int(co.ctas[0])
                wanted = int(self.expected[row, n])
                goal = total - int(self.exited[row]) if wanted < 0 else wanted
                text = (
                    f"barrier {n} has {int(self.arrived[row, n])} of {goal} threads and no one else can come"
                )
                out.append((co, block.instruction, text))
        return out
