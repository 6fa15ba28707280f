"""Runs the cohorts of a chunk of CTAs: lowest block first, so that divergent lanes meet again where paths
join.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from workbench.findings import Severity
from workbench.isa.ptx.model import Instruction, Operand, Reg
from workbench.simulator.access import PARAM_WINDOW, BankedSpace, GlobalSpace, Site
from workbench.simulator.adversary import Pick
from workbench.simulator.barriers import Barriers
from workbench.simulator.cluster import Clusters
from workbench.simulator.cohort import Cohort, merge, poison
from workbench.simulator.copies import AsyncCopies
from workbench.simulator.launch import LaunchState
from workbench.simulator.mbarrier import Mbarriers
from workbench.simulator.memory import BASE
from workbench.simulator.multimem import describe, is_multicast
from workbench.simulator.ordering.order import order_of
from workbench.simulator.pending import AsyncOperations
from workbench.simulator.program import Action, Block, UnsupportedInstruction
from workbench.simulator.proxies import Proxies, needed
from workbench.simulator.special import special
from workbench.simulator.stuck import report_deadlock
from workbench.simulator.tcgen05 import TensorCores
from workbench.simulator.wgmma import Warpgroups

Array = npt.NDArray[Any]

STALLS_BEFORE_PARTIAL = 4
"""Fruitless polling rounds before an incomplete warp goes on without its missing lanes."""
STALLS_BEFORE_DEADLOCK = 64
"""Fruitless polling rounds of every chunk before the launch counts as deadlocked."""
STALLS_BEFORE_COMPARISON = 8
"""From here on a round also counts as progress if a register of a polling lane has changed."""


class Chunk:
    """CTAs that run together, as arrays of their lanes."""

    def __init__(self, launch: LaunchState, ctas: Array, space_global: GlobalSpace) -> None:
        self.launch, self.ctas = launch, ctas
        self.options = launch.options
        self.watched = (
            launch.options.observer is not None or launch.traffic is not None or launch.tracer is not None
        )
        self.space_global = space_global
        program = launch.program
        shared = program.shared_static + launch.shared_dynamic
        self.space_shared = BankedSpace(len(ctas), shared, "shared")
        if shared and self.options.check_memory and not self.options.check_races and needed(program.kernel):
            self.space_shared.proxies = Proxies(len(ctas), self.space_shared.stride)
        self.space_local = BankedSpace(
            len(ctas) * launch.threads if program.local_bytes else 1, program.local_bytes, "local"
        )
        self.order = self.space_shared.order = order_of(self, launch)
        self.alive = np.ones((len(ctas), launch.threads), bool)
        self.exited = False
        self.barriers = Barriers(self)
        self.copies = AsyncCopies(self)
        self.wgmma = Warpgroups(self)
        self.cluster = Clusters(self)
        self.mbarriers = Mbarriers(self)
        self.asyncs = AsyncOperations(self)
        self.tensor = TensorCores(self)
        self.pending: dict[int, list[Cohort]] = {}
        self.parked: dict[int, list[Cohort]] = {}
        """Incomplete warps before a warp-synchronous block."""
        self.yielded: dict[int, list[Cohort]] = {}
        self.visits = np.zeros((len(program.blocks), len(ctas) * launch.warps), np.uint32)
        self.passes = [0] * len(program.blocks)
        """Lanes that ran each block."""
        self._random = Random(self.options.seed * 1_000_003 + int(ctas[0])) if self.options.seed else None
        self._size = len(program.blocks)
        adversary = self.options.adversary
        self._ahead = adversary.pick is Pick.HIGHEST
        self._victims: Array | None = None
        """Threads that run only when no other thread can, (CTAs, threads); their cohorts wait under the
        number of their block plus the number of blocks."""
        if adversary.starved is not None:
            x, y, z = launch.cluster
            held = adversary.starved.rows_and_threads(ctas, launch.threads, x * y * z)
            self._victims = held if held.any() and not held.all() else None
        self._seen_by_pollers = 0
        self.dependent: list[tuple[Cohort, Block]] = []
        """Who waits in griddepcontrol.wait."""
        self.started = len(ctas)
        """CTAs that have begun."""
        if adversary.resident is not None:
            self.started = min(len(ctas), max(self.cluster_size, self._room()))
        self.divergent_branches = 0
        self.deadlocked = False
        x, y, _ = launch.grid
        self.ctaid = {"x": ctas % x, "y": ctas // x % y, "z": ctas // (x * y)}

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        x, y, z = self.launch.cluster
        return x * y * z

    def _room(self) -> int:
        """CTAs that can be resident at a time, in whole clusters."""
        room = self.options.adversary.resident
        return len(self.ctas) if room is None else room - room % self.cluster_size

    @property
    def progress(self) -> int:
        """Counts events that may let a waiting lane go on."""
        return self.launch.progress

    @progress.setter
    def progress(self, value: int) -> None:
        self.launch.progress = value

    def watch(self, site: Site, address: Array, co: Cohort) -> None:
        """Show an access to whoever counts or observes; called only while `watched`."""
        if self.launch.traffic is not None:
            self.launch.traffic.access(site, address, co)
        if self.launch.tracer is not None:
            self.launch.tracer.access(site, address, co)
        if self.options.observer is not None:
            self.options.observer(site, address, co, self)

    # -- execution -------------------------------------------------------------------------------

    def run(self) -> Iterator[bool]:
        """Run to the end; yields False while every lane polls memory, True where others may run."""
        launch = self.launch
        blocks, functions, live = launch.program.blocks, launch.program.functions, launch.program.live
        costs = launch.program.costs
        needs = [_needs_whole_warps(b) for b in blocks]
        unwritten = {key: poison(launch.program.dtypes[key]) for key in live[0]}
        self._unwritten = unwritten
        self._begin(0, self.started)
        full = len(self.ctas) * launch.threads
        forced = False
        stalls, seen, state = 0, launch.progress, 0
        while True:
            if not self.pending:
                if self.yielded and self.asyncs.relieve(stalls):
                    self.pending, self.yielded, stalls = self.yielded, {}, 0
                    continue
                if self.dependent:
                    if launch.may_pass_wait:
                        self._pass_wait()
                        continue
                    yield False
                    self.pending, self.yielded = self.yielded, {}
                    continue
                if self.yielded and not (self.parked and stalls > STALLS_BEFORE_PARTIAL):
                    yield False
                    stalls = 0 if launch.progress != seen else stalls + 1
                    seen = launch.progress
                    if stalls > STALLS_BEFORE_COMPARISON:
                        before, state = state, self._state()
                        if state != before:
                            stalls = STALLS_BEFORE_COMPARISON
                    if stalls > STALLS_BEFORE_DEADLOCK and not self.parked:
                        self._deadlock()
                        return
                    self.pending, self.yielded = self.yielded, {}
                elif self.parked:
                    k = min(self.parked)
                    self.pending[k] = self.parked.pop(k)
                    forced, stalls = True, 0
                else:
                    break
            if self._victims is not None and self.yielded and min(self.pending) >= self._size:
                moved = self.asyncs.relieve(0)
                if moved or launch.progress != self._seen_by_pollers:
                    self._seen_by_pollers = launch.progress
                    for key, cohorts in self.yielded.items():
                        self.pending.setdefault(key, []).extend(cohorts)
                    self.yielded = {}
                    continue
            k = self._pick()
            group = self.pending.pop(k)
            if k in self.parked:
                group += self.parked.pop(k)
            level, k = k - k % self._size, k % self._size
            co = group[0] if len(group) == 1 else merge(group, live[k], launch.program.dtypes)
            while True:
                block = blocks[k]
                if needs[k] and not co.whole():
                    if not forced:
                        # Warps that are complete go on: what the others miss may be waiting for them.
                        ready, rest = co.split(co.lanes_of_whole_warps(), live[k], live[k])
                        if rest is not None:
                            self.parked.setdefault(k + level, []).append(rest)
                        if ready is None:
                            break
                        co = ready
                        continue
                    forced = False
                    if block.action is Action.BARRIER and not block.warp_synchronous:
                        self._partial_barrier(co, block)
                lanes = co.lanes
                if lanes == full:
                    self.visits[k] += 1
                else:
                    self.visits[k, co.warps()] += 1
                self.passes[k] += lanes
                launch.lane_instructions += lanes * costs[k].instructions
                launch.check_limits()
                result = functions[k](co, self)
                k = self._after(co, block, result)
                if launch.stepwise:
                    yield True
                if k < 0:
                    break
                if ((self.pending or level) and self._interrupts(k + level)) or k + level in self.parked:
                    self.pending.setdefault(k + level, []).append(co)
                    break
        self.asyncs.finish()
        self.tensor.finish()
        if self.barriers.waiting or self.cluster.waiting:
            self._deadlock()

    def _pick(self) -> int:
        """Choose the block to run next: the lowest, or any if a seed asks for another schedule."""
        if len(self.pending) == 1:
            return next(iter(self.pending))
        if self._random is None and not self._ahead:
            return min(self.pending)
        first = [k for k in self.pending if k < self._size] or list(self.pending)
        return max(first) if self._random is None else self._random.choice(sorted(first))

    def _interrupts(self, k: int) -> bool:
        """Whether other lanes run before a cohort that stands at block `k`."""
        if k >= self._size and (
            self.launch.progress != self._seen_by_pollers
            if self.yielded
            else self.pending and min(self.pending) < self._size
        ):
            return True
        if not self.pending:
            return False
        if self._random is not None:
            return self._random.random() < 0.5
        if self._ahead:
            return max(self.pending) > k
        return min(self.pending) <= k

    def _state(self) -> int:
        """Return a checksum of the registers of polling lanes."""
        total = 0
        for k in sorted(self.yielded):
            for co in self.yielded[k]:
                for key in sorted(self.launch.program.live[k % self._size] & co.registers.keys()):
                    total = crc32(co.registers[key].tobytes(), total)
        return total

    def _after(self, co: Cohort, block: Block, result: Any) -> int:
        """Carry out a block's action; return the block at which the same cohort goes on, or -1."""
        live = self.launch.program.live
        action = block.action
        if action is Action.JUMP:
            k = block.target if block.target >= 0 else block.following
            if block.spins and k <= block.index:
                self._yield(co, k)
                return -1
            return k
        if action is Action.BRANCH:
            taken, other = co.split(result, live[block.target], live[block.following])
            if taken is not None and other is not None:
                self.divergent_branches += max(0, len(taken.warps()) + len(other.warps()) - len(co.warps()))
            spins = block.spins and block.target <= block.index
            if taken is not None and spins:
                self._yield(taken, block.target)
                taken = None
            if taken is None:
                if other is None:
                    return -1
                if other is co:
                    return block.following
                self._push(other, block.following)
                return -1
            if other is None and taken is co:
                return block.target
            self._push(taken, block.target)
            if other is not None:
                self._push(other, block.following)
            return -1
        if action is Action.BARRIER:
            if block.instruction is not None and block.instruction.opcode == "griddepcontrol":
                if self.launch.may_pass_wait:
                    if self.order is not None:
                        self.order.grid_wait(co)
                    return block.following
                self.dependent.append((co, block))
                return -1
            if block.instruction is not None and "cluster" in block.instruction.modifiers:
                released = self.cluster.wait(co, block)
            else:
                released = self.barriers.arrive(co, block, *result)
            if len(released) == 1 and released[0][0] is co:
                return released[0][1]
            self._continue(released)
            return -1
        if action is Action.TABLE:
            for v in np.unique(result):
                if int(v) >= len(block.table):
                    assert block.instruction is not None
                    self.report(
                        "out-of-bounds",
                        block.instruction,
                        "the index of brx.idx is past its table",
                        co,
                        result == v,
                    )
                    continue
                some = co if result.size == 1 else co.split(result == v, live[block.table[v]], frozenset())[0]
                if some is not None:
                    self._push(some, block.table[int(v)])
            return -1
        if action is Action.TRAP:
            assert block.instruction is not None
            self.report("trap", block.instruction, "the kernel executes a trap", co, np.ones((1, 1), bool))
        self._exit(co)
        return -1

    def resume(self, cohorts: list[tuple[Cohort, int]]) -> None:
        """Have cohorts go on at the blocks given with them."""
        self._continue(cohorts)

    def _continue(self, cohorts: list[tuple[Cohort, int]]) -> None:
        for co, k in cohorts:
            self._push(co, k)

    def _level(self, co: Cohort) -> int:
        """Return what is added to the number of a block for a cohort that is held back."""
        if self._victims is None:
            return 0
        return self._size if self._victims[co.ctas[0], co.threads[0]] else 0

    def _push(self, co: Cohort, k: int) -> None:
        """Have a cohort go on at block `k` when its turn comes."""
        self.pending.setdefault(k + self._level(co), []).append(co)

    def _yield(self, co: Cohort, k: int) -> None:
        """Have a cohort that polls look again at block `k` when others have run."""
        self.yielded.setdefault(k + self._level(co), []).append(co)

    def _begin(self, first: int, last: int) -> None:
        """Start the CTAs `first` to `last - 1` of the chunk."""
        everyone = Cohort(
            self, np.arange(first, last), np.arange(self.launch.threads), True, dict(self._unwritten)
        )
        if self._victims is None:
            self._push(everyone, 0)
            return
        nothing = frozenset(self._unwritten)
        for part in everyone.split(self._victims[first:last], nothing, nothing):
            if part is not None:
                self._push(part, 0)

    def _admit(self) -> None:
        """Start CTAs that had no room as others have exited."""
        resident = int(self.alive[: self.started].any(axis=1).sum())
        while self.started < len(self.ctas) and resident + self.cluster_size <= self._room():
            self._begin(self.started, self.started + self.cluster_size)
            self.started += self.cluster_size
            resident += self.cluster_size

    def trigger(self, co: Cohort) -> None:
        """griddepcontrol.launch_dependents: what the CTA had to do before the next grid may start."""
        if self.order is not None:
            self.order.trigger(co)
        self.launch.open[self.ctas[co.ctas]] = True
        self.progress += 1

    def _pass_wait(self) -> None:
        waiting, self.dependent = self.dependent, []
        if self.order is not None:
            for co, _ in waiting:
                self.order.grid_wait(co)
        self._continue([(co, block.following) for co, block in waiting])

    def _exit(self, co: Cohort) -> None:
        self.progress += 1
        if co.lanes == self.alive.size:
            self.launch.open[self.ctas] = True
            self.cluster.end()
            return
        self.exited = True
        if co.rectangular:
            self.alive[np.ix_(co.ctas, co.threads)] = False
        else:
            self.alive[co.ctas, co.threads] = False
        if self.options.adversary.overlap:
            self.launch.open[self.ctas] |= ~self.alive.any(axis=1)
        self._continue(self.barriers.retire(co))
        self._continue(self.cluster.retire(co))
        if self.started < len(self.ctas):
            self._admit()

    def _deadlock(self) -> None:
        self.deadlocked = True
        report_deadlock(self)

    def _partial_barrier(self, co: Cohort, block: Block) -> None:
        item = block.instruction
        assert item is not None
        self.report(
            "barrier-divergence",
            item,
            "part of a warp reaches a barrier that wants whole warps",
            co,
            np.ones((1, 1), bool),
        )

    # -- lanes -----------------------------------------------------------------------------------

    def live_lanes_of_warps(self) -> Array:
        """Number of lanes that have not exited, by warp."""
        counts = np.add.reduceat(self.alive, np.arange(0, self.launch.threads, 32), axis=1, dtype=np.int64)
        result: Array = counts.ravel()
        return result

    def living_masks(self, co: Cohort) -> Array:
        """Return for each lane of `co` the mask of lanes of its warp that have not exited."""
        padded = np.zeros((len(self.ctas), self.launch.warps * 32), bool)
        padded[:, : self.launch.threads] = self.alive
        masks = np.packbits(padded.reshape(len(self.ctas), -1, 32), axis=-1, bitorder="little").view(
            np.uint32
        )[..., 0]
        result: Array = masks[co.rows(), co.columns() >> 5]
        return result

    def write_register(self, co: Cohort, operand: Operand, value: Array) -> None:
        """Write a register of a waiting cohort."""
        if isinstance(operand, Reg):
            for key in self.launch.program.context.keys(operand.name):
                co.registers[key] = value.astype(self.launch.program.dtypes[key])

    def special(self, co: Cohort, name: str) -> Array:
        """Return a special register for the lanes of a cohort."""
        return special(self, co, name)

    # -- findings --------------------------------------------------------------------------------

    def _first(self, co: Cohort, bad: Array) -> tuple[str, int, tuple[int, int]]:
        spread = np.broadcast_to(bad, co.shape)
        at = int(np.argmax(spread))
        r, c = divmod(at, co.shape[1])
        return self.thread_name(co, r, c), int(np.count_nonzero(spread)), (r, c)

    def thread_name(self, co: Cohort, r: int, c: int) -> str:
        """Return a lane of a cohort as findings name it."""
        cta = int(co.ctas[r] if co.rectangular else co.ctas[c])
        thread = int(co.threads[c])
        return self.launch.thread_name(int(self.ctas[cta]), thread)

    def report(
        self, rule: str, item: Instruction | None, message: str, co: Cohort, bad: Array, *,
        other: Instruction | None = None, fix: str = "", buffer: str | None = None,
        severity: Severity = Severity.ERROR,
    ) -> None:  # fmt: skip
        """Add a finding about the lanes `bad` (bool, broadcastable to the cohort's shape).

        Args:
            rule: its id.
            item: the instruction.
            message: what can go wrong.
            co: the lanes.
            bad: which of them.
            other: the second instruction of a pair.
            fix: what to do, if not what the rule says.
            buffer: the buffer concerned.
            severity: how much it matters.
        """
        thread, count, _ = self._first(co, bad)
        if self.launch.tracer is not None:
            self.launch.tracer.finding(rule, item, co, self, bad)
        self.launch.log.add(
            rule, item, message, thread=thread, count=count, other=other, fix=fix, buffer=buffer,
            severity=severity,
        )  # fmt: skip

    def fault(self, rule: str, site: Site, co: Cohort, bad: Array, address: Array) -> None:
        """Add a finding about memory accesses of the lanes `bad` at `address`."""
        item = site.instruction
        thread, count, (r, c) = self._first(co, bad)
        at = int(np.broadcast_to(address, co.shape)[r, c])
        bank = {"shared": self.space_shared, "local": self.space_local}.get(site.space)
        if rule == "race" and bank is not None:  # a place among all banks
            at = at % bank.stride + bank.base
        buffer, place = self._place(site, at)
        if rule == "out-of-bounds" and is_multicast(at) and item.opcode != "multimem":
            rule = "multimem-order"
        verb = "writes" if item.opcode in ("st", "red", "atom") else "reads"
        if item.opcode == "cp":
            verb = "copies"
        messages = {
            "out-of-bounds": f"a {site.size}-byte access outside every buffer: {place}",
            "misaligned": f"a {site.size}-byte access at no multiple of {site.size}: {place}",
            "uninitialized-read": f"{verb} {site.size} bytes of which some were never written: {place}",
            "read-only-write": f"writes to a buffer that is only to be read: {place}",
            "multimem-order": f"multimem on an ordinary address: {place}"
            if item.opcode == "multimem"
            else f"an ordinary access to a multicast address is undefined: {place}",
            "race": f"lanes of one instruction store different values to one address: {place}",
        }
        if self.launch.tracer is not None:
            self.launch.tracer.finding(rule, item, co, self, bad)
        self.launch.log.add(rule, item, messages[rule], thread=thread, address=at, buffer=buffer, count=count)

    def _place(self, site: Site, address: int) -> tuple[str | None, str]:
        if site.space != "global":
            space = {"shared": self.space_shared, "local": self.space_local}.get(site.space)
            size = f" of {space.size} bytes" if space is not None else ""
            start = space.base if space is not None else 0
            return None, f"byte {address - start} of {site.space} memory{size}"
        memory = self.launch.memory
        if is_multicast(address):
            return describe(memory.multicast, address)
        offset = address - BASE
        a = memory.find(offset)
        if a is not None:
            return a.name, f"byte {offset - a.start} of {a.name!r}, which has {a.size}"
        a = memory.nearest(offset)
        if a is None or max(a.start - offset, offset - a.end) > 1 << 20:
            return None, f"address {address:#x}, near no buffer"
        if offset < a.start:
            return a.name, f"{a.start - offset} bytes before {a.name!r}"
        return a.name, f"{offset - a.end} bytes after the end of {a.name!r}, which has {a.size}"

    def unsupported(self, item: Instruction, reason: str) -> None:
        """Stop at an operation that only shows at run time.

        Raises:
            UnsupportedInstruction: always.
        """
        raise UnsupportedInstruction(item, reason)

    def load_param(self, site: Site, address: Array, co: Cohort) -> Array:
        """Read kernel parameters through a pointer."""
        from workbench.simulator.access import typed_views

        i = address + site.k
        if int(i.min()) >= PARAM_WINDOW:
            i = i - PARAM_WINDOW
        data = np.zeros(len(self.launch.parameters) + 64, np.uint8)
        data[: len(self.launch.parameters)] = np.frombuffer(self.launch.parameters, np.uint8)
        bad = (i < 0) | (i + site.size > len(self.launch.parameters))
        if bad.any():
            self.fault("out-of-bounds", site, co, bad, i)
            i = np.where(bad, 0, i)
        if ((i & site.mask) != 0).any():
            self.fault("misaligned", site, co, (i & site.mask) != 0, i)
        return typed_views(data)[site.size].take(i >> site.shift, mode="clip")

    def printf(self, form: Array, arguments: Array, co: Cohort) -> None:
        """Collect the text of a device printf, a line a lane."""
        from workbench.simulator.printf import render

        room = self.options.printf_limit - len(self.launch.printed)
        if room > 0:
            self.launch.printed.extend(render(self, form, arguments, co, room))


def _needs_whole_warps(block: Block) -> bool:
    if block.warp_synchronous:
        return True
    item = block.instruction
    if block.action is not Action.BARRIER or item is None:
        return False
    return item.opcode == "bar" or "aligned" in item.modifiers
