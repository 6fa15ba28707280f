"""mbarrier objects: phases, arrivals, transaction counts (PTX ISA 9.7.14.16).

A chunk keeps the state of its barriers in arrays, one entry (a *slot*) for each CTA and shared-memory offset
at which some CTA has initialised a barrier. A phase is complete when no arrival is pending and the
transaction count is zero; the count may be negative in between, when bytes arrive before they are announced.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.isa.ptx.model import Instruction
from workbench.simulator.access import Site
from workbench.simulator.pending import Operation, cohort_of, lanes_of

if TYPE_CHECKING:
    from workbench.simulator.cohort import Cohort
    from workbench.simulator.scheduler import Chunk

Array = npt.NDArray[Any]
RULE = "mbarrier-phase"
LIMIT = (1 << 20) - 1
"""Largest count, and largest magnitude of the transaction count."""
_COUNT_BITS = np.uint64(20)


class Mbarriers:
    """The mbarriers of the CTAs of a chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.banks = len(chunk.ctas)
        self._column = np.full(chunk.space_shared.stride // 8 + 1, -1, np.int64)
        self.offsets: list[int] = []
        """Offset in shared memory of each column of slots; slot = column * banks + row."""
        self.live = np.zeros(0, bool)
        self.expected = np.zeros(0, np.int64)
        self.pending = np.zeros(0, np.int64)
        self.tx = np.zeros(0, np.int64)
        self.phase = np.zeros(0, np.int64)
        """Completed phases."""
        self.unseen = np.zeros(0, bool)
        """The last phase is complete, and no wait for it has succeeded yet."""
        self._polled: list[Array] = []
        self._last: tuple[Array, Array, Array] | None = None
        """For each thread its last unsuccessful poll: slot, phase it waits for, index of the instruction."""
        self._items: list[Instruction] = []
        seed = chunk.options.seed
        self._random = Random(seed * 7_919 + int(chunk.ctas[0])) if seed else None

    # -- finding barriers ------------------------------------------------------------------------

    def locate(self, site: Site, address: Array, co: Cohort, *, create: bool = False) -> Array:
        """Return the slots of the mbarriers at `address` (int64; shared::cluster or generic, as `site` says).

        Lanes that fault, or whose barrier is not initialised, get -1, and a finding says so. The shape is
        that of the address and the CTAs of the cohort broadcast together.
        """
        ck = self.chunk
        rows, offset, bad = ck.cluster.locate(site, address, co)
        if ck.exited:
            ck.cluster.check_present(site.instruction, rows, co)
        if bad is not None:
            offset = np.where(bad, 0, offset)
        column = self._column[offset >> 3]
        if create and (column < 0).any():
            fresh = np.unique((offset >> 3)[column < 0])
            self._add_columns(fresh)
            column = self._column[offset >> 3]
        slots = np.where(column >= 0, column * self.banks + rows, -1)
        if bad is not None:
            slots = np.where(bad, -1, slots)
        if not create:
            dead = (slots < 0) | ~self._live(slots)
            if bad is not None:
                dead &= ~bad
            if dead.any():
                where = int(np.broadcast_to(offset, dead.shape)[dead][0])
                text = f"uses an mbarrier that is not initialised: byte {where} of shared memory"
                ck.report(RULE, site.instruction, text, co, dead)
                slots = np.where(dead, -1, slots)
        return slots

    def _live(self, slots: Array) -> Array:
        return self.live[slots] if len(self.live) else np.zeros(slots.shape, bool)

    def _add_columns(self, units: Array) -> None:
        start = len(self.offsets)
        self._column[units] = np.arange(start, start + len(units))
        self.offsets.extend(int(u) * 8 for u in units)
        more = len(units) * self.banks
        self.live = np.concatenate([self.live, np.zeros(more, bool)])
        self.unseen = np.concatenate([self.unseen, np.zeros(more, bool)])
        for name in ("expected", "pending", "tx", "phase"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, np.int64)]))

    def name(self, slot: int) -> str:
        """Say which barrier a slot is, and its state."""
        column, row = divmod(slot, self.banks)
        return (
            f"the mbarrier at byte {self.offsets[column]} of shared memory of CTA "
            f"{int(self.chunk.ctas[row])} (phase {int(self.phase[slot])}: {int(self.pending[slot])} of "
            f"{int(self.expected[slot])} arrivals pending, tx-count {int(self.tx[slot])})"
        )

    # -- changes ---------------------------------------------------------------------------------

    def initialise(self, slots: Array, count: Array) -> Array:
        """Set up barriers; return which of `slots` were live already."""
        again = self.live[slots]
        self.live[slots] = True
        self.unseen[slots] = False
        self.expected[slots] = self.pending[slots] = count
        self.tx[slots] = self.phase[slots] = 0
        self.chunk.progress += 1
        return again

    def arrive(self, slots: Array, count: Array, tx: Array | None, drop: bool) -> tuple[Array, Array, Array]:
        """Let lanes arrive one after the other; all arrays (lanes,), no slot is -1.

        Returns:
            The token of each lane (phase and pending count before it arrived), which lanes arrive where no
            arrival is due, and which begin a phase though nobody has seen the end of the one before (ISA:
            some wait for each phase must succeed before an arrival in the next).
        """
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        first = np.ones(len(slots), bool)
        first[1:] = ordered[1:] != ordered[:-1]
        starts = np.flatnonzero(first)
        segment = np.cumsum(first) - 1
        heads = ordered[starts]
        total = np.add.reduceat(count[order], starts)
        token = np.empty(len(slots), np.int64)
        over, hasty = np.zeros(len(slots), bool), self.unseen[slots]
        if (total <= self.pending[heads]).all():
            before = np.cumsum(count[order]) - count[order]
            before -= before[starts][segment]
            token[order] = self.phase[ordered] << 20 | (self.pending[ordered] - before)
            if tx is not None:
                self.tx[heads] += np.add.reduceat(tx[order], starts)
            if drop:
                self.expected[heads] -= total
            self.pending[heads] -= total
            self._complete(heads)
            return token, over, hasty
        rank = np.arange(len(slots)) - starts[segment]
        for r in range(int(rank.max()) + 1):
            lanes = order[rank == r]
            at, n = slots[lanes], count[lanes]
            token[lanes] = self.phase[at] << 20 | self.pending[at]
            hasty[lanes] = self.unseen[at]
            if tx is not None:
                self.tx[at] += tx[lanes]
            bad = n > self.pending[at]
            over[lanes] = bad
            good = ~bad
            if drop:
                self.expected[at[good]] -= n[good]
            self.pending[at[good]] -= n[good]
            self._complete(at)
        return token, over, hasty

    def add_tx(self, slots: Array, amount: Array) -> None:
        """expect_tx (positive) or complete_tx (negative); (lanes,), no slot is -1."""
        np.add.at(self.tx, slots, amount)
        self._complete(np.unique(slots))

    def _complete(self, slots: Array) -> None:
        self.chunk.progress += 1
        done = slots[(self.pending[slots] == 0) & (self.tx[slots] == 0)]
        if len(done):
            self.phase[done] += 1
            self.unseen[done] = True
            self.pending[done] = self.expected[done]
            if self.chunk.order is not None:
                self.chunk.order.mbarrier_complete(done)

    def signal(self, operation: Operation, chosen: Array) -> None:
        """Do what the completion of an asynchronous operation does to its barriers."""
        assert operation.slots is not None
        slots = operation.slots[chosen]
        known = slots >= 0
        dead = known & ~self._live(slots)
        if dead.any():
            ck = self.chunk
            text = "an asynchronous operation completes on an mbarrier that is no longer valid"
            ck.report(RULE, operation.item, text, cohort_of(ck, operation.lanes[chosen]), dead[None, :])
        known &= ~dead
        slots = slots[known]
        if not len(slots):
            return
        if self.chunk.order is not None:
            self.chunk.order.completed(operation, chosen)
        if operation.transaction is not None:
            self.add_tx(slots, -operation.transaction[chosen][known])
        if operation.arrivals:
            count = np.full(len(slots), operation.arrivals, np.int64)
            _, over, _ = self.arrive(slots, count, None, False)
            if over.any():
                ck = self.chunk
                text = f"an asynchronous arrival too many at {self.name(int(slots[over][0]))}"
                lanes = cohort_of(ck, operation.lanes[chosen][known])
                ck.report(RULE, operation.item, text, lanes, over[None, :])

    # -- waiting ---------------------------------------------------------------------------------

    def test(self, site: Site, slots: Array, goal: Array | None, parity: Array | None, co: Cohort) -> Array:
        """Whether a phase is complete: the one numbered `goal`, or the last one of `parity`."""
        known = slots >= 0
        # A barrier that was never initialised has no slot; where none has, there is no table either.
        phase = self.phase[slots] if len(self.phase) else np.zeros(slots.shape, np.int64)
        done = phase > goal if goal is not None else (phase & 1) != parity
        done = done | ~known
        if not done.all():
            self._note(site, slots, phase, done, co)
        return done

    def stumble(self, done: Array) -> Array:
        """Have a poll that could succeed come too early now and then; only under a seed."""
        if self._random is None or not done.any() or self._random.random() >= 0.25:
            return done
        self.chunk.progress += 1
        return np.zeros(done.shape, bool)

    def _note(self, site: Site, slots: Array, phase: Array, done: Array, co: Cohort) -> None:
        if self._last is None:
            count = self.banks * self.chunk.launch.threads
            self._last = (np.full(count, -1, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64))
        if site.instruction not in self._items[-8:]:
            self._items.append(site.instruction)
        shape = co.shape
        waits = ~np.broadcast_to(done, shape).ravel()
        lanes = lanes_of(co)[waits]
        spread = np.broadcast_to(slots, shape).ravel()[waits]
        self._polled.append(np.broadcast_to(slots, done.shape)[~done])
        slot, goal, index = self._last
        slot[lanes] = spread
        goal[lanes] = np.broadcast_to(phase, shape).ravel()[waits]
        index[lanes] = len(self._items) - 1 - self._items[::-1].index(site.instruction)

    def take_polled(self) -> Array:
        """Return the slots that threads polled in vain since the last call."""
        polled, self._polled = self._polled, []
        return np.unique(np.concatenate(polled)) if polled else np.zeros(0, np.int64)

    def describe(self, co: Cohort) -> tuple[Instruction, str] | None:
        """Say what the first lane of a polling cohort waits for, if it is an mbarrier."""
        if self._last is None:
            return None
        lane = int(lanes_of(co)[0])
        slot, goal, index = (int(x[lane]) for x in self._last)
        if slot < 0 or int(self.phase[slot]) != goal:
            return None
        return self._items[index], f"waits for the end of phase {goal} of {self.name(slot)}"


