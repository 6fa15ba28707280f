"""Templates edited by hand to be wrong, each in one way: verification fails and says which way.

Each mutant is the shipped template with one place changed. The expected rule is the one a reader of the
report needs; that the unchanged template passes the same checks is tested first.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from workbench.compile import CompileRequest, compile_candidate
from workbench.findings import Severity
from workbench.ops import load_op
from workbench.templates import load_template, parse_template
from workbench.verify.report import Verdict
from workbench.verify.runs import CaseCache, check_artifact
from workbench.workspace import Workspace

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    name: str
    op: str
    template: str
    edits: tuple[tuple[str, str], ...]
    rules: frozenset[str]
    """Any of these rule ids says what is wrong."""
    generators: tuple[str, ...] = ("ordinary",)
    workload: str = "small_b3"
    knobs: tuple[tuple[str, object], ...] = ()


def edit(name, op, template, old, new, *rules, **more):
    return Mutant(name, op, template, ((old, new),), frozenset(rules), **more)


EXPERTS = ("moe_experts", "gemv")
NORM = ("rmsnorm", "row")
CHAIN = ("moe", "chain")

SUM = "weights[token, slot].to(Float32) * expanded[token, slot, column].to(Float32) + total"
ROUNDED_SUM = (f"total = {SUM}\n", f"total = ({SUM}).to(BFloat16).to(Float32)\n")

MUTANTS = [
    edit(
        "wrong expert: the next slot's",
        *EXPERTS,
        "expert = ids[token, slot]\n        wanted = [first + r for r in range(self.rows)]",
        "expert = ids[token, (slot + 1) % self.slots]\n"
        "        wanted = [first + r for r in range(self.rows)]",
        "wrong-expert",
    ),
    edit(
        "wrong expert: one that nobody chose",
        *EXPERTS,
        "expert = ids[token, slot]\n        wanted = [first + r for r in range(self.down_rows)]",
        "expert = ids[token, slot] ^ 1\n        wanted = [first + r for r in range(self.down_rows)]",
        "wrong-expert",
    ),
    edit(
        "missing scale",
        *EXPERTS,
        "self.piece.dot(words[None, r, s], x) * scale + sums[r]",
        "self.piece.dot(words[None, r, s], x) + sums[r]",
        "missing-scale",
    ),
    edit(
        "dropped tail",
        *EXPERTS,
        "self.pieces = depth // 32\n",
        "self.pieces = depth // 32 - 1\n",
        "dropped-tail",
    ),
    edit(
        "swapped gate and up",
        *EXPERTS,
        "gate, up = sums[r], sums[self.rows + r]",
        "up, gate = sums[r], sums[self.rows + r]",
        "swapped-gate-up",
    ),
    edit(
        "normalised row rounded before it is weighted",
        *NORM,
        "held[r].load().to(Float32) * scale * w.load().to(Float32)",
        "(held[r].load().to(Float32) * scale).to(BFloat16).to(Float32) * w.load().to(Float32)",
        "wrong-rounding",
    ),
    edit(
        "gate and up rounded before SiTU",
        *EXPERTS,
        "gate, up = sums[r], sums[self.rows + r]\n",
        "gate, up = [s.to(BFloat16).to(Float32) for s in (sums[r], sums[self.rows + r])]\n",
        "wrong-rounding",
        generators=("negative_gates",),
    ),
    edit(
        "weighted sum rounded after every slot",
        *CHAIN,
        ROUNDED_SUM[0],
        ROUNDED_SUM[1],
        "wrong-rounding",
        generators=("large",),
        knobs=(("combine", "separate"),),
    ),
    edit(
        "out-of-bounds read",
        *NORM,
        "                if vector < self.vectors:\n                    cute.copy(atom",
        "                if vector <= self.vectors:\n                    cute.copy(atom",
        "out-of-bounds",
        workload="latent_b1",
    ),
    edit(
        "shared memory read before it is written: one warp forgets",
        *NORM,
        "            if lane == 0:\n",
        "            if lane == 0 and warp != 1:\n",
        "uninitialized-read",
        knobs=(("threads", 64), ("vec", 2)),
    ),
    edit(
        "shared memory read before it is written: no barrier",
        *NORM,
        "                sums[r, warp] = square\n        cute.arch.sync_threads()\n",
        "                sums[r, warp] = square\n",
        "uninitialized-read",
        "race",
        knobs=(("threads", 64), ("vec", 2)),
    ),
    edit(
        "activation load above the wait",
        *NORM,
        """        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        held = []
        for r in range_constexpr(self.rows):
            # A CTA past the last row repeats it: the loads stay in bounds and the result is not stored.
            row = cutlass.min(block * self.rows + r, self.tokens - 1)
            held.append(self.load(x[row, None], thread))
