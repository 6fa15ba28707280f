"""Happens-before against vector clocks kept a thread each, in plain Python, on random programs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.simulator.kernels import kernel, lanes, run

THREADS = 96
Pair = tuple[int, int]


@dataclass
class Oracle:
    """One vector clock a thread; the order in which operations are given is an order of execution."""

    now: list[list[int]] = field(
        default_factory=lambda: [[int(i == j) for j in range(THREADS)] for i in range(THREADS)]
    )
    flags: dict[int, list[int]] = field(default_factory=dict)
    accesses: dict[int, list[tuple[int, int, bool, int]]] = field(default_factory=dict)
    races: set[Pair] = field(default_factory=set)

    def access(self, thread: int, slot: int, write: bool, line: int) -> None:
        for other, when, wrote, first in self.accesses.setdefault(slot, []):
            if (write or wrote) and other != thread and self.now[thread][other] < when:
                self.races.add((first, line))
        self.accesses[slot].append((thread, self.now[thread][thread], write, line))

    def release(self, threads: list[int]) -> list[int]:
        joined = [max(self.now[t][k] for t in threads) for k in range(THREADS)]
        for t in threads:
            self.now[t][t] += 1
        return joined

    def acquire(self, threads: list[int], clock: list[int]) -> None:
        for t in threads:
            self.now[t] = [max(a, b) for a, b in zip(self.now[t], clock, strict=True)]

    def atomic(self, thread: int, flag: int) -> None:
        if flag in self.flags:
            self.acquire([thread], self.flags[flag])
        mine = self.release([thread])
        self.flags[flag] = [max(a, b) for a, b in zip(mine, self.flags.get(flag, mine), strict=True)]


def span(rng: random.Random) -> tuple[int, int]:
    """A range of threads: a warp, a lane, part of a warp, all."""
    warp = rng.randrange(3) * 32
    lane = rng.randrange(32)
    return rng.choice(
        [
            (warp, warp + 32),
            (warp + lane, warp + lane + 1),
            (warp, warp + 1),
            (warp + 8, warp + 24),
            (0, THREADS),
        ]
    )


def program(seed: int) -> tuple[str, Oracle]:
    """A random program for 96 threads and what the oracle says of it. One line an instruction that counts."""
    rng, oracle = random.Random(seed), Oracle()
    text = ["mov.u32 %r1, %tid.x;", "mov.u32 %r2, s;", "mad.lo.u32 %r3, %r1, 4, %r2;", "mov.u32 %r4, flags;"]
    line = kernel("", ["out"]).splitlines().index("ld.param.u64 %out, [p_out];") + 1 + 2  # and two variables

    def say(*instructions: str) -> int:
        text.extend(instructions)
        return line + len(text) - 1

    def where(threads: tuple[int, int]) -> None:
        say(f"sub.u32 %r10, %r1, {threads[0]};", f"setp.lt.u32 %p1, %r10, {threads[1] - threads[0]};")

    for step in range(rng.randrange(4, 14)):
        who = span(rng)
        everyone = list(range(*who))
        match rng.choice(
            ["store", "load", "store", "load", "fixed", "peek", "bar", "pair", "arrive", "warp", "atom"]
        ):
            case "store":
                where(who)
                at = say(f"add.u32 %r11, %r1, {1000 * (step + 1)};", "@%p1 st.shared.u32 [%r3], %r11;")
                for t in everyone:
                    oracle.access(t, t, True, at)
            case "load":
                where(who)
                d = rng.choice([1, 4, 31, 32, 64])
                at = say(
                    f"add.u32 %r12, %r1, {d};", f"rem.u32 %r12, %r12, {THREADS};",
                    "mad.lo.u32 %r12, %r12, 4, %r2;",
                    "@%p1 ld.shared.u32 %r13, [%r12];",
                )  # fmt: skip
                for t in everyone:
                    oracle.access(t, (t + d) % THREADS, False, at)
            case "fixed":
                where((who[0], who[0] + 1))
                at = say(f"@%p1 st.shared.u32 [%r2+20], {7000 + step};")
                oracle.access(who[0], 5, True, at)
            case "peek":
                where(who)
                at = say("@%p1 ld.shared.u32 %r13, [%r2+20];")
                for t in everyone:
                    oracle.access(t, 5, False, at)
            case "bar":
                say("bar.sync 0;")
                all_of_them = list(range(THREADS))
                oracle.acquire(all_of_them, oracle.release(all_of_them))
            case "pair":
                where((32, 96))
                say("@%p1 bar.sync 1, 64;")
                both = list(range(32, 96))
                oracle.acquire(both, oracle.release(both))
            case "arrive":
                first, second = rng.sample([0, 32, 64], 2)
                where((first, first + 32))
                say("@%p1 bar.arrive 2, 64;")
                where((second, second + 32))
                say("@%p1 bar.sync 2, 64;")
                givers, takers = list(range(first, first + 32)), list(range(second, second + 32))
                oracle.acquire(takers, oracle.release(givers + takers))
            case "warp":
                warp = who[0] // 32 * 32
                where((warp, warp + 32))
                say("@%p1 bar.warp.sync 0xffffffff;")
                oracle.acquire(list(range(warp, warp + 32)), oracle.release(list(range(warp, warp + 32))))
            case "atom":
                flag = rng.randrange(2)
                where((who[0], who[0] + 1))
                say(f"@%p1 atom.acq_rel.cta.shared.add.u32 %r13, [%r4+{4 * flag}], 1;")
                oracle.atomic(who[0], flag)
    return "\n".join(text), oracle


def found(result) -> Iterator[Pair]:
    for f in result.outcome.findings:
        other = re.search(r"which line (\d+)", f.message)
        assert other is not None, f
        yield int(other[1]), f.ptx_line


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    body, oracle = program(seed)
    variables = ".shared .align 16 .b8 s[384];\n.shared .align 16 .b8 flags[16];"
    text = kernel(body, ["out"], variables=variables)
    result = run(text, {"out": (1, np.uint32)}, block=THREADS, check_memory=False, grid=2)
    pairs = set(found(result))
    assert bool(pairs) == bool(oracle.races), (body, oracle.races, pairs)
    assert pairs <= oracle.races


ACROSS = """
mov.u32 %r10, %nctaid.x;
add.u32 %r11, %r50, DISTANCE;
rem.u32 %r11, %r11, %r10;
mad.lo.u32 %r11, %r11, %r51, %r52;
mul.wide.u32 %d1, %r11, 4;
add.s64 %d1, %scratch, %d1;
add.s64 %d2, %scratch, %d50;
st.global.u32 [%d2], %r0;
ld.global.u32 %r1, [%d1];
"""


@pytest.mark.parametrize("distance", [0, 1, 30])
def test_findings_do_not_depend_on_processes(distance: int) -> None:
    def go(processes: int):
        inputs = {"scratch": np.zeros(64 * 32, np.uint32)}
        return lanes(
            ACROSS.replace("DISTANCE", str(distance)), 64 * 32, 32, inputs=inputs, processes=processes,
            chunk_lanes=256,
        )  # fmt: skip

    one, two, three = go(1), go(2), go(3)
    assert one.rules == (["race"] * 2 if distance else [])
    assert one.outcome.findings == two.outcome.findings == three.outcome.findings
    np.testing.assert_array_equal(one["out"], two["out"])