# -- what generated code calls -------------------------------------------------------------------


def init(site: Site, address: Array, count: Array, co: Cohort, ck: Chunk) -> None:
    """mbarrier.init."""
    m = ck.mbarriers
    slots = m.locate(site, address, co, create=True)
    shape = np.broadcast_shapes(slots.shape, count.shape)
    slots, number = np.broadcast_to(slots, shape), np.broadcast_to(count.astype(np.int64), shape)
    wrong = (number < 1) | (number > LIMIT)
    if wrong.any():
        ck.report(RULE, site.instruction, "an mbarrier count is 1 to 1048575", co, wrong)
    known = slots >= 0
    again = np.zeros(shape, bool)
    again[known] = m.initialise(slots[known], number[known])
    if ck.order is not None:
        ck.order.mbarrier_reset(slots[known])
    if again.any():
        text = f"initialises {m.name(int(slots[again][0]))} again without mbarrier.inval"
        ck.report(RULE, site.instruction, text, co, again)


def inval(site: Site, address: Array, co: Cohort, ck: Chunk) -> None:
    """mbarrier.inval."""
    slots = ck.mbarriers.locate(site, address, co)
    ck.mbarriers.live[slots[slots >= 0]] = False
    ck.progress += 1


def arrive(
    site: Site, address: Array, count: Array, tx: Array | None, drop: bool, incomplete: bool, co: Cohort,
    ck: Chunk,
) -> Array:  # fmt: skip
    """mbarrier.arrive and arrive_drop, with `.expect_tx` if `tx`; return the tokens (uint64)."""
    m = ck.mbarriers
    slots = np.broadcast_to(m.locate(site, address, co), co.shape).ravel()
    known = slots >= 0
    lanes = slots[known]
    tokens = np.zeros(co.lanes, np.int64)
    if len(lanes):

        def flat(value: Array) -> Array:
            wide: Array = np.broadcast_to(value.astype(np.int64), co.shape).ravel()[known]
            return wide

        before = m.phase[lanes].copy()
        names = m.name(int(lanes[0]))
        if ck.order is not None:
            ck.order.mbarrier_arrive(site.instruction, slots, co)
        token, over, hasty = m.arrive(lanes, flat(count), None if tx is None else flat(tx), drop)
        tokens[known] = token
        bad = np.zeros(co.lanes, bool)
        if over.any():
            bad[known] = over
            text = f"an arrival too many: {names}" if len(lanes) == 1 else (
                f"more arrivals than are pending at {m.name(int(lanes[over][0]))}"
            )  # fmt: skip
            ck.report(RULE, site.instruction, text, co, bad.reshape(co.shape))
        elif hasty.any():
            bad[known] = hasty
            text = (
                f"arrives in the next phase of {m.name(int(lanes[hasty][0]))} though no wait saw the end "
                "of the one before: there are more arrivals than the count says, or nobody waits"
            )
            ck.report(RULE, site.instruction, text, co, bad.reshape(co.shape))
        if incomplete and (m.phase[lanes] != before).any():
            bad[known] = m.phase[lanes] != before
            text = "an arrival with .noComplete completes the phase"
            ck.report(RULE, site.instruction, text, co, bad.reshape(co.shape))
        ck.cluster.signalled(lanes % m.banks)
    return tokens.view(np.uint64).reshape(co.shape)