""",
        """        held = []
        for r in range_constexpr(self.rows):
            row = cutlass.min(block * self.rows + r, self.tokens - 1)
            held.append(self.load(x[row, None], thread))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
""",
        "pdl-load-before-wait",
    ),
    Mutant(
        "nc load of an activation behind an elected wait",
        *NORM,
        (
            (
                "        cute.arch.griddepcontrol_wait()\n",
                "        if thread == 0:\n            cute.arch.griddepcontrol_wait()\n"
                "        cute.arch.sync_threads()\n",
            ),
            (
                "            held.append(self.load(x[row, None], thread))\n",
                "            held.append(self.load_nc(x[row, None], thread))\n",
            ),
            (
                "    @cute.jit\n    def store(",
                """    @cute.jit
    def load_nc(self, row: cute.Tensor, thread: cutlass.Int32) -> cute.Tensor:
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyG2ROp(), BFloat16, num_bits_per_copy=16 * self.vec, invariant=True
        )
        held = cute.make_rmem_tensor((self.vec, self.steps), BFloat16)
        for step in range_constexpr(self.steps):
            vector = step * self.threads + thread
            held[None, step].fill(BFloat16(0.0))
            if vector < self.vectors:
                cute.copy(atom, cute.local_tile(row, (self.vec,), (vector,)), held[None, step])
        return held

    @cute.jit
    def store(""",
            ),
        ),
        frozenset({"nc-load-of-mutable"}),
    ),
]


@pytest.fixture(scope="module")
def workspace():
    return Workspace(ROOT)


@pytest.fixture(scope="module")
def cases():
    return CaseCache(capacity=8)


def check(workspace, cases, mutant, source_edits):
    op = load_op(workspace, mutant.op)
    workload = op.workload(mutant.workload)
    template = load_template(workspace.template(mutant.op, mutant.template))
    source = template.source
    for old, new in source_edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the template"
        source = source.replace(old, new)
    template = replace(parse_template(source, template.path), name="edited")
    wanted = dict(mutant.knobs)
    point = next(
        p for p in sorted(template.space(workload.axes).points(), key=lambda p: p != template.default)
        if all(p[k] == v for k, v in wanted.items())
    )  # fmt: skip
    artifact = compile_candidate(CompileRequest.of(op, workload, template, point), None)
    return check_artifact(artifact, op, generators=mutant.generators, cases=cases).report


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_unchanged_template_passes(mutant, workspace, cases):
    report = check(workspace, cases, mutant, ())
    assert report.verdict is Verdict.PASS, report.model_dump_json(indent=1)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_mutant_fails_with_a_finding_that_says_why(mutant, workspace, cases):
    report = check(workspace, cases, mutant, mutant.edits)
    assert report.verdict is Verdict.FAIL
    errors = {f.rule for f in report.findings if f.severity is Severity.ERROR}
    assert errors & mutant.rules, f"found {sorted(errors)}"
    named = [f for f in report.findings if f.rule in mutant.rules]
    assert all(f.message for f in named)
