"""Random structured programs against a plain interpreter that runs one lane after the other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.simulator.kernels import lanes

REGISTERS = [f"%r{k}" for k in range(2, 8)]
BINARY = {
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "min.u32": min,
}
COMPARE = {"lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "gt": lambda a, b: a > b}
MASK = 0xFFFFFFFF


class Program:
    """A random program: `tree` for the interpreter, `text` as PTX."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.labels = 0
        self.predicates = 0
        self.text: list[str] = []
        self.tree = self.block(0, 5)

    def block(self, depth: int, length: int) -> list[tuple]:
        return [self.statement(depth) for _ in range(self.random.randint(2, length))]

    def value(self) -> tuple[str, object]:
        r = self.random.random()
        if r < 0.6:
            name = self.random.choice(REGISTERS)
            return name, name
        number = self.random.choice([0, 1, 2, 3, 7, 31, 100])
        return str(number), number

    def condition(self) -> tuple:
        self.predicates += 1
        p = f"%q{self.predicates}"
        left = self.random.choice([*REGISTERS, "%tid.x", "%ctaid.x"])
        modulus = self.random.choice([2, 3, 5])
        against = self.random.randint(0, modulus - 1)
        name = self.random.choice(list(COMPARE))
        self.text += [
            f"mov.u32 %r20, {left};",
            f"rem.u32 %r20, %r20, {modulus};",
            f"setp.{name}.u32 {p}, %r20, {against};",
        ]
        return p, left, modulus, name, against

    def assign(self, guard: str = "") -> tuple:
        op = self.random.choice(list(BINARY))
        d = self.random.choice(REGISTERS)
        (ta, a), (tb, b) = self.value(), self.value()
        if isinstance(a, int):
            self.text.append(f"mov.u32 %r21, {ta};")
            ta = "%r21"
        self.text.append(f"{guard}{op} {d}, {ta}, {tb};")
        return "assign", op, d, a, b

    def statement(self, depth: int) -> tuple:
        kind = self.random.random()
        if depth >= 3 or kind < 0.45:
            return self.assign()
        if kind < 0.6:
            condition = self.condition()
            return "guard", condition, self.assign(f"@{condition[0]} ")
        if kind < 0.7 and depth == 0:
            d, a = self.random.choice(REGISTERS), self.random.choice(REGISTERS)
            lane = self.random.choice([1, 2, 16])
            self.text.append(f"shfl.sync.bfly.b32 {d}, {a}, {lane}, 31, -1;")
            return "shuffle", d, a, lane
        if kind < 0.75 and depth == 0:
            self.text.append("bar.sync 0;")
            return ("barrier",)
        self.labels += 1
        n = self.labels
        if kind < 0.9:
            condition = self.condition()
            self.text.append(f"@!{condition[0]} bra ELSE{n};")
            then = self.block(depth + 1, 3)
            self.text += [f"bra END{n};", f"ELSE{n}:"]
            other = self.block(depth + 1, 3)
            self.text.append(f"END{n}:")
            return "if", condition, then, other
        counter = f"%c{n}"
        source = self.random.choice(REGISTERS)
        self.text += [f"and.b32 {counter}, {source}, 3;", f"LOOP{n}:"]
        body = self.block(depth + 1, 3)
        self.text += [
            f"sub.u32 {counter}, {counter}, 1;",
            f"setp.lt.s32 %q0, {counter}, 0;",
            f"@!%q0 bra LOOP{n};",
        ]
        return "loop", source, body


class Lane:
    def __init__(self, cta: int, thread: int, threads: int) -> None:
        self.r = {name: (cta * threads + thread) * (k + 3) & MASK for k, name in enumerate(REGISTERS)}
        self.special = {"%tid.x": thread, "%ctaid.x": cta}

    def read(self, x):
        return x if isinstance(x, int) else self.special.get(x, self.r.get(x))

    def holds(self, condition) -> bool:
        _, left, modulus, name, against = condition
        return COMPARE[name](self.read(left) % modulus, against)

    def run(self, tree) -> None:
        for s in tree:
            if s[0] == "assign":
                self.r[s[2]] = BINARY[s[1]](self.read(s[3]), self.read(s[4])) & MASK
            elif s[0] == "guard":
                if self.holds(s[1]):
                    self.run([s[2]])
            elif s[0] == "if":
                self.run(s[2] if self.holds(s[1]) else s[3])
            elif s[0] == "loop":
                for _ in range((self.r[s[1]] & 3) + 1):
                    self.run(s[2])


def interpret(program: Program, ctas: int, threads: int) -> np.ndarray:
    grid = [[Lane(c, t, threads) for t in range(threads)] for c in range(ctas)]
    for s in program.tree:
        if s[0] == "shuffle":
            for cta in grid:
                old = [lane.r[s[2]] for lane in cta]
                for t, lane in enumerate(cta):
                    lane.r[s[1]] = old[t ^ s[3]]
        elif s[0] != "barrier":
            for cta in grid:
                for lane in cta:
                    lane.run([s])
    return np.array([sum(lane.r.values()) & MASK for cta in grid for lane in cta], np.uint32)


@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_random_program(seed, schedule):
    program = Program(seed)
    ctas, threads = (3, 64) if seed % 2 else (4, 32)
    start = "\n".join(f"mul.lo.u32 {name}, %r0, {k + 3};" for k, name in enumerate(REGISTERS))
    total = "mov.u32 %r1, 0;\n" + "\n".join(f"add.u32 %r1, %r1, {name};" for name in REGISTERS)
    variables = f".reg .pred %q<{program.predicates + 1}>;\n.reg .b32 %c<{program.labels + 1}>;"
    body = start + "\n" + "\n".join(program.text) + "\n" + total
    result = lanes(
        body,
        ctas * threads,
        threads,
        variables=variables,
        chunk_lanes=128 if seed % 3 else 32768,
        seed=schedule,
    )
    assert result.rules == [], result.outcome.findings
    np.testing.assert_array_equal(result["out"], interpret(program, ctas, threads))