def change_tx(site: Site, address: Array, amount: Array, sign: int, co: Cohort, ck: Chunk) -> None:
    """mbarrier.expect_tx (sign 1) and complete_tx (sign -1)."""
    slots = np.broadcast_to(ck.mbarriers.locate(site, address, co), co.shape).ravel()
    number = np.broadcast_to(amount.astype(np.int64), co.shape).ravel() * sign
    known = slots >= 0
    if known.any():
        ck.mbarriers.add_tx(slots[known], number[known])


def test(
    site: Site, address: Array, state: Array, parity: bool, patient: bool, co: Cohort, ck: Chunk
) -> Array:
    """mbarrier.test_wait, or try_wait if `patient`; `state` is a token or the parity of a phase."""
    m = ck.mbarriers
    slots = m.locate(site, address, co)
    if parity:
        done = m.test(site, slots, None, state.astype(np.int64) & 1, co)
        return _passed(site, slots, m.stumble(done) if patient else done, co, ck)
    goal = (state >> _COUNT_BITS).astype(np.int64)
    old = (slots >= 0) & (m.phase[slots] > goal + 1)
    if old.any():
        text = "waits with the token of a phase that is neither the current one nor the one before"
        ck.report(RULE, site.instruction, text, co, old)
    done = m.test(site, slots, goal, None, co)
    return _passed(site, slots, m.stumble(done) if patient else done, co, ck)


def _passed(site: Site, slots: Array, done: Array, co: Cohort, ck: Chunk) -> Array:
    """Have threads whose wait succeeds be ordered after those that arrived."""
    known = done & (slots >= 0)
    if known.any():
        ck.mbarriers.unseen[np.broadcast_to(slots, known.shape)[known]] = False
    if ck.order is not None:
        ck.order.mbarrier_wait(site.instruction, slots, done & (slots >= 0), co)
    return done


def pending_count(state: Array) -> Array:
    """mbarrier.pending_count: the pending arrivals that a token holds."""
    return (state & np.uint64(LIMIT)).astype(np.uint32)
